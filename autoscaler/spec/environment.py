"""Settings from the environment: `PILOTLIGHT_LIMITS_BODY_BYTES_MAX=1Mi` is `limits.bodyBytesMax: 1Mi`.

Owns the names (the key path in upper case with underscores) and the override. Values are YAML, so lists work too. The
environment is an argument. A variable that begins like ours and is no setting is an error: a typo must not be silent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from autoscaler.spec.decode import Part, WrongKeyError, decode, nearest
from autoscaler.spec.settings import Settings
from autoscaler.spec.yaml import YamlError, read

PREFIX = "PILOTLIGHT_"
RESERVED = frozenset({"PILOTLIGHT_REPLICA", "PILOTLIGHT_TRACEBACK"})
"""Variables with our prefix that are no settings: the mark of a Replica's processes, and the switch for tracebacks."""


def override(settings: Settings, environ: Mapping[str, str], reserved: Collection[str] = RESERVED) -> Settings:
    """`settings` with what the environment says. Raises WrongKeyError whose path is the variable's name."""
    leaves = {name: (path, kind) for name, path, kind in _leaves(Settings, PREFIX, ())}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in reserved:
            continue
        if name not in leaves:
            raise WrongKeyError((name,), f"is not a setting{nearest(name, leaves)}")
        path, kind = leaves[name]
        try:
            values = read(text)
        except YamlError as error:
            raise WrongKeyError((name,), str(error)) from error
        settings = _replaced(settings, path, _typed(values[0] if values else None, kind, name, path[-1]))
    return settings


def _leaves(part: type[Part], prefix: str, at: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """(variable, attribute path, type) of everything in a Part that is not itself a Part."""
    for field in msgspec.structs.fields(part):
        name = prefix + re.sub(r"(?=[A-Z])", "_", field.encode_name).upper()
        if isinstance(field.type, type) and issubclass(field.type, Part):
            yield from _leaves(field.type, name + "_", (*at, field.name))
        else:
            yield name, (*at, field.name), field.type


def _typed(value: object, kind: Any, name: str, attribute: str) -> object:
    """The value as the setting's type; the message speaks of the variable, the words of the key."""
    try:
        return decode(value, kind, at=(attribute.title().replace("_", ""),))
    except WrongKeyError as error:
        raise WrongKeyError((name, *error.path[1:]), error.message) from None


def _replaced(part: Part, path: tuple[str, ...], value: object) -> Any:
    if len(path) > 1:
        value = _replaced(getattr(part, path[0]), path[1:], value)
    return msgspec.structs.replace(part, **{path[0]: value})
