"""Parses an Ollama Modelfile into its instructions, in order. Pure.

Each line has one instruction: a case-insensitive name, and a value that is plain, quoted, or in triple quotes over
several lines. Lines that begin with `#` are comments. The caller interprets the instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from autoscaler.spec.decode import WrongKeyError, suggest_nearest

KNOWN = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "RENDERER", "PARSER", "REQUIRES")
THREE = '"""'


class Instruction(NamedTuple):
    """A known instruction and its value."""

    name: str
    value: str


def parse_modelfile(text: str, known: Sequence[str] = KNOWN) -> list[Instruction]:
    """Parse a Modelfile. `known`: valid names, in upper case. Raises WrongKeyError with the line as its path."""
    found: list[Instruction] = []
    lines = list(enumerate(text.splitlines(), 1))
    while lines:
        number, line = lines.pop(0)
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if name.upper() not in known:
            names = ", ".join(known)
            raise WrongKeyError((f"line {number}",), f"expected one of {names}{suggest_nearest(name.upper(), known)}")
        value = rest.strip()
        for quote in (THREE, '"'):
            lead, begins, after = value.partition(quote)
            if begins and (not lead or name.upper() in ("PARAMETER", "MESSAGE")):
                while not after.rstrip().endswith(quote):
                    if not lines:
                        raise WrongKeyError((f"line {number}",), f"expected {quote} at its end")
                    after += "\n" + lines.pop(0)[1]
                value = lead + after.rstrip().removesuffix(quote)
                break
        if not value:
            raise WrongKeyError((f"line {number}",), f"expected a value after {name}")
        found.append(Instruction(name.upper(), value))
    return found


def parse_name_comment(text: str) -> str:
    """Return the name in the comment that `ollama show --modelfile` writes: the line after `replace FROM with:`."""
    lines = text.splitlines()
    for before, line in pairwise(lines):
        if before.startswith("#") and before.rstrip().endswith("replace FROM with:"):
            return line.removeprefix("#").strip().removeprefix("FROM").strip()
    return ""
