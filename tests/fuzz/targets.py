"""The fuzz targets: plain functions that assert their invariants, their seeds, and generators of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.limits import Limited

FOUND = Path(__file__).parent / "found"
"""Inputs that once violated an invariant, one folder per target; they always run first."""


class Target(NamedTuple):
    """`one_input` raises if an invariant is violated. `words` are typical parts of inputs."""

    one_input: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]
    case: Callable[[Random], bytes] | None = None
    """Generates a structured input of the format, which reaches deeper than mutated bytes."""

    def limited(self) -> Callable[[bytes], None]:
        """`one_input` with limits on time and memory."""
        return Limited(self.one_input)


def _requests() -> Target:
    from tests.fuzz import requests

    return Target(requests.requests, requests.SEEDS, requests.WORDS)


def _answers() -> Target:
    from tests.fuzz import answers

    return Target(answers.answers, answers.SEEDS, answers.WORDS)


def _documents() -> Target:
    from tests.fuzz import bodies

    return Target(bodies.documents, bodies.JSON_SEEDS, bodies.JSON_WORDS)


def _forms() -> Target:
    from tests.fuzz import bodies

    return Target(bodies.forms, bodies.FORM_SEEDS, bodies.FORM_WORDS)


def _messages() -> Target:
    from tests.fuzz import messages

    return Target(messages.messages, messages.SEEDS, messages.WORDS)


def _manifests() -> Target:
    from tests.fuzz import manifests

    return Target(manifests.manifests, manifests.SEEDS, manifests.WORDS)


def _archives() -> Target:
    from tests.fuzz import archives

    return Target(archives.archives, archives.SEEDS, archives.WORDS)


def _signed() -> Target:
    from tests.fuzz import signed

    return Target(signed.signed, signed.SEEDS, signed.WORDS)


def _objects() -> Target:
    from tests.fuzz import objects

    return Target(objects.objects, objects.seeds(), objects.WORDS, objects.case)


def _reports() -> Target:
    from tests.fuzz import reports

    return Target(reports.reports, reports.SEEDS, reports.WORDS, reports.case)


def _yaml() -> Target:
    from tests.fuzz import texts

    return Target(texts.texts, texts.SEEDS, texts.WORDS, texts.case)


def _gguf() -> Target:
    from tests.fuzz import weights

    return Target(weights.headers, weights.GGUF_SEEDS, weights.GGUF_WORDS, weights.gguf_case)


def _safetensors() -> Target:
    from tests.fuzz import weights

    return Target(weights.folders, weights.FOLDER_SEEDS, weights.FOLDER_WORDS, weights.folder_case)


def _providers() -> Target:
    from tests.fuzz import providers

    return Target(providers.providers, providers.seeds(), providers.WORDS, providers.case)


def _port() -> Target:
    from tests.fuzz import port

    return Target(port.port, port.SEEDS, port.WORDS, port.case)


MADE: dict[str, Callable[[], Target]] = {
    "requests": _requests,
    "answers": _answers,
    "documents": _documents,
    "forms": _forms,
    "messages": _messages,
    "manifests": _manifests,
    "archives": _archives,
    "signed": _signed,
    "objects": _objects,
    "reports": _reports,
    "yaml": _yaml,
    "gguf": _gguf,
    "safetensors": _safetensors,
    "port": _port,
    "providers": _providers,
}
"""A target imports the code under test when it is created: atheris takes seconds to import all of it."""


@cache
def target(name: str) -> Target:
    """The target of this name."""
    return MADE[name]()


def found(name: str) -> list[bytes]:
    """Inputs that were found before."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
