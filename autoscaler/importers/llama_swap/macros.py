"""llama-swap's macros: `${NAME}` in any value of its configuration, and `${env.NAME}` anywhere in its text. Pure.

Owns their order: the environment first, in the text; then a Model's own macros over the global ones, where a macro may
use those before it. `${PORT}` stays, as our own placeholder: Pilotlight chooses ports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoscaler.spec.decode import Path, WrongKeyError

PORT = "{port}"
RUN_TIME = frozenset({"PORT", "PID"})
_ENV = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")

Macros = Mapping[str, object]


def expand_environment(text: str, environ: Mapping[str, str]) -> str:
    """The text with the environment filled in. Raises WrongKeyError; its message never has a value."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environ:
            raise WrongKeyError((), f"${{env.{name}}}: this variable is not set here: set it, as for llama-swap")
        return environ[name]

    lines = (line if line.lstrip().startswith("#") else _ENV.sub(value, line) for line in text.splitlines())
    return "\n".join(lines) + "\n"


def expand_macros(value: object, macros: Macros, at: Path) -> object:
    """A value with all macros filled in; one that is a macro and nothing else takes its type. Raises WrongKeyError."""
    if isinstance(value, dict):
        return {key: expand_macros(one, macros, (*at, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [expand_macros(one, macros, (*at, position)) for position, one in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name in reversed(list(macros)):  # a macro may use those before it
        if value == f"${{{name}}}":
            return expand_macros(macros[name], macros, at)
        value = value.replace(f"${{{name}}}", _text(macros[name]))
    unknown = next((name for name in _MACRO.findall(value) if name not in RUN_TIME), None)
    if unknown is not None:
        raise WrongKeyError(at, f"unknown macro ${{{unknown}}}")
    return value.replace("${PORT}", PORT)


def merge_macros(every: Macros, own: Macros, model: str) -> Macros:
    """The macros that hold in one Model."""
    return {"MODEL_ID": model, **every, **own}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
