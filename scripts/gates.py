"""Checks of `make check` that no linter has: sizes of files, functions, folders and pages, class names, pure modules.

Run `python -m scripts.gates`. Exit status 1 and one line per violation, or nothing.

A pure module imports only the libraries in PURE and modules of the product that are pure themselves, so it reaches no
clock, file or socket through another module either.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("pilotlight", "gateway", "autoscaler", "artifacts", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
"""The product."""
TOOLS = ("tests", "bench", "examples", "docs", "scripts")
EVERYTHING = sorted(
    [*SOURCES, ROOT / "hatch_build.py", *(path for one in TOOLS for path in (ROOT / one).rglob("*.py"))]
)

FILE_LINES_MAX = 1_000
FUNCTION_LINES_MAX = 80
"""Without its docstring."""
TEST_NAME_CHARACTERS_MAX = 70

PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for one in (*PACKAGES, *TOOLS, "charts") for path in (ROOT / one).rglob("*.md"))]
)
"""All pages of the documentation."""
PAGE_BYTES_MAX = 12 * 1024
PAGES_BYTES_MAX = {"ARCHITECTURE.md": 18 * 1024, "README.md": 10 * 1024, "CHANGELOG.md": 5 * 1024}
"""Pages with another limit."""
PAGES_LINES_MAX = {"ARCHITECTURE.md": 250}
GENERATED_PAGES = frozenset(
    f"docs/reference/{page}.md"
    for page in ("chart-values", "command-options", "custom-resource-fields", "engines", "error-codes")
)
"""Written by docs/chart.py, commands.py, custom_resources.py, engines.py and error_codes.py; no limit of size."""

IO_FOLDERS = (
    "pilotlight/", "loadtest/", "autoscaler/controller/", "autoscaler/drivers/", "autoscaler/engines/programs/",
    "autoscaler/kubernetes/", "autoscaler/providers/", "autoscaler/server/", "autoscaler/signals/scraper",
    "gateway/control/", "gateway/gateway", "gateway/memory/", "gateway/ops", "gateway/server/", "gateway/telemetry",
    "gateway/upstream/",
    *(
        f"artifacts/{folder}/"
        for folder in (
            "credentials", "disk", "download", "fetch", "formats", "http", "pack", "peers", "registry", "sources",
            "store",
        )
    ),
)  # fmt: skip
"""Folders whose modules may do I/O; all other modules of the product are pure."""
LONG_LIVED = ("autoscaler/", "pilotlight/processes/")
"""Folders whose code must not catch a MemoryError."""
ENDS_AT_ONCE = frozenset({"autoscaler/engines/programs/xllamacpp_server"})
"""Modules of LONG_LIVED whose process ends after each exception."""
FOLDER_MODULES_MAX = 15
"""Without `__init__.py` and `__main__.py`."""
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
"""Libraries that pure modules may import: none does I/O by itself, reads a clock or uses random numbers."""
VERIFYING = "verifies signatures; uses nothing that generates keys or random numbers, or reads a clock"
_PRIMITIVES = "cryptography.hazmat.primitives"
_CRYPTOGRAPHY = {
    "artifacts/signatures/public_keys": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.serialization"),
        *(f"{_PRIMITIVES}.asymmetric{one}" for one in ("", ".types", ".utils")),
    ),
    "artifacts/signatures/certificates": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.serialization"),
        *("cryptography.x509", "cryptography.x509.certificate_transparency", "cryptography.x509.oid"),
    ),
    "artifacts/signatures/trust_root": (f"{_PRIMITIVES}.serialization", "cryptography.x509"),
    "artifacts/signatures/timestamps": (
        *("cryptography.exceptions", f"{_PRIMITIVES}.hashes", f"{_PRIMITIVES}.asymmetric"),
        *("cryptography.x509", "cryptography.x509.oid"),
    ),
}
_PACKAGES = ("cryptography", "cryptography.hazmat", _PRIMITIVES)
EXCEPTIONS = {
    ("gateway/http/body_buffers", "mmap"): "anonymous memory, never a file",
    (
        "autoscaler/importers/command_line",
        "shlex",
    ): "splits a text into words; reads standard input only without one",
    ("artifacts/registry/challenge", "yarl"): "parses URLs as the transport does",
    (
        "artifacts/archives/decompress",
        "zstandard",
    ): "turns bytes into bytes, as zlib does; its file functions are unused",
    ("artifacts/http/xml", "xml"): "turns bytes into elements; document types are refused, so it reads nothing else",
    ("artifacts/http/xml", "xml.parsers"): "as above",
    ("artifacts/credentials/sigv4", "datetime"): "formats a given time; reads no clock",
    **{
        ("autoscaler/signals/metric_responses", f"prometheus_client{what}"): "only parses text"
        for what in ("", ".parser", ".samples")
    },
    ("autoscaler/spec/policy", "urllib"): "only parses URLs",
    ("autoscaler/spec/policy", "urllib.parse"): "as above",
    ("artifacts/credentials/sigv4", "urllib"): "only quotes strings",
    ("artifacts/credentials/sigv4", "urllib.parse"): "as above",
    ("artifacts/credentials/sigv4", "yarl"): "parses URLs as the transport does",
    ("artifacts/http/url_policy", "yarl"): "parses URLs as the transport does; parsers disagree on some",
    **{(module, what): VERIFYING for module, all_of in _CRYPTOGRAPHY.items() for what in (*_PACKAGES, *all_of)},
    **{
        ("artifacts/signatures/certificates", f"cryptography{what}"): VERIFYING for what in ("", ".exceptions", ".x509")
    },
    ("artifacts/signatures/certificates", "datetime"): "names UTC; reads no clock",
    ("artifacts/signatures/trust_root", "datetime"): "parses a time; reads no clock",
    ("artifacts/signatures/der", "datetime"): "parses a time; reads no clock",
    ("artifacts/http/retry", "email"): "parses a time; reads no clock",
    ("artifacts/http/retry", "email.utils"): "as above",
    ("autoscaler/spec/cron", "datetime"): "calculates with calendar days; reads no clock",
    ("autoscaler/spec/cron", "zoneinfo"): "reads the time zones of the machine, which do not change",
    ("autoscaler/text", "datetime"): "formats a given time; reads no clock",
    **{
        (
            "autoscaler/engines/command_line",
            f"autoscaler.engines.programs{what}",
        ): "a path, `parse_flags`"
        for what in ("", ".xllamacpp_server")
    },
}
"""(pure module, library outside PURE that it imports) -> why this is harmless."""
FORBIDDEN_WORDS = frozenset({"open", "input", "print", "exec", "eval", "compile", "breakpoint", "__import__"})
"""Built-in functions that do I/O or circumvent this gate."""
CLOCKS = frozenset({"now", "utcnow", "today"})
"""Attributes of datetime's types that read the clock."""
NUMPY = frozenset({"numpy", "numpy.typing"})
NUMPY_IMPURE = frozenset({"random", "load", "save", "savez", "loadtxt", "savetxt", "genfromtxt", "fromfile", "memmap"})
"""Attributes of `np` that use random numbers or files."""


def name(path: Path) -> str:
    """Return the module's path without the suffix: `gateway/http/request_reader`."""
    return str(path.relative_to(ROOT).with_suffix(""))


BY_NAME = {name(path): path for path in SOURCES}


def pure(path: Path) -> bool:
    """Return whether the module must not do I/O."""
    return not name(path).startswith(IO_FOLDERS)


def impure_uses(module: str, text: str) -> list[str]:
    """Return the forbidden uses in the text of a pure `module`, as `line: what`."""
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
        if isinstance(node, ast.Attribute) and node.attr in NUMPY_IMPURE and _is_numpy(node.value):
            found.append((line, f"np.{node.attr}"))
    return [f"{line}: {what}" for line, what in found]


def _is_numpy(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"np", "numpy"}


def imported(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports, each with its parent packages, whose `__init__` runs first.

    For `from a.b import c` also a.b.c, if that is a module of the product.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
        return ["relative"]  # the product uses absolute imports only
    elif isinstance(node, ast.ImportFrom):
        inner = (f"{node.module}.{alias.name}" for alias in node.names)
        names = [str(node.module), *(one for one in inner if source(one) is not None)]
    else:
        return []
    parts = (one.split(".") for one in names)
    return list(dict.fromkeys(".".join(of_one[: end + 1]) for of_one in parts for end in range(len(of_one))))


def allowed(module: str, what: str) -> bool:
    """Return whether the pure `module` may import `what`."""
    path = source(what)
    package = what.partition(".")[0]
    pure_one = (package in PURE or what in NUMPY) if path is None else pure(path)
    return pure_one or (module, what) in EXCEPTIONS


def source(module: str) -> Path | None:
    """Return the file of a product module named with dots; None if there is none."""
    path = module.replace(".", "/")
    return BY_NAME.get(path) or BY_NAME.get(f"{path}/__init__")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions, including nested ones."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def too_long(path: Path) -> Iterator[str]:
    """Yield the violations of the length limits in a file."""
    text = path.read_text()
    if text.count("\n") > FILE_LINES_MAX:
        yield f"{name(path)}.py has {text.count(chr(10))} lines; the limit is {FILE_LINES_MAX}"
    for function in functions(ast.parse(text)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > FUNCTION_LINES_MAX:
            yield f"{name(path)}.py: {function.name} has {lines} lines; the limit is {FUNCTION_LINES_MAX}"
        size = len(function.name)
        if function.name.startswith("test_") and size > TEST_NAME_CHARACTERS_MAX:
            yield f"{name(path)}.py: {function.name} has {size} characters; the limit is {TEST_NAME_CHARACTERS_MAX}"


def memory_errors_caught(text: str) -> list[str]:
    """The lines that catch every exception and do not pass on a MemoryError first."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or _is_every(node.type)):
            first = ast.unparse(node.body[0])
            if not isinstance(node.body[-1], ast.Raise) and first != f"reraise_memory_error({node.name})":
                found.append(f"{node.lineno}: {'except' if node.type is None else ast.unparse(node.type)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"suppress", "contextlib.suppress"}:
            found += [f"{node.lineno}: {ast.unparse(node)}"] * any(map(_is_every, node.args))
    return found


def _is_every(node: ast.expr) -> bool:
    return (
        any(_is_every(one) for one in node.elts)
        if isinstance(node, ast.Tuple)
        else (ast.unparse(node) in {"Exception", "BaseException"})
    )


def crowded() -> Iterator[str]:
    """Yield the folders of the product and of the tests with too many modules."""
    modules = (
        path for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")) if path.name not in {"__init__.py", "__main__.py"}
    )
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    for folder, count in sorted(counts.items()):
        if count > FOLDER_MODULES_MAX:
            yield f"{folder}/ has {count} modules; the limit is {FOLDER_MODULES_MAX}"


def repeated_classes() -> Iterator[str]:
    """Yield the public classes of the product that have the name of another one in the same package."""
    modules: dict[tuple[str, str], list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault((name(path).partition("/")[0], node.name), []).append(name(path))
    for (package, one), places in sorted(modules.items()):
        if len(places) > 1:
            yield f"{package}/ has {len(places)} public classes {one}: {', '.join(places)}; rename one"


def page_too_long(page: str, content: bytes) -> Iterator[str]:
    """Yield the violations of the limits of a page, which is named by its path in the repository."""
    limit, advice = PAGES_BYTES_MAX.get(page, PAGE_BYTES_MAX), "shorten it or move a part to another page"
    if page not in GENERATED_PAGES and len(content) > limit:
        whose = "this page" if page in PAGES_BYTES_MAX else "a page"
        yield f"{page}: {len(content):,} bytes; the limit of {whose} is {limit:,}; {advice}"
    lines, lines_max = content.count(b"\n"), PAGES_LINES_MAX.get(page)
    if lines_max is not None and lines > lines_max:
        yield f"{page}: {lines} lines; the limit of this page is {lines_max}; {advice}"


def stale_exceptions() -> Iterator[str]:
    """Yield the entries of EXCEPTIONS and the limits of pages that no longer apply to a module or a page."""
    pages = {str(path.relative_to(ROOT)) for path in PAGES}
    for page in sorted({*PAGES_BYTES_MAX, *PAGES_LINES_MAX, *GENERATED_PAGES} - pages):
        yield f"the limits of pages name {page}, which does not exist"
    for module, what in EXCEPTIONS:
        if not any(what in imported(node) for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text()))):
            yield f"EXCEPTIONS lets {module} import {what}, which it does not import"


def violations() -> Iterator[str]:
    """Yield all violations in the tree."""
    for path in EVERYTHING:
        yield from too_long(path)
    for path in SOURCES:
        if pure(path):
            uses = impure_uses(name(path), path.read_text())
            yield from (f"{name(path)}.py must stay pure (see PURE and IO_FOLDERS): line {use}" for use in uses)
        if name(path).startswith(LONG_LIVED) and name(path) not in ENDS_AT_ONCE:
            caught = memory_errors_caught(path.read_text())
            yield from (
                f"{name(path)}.py catches a MemoryError (see autoscaler.exception_handling): line {one}"
                for one in caught
            )
        if not name(path).startswith("pilotlight/") and "import uvloop" in path.read_text():
            yield f"{name(path)}.py imports uvloop; only pilotlight/ installs it"
    yield from crowded()
    yield from repeated_classes()
    for page in PAGES:
        yield from page_too_long(str(page.relative_to(ROOT)), page.read_bytes())
    yield from stale_exceptions()


if __name__ == "__main__":
    found = list(violations())
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
