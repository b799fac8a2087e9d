"""Limits the part of a node's report that describes weights, since an autoscaler rejects a report above 1 MiB. Pure.

Rows of requests that replicas wait for are reported first, the shortest first, so that long names delay only their own
Models. The other rows take turns: each group is reported for ROTATE_S, so every autoscaler gets each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from autoscaler.agent_contract import NODE_PERIOD_S, WeightsReport, WeightsRequest, read_weights_request

COPIES_BYTES_MAX = 128 << 10
"""Maximum size of the names of copies in a report, encoded."""
WEIGHTS_BYTES_MAX = 640 << 10
"""Maximum size of the rows about weights in a report, encoded."""
ROTATE_S = NODE_PERIOD_S + 2.0
"""Time for which the same rows are reported. Every autoscaler gets a report in this time."""

_encode = msgspec.json.Encoder().encode


def limit_copies(in_use: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the names, sorted. If they exceed COPIES_BYTES_MAX, the last ones of `others` are omitted first."""
    left, chosen = COPIES_BYTES_MAX, list[str]()
    for name in dict.fromkeys((*sorted(in_use), *others)):
        left -= len(_encode(name)) + 1
        if left < 0:
            break
        chosen.append(name)
    return tuple(sorted(chosen))


class RowLimit:
    """Selects the rows of each report."""

    def __init__(self) -> None:
        self._first: WeightsRequest | None = None
        """Where the other rows begin. None: with the first one."""
        self._next: WeightsRequest | None = None
        """Where they begin after ROTATE_S."""
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
        left, chosen = WEIGHTS_BYTES_MAX - 2, list[WeightsReport]()
        for size, row in sorted(((_size(row), row) for row in waiting), key=lambda one: one[0]):
            if size > left:
                break
            left -= size
            chosen.append(row)
        self._next = None
        for row in self._in_turn(others):
            size = _size(row)
            if size > left:
                self._next = read_weights_request(row)
                break
            left -= size
            chosen.append(row)
        return tuple(chosen)

    def _in_turn(self, rows: Sequence[WeightsReport]) -> list[WeightsReport]:
        """Return the rows, beginning at `_first`."""
        ordered = sorted(rows, key=read_weights_request)
        first = self._first
        if first is None:
            return ordered
        begin = next((at for at, row in enumerate(ordered) if read_weights_request(row) >= first), 0)
        return ordered[begin:] + ordered[:begin]


def _size(row: WeightsReport) -> int:
    """Return the encoded size with the separator."""
    return len(_encode(row)) + 1
