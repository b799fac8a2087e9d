"""What the instructions of a Modelfile mean for an artifact: Ollama's, and modctl's beside them. Pure.

Owns the meaning; the grammar is read elsewhere, and files are looked for elsewhere, too. Texts become files under the
names that a model of Ollama's has here (`artifacts.dialects.ollama`), so that an engine finds them at one place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from artifacts.pack.pack import About, Kind, Offered, PackError

MODCTL = (
    *("NAME", "ARCH", "FAMILY", "FORMAT", "PARAMSIZE", "PRECISION", "QUANTIZATION"),
    *("CONFIG", "MODEL", "CODE", "DATASET", "DOC"),
)
"""Instructions that only modctl knows (https://github.com/modelpack/modctl, docs/getting-started.md)."""
_ABOUT = {
    "NAME": "name",
    "ARCH": "architecture",
    "FAMILY": "family",
    "FORMAT": "format",
    "PARAMSIZE": "param_size",
    "PRECISION": "precision",
    "QUANTIZATION": "quantization",
}
_FILES: dict[str, Kind] = {
    "CONFIG": "weight.config",
    "MODEL": "weight",
    "CODE": "code",
    "DATASET": "dataset",
    "DOC": "doc",
}
_TEXTS = {"TEMPLATE": "template", "SYSTEM": "system"}
_ROLES = ("system", "user", "assistant")


class Wishes(NamedTuple):
    """What a Modelfile asks for."""

    models: tuple[str, ...]
    """Files or folders, as they are written: FROM."""
    adapters: tuple[str, ...]
    patterns: tuple[tuple[Kind, str], ...]
    """Of paths below the Modelfile's folder."""
    texts: tuple[Offered, ...]
    about: About
    left: tuple[tuple[str, str], ...]
    """Instructions that an artifact has no place for, and why."""


def read_instructions(instructions: Iterable[tuple[str, str]]) -> Wishes:
    """Raises PackError."""
    listed = list(instructions)
    values: dict[str, list[str]] = {}
    for name, value in listed:
        values.setdefault(name, []).append(value)
    about = About(**{_ABOUT[name]: given[-1] for name, given in values.items() if name in _ABOUT})
    texts = {path: values[name][-1] for name, path in _TEXTS.items() if name in values}
    if "PARAMETER" in values:
        texts["params.json"] = json.dumps(_parameters(values["PARAMETER"]), indent=1, ensure_ascii=False)
    if "MESSAGE" in values:
        texts["messages.json"] = json.dumps([_message(one) for one in values["MESSAGE"]], indent=1, ensure_ascii=False)
    for number, text in enumerate(dict.fromkeys(values.get("LICENSE", ())), 1):
        texts["LICENSE" if number == 1 else f"LICENSE-{number}"] = text
    return Wishes(
        models=tuple(dict.fromkeys(values.get("FROM", ()))),
        adapters=tuple(dict.fromkeys(values.get("ADAPTER", ()))),
        patterns=tuple((_FILES[name], value) for name, value in listed if name in _FILES),
        texts=tuple(Offered(path, len(text.encode()), content=text.encode()) for path, text in texts.items()),
        about=about,
        left=tuple(
            (name, "it is an order to Ollama, and no part of the model")
            for name in ("RENDERER", "PARSER", "REQUIRES")
            if name in values
        ),
    )


def _parameters(given: list[str]) -> dict[str, object]:
    """As Ollama keeps them: `stop` is a list, the others are numbers, yes or no, or texts; the last one counts."""
    found: dict[str, object] = {}
    stops = list[str]()
    for one in given:
        key, _, value = one.partition(" ")
        value = value.strip()
        if not value:
            raise PackError(f"PARAMETER {key}: expected a value")
        if key == "stop":
            stops.append(value)
            found[key] = stops
        else:
            found[key] = _value(value)
    return found


def _value(text: str) -> object:
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if text.isascii() and abs(number) < float("inf"):
            return number
    return text


def _message(text: str) -> dict[str, str]:
    role, _, content = text.partition(" ")
    if role not in _ROLES:
        raise PackError(f"MESSAGE {role[:40]!r}: expected one of {', '.join(_ROLES)}")
    return {"role": role, "content": content.strip()}
