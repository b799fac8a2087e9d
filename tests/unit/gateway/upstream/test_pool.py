"""Parsing of engine addresses as given in Routes."""

from __future__ import annotations

import pytest

from gateway.upstream.pool import EngineAddress, parse_address


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("127.0.0.1:80", EngineAddress("127.0.0.1", 80, None, b"127.0.0.1:80")),
        ("[::1]:9000", EngineAddress("::1", 9000, None, b"[::1]:9000")),
        ("engine:80", EngineAddress("engine", 80, None, b"engine:80")),
        ("https://10.0.0.7:443", EngineAddress("10.0.0.7", 443, "10.0.0.7", b"10.0.0.7:443")),
        ("https://[fd00::7]:443", EngineAddress("fd00::7", 443, "fd00::7", b"[fd00::7]:443")),
        ("https://m.example@10.0.0.7:443", EngineAddress("10.0.0.7", 443, "m.example", b"m.example:443")),
        ("https://m.example@[fd00::7]:8", EngineAddress("fd00::7", 8, "m.example", b"m.example:8")),
    ],
)
def test_engine_address_is_parsed_into_host_port_and_tls_server_name(address: str, parsed: EngineAddress) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "host", "https://", "https://host", "host:port", "http://host:80:x"])
def test_malformed_address_raises_value_error(address: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal"):
        parse_address(address)
