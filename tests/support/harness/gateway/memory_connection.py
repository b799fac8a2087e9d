"""A gateway connection without a socket: bytes are passed in directly, and the output is recorded."""

from __future__ import annotations

import asyncio
import re

from gateway.gateway import Gateway

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) ")


class Wire(asyncio.Transport):
    """The transport that a connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = False
        """Whether it is closed, or nothing more is written to it."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("192.0.2.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.ended

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


def heard(front: Gateway, pieces: list[bytes]) -> tuple[list[int], bool]:
    """The statuses that a client receives that sends these bytes, and whether the connection ended."""
    wire, connection = Wire(), front.connection()
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.ended:
            connection.data_received(piece)
    statuses = [int(status) for status in _STATUS.findall(wire.written)]
    connection.connection_lost(None)
    return statuses, wire.ended
