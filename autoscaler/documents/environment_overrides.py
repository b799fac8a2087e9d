"""Overrides Settings by environment variables: `PILOTLIGHT_LIMITS_BODY_BYTES_MAX=1Mi` is `limits.bodyBytesMax: 1Mi`.

Pure: the environment is an argument. The name is the key path in upper case with underscores; the value is YAML. A
variable with the prefix that is not a setting is an error, so that a typing error is reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from autoscaler.spec.decode import Part, WrongKeyError, decode_value, suggest_nearest
from autoscaler.spec.settings import Settings
from autoscaler.spec.yaml import YamlError, parse_yaml

PREFIX = "PILOTLIGHT_"
RESERVED = frozenset({"PILOTLIGHT_REPLICA", "PILOTLIGHT_TRACEBACK"})
"""Variables with the prefix that are not settings: the marker of replicas' processes, the switch for tracebacks."""


def override_settings(settings: Settings, environ: Mapping[str, str], reserved: Collection[str] = RESERVED) -> Settings:
    """Return `settings` with overrides of `environ`. Raises WrongKeyError with the variable's name as its path."""
    leaves = {name: (path, kind) for name, path, kind in _leaves(Settings, PREFIX, ())}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in reserved:
            continue
        if name not in leaves:
            raise WrongKeyError((name,), f"is not a setting{suggest_nearest(name, leaves)}")
        path, kind = leaves[name]
        try:
            values = parse_yaml(text)
        except YamlError as error:
            raise WrongKeyError((name,), str(error)) from error
        settings = _replaced(settings, path, _typed(values[0] if values else None, kind, name, path[-1]))
    return settings


def _leaves(part: type[Part], prefix: str, at: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield (variable, attribute path, type) for every field of a Part that is not itself a Part."""
    for field in msgspec.structs.fields(part):
        name = prefix + re.sub(r"(?=[A-Z])", "_", field.encode_name).upper()
        if isinstance(field.type, type) and issubclass(field.type, Part):
            yield from _leaves(field.type, name + "_", (*at, field.name))
        else:
            yield name, (*at, field.name), field.type


def _typed(value: object, kind: Any, name: str, attribute: str) -> object:
    """Decode the value to the type of the setting. An error's path is the variable; the unit comes from the key."""
    try:
        return decode_value(value, kind, at=(attribute.title().replace("_", ""),))
    except WrongKeyError as error:
        raise WrongKeyError((name, *error.path[1:]), error.message) from None


def _replaced(part: Part, path: tuple[str, ...], value: object) -> Any:
    if len(path) > 1:
        value = _replaced(getattr(part, path[0]), path[1:], value)
    return msgspec.structs.replace(part, **{path[0]: value})
