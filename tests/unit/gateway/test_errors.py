"""The headers of error responses."""

from __future__ import annotations

import pytest

from gateway import errors


@pytest.mark.parametrize(
    ("code", "should_retry"),
    [("model_faulty", b"false"), ("model_start_failed", b"true"), ("no_capacity", b"true"), ("overloaded", b"true")],
)
def test_client_should_retry_every_503_except_model_faulty(code: str, should_retry: bytes) -> None:
    headers = errors.render_error_headers(errors.service_unavailable(code, "why", 2.5))
    assert headers == [(b"retry-after", b"3"), (b"retry-after-ms", b"2500"), (b"x-should-retry", should_retry)]
