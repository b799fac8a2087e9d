"""The headers of error responses."""

from __future__ import annotations

import pytest

from gateway import errors


@pytest.mark.parametrize("should_retry", [True, False])
def test_error_with_a_retry_time_has_retry_after_and_should_retry_headers(should_retry: bool) -> None:
    error = errors.service_unavailable("model_start_failed", "why", 2.5, should_retry=should_retry)
    said = b"true" if should_retry else b"false"
    assert errors.render_error_headers(error) == [
        (b"retry-after", b"3"), (b"retry-after-ms", b"2500"), (b"x-should-retry", said)
    ]  # fmt: skip


@pytest.mark.parametrize("error", [errors.upstream_timeout(), errors.engine_distrusted()])
def test_engine_error_that_a_retry_cannot_cure_has_x_should_retry_false(error: errors.CallError) -> None:
    assert errors.render_error_headers(error) == [(b"x-should-retry", b"false")]
