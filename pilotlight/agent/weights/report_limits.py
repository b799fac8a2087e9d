"""Limits the part of a node's report that describes weights, since an autoscaler rejects a report above 1 MiB. Pure.

Rows of requests that replicas wait for are reported first, the shortest first, so that long names delay only their own
Models. The rest takes turns: the row whose turn it is has its place in each report, for ROTATE_S, so every autoscaler
gets each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from autoscaler.agent_contract import IMAGES_MAX, NODE_PERIOD_S, WeightsReport, WeightsRequest, read_weights_request

HEADERS_CHARS_MAX = 400_000
"""Total size of the headers in a report, which is limited to 1 MiB. Autoscalers do not request a reported header
again, so that later reports have room for the others.
"""

REASON_CHARS_MAX = 1000
"""Maximum length of a reason. It may contain foreign file names, and an oversized report is rejected."""


COPIES_BYTES_MAX = 128 << 10
"""Maximum size of the names of copies in a report, encoded."""
WEIGHTS_BYTES_MAX = 640 << 10
"""Maximum size of the rows about weights in a report, encoded."""
IMAGES_BYTES_MAX = 128 << 10
"""Maximum size of the names of images in a report, encoded."""
ROTATE_S = NODE_PERIOD_S + 2.0
"""Time for which the same rows are reported. Every autoscaler gets a report in this time."""

_encode = msgspec.json.Encoder().encode


def limit_copies(in_use: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the names, sorted. A name that exceeds what the names before it left of COPIES_BYTES_MAX is omitted."""
    left, chosen = COPIES_BYTES_MAX, list[str]()
    for name in dict.fromkeys((*sorted(in_use), *others)):
        size = len(_encode(name)) + 1
        if size <= left:
            left -= size
            chosen.append(name)
    return tuple(sorted(chosen))


def limit_images(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of images, sorted. If they exceed IMAGES_MAX or IMAGES_BYTES_MAX, the longest are omitted."""
    left, chosen = IMAGES_BYTES_MAX, list[str]()
    for size, name in sorted((len(_encode(name)) + 1, name) for name in set(names))[:IMAGES_MAX]:
        left -= size
        if left < 0:
            break
        chosen.append(name)
    return tuple(sorted(chosen))


class RowLimit:
    """Selects the rows of each report."""

    def __init__(self) -> None:
        self._first: WeightsRequest | None = None
        """The request whose turn it is. None: the first one."""
        self._next: WeightsRequest | None = None
        """The request whose turn it is after ROTATE_S."""
        self._began_s = 0.0

    def choose(
        self, waiting: Sequence[WeightsReport], others: Sequence[WeightsReport], now_s: float
    ) -> tuple[WeightsReport, ...]:
        """Return the rows that fit into WEIGHTS_BYTES_MAX. `waiting`: rows of requests that replicas wait for."""
        rows = (*waiting, *others)
        if len(_encode(rows)) <= WEIGHTS_BYTES_MAX:
            return rows
        if now_s >= self._began_s + ROTATE_S:
            self._first, self._began_s = self._next, now_s
        turns, sizes = self._in_turn(rows), {id(row): len(_encode(row)) + 1 for row in rows}
        waits = sorted(waiting, key=lambda row: sizes[id(row)])
        chosen, left = set[int](), WEIGHTS_BYTES_MAX - 2
        for row in (turns[0], *waits, *turns):
            if id(row) not in chosen and sizes[id(row)] <= left:
                chosen.add(id(row))
                left -= sizes[id(row)]
        omitted = next((row for row in turns[1:] if id(row) not in chosen), None)
        self._next = None if omitted is None else read_weights_request(omitted)
        return tuple(row for row in (*waits, *others) if id(row) in chosen)

    def _in_turn(self, rows: Sequence[WeightsReport]) -> list[WeightsReport]:
        """Return the rows, beginning at `_first`."""
        ordered = sorted(rows, key=read_weights_request)
        first = self._first
        if first is None:
            return ordered
        begin = next((at for at, row in enumerate(ordered) if read_weights_request(row) >= first), 0)
        return ordered[begin:] + ordered[:begin]


def truncate_reasons(said: WeightsReport) -> WeightsReport:
    """Return the report with its reasons truncated."""
    return replace(said, no_image=said.no_image[:REASON_CHARS_MAX], no_header=said.no_header[:REASON_CHARS_MAX])


def limit_headers(said: Iterable[WeightsReport]) -> Iterator[WeightsReport]:
    """Skip reports whose headers exceed the limit of one report."""
    left = HEADERS_CHARS_MAX
    for one in said:
        if len(one.header) <= left:
            left -= len(one.header)
            yield one
