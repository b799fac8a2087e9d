"""The bytes of requests that the load generator sends."""

from __future__ import annotations

import pytest

from loadtest.client import LoadError, request_bytes, target_of


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://a.example", "a.example:80"), ("http://10.0.0.1:8080/v1", "10.0.0.1:8080"),
     ("http://[fd00::1]:8080", "[fd00::1]:8080"), ("https://[::1]", "[::1]:443")],
)  # fmt: skip
def test_host_header_has_a_port_and_brackets_around_ipv6_addresses(url: str, host: str) -> None:
    assert f"\r\nHost: {host}\r\n".encode() in request_bytes(target_of(url), "GET", "/v1/models", (), b"")


@pytest.mark.parametrize("url", ["http://a/?\udcff", "http://a/#\udcff", "http://\udcff", "ftp://a", "http://a:x"])
def test_url_of_another_scheme_or_that_is_not_utf8_is_rejected(url: str) -> None:
    with pytest.raises(LoadError, match="not a URL of a server"):
        target_of(url)
