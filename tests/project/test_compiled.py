"""The compiled wheel holds the modules of the request path, and no code that compilation would change."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import gateway
from pilotlight.cli.main import COMPILED

ROOT = Path(__file__).resolve().parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
MODULES: list[str] = BUILD["hooks"]["custom"]["compiled"]
GATEWAY = Path(str(gateway.__file__)).parent
STRUCTS = {
    "control/snapshot_file",
    "dialects/decoded_structs",
    "dialects/messages_structs",
    "dialects/responses_structs",
    "dialects/triton_structs",
    "dispatch/effects",
    "http/json_structs",
    "limits",
    "policy/external_check_addresses",
    "policy/external_checks",
}
"""Modules of msgspec Structs."""
AWAITING = {
    "control/client",
    "control/discovery",
    "control/fault_containment",
    "control/sync",
    "memory/process_memory",
    "ops",
    "server/tls_handshakes",
    "upstream/external_check_client",
}
"""Modules that wait for the autoscaler, people, files, handshakes and checks: none runs per request without checks."""


def test_every_gateway_module_is_compiled_or_explicitly_excluded() -> None:
    modules = (path for path in GATEWAY.rglob("*.py") if path.name != "__init__.py")
    sources = {f"gateway/{path.relative_to(GATEWAY)}" for path in modules}
    left_out = {f"gateway/{name}.py" for name in STRUCTS | AWAITING}
    assert set(MODULES) | left_out == sources
    assert not set(MODULES) & left_out


@pytest.mark.parametrize("module", MODULES)
def test_compiled_modules_define_no_msgspec_structs(module: str) -> None:
    """Compilation drops a class's keyword arguments (`frozen=True`), and the annotations that msgspec needs."""
    tree = ast.parse((GATEWAY.parent / module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not node.keywords, f"{module}: {node.name}"
            assert not re.search(r"\bStruct\b", " ".join(map(ast.unparse, node.bases))), f"{module}: {node.name}"


def test_modules_are_c_extensions_only_in_the_compiled_tree() -> None:
    """In build/compiled all of them are C extensions; in a clone none is."""
    kinds = {Path(str(__import__(name, fromlist=["x"]).__file__)).suffix for name in map(dotted, MODULES)}
    assert kinds == ({".so"} if COMPILED else {".py"})
    assert (ROOT.name == "compiled") == COMPILED


def dotted(module: str) -> str:
    """`gateway/http/request_reader.py` -> `gateway.http.request_reader`."""
    return module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
