"""Feeds a RequestReader with bytes split in every possible way, and compares the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.errors import CallError
from gateway.http.request_reader import Request, RequestReader
from tests.support.net.upstream_requests import in_one

UNFINISHED = "unfinished"
"""The reader waits for more of a head or body."""

Seen = Request | CallError | str
SPLITS_MAX = 1024
"""Longer inputs are split only at this many first and last offsets."""


def read(pieces: Iterable[bytes], body_bytes_max: int = 1 << 20) -> list[Seen]:
    """The results of one connection, in order: Requests, then at most one error or UNFINISHED.

    Like the edge: one Request at a time, and nothing is read after one that is not kept alive.
    """
    reader = RequestReader(body_bytes_max)
    seen: list[Seen] = []
    try:
        for piece in pieces:
            request = reader.feed(piece)
            while request is not None:
                seen.append(request)
                if not request.head.keep_alive:
                    return seen
                request = reader.next()
    except CallError as error:
        return [*seen, error, *(["still holds bytes"] if reader.buffered else [])]
    return [*seen, UNFINISHED] if reader.buffered or reader.waiting_for == "body" else seen


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """The input as a whole, byte by byte, and split in two at every offset."""
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for at in range(1, len(data)):
        if at <= SPLITS_MAX // 2 or len(data) - at <= SPLITS_MAX // 2:
            yield [data[:at], data[at:]]


def read_every_way(data: bytes, body_bytes_max: int = 1 << 20) -> list[Seen]:
    """The results, after checking that they do not depend on how the bytes are split."""
    whole = read([data], body_bytes_max)
    expected = [plain(item) for item in whole]
    for pieces in cuts(data):
        assert [plain(item) for item in read(pieces, body_bytes_max)] == expected, [len(piece) for piece in pieces][:3]
    return whole


def plain(seen: Seen) -> object:
    """The whole result as comparable values."""
    if isinstance(seen, Request):
        head = seen.head
        return (
            head.method,
            head.path,
            head.headers,
            head.query,
            head.minor,
            head.keep_alive,
            head.expects_continue,
            in_one(seen.body),
        )
    return (seen.status, seen.code, seen.message, seen.close) if isinstance(seen, CallError) else seen


def brief(seen: Seen) -> str | int:
    """The notation of the corpus for verdicts: "METHOD path body", a status, or "unfinished"."""
    if isinstance(seen, Request):
        return f"{seen.head.method.decode()} {seen.head.path.decode()} {in_one(seen.body).decode()}"
    return seen.status if isinstance(seen, CallError) else seen
