"""Where an engine is: its address as Routes say it (`autoscaler.contract`), taken apart. Pure.

Owns that small grammar: `host:port`, `https://host:port`, `https://name@host:port`; an IPv6 host stands in brackets.
"""

from __future__ import annotations

from typing import NamedTuple

TLS = "https://"


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
    host = bracketed.strip("[]")
    if not address.startswith(TLS):
        return EngineAddress(host, int(port), None, address.encode())
    return EngineAddress(host, int(port), name or host, (f"{name}:{port}" if name else at).encode())
