"""Hostile values at every key of our documents: a document is loaded and planned, or rejected in one line.

The keys are derived from the types, so that a new key gets its cases automatically.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec

from autoscaler.documents import parse, render
from autoscaler.documents.document_types import DocumentError, ModelDocument, SettingsDocument, TenantDocument
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import Planner
from autoscaler.routing import catalogue
from autoscaler.spec.decode import Part
from autoscaler.state.events import DocumentsSeen
from tests.fuzz.checks.error_messages import check_line
from tests.fuzz.inputs.json_mutations import VALUES, Members, Written, tree, written
from tests.support.builders.worlds import T0, device, gateway, level, world

Path = tuple[str, ...]
LIST: Final = "[]"
"""Path element: the only item of a list."""
ANY: Final = "{}"
"""Path element: a member with a user-defined name."""
KINDS: Final[dict[str, type[Part]]] = {"Model": ModelDocument, "Tenant": TenantDocument, "Settings": SettingsDocument}
BASES: Final[dict[str, dict[str, object]]] = {
    "Model": {"metadata": {"name": "ada"}, "spec": {"engine": "vllm", "artifact": "oci://registry.example/ada:1"}},
    "Tenant": {"metadata": {"name": "team"}, "spec": {"models": ["ada"]}},
    "Settings": {},
}
TEXTS: Final[tuple[object, ...]] = tuple(
    Written(text.encode())
    for text in (
        "&a [*a]", "!!timestamp x", "!!binary aGk=", "!!int ''", "!!bool x", "!!set {a, b}", ".nan", ".inf",
        "2026-01-01", "0x1f", "1:30", "~",
        "{<<: {a: 1}}", "{1: 2}", "{a: 1, a: 2}",
        "[" * 99 + "]" * 99, "*nobody", "!x y", "{? [a] : b}", "|\n  x",
    )
)  # fmt: skip
"""YAML values that JSON cannot express."""
HOSTILE: Final = (*(one for one in VALUES if len(written(one)) < 10_000), *TEXTS)


def paths(kind: type[Part]) -> Iterator[Path]:
    """All keys of a document, including those of optional parts."""
    return _paths(kind, (), ())


def _paths(kind: Any, at: Path, above: tuple[type, ...]) -> Iterator[Path]:  # annotations have any type
    if at:
        yield at
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for one in parts:
            yield from (path for path in _paths(one, at, above) if path != at)
    elif origin is tuple:
        yield from _paths(parts[0], (*at, LIST), above)
    elif origin is dict:
        yield from _paths(parts[1], (*at, ANY), above)
    elif hasattr(origin, "__metadata__") or hasattr(kind, "__metadata__"):
        yield from (path for path in _paths(parts[0], at, above) if path != at)
    elif isinstance(kind, type) and issubclass(kind, Part) and kind not in above:
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            yield from _paths(hints[field.name], (*at, field.encode_name), (*above, kind))


def document(kind: str, path: Path, value: object) -> bytes:
    """The document with a value at a path."""
    root = tree({"apiVersion": "pilotlight.dev/v1alpha1", "kind": kind, **BASES[kind]})
    here: object = root
    for number, name in enumerate(path):
        inner: object = value if number + 1 == len(path) else [] if path[number + 1] == LIST else Members()
        here = _put(here, name, inner)
    return written(root)


def _put(of: object, name: str, value: object) -> object:
    """Set a member or append an item, and return it. An existing container stays."""
    if isinstance(of, list) and not isinstance(of, Members):
        of.append(value)
        return value
    assert isinstance(of, Members)
    known = dict(of).get("a" if name == ANY else name)
    if isinstance(known, list) and isinstance(value, list):
        return known
    of[:] = [pair for pair in of if pair[0] != name]
    of.append(("a" if name == ANY else name, value))
    return value


def places(kinds: Iterable[str]) -> Iterator[tuple[str, Path, int]]:
    """(kind of document, key, index in HOSTILE) of all cases."""
    for name in kinds:
        for path in dict.fromkeys(paths(KINDS[name])):
            yield from ((name, path, number) for number in range(len(HOSTILE)))


def check(data: bytes) -> None:
    """One YAML text: rejected in one line, or loaded, published and planned with waiting requests."""
    text = data.decode(errors="surrogatepass") if _is_unicode(data) else data.decode("latin-1")
    try:
        loaded = parse.parse_documents([("a.yaml", text)])
    except DocumentError as error:
        check_line(error)
        return
    seen = DocumentsSeen(models=loaded.models, tenants=loaded.tenants, settings=loaded.settings)
    waiting = gateway(levels=[level(str(one.name), waiting=1) for one in loaded.models])
    now, _ = fold(world((), [device()], gateways=[waiting]), (seen,), T0)
    Planner().plan(now, T0)
    msgspec.json.encode(catalogue.catalogue_full(now))
    for one in loaded.models:
        one.spec_hash()
    assert parse.parse_documents([("a.yaml", render.to_yaml(loaded))]) == loaded, "read again it is another"


def _is_unicode(data: bytes) -> bool:
    try:
        data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return False
    return True
