"""Bodies spliced from a socket into a file: never more bytes than requested, and every wait ends."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artifacts.download.splice import Goal, interrupt_transfer, splice_body
from artifacts.http.transport import Limits
from artifacts.registry.blobs import Moved

pytestmark = pytest.mark.standard

CONTENT = bytes(range(256)) * 1024
USUAL, SILENT, TRICKLE = Limits(), Limits(read_s=0.05), Limits(pace_s=0.1)
"""Each short limit applies to one kind of wait, so that a busy machine does not exceed another limit."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The registry's end and the client's end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as own:
        foreign, _ = server.accept()
        own.setblocking(False)
        with foreign:
            yield foreign, own


class Came:
    """A file, and the moves that were reported while it was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moves: list[tuple[int, int]] = []

    def move(self, rest: socket.socket, count: int, at: int = 0, limits: Limits = USUAL) -> Moved:
        with self.path.open("wb") as file:
            return splice_body(rest, count, Goal(file.fileno(), lambda *one: self.moves.append(one)), at, limits)


def send(foreign: socket.socket, content: bytes) -> threading.Thread:
    sending = threading.Thread(target=foreign.sendall, args=(content,))
    sending.start()
    return sending


def test_spliced_body_is_written_at_its_offset_without_later_bytes(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    foreign, own = ends
    came = Came(tmp_path / "file")
    sending = send(foreign, CONTENT + b"more")
    assert came.move(own, len(CONTENT), 1000) == Moved(len(CONTENT))
    sending.join()
    assert came.path.read_bytes() == bytes(1000) + CONTENT
    assert sum(count for _, count in came.moves) == len(CONTENT)
    assert [at for at, _ in came.moves] == [1000 + sum(n for _, n in came.moves[:i]) for i in range(len(came.moves))]
    assert own.recv(100) == b"more"


def test_file_system_without_splice_falls_back_to_copying(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.splice

    def splice(source: int, into: int, count: int, *, offset_dst: int | None = None, flags: int = 0) -> int:
        if offset_dst is not None:
            raise OSError(errno.EINVAL, "no splice")
        return true(source, into, count, flags=flags)

    monkeypatch.setattr(os, "splice", splice)
    foreign, own = ends
    came = Came(tmp_path / "file")
    sending = send(foreign, CONTENT)
    assert came.move(own, len(CONTENT)) == Moved(len(CONTENT))
    sending.join()
    assert came.path.read_bytes() == CONTENT


def test_disk_error_during_a_splice_is_raised_as_os_error(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.splice

    def splice(*given: Any, offset_dst: int | None = None, flags: int = 0) -> int:
        if offset_dst is not None:
            raise OSError(errno.ENOSPC, "full")
        return true(given[0], given[1], given[2], flags=flags)

    monkeypatch.setattr(os, "splice", splice)
    foreign, own = ends
    foreign.sendall(CONTENT[:100])
    with pytest.raises(OSError, match="full"):
        Came(tmp_path / "file").move(own, 100)


def test_splice_ends_if_the_connection_is_closed_silent_or_slow(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    foreign, own = ends
    came = Came(tmp_path / "file")
    foreign.sendall(b"abc")
    assert came.move(own, 10, limits=SILENT) == Moved(3, "the connection broke during the response (too slow)")
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            foreign.sendall(b"x")

    dripping = threading.Thread(target=trickle)
    dripping.start()
    moved = came.move(own, 1 << 20, limits=TRICKLE)
    over.set()
    dripping.join()
    assert "sent only" in moved.broken
    foreign.close()
    while (moved := came.move(own, 10)).came == 10:
        pass
    assert "it ended too early" in moved.broken


def test_splice_ends_on_an_interrupt_from_another_thread(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    _, own = ends
    threading.Timer(0.01, interrupt_transfer, [own]).start()
    assert "ended too early" in Came(tmp_path / "file").move(own, 10).broken
