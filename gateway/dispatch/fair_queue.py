"""When a gateway's parked Calls expire: one heap over lines, each of which knows its own soonest deadline.

Owns the order of lines by their soonest deadline. Promises O(log lines) per change and that its heap stays in
proportion to the lines that have Calls: entries that no longer hold are dropped when they surface, or all at once when
they are the most.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from gateway.dispatch.queue import COMPACT_MIN, Line


class Deadlines:
    """Lines by the time at which they are to be looked at: never later than their soonest deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Line]] = []
        """An entry is valid while its time is the line's `watch_s`."""
        self._watched = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, line: Line, deadline_s: float) -> None:
        """A Call with this deadline parked in the line."""
        if line.watch_s is not None and line.watch_s <= deadline_s:
            return
        self._watched += line.watch_s is None
        line.watch_s = deadline_s
        heappush(self._heap, (deadline_s, next(self._numbers), line))
        if len(self._heap) > 2 * self._watched + COMPACT_MIN:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].watch_s]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """The soonest deadline of all, None when nothing is parked."""
        heap = self._heap
        while heap:
            at_s, _, line = heap[0]
            if at_s != line.watch_s:
                heappop(heap)
                continue
            soonest_s = line.soonest_s()
            if soonest_s == at_s:
                return at_s
            line.watch_s = soonest_s
            if soonest_s is None:
                self._watched -= 1
                heappop(heap)
            else:
                heapreplace(heap, (soonest_s, next(self._numbers), line))
        return None

    def due(self, now_s: float) -> Iterator[Line]:
        """The lines with an overdue Call; who iterates takes those Calls out before going on."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            yield self._heap[0][2]
