"""The fuzz targets: plain functions that assert their invariants, their seeds, and generators of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.checks.resource_limits import Limited

FOUND = Path(__file__).parent / "findings"
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
    from tests.fuzz.targets import http_requests

    return Target(http_requests.requests, http_requests.SEEDS, http_requests.WORDS)


def _answers() -> Target:
    from tests.fuzz.targets import engine_responses

    return Target(engine_responses.answers, engine_responses.SEEDS, engine_responses.WORDS)


def _documents() -> Target:
    from tests.fuzz.targets import request_bodies

    return Target(request_bodies.documents, request_bodies.JSON_SEEDS, request_bodies.JSON_WORDS)


def _forms() -> Target:
    from tests.fuzz.targets import request_bodies

    return Target(request_bodies.forms, request_bodies.FORM_SEEDS, request_bodies.FORM_WORDS)


def _messages() -> Target:
    from tests.fuzz.targets import contract_messages

    return Target(contract_messages.messages, contract_messages.SEEDS, contract_messages.WORDS)


def _manifests() -> Target:
    from tests.fuzz.targets import registry_manifests

    return Target(registry_manifests.manifests, registry_manifests.SEEDS, registry_manifests.WORDS)


def _archives() -> Target:
    from tests.fuzz.targets import layer_archives

    return Target(layer_archives.archives, layer_archives.SEEDS, layer_archives.WORDS)


def _signed() -> Target:
    from tests.fuzz.targets import signatures

    return Target(signatures.signed, signatures.SEEDS, signatures.WORDS)


def _objects() -> Target:
    from tests.fuzz.targets import watched_objects

    return Target(watched_objects.objects, watched_objects.seeds(), watched_objects.WORDS, watched_objects.case)


def _reports() -> Target:
    from tests.fuzz.targets import reports

    return Target(reports.reports, reports.SEEDS, reports.WORDS, reports.case)


def _yaml() -> Target:
    from tests.fuzz.targets import yaml_documents

    return Target(yaml_documents.texts, yaml_documents.SEEDS, yaml_documents.WORDS, yaml_documents.case)


def _gguf() -> Target:
    from tests.fuzz.targets import weight_headers

    return Target(
        weight_headers.headers, weight_headers.GGUF_SEEDS, weight_headers.GGUF_WORDS, weight_headers.gguf_case
    )


def _safetensors() -> Target:
    from tests.fuzz.targets import weight_headers

    return Target(
        weight_headers.folders, weight_headers.FOLDER_SEEDS, weight_headers.FOLDER_WORDS, weight_headers.folder_case
    )


def _providers() -> Target:
    from tests.fuzz.targets import provider_lists

    return Target(provider_lists.providers, provider_lists.seeds(), provider_lists.WORDS, provider_lists.case)


def _port() -> Target:
    from tests.fuzz.targets import operations_port

    return Target(operations_port.port, operations_port.SEEDS, operations_port.WORDS, operations_port.case)


def _loads() -> Target:
    from tests.fuzz.targets import load_responses

    return Target(load_responses.loads, load_responses.SEEDS, load_responses.WORDS)


def _translations() -> Target:
    from tests.fuzz.targets import api_translations

    return Target(api_translations.translations, api_translations.SEEDS, api_translations.WORDS)


def _metrics() -> Target:
    from tests.fuzz.targets import engine_responses

    return Target(engine_responses.metrics, engine_responses.METRIC_SEEDS, engine_responses.METRIC_WORDS)


def _responses() -> Target:
    from tests.fuzz.targets import api_translations

    return Target(api_translations.responses, api_translations.RESPONSES_SEEDS, api_translations.RESPONSES_WORDS)


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
    "loads": _loads,
    "translations": _translations,
    "metrics": _metrics,
    "responses": _responses,
}
"""A target imports the code under test when it is created: atheris takes seconds to import all of it."""


@cache
def target(name: str) -> Target:
    """The target of this name."""
    return MADE[name]()


def found(name: str) -> list[bytes]:
    """Inputs that were found before."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
