"""Keys that the documents will have and that this version does not act on yet.

Owns the list (interfaces, section 2, less what `autoscaler.spec.model`, `tenant` and `settings` define). Such a key is
refused and not ignored: who writes it expects it to work. A key leaves this list in the change that puts it in force.
Of `capacity` each kind is refused by `autoscaler.spec.capacity`, in which it stands.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoscaler.spec.artifact import STORED
from autoscaler.spec.decode import Path

MESSAGE = "is not in force yet in this version"

ENGINES = frozenset({"triton", "tei", "transformers", "external"})
SCHEMES = frozenset({"pvc", *STORED})

_MODEL = (*("fallbacks", "url", "upstreamModel", "keyFrom", "sleep", "owner"),)
_TENANT = (
    *("parent", "namespaces", "keysFrom", "jwt", "guarantee", "limit", "lending", "reclaimSeconds", "rate", "budget"),
)
_SETTINGS = ("history",)
KEYS: dict[str, tuple[str, ...]] = {
    "Model": tuple(f"spec.{key}" for key in _MODEL),
    "Tenant": tuple(f"spec.{key}" for key in _TENANT),
    "Settings": _SETTINGS,
}
"""Kind -> key paths; `*` stands for any key, and for any item of a list."""


def not_yet(kind: str, document: object) -> Path | None:
    """The first key of the document, or engine, that is not in force yet."""
    for key in KEYS[kind]:
        for found in _find(document, key.split("."), ()):
            return found
    return ("spec", "engine") if kind == "Model" and _engine(document) in ENGINES else None


def _find(value: object, parts: list[str], at: Path) -> Iterator[Path]:
    if not parts:
        yield at
    elif isinstance(value, list) and parts[0] == "*":
        for position, item in enumerate(value):
            yield from _find(item, parts[1:], (*at, position))
    elif isinstance(value, dict):
        for key in value if parts[0] == "*" else [parts[0]]:
            if key in value:
                yield from _find(value[key], parts[1:], (*at, key))


def _engine(document: object) -> str:
    spec = document.get("spec") if isinstance(document, dict) else None
    engine = spec.get("engine") if isinstance(spec, dict) else None
    return engine if isinstance(engine, str) else ""
