"""docs/reference/error-codes.md is generated from the code, and the generator finds every code and reason."""

from __future__ import annotations

import pytest

from docs import error_codes
from tests.project.test_limits import errors_of_gateways
from tests.unit.autoscaler.kubernetes.resources.test_model_status import SITUATIONS

AS_REPORTED = {"CreateContainerConfigError"}
"""Reasons that a kubelet chooses."""


def test_error_code_reference_equals_the_generated_one() -> None:
    assert error_codes.PAGE.read_text() == error_codes.page(error_codes.PAGE.read_text()), (
        "run `.venv/bin/python -m docs.error_codes`"
    )


def test_generator_finds_every_error_that_a_gateway_constructs() -> None:
    found = {(str(one.status), one.code) for one in error_codes.raised_errors()}
    assert found == errors_of_gateways()


def test_generator_finds_the_reason_of_each_state_of_a_model() -> None:
    assert SITUATIONS.keys() - AS_REPORTED <= error_codes.ready_reasons()
    assert error_codes.kubernetes_reasons() >= AS_REPORTED


@pytest.mark.parametrize("table", [error_codes.ERRORS, error_codes.READY, error_codes.OTHER, error_codes.ADOPTED])
def test_error_code_without_a_meaning_fails_the_page_generation(
    table: dict[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(table, next(iter(table)))
    with pytest.raises(ValueError, match="without a meaning"):
        error_codes.page(error_codes.PAGE.read_text())


def test_error_page_marks_exactly_seven_errors_as_not_always_retryable() -> None:
    rows = [line for line in error_codes.error_rows().splitlines() if "`false`" in line]
    assert [row.split(" | ")[1] for row in rows] == [
        "`request_rejected`", "`upstream_error`", "`check_failed`", "`model_faulty`", "`model_start_failed`",
        "`no_capacity`", "`upstream_timeout`",
    ]  # fmt: skip
