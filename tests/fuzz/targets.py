"""What is fuzzed: a plain function with its invariants inside, and what to begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import answers, archives, bodies, manifests, messages, requests, signed

FOUND = Path(__file__).parent / "found"
"""Inputs that once broke something, one folder per target; they are tried first, for ever."""


class Target(NamedTuple):
    """`one_input` raises when an invariant does not hold. `words` are what inputs are often made of."""

    one_input: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]


TARGETS = {
    "requests": Target(requests.requests, requests.SEEDS, requests.WORDS),
    "answers": Target(answers.answers, answers.SEEDS, answers.WORDS),
    "documents": Target(bodies.documents, bodies.JSON_SEEDS, bodies.JSON_WORDS),
    "forms": Target(bodies.forms, bodies.FORM_SEEDS, bodies.FORM_WORDS),
    "messages": Target(messages.messages, messages.SEEDS, messages.WORDS),
    "manifests": Target(manifests.manifests, manifests.SEEDS, manifests.WORDS),
    "archives": Target(archives.archives, archives.SEEDS, archives.WORDS),
    "signed": Target(signed.signed, signed.SEEDS, signed.WORDS),
}


def found(name: str) -> list[bytes]:
    """What was found before."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
