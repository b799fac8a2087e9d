"""The queue of one model in one gateway, and the deadlines of all queued requests.

Order: priority first, then fair over tenants, then first come, first served. Fairness is start-time fair queueing
(Goyal, Vin, Cheng 1997) within one priority: every grant advances the tenant's tag by its step, and the lowest tag is
next. Tags are integers, so that a large tag absorbs no small step. A tenant that returns starts at the tag of the last
grant, so that idle time is not saved up. A line is one (tenant, priority). The queue does not decide which requests may
wait or are rejected. Operations take O(1) or O(log n).

Deadlines: one heap over the lines, each of which knows its own soonest deadline. A change takes O(log lines). Stale
entries are dropped when they reach the top, or all together when they are the majority.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final

from autoscaler.contract import ModelName, QueueLimits, TenantName
from gateway.dispatch.call import Call
from gateway.dispatch.reports import Account
from gateway.exception_handling import reraise_memory_error
from gateway.http.body_buffers import LARGE_BYTES

COMPACT_MIN = 64
"""A deadline heap is rebuilt when more than half of it, and more than this number, is stale."""


DEFAULT_STEP: Final = 10**12
"""The step of weight 1. With the greatest weight, 1e6, rounding changes a step by less than one in a million."""


def compute_step(weight: float) -> int:
    """Return by how much a grant advances the tag of a tenant: in inverse proportion to its weight."""
    return round(DEFAULT_STEP / weight)


class PriorityBand:
    """One priority of one model: `tag` is the start tag of its latest grant."""

    __slots__ = ("priority", "tag")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.tag = 0


class TenantQueue:
    """The requests of one tenant with one priority for one model: the queued ones in order, and how many run."""

    __slots__ = (
        "account", "calls", "deadlines", "entry", "lane", "listed", "model", "running", "step", "tag", "tickets",
        "watch_s",
    )  # fmt: skip

    def __init__(self, model: ModelName, lane: PriorityBand, account: Account, step: int) -> None:
        self.model = model
        self.lane = lane
        self.account = account
        self.step = step
        """`compute_step` of the tenant's weight."""
        self.calls: OrderedDict[Call, int] = OrderedDict()
        """Queued requests -> their ticket, which rises from head to tail."""
        self.tickets = 0
        self.running = 0
        self.tag = 0
        """Start tag of its next grant, unless the priority band has moved past it."""
        self.entry: int | None = None
        """The tag of its valid entry in the Queue's heap; any other entry of it there is stale."""
        self.deadlines: list[tuple[float, int, Call]] = []
        self.watch_s: float | None = None
        """The time of its entry in Deadlines; written by Deadlines only."""
        self.listed = False
        """Whether it is among the lines to report; written by dispatch only."""

    def soonest_s(self) -> float | None:
        """Return the soonest deadline of its queued requests; None if none is queued."""
        heap, calls = self.deadlines, self.calls
        while heap and heap[0][2] not in calls:
            heappop(heap)
        return heap[0][0] if heap else None

    def soonest(self) -> Call:
        """Return the request with the soonest deadline; call it only after `soonest_s` has returned one."""
        return self.deadlines[0][2]

    def first(self) -> Call:
        """Return the next request to grant; the line is not empty."""
        return next(iter(self.calls))

    def compact(self) -> None:
        """Keep the deadline heap in proportion to the number of queued requests."""
        if len(self.deadlines) > 2 * len(self.calls) + COMPACT_MIN:
            self.deadlines = [(call.deadline_s, number, call) for number, call in enumerate(self.calls)]
            heapify(self.deadlines)


class Parked:
    """Bytes of small bodies of queued requests, for all models. Large ones are counted by the body budget."""

    __slots__ = ("bytes", "bytes_max")

    def __init__(self) -> None:
        self.bytes = 0
        self.bytes_max = 1 << 60
        """Set from the gateway's memory (`gateway.memory.body_budget`)."""

    def full(self, size: int) -> bool:
        """Return whether one more body would exceed the maximum."""
        return size <= LARGE_BYTES and self.bytes + size > self.bytes_max


class Queue:
    """The queued requests of one model."""

    __slots__ = ("_heap", "_lanes", "_numbers", "_parked", "_small_bytes", "bytes", "lines", "model", "waiting")

    def __init__(self, model: ModelName, parked: Parked | None = None) -> None:
        self.model = model
        self._parked = parked or Parked()
        self._small_bytes = 0
        """Its part of `_parked`."""
        self.lines: dict[tuple[TenantName, int], TenantQueue] = {}
        """At most tenants x priorities of the catalogue; all are dropped when the model has no request."""
        self.waiting = 0
        self.bytes = 0
        self._lanes: dict[int, PriorityBand] = {}
        self._heap: list[tuple[int, int, int, TenantQueue]] = []
        """(-priority, tag, number, line): one valid entry per line.
        Stale entries come only from moved requests and emptied lines; dropped at the top or when the queue is empty.
        """
        self._numbers = count()

    def open(self, tenant: TenantName, priority: int, account: Account, step: int) -> TenantQueue:
        """Add a line, level with the least served one."""
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = PriorityBand(priority)
        line = self.lines[tenant, priority] = TenantQueue(self.model, lane, account, step)
        return line

    def full(self, call: Call, limits: QueueLimits) -> bool:
        """Return whether the request would exceed a limit."""
        if self._parked.full(call.body_bytes):
            return True
        return self.waiting >= limits.calls_max or self.bytes + call.body_bytes > limits.bytes_max

    def park(self, line: TenantQueue, call: Call) -> None:
        """Append the request to its line; a line that was empty starts level with the least served one."""
        if not line.calls:
            line.tag = max(line.tag, line.lane.tag)
        line.tickets += 1
        line.calls[call] = line.tickets
        self._add(line, call, next(self._numbers))

    def park_first(self, line: TenantQueue, call: Call) -> None:
        """Put a granted request back at the head of its line, and refund the cost of the grant to the line."""
        line.tag = max(line.tag, line.lane.tag) - line.step
        line.calls[call] = line.calls[line.first()] - 1 if line.calls else line.tickets
        line.calls.move_to_end(call, last=False)
        self._add(line, call, -next(self._numbers))  # before all lines with the same tag

    def _add(self, line: TenantQueue, call: Call, number: int) -> None:
        self.waiting += 1
        self._count(call.body_bytes)
        heappush(line.deadlines, (call.deadline_s, number, call))
        line.compact()
        if line.entry != line.tag:
            line.entry = line.tag
            heappush(self._heap, (-line.lane.priority, line.tag, number, line))

    def remove(self, line: TenantQueue, call: Call) -> None:
        """Remove a request from any position of its line."""
        self._discount(line, call)
        del line.calls[call]

    def pop(self) -> tuple[TenantQueue, Call]:
        """Remove and return the next request, and charge its line. Raises IndexError if the queue is empty."""
        heap = self._heap
        while True:
            _, tag, _, line = heap[0]
            if tag == line.entry and line.calls:
                break
            if tag == line.entry:
                line.entry = None
            heappop(heap)
        call = line.first()
        line.lane.tag = max(line.lane.tag, line.tag)
        line.tag += line.step
        if len(line.calls) > 1:
            line.entry = line.tag
            heapreplace(heap, (-line.lane.priority, line.tag, next(self._numbers), line))
        else:
            line.entry = None
            heappop(heap)
        self._discount(line, call)
        del line.calls[call]
        return line, call

    def charge(self, line: TenantQueue) -> None:
        """Charge a line for the grant of a request that was never queued."""
        lane = line.lane
        lane.tag = max(lane.tag, line.tag)
        line.tag = lane.tag + line.step

    def _discount(self, line: TenantQueue, call: Call) -> None:
        """Update the counts for a request that the caller then removes: if this raises, it is still in its line."""
        self.waiting -= 1
        self._count(call.body_bytes, -1)
        line.compact()
        if not self.waiting:
            for _, _, _, stale in self._heap:
                stale.entry = None
            self._heap.clear()

    def _count(self, size: int, sign: int = 1) -> None:
        self.bytes += sign * size
        if size <= LARGE_BYTES:
            self._small_bytes += sign * size
            self._parked.bytes += sign * size

    def clear(self) -> list[Call]:
        """Remove and return all requests. It works also after an exception that left heap and counts inconsistent."""
        removed = [call for line in self.lines.values() for call in line.calls]
        for line in self.lines.values():
            line.entry = None
            line.calls.clear()
            line.deadlines.clear()
        self._parked.bytes -= self._small_bytes
        self.waiting = self.bytes = self._small_bytes = 0
        self._heap.clear()
        return removed

    def forget(self) -> None:
        """The model has no request: drop the service history of its tenants."""
        self.lines.clear()
        self._lanes.clear()


class Deadlines:
    """Lines by the time of their next check: never later than their soonest deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TenantQueue]] = []
        """An entry is valid while its time is the line's `watch_s`."""
        self._watched = 0
        self._numbers = count()
        self.faults: dict[ModelName, Exception] = {}
        """Models with a line that raised an exception, which is not checked any more."""

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, line: TenantQueue, deadline_s: float) -> None:
        """Register the deadline of a request queued in the line."""
        if line.watch_s is not None and line.watch_s <= deadline_s:
            return
        self._watched += line.watch_s is None
        line.watch_s = deadline_s
        heappush(self._heap, (deadline_s, next(self._numbers), line))
        if len(self._heap) > 2 * self._watched + COMPACT_MIN:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].watch_s]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """Return the soonest deadline of all; None if nothing is queued."""
        heap = self._heap
        while heap:
            at_s, _, line = heap[0]
            if at_s != line.watch_s:
                heappop(heap)
                continue
            try:
                soonest_s = line.soonest_s()
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                self.faults[line.model], soonest_s = error, None
            if soonest_s == at_s:
                return at_s
            line.watch_s = soonest_s
            if soonest_s is None:
                self._watched -= 1
                heappop(heap)
            else:
                heapreplace(heap, (soonest_s, next(self._numbers), line))
        return None

    def due(self, now_s: float) -> Iterator[TenantQueue]:
        """Yield lines with an overdue request; the caller must remove those requests before continuing."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            yield self._heap[0][2]
