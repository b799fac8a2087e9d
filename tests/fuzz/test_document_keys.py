"""Hostile values at the keys of our documents: no traceback, and each rejection in one line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest

from tests.fuzz.inputs import document_keys

SHARE = 131
"""`make test` runs one in this many cases. The number is prime, so that each key and each value has its turn."""
CASES_MIN = 20_000


def run(places: Iterable[tuple[str, document_keys.Path, int]]) -> None:
    """Run the cases."""
    for kind, path, number in places:
        text = document_keys.document(kind, path, document_keys.HOSTILE[number])
        try:
            document_keys.check(text)
        except BaseException as error:
            error.add_note(f"{kind} {'.'.join(path)}: value {number}: {text[:300]!r}")
            raise


def test_hostile_values_at_sampled_keys_give_at_most_a_one_line_error() -> None:
    run(islice(document_keys.places(document_keys.KINDS), 0, None, SHARE))


@pytest.mark.deep
@pytest.mark.parametrize("kind", document_keys.KINDS)
def test_hostile_values_at_every_key_give_at_most_a_one_line_error(kind: str) -> None:
    run(document_keys.places([kind]))


def test_document_kinds_have_at_least_20000_hostile_value_cases() -> None:
    assert sum(1 for _ in document_keys.places(document_keys.KINDS)) >= CASES_MIN


def test_generated_document_has_the_hostile_value_at_the_given_path() -> None:
    text = document_keys.document("Model", ("spec", "replicas", "schedule", document_keys.LIST, "min"), "x")
    assert b'"replicas":{"schedule":[{"min":"x"}]}' in text
    assert b'"env":{"a":{"valueFrom":1}}' in document_keys.document(
        "Model", ("spec", "env", document_keys.ANY, "valueFrom"), 1
    )
    assert b'"metadata":{"name":null}' in document_keys.document("Model", ("metadata", "name"), None)
