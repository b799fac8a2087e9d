"""Expands llama-swap's macros: `${NAME}` in any value of its configuration, `${env.NAME}` anywhere in its text. Pure.

The environment is expanded first, in the text. A model's macros take precedence over global ones, and a macro may use
earlier ones. `${PORT}` becomes Pilotlight's placeholder for the port.
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
    """Expand environment variables in a text. Raises WrongKeyError, whose message never contains a value."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environ:
            raise WrongKeyError((), f"${{env.{name}}}: this environment variable is not set: set it as for llama-swap")
        return environ[name]

    lines = (line if line.lstrip().startswith("#") else _ENV.sub(value, line) for line in text.splitlines())
    return "\n".join(lines) + "\n"


def expand_macros(value: object, macros: Macros, at: Path) -> object:
    """Expand all macros in a value; a value that is a single macro gets the macro's type. Raises WrongKeyError."""
    if isinstance(value, dict):
        return {key: expand_macros(one, macros, (*at, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [expand_macros(one, macros, (*at, position)) for position, one in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name in reversed(list(macros)):  # a macro may use earlier ones
        if value == f"${{{name}}}":
            return expand_macros(macros[name], macros, at)
        value = value.replace(f"${{{name}}}", _text(macros[name]))
    unknown = next((name for name in _MACRO.findall(value) if name not in RUN_TIME), None)
    if unknown is not None:
        raise WrongKeyError(at, f"unknown macro ${{{unknown}}}")
    return value.replace("${PORT}", PORT)


def merge_macros(every: Macros, own: Macros, model: str) -> Macros:
    """Return the macros of one model."""
    return {"MODEL_ID": model, **every, **own}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
