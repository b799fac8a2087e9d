"""The house stays tidy: sizes, docstrings, pure modules, one word per concept. Bounds are not widened to pass.

A pure module may import what is in PURE, and modules of ours that are pure themselves; so no clock, file or socket is
reached through another one either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pilotlight", "gateway", "autoscaler", "artifacts", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TOOLS = sorted([*(ROOT / "docs").glob("*.py"), ROOT / "hatch_build.py"])
"""What draws the documents and builds the wheel: said as well as the product, though not shipped."""
BESIDE = ("tests", "bench", "examples")
EVERYTHING = sorted([*SOURCES, *TOOLS, *(path for folder in BESIDE for path in (ROOT / folder).rglob("*.py"))])

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
DOCSTRING_CHARACTERS_MIN = 60

IMPURE = frozenset(
    {
        *("gateway/" + room for room in ("edge", "local", "exchange", "upstream", "pool", "front", "telemetry")),
        *("gateway/" + room for room in ("sync", "link", "ops", "early", "ends", "intake", "outlet", "scale")),
        "gateway/finding",
        "gateway/handshake",
        "gateway/kept",
        "gateway/memory",
        *("autoscaler/" + name for name in ("door", "loop", "serve", "ops", "foresight", "metrics", "processwatch")),
        *("autoscaler/commands", "autoscaler/nodeintake", "autoscaler/nodesupply", "autoscaler/nodetelling"),
        "artifacts/agent",
        "artifacts/gguf",
        "artifacts/gpubus",
        "artifacts/hfconfig",
        "artifacts/images",
        "artifacts/nodesockets",
        "artifacts/ocilayout",
        "artifacts/trusting",
        "artifacts/unpack",
        *("artifacts/" + room for room in ("fill", "headers", "inside", "meanings", "obtain", "resolve", "verify")),
        *("artifacts/" + room for room in ("blobs", "client", "credentials", "mirrors", "pace", "pushing")),
        *("artifacts/" + room for room in ("logins", "partial", "permits", "programs", "pull", "splicing")),
        *("artifacts/" + room for room in ("sealed", "unsealing")),
        *("artifacts/" + room for room in ("awskeys", "bring", "bucket", "gather", "hub", "places", "sums")),
        *("artifacts/clouds/" + cloud for cloud in ("amazon", "azure", "cloud", "google", "metadata", "podkeys")),
        *("artifacts/" + room for room in ("chunksums", "offers", "serving", "swarm")),
        *("artifacts/" + room for room in ("referrers", "registry", "remote", "resolver", "tokens", "transport")),
        *(
            "artifacts/" + room
            for room in (
                "disk",
                "flocks",
                "layout",
                "ledger",
                "publish",
                "settling",
                "shelf",
                "store",
                "waiting",
                "warmth",
            )
        ),
        *("autoscaler/capacity/" + name for name in ("fabric_cro", "fabric_redfish", "kueue", "nodegroups", "nodes")),
        *("autoscaler/capacity/" + name for name in ("delaying", "growing", "guarding", "provisioning", "publishing")),
        *("autoscaler/capacity/" + name for name in ("remembering", "supplying")),
        *("autoscaler/capacity/" + name for name in ("together", "turns", "upkeep", "using")),
        *("autoscaler/capacity/redfish_" + room for room in ("bay", "cluster", "http", "reading")),
        "autoscaler/engines/installed",
        "autoscaler/merge",
        "autoscaler/page",
        "autoscaler/schema/__main__",
        "autoscaler/crds/__main__",
    }
)
"""Modules that may do I/O (architecture, section 3), beside the folders below."""
IMPURE_FOLDERS = ("pilotlight/", "loadtest/", "autoscaler/drivers/", "autoscaler/engines/xllamacpp_server")
PURE = frozenset(
    {
        "__future__",
        "abc",
        "array",
        "base64",
        "binascii",
        "bisect",
        "codecs",
        "collections",
        "copy",
        "dataclasses",
        "difflib",
    }
    | {
        "enum",
        "fnmatch",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "html",
        "ipaddress",
        "itertools",
        "json",
    }
    | {"math", "operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "unicodedata", "zlib"}
    | {"msgspec", "yaml"}
)
"""From outside, what pure modules may import: nothing of it does I/O unasked, knows a clock, or draws."""
VERIFYING = "judges what strangers signed; of what draws, makes keys or reads clocks nothing is used"
_PRIMITIVES = "cryptography.hazmat.primitives"
_CRYPTOGRAPHY = {
    "artifacts/publickeys": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.serialization"),
        *(f"{_PRIMITIVES}.asymmetric{one}" for one in ("", ".types", ".utils")),
    ),
    "artifacts/identities": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.serialization"),
        *("cryptography.x509", "cryptography.x509.certificate_transparency", "cryptography.x509.oid"),
    ),
    "artifacts/trustroot": (f"{_PRIMITIVES}.serialization", "cryptography.x509"),
    "artifacts/timestamps": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.asymmetric"),
        *("cryptography.x509", "cryptography.x509.oid"),
    ),
}
_PACKAGES = ("cryptography", "cryptography.hazmat", _PRIMITIVES)
EXCEPTIONS = {
    ("gateway/body", "mmap"): "anonymous memory, never a file",
    ("autoscaler/foreign/llama_swap_commands", "shlex"): "takes a text into words; reads nothing when it has one",
    ("artifacts/challenge", "yarl"): "URLs, as the transport reads them",
    ("artifacts/inflate", "zstandard"): "takes bytes to bytes, as zlib does; of its files nothing is used",
    ("artifacts/plainxml", "xml"): "takes bytes to elements, and is let no document type: it reads nothing else",
    ("artifacts/plainxml", "xml.parsers"): "as above",
    ("artifacts/sigv4", "datetime"): "writes a time that is given; never the clock",
    ("artifacts/sigv4", "urllib"): "its quoting alone",
    ("artifacts/sigv4", "urllib.parse"): "as above",
    ("artifacts/sigv4", "yarl"): "URLs, as the transport reads them",
    ("artifacts/origin", "yarl"): "URLs, as the transport reads them: two parsers would differ on some",
    **{(module, what): VERIFYING for module, all_of in _CRYPTOGRAPHY.items() for what in (*_PACKAGES, *all_of)},
    **{("artifacts/chains", f"cryptography{what}"): VERIFYING for what in ("", ".exceptions", ".x509")},
    ("artifacts/identities", "datetime"): "names UTC; never the clock",
    ("artifacts/trustroot", "datetime"): "reads a time that is written; never the clock",
    ("artifacts/der", "datetime"): "reads a time that is written; never the clock",
    ("artifacts/retrying", "email"): "reads a time that is written; never the clock",
    ("artifacts/retrying", "email.utils"): "as above",
    ("autoscaler/cron", "datetime"): "reckons with days of a calendar; never the clock",
    ("autoscaler/cron", "zoneinfo"): "the machine's time zones, which say the same each time",
    ("autoscaler/tenant", "datetime"): "reads a time that is written; never the clock",
    ("autoscaler/engines/launching", "autoscaler.engines.xllamacpp_server"): "its path, and its `parse`, which is pure",
}
"""(pure module, what it imports all the same) -> why that is no harm."""
FORBIDDEN_WORDS = frozenset({"open", "input", "print", "exec", "eval", "compile", "breakpoint", "__import__"})
"""Built-in functions that reach out, or around this test."""
CLOCKS = frozenset({"now", "utcnow", "today"})
"""Attributes of datetime's types that read the clock."""
NUMPY = frozenset({"numpy", "numpy.typing"})
NUMPY_REACHES_OUT = frozenset(
    {"random", "load", "save", "savez", "loadtxt", "savetxt", "genfromtxt", "fromfile", "memmap"}
)
"""Attributes of `np` that draw, or touch files."""
SYNONYMS = {
    r"\bworkers?\b": "Replica or process",
    r"\bbackends?\b": "engine or Replica",
    r"(?<!computeMetadata/v1/)\binstances?\b": "Replica, or an object's own name",
    r"(?<![\"-])\bmanager\b": "the noun that is owned",
    r"\bhelpers?\b": "the noun that is owned",
    r"(?<!importlib\.)(?<!email\.)(?<!asymmetric\.)\butils?\b": "the noun that is owned",
    r"(?<!aws-node-termination-)\bhandler\b(?!: Answer|\(request\))": "the noun that is owned",
}
"""Words for things that have another word (architecture, section 2). What foreign interfaces are called with is let
through by the pattern itself.
"""


def name(path: Path) -> str:
    """`gateway/wire` for gateway/wire.py."""
    return str(path.relative_to(ROOT).with_suffix(""))


BY_NAME = {name(path): path for path in SOURCES}


def pure(path: Path) -> bool:
    """Whether the module must not do I/O."""
    return name(path) not in IMPURE and not name(path).startswith(IMPURE_FOLDERS)


def impure_uses(module: str, text: str) -> list[str]:
    """What a pure module `module` with this text must not use, as `line: what`."""
    found: list[tuple[int, str]] = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        found += [(line, one) for one in imported(node) if not allowed(module, one)]
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_WORDS and isinstance(node.ctx, ast.Load):
            found.append((line, node.id))
        if isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith):
            found.append((line, "async"))
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and (module, "datetime") in EXCEPTIONS:
            found.append((line, node.attr))
        if isinstance(node, ast.Attribute) and node.attr in NUMPY_REACHES_OUT and _is_numpy(node.value):
            found.append((line, f"np.{node.attr}"))
    return [f"{line}: {what}" for line, what in found]


def _is_numpy(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"np", "numpy"}


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports, each with the packages that it is in, whose `__init__` runs first.

    Of `from a.b import c` also a.b.c, where that is a module of ours.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
        return ["relative"]  # ours are named whole
    elif isinstance(node, ast.ImportFrom):
        inner = (f"{node.module}.{alias.name}" for alias in node.names)
        names = [str(node.module), *(one for one in inner if source(one) is not None)]
    else:
        return []
    parts = (one.split(".") for one in names)
    return list(dict.fromkeys(".".join(of_one[: end + 1]) for of_one in parts for end in range(len(of_one))))


def allowed(module: str, what: str) -> bool:
    """Whether the pure `module` may import `what`."""
    path = source(what)
    package = what.partition(".")[0]
    pure_one = (package in PURE or what in NUMPY) if path is None else pure(path)
    return pure_one or (module, what) in EXCEPTIONS


def source(module: str) -> Path | None:
    """The file of a module of ours, named with dots; None: it is somebody else's, or no module."""
    path = module.replace(".", "/")
    return BY_NAME.get(path) or BY_NAME.get(f"{path}/__init__")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_files_and_functions_fit_a_screen(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, f"{name(path)} is too long: split it by concept"
    for function in functions(ast.parse(text)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= FUNCTION_LINES_MAX, f"{name(path)}: {function.name} has {lines} lines"


@pytest.mark.parametrize("path", [p for p in (*SOURCES, *TOOLS) if p.read_text()], ids=name)
def test_every_module_says_what_it_owns(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(docstring) >= DOCSTRING_CHARACTERS_MIN, f"{name(path)}: say what it owns, promises and must not do"


@pytest.mark.parametrize("path", [p for p in SOURCES if pure(p)], ids=name)
def test_pure_modules_use_nothing_impure(path: Path) -> None:
    assert not impure_uses(name(path), path.read_text()), f"{name(path)} is pure: see PURE and IMPURE"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from gateway import ops", ["1: gateway.ops"]),
        ("import gateway.ops", ["1: gateway.ops"]),
        ("from gateway.ops import application", ["1: gateway.ops"]),
        ("def f():\n    from gateway import upstream", ["2: gateway.upstream"]),
        ("from autoscaler.drivers.base import Driver", ["1: autoscaler.drivers", "1: autoscaler.drivers.base"]),
        ("from pilotlight import quiet", ["1: pilotlight", "1: pilotlight.quiet"]),
        ("from pathlib import Path", ["1: pathlib"]),
        ("import time, os.path", ["1: time", "1: os", "1: os.path"]),
        ("from datetime import datetime\nx = datetime.now()", ["1: datetime"]),
        ("import secrets, prometheus_client, sys", ["1: secrets", "1: prometheus_client", "1: sys"]),
        ("from . import ops", ["1: relative"]),
        ("x = open('f').read()", ["1: open"]),
        ("reader = open", ["1: open"]),
        ("async def f(): ...", ["1: async"]),
        ("from gateway import errors\nfrom autoscaler.contract import ModelName\nimport re, msgspec.json", []),
    ],
)
def test_what_is_impure_is_found(text: str, found: list[str]) -> None:
    assert impure_uses("gateway/rewrite", text) == found


def test_who_may_read_written_times_may_not_read_the_clock() -> None:
    assert impure_uses("autoscaler/tenant", "from datetime import datetime\nx = datetime.now()") == ["2: now"]
    text = "import numpy as np\nfrom numpy.random import default_rng\nx = np.random.rand(np.load('x'))"
    assert impure_uses("autoscaler/stock", text) == ["2: numpy.random", "3: np.random", "3: np.load"]


def test_tables_name_modules_that_exist() -> None:
    known = {name(path) for path in SOURCES}
    assert known >= IMPURE
    for module, what in EXCEPTIONS:
        assert any(what in imported(node) for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text()))), what


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=name)
def test_one_word_per_concept(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, better in SYNONYMS.items():
            found = re.search(pattern, line, re.IGNORECASE)
            assert found is None, f"{name(path)}:{number}: {line.strip()!r}: say {better}"


def test_only_the_front_door_installs_uvloop() -> None:
    for path in SOURCES:
        if not name(path).startswith("pilotlight/"):
            assert "import uvloop" not in path.read_text(), name(path)
