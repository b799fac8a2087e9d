"""Addresses of engines, as the scraper reads them."""

from __future__ import annotations

import pytest

from autoscaler.signals.scraper import EngineUrl, parse_engine_url
from autoscaler.text import format_engine_address


@pytest.mark.parametrize(
    ("host", "tls_name", "url"),
    [
        ("127.0.0.1", None, EngineUrl("http://127.0.0.1:8000", None)),
        ("fd00::1", None, EngineUrl("http://[fd00::1]:8000", None)),
        ("10.0.0.1", "", EngineUrl("https://10.0.0.1:8000", None)),
        ("fd00::1", "engine.example", EngineUrl("https://[fd00::1]:8000", "engine.example")),
    ],
)
def test_engine_url_is_parsed_from_the_address_in_routes(host: str, tls_name: str | None, url: EngineUrl) -> None:
    assert parse_engine_url(format_engine_address(host, 8000, tls_name)) == url
