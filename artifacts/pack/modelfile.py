"""Interprets the instructions of a Modelfile (Ollama's and modctl's) for an artifact. Pure.

Parsing and file lookup happen elsewhere. Texts become files with the names that `artifacts.dialects.ollama` uses, so
that an engine finds them in one place.
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
"""Instructions specific to modctl (https://github.com/modelpack/modctl, docs/getting-started.md)."""
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


class ModelfileContent(NamedTuple):
    """Content of a Modelfile."""

    models: tuple[str, ...]
    """Values of FROM, files or folders, as written."""
    adapters: tuple[str, ...]
    patterns: tuple[tuple[Kind, str], ...]
    """Kinds and path patterns, relative to the Modelfile's folder."""
    texts: tuple[Offered, ...]
    about: About
    left: tuple[tuple[str, str], ...]
    """Ignored instructions, each with the reason."""


def read_instructions(instructions: Iterable[tuple[str, str]]) -> ModelfileContent:
    """Interpret (name, value) pairs. Raises PackError."""
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
    return ModelfileContent(
        models=tuple(dict.fromkeys(values.get("FROM", ()))),
        adapters=tuple(dict.fromkeys(values.get("ADAPTER", ()))),
        patterns=tuple((_FILES[name], value) for name, value in listed if name in _FILES),
        texts=tuple(Offered(path, len(text.encode()), content=text.encode()) for path, text in texts.items()),
        about=about,
        left=tuple(
            (name, "it is an instruction to Ollama, not a part of the model")
            for name in ("RENDERER", "PARSER", "REQUIRES")
            if name in values
        ),
    )


def _parameters(given: list[str]) -> dict[str, object]:
    """Convert as Ollama does: `stop` is a list, others are numbers, booleans or texts; the last value wins."""
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
