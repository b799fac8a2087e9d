"""Where an engine is: its address as Routes say it (`autoscaler.contract`), taken apart. Pure.

Owns that small grammar: `host:port`, `https://host:port`, `https://name@host:port`; an IPv6 host stands in brackets.
"""

from __future__ import annotations

from typing import NamedTuple

TLS = "https://"
PORT_MAX = 65_535


class EngineAddress(NamedTuple):
    """`name`: what the engine's certificate must be for. None: the engine speaks plain HTTP."""

    host: str
    port: int
    name: str | None
    authority: bytes
    """What the Host header says (RFC 9112, 3.2)."""


def parse(address: str) -> EngineAddress:
    """Raises ValueError on what is no address."""
    rest = address.removeprefix(TLS)
    name, _, at = rest.rpartition("@")
    bracketed, _, port = at.rpartition(":")
    host, number = bracketed.strip("[]"), int(port)
    if not host or not 0 < number <= PORT_MAX:
        raise ValueError("no host and port")
    if not address.startswith(TLS):
        return EngineAddress(host, number, None, address.encode())
    return EngineAddress(host, number, name or host, (f"{name}:{port}" if name else at).encode())
