"""Bounds of the inference port that are not a Model's own (interfaces, section 2, Settings `limits`). Pure data."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client connection may take: sizes in bytes, times in seconds."""

    body_bytes_max: int = 64 << 20
    header_seconds_max: float = 15.0
    """From a head's first byte to its last."""
    body_seconds_max: float = 30.0
    """From a head's last byte to its body's last, however slowly bytes trickle."""
    idle_seconds_max: float = 75.0
    """Between two requests."""
    write_stall_seconds_max: float = 60.0
    """A client that takes nothing for so long is cut, and its Call with it."""
    connections_per_address_max: int = 2000
    """More are closed unanswered."""
    memory_bytes: int = 0
    """What this process may hold; 0: what its cgroup allows."""
