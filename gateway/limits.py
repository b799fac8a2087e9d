"""Limits of the inference port that do not belong to a model (interfaces, section 2, Settings `limits`). Pure data."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one client connection: sizes in bytes, times in seconds."""

    body_bytes_max: int = 64 << 20
    header_seconds_max: float = 15.0
    """From the first to the last byte of a request head."""
    body_seconds_max: float = 30.0
    """A body of which no byte arrives for this long is rejected."""
    body_bytes_per_second_min: int = 4 << 10
    """A body that has arrived more slowly for `body_seconds_max` and longer, on average, is rejected."""
    idle_seconds_max: float = 75.0
    """Between two requests."""
    write_stall_seconds_max: float = 60.0
    """A client that reads nothing for this long is disconnected, and its request is canceled."""
    connections_per_address_max: int = 2000
    """Further connections are closed without a response."""
    memory_bytes: int = 0
    """Memory limit of this process; 0 for the limit of its cgroup."""
