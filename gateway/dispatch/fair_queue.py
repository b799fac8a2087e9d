"""The queue of one Model in one gateway, and the deadlines of all queued Calls.

Order: priority first, then fair over Tenants, then first come, first served. Fairness is start-time fair queueing
(Goyal, Vin, Cheng 1997) within one priority: every grant advances the Tenant's tag by 1 / weight, and the lowest tag is
next. A Tenant that returns starts at the tag of the last grant, so that idle time is not saved up. A line is one
(Tenant, priority). The queue does not decide who may wait or who is refused. Each operation takes O(1) or O(log n).

Deadlines: one heap over the lines, each of which knows its own soonest deadline. A change takes O(log lines). Entries
that no longer hold are dropped when they reach the top, or all at once when they are the majority.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from autoscaler.contract import ModelName, QueueLimits, TenantName
from gateway.dispatch.call import Call
from gateway.dispatch.reports import Account
from gateway.http.body import LARGE_BYTES

COMPACT_MIN = 64
"""A deadline heap is rebuilt when more than half of it, and more than this, is dead."""


class PriorityBand:
    """One priority of one Model: `tag` is the start tag of its latest grant."""

    __slots__ = ("priority", "tag")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.tag = 0.0


class TenantQueue:
    """The Calls of one Tenant with one priority for one Model: those parked in order, and how many run."""

    __slots__ = (
        "account", "calls", "deadlines", "entry", "lane", "listed", "model", "running", "step", "tag", "tickets",
        "watch_s",
    )  # fmt: skip

    def __init__(self, model: ModelName, lane: PriorityBand, account: Account, step: float) -> None:
        self.model = model
        self.lane = lane
        self.account = account
        self.step = step
        """1 / weight of the Tenant."""
        self.calls: OrderedDict[Call, int] = OrderedDict()
        """Parked Calls -> their ticket, which rises from head to tail."""
        self.tickets = 0
        self.running = 0
        self.tag = 0.0
        """Start tag of its next grant, unless the lane has moved past it."""
        self.entry: float | None = None
        """The tag under which the Queue's heap knows it; any other entry of it there is stale."""
        self.deadlines: list[tuple[float, int, Call]] = []
        self.watch_s: float | None = None
        """The time at which Deadlines looks at it; written by Deadlines only."""
        self.listed = False
        """Among the lines that reports look at; written by dispatch only."""

    def soonest_s(self) -> float | None:
        """The soonest deadline of its parked Calls, None when none is parked."""
        heap, calls = self.deadlines, self.calls
        while heap and heap[0][2] not in calls:
            heappop(heap)
        return heap[0][0] if heap else None

    def soonest(self) -> Call:
        """The Call with the soonest deadline; `soonest_s` has just said that there is one."""
        return self.deadlines[0][2]

    def first(self) -> Call:
        """The Call that is granted next; the line is not empty."""
        return next(iter(self.calls))

    def compact(self) -> None:
        """Keeps the deadline heap in proportion to what is parked."""
        if len(self.deadlines) > 2 * len(self.calls) + COMPACT_MIN:
            self.deadlines = [(call.deadline_s, number, call) for number, call in enumerate(self.calls)]
            heapify(self.deadlines)


class Parked:
    """Bytes of small bodies that wait, of all Models of a gateway. Large ones are counted where they are read."""

    __slots__ = ("bytes", "bytes_max")

    def __init__(self) -> None:
        self.bytes = 0
        self.bytes_max = 1 << 60
        """The gateway's memory says how much (`gateway.memory.body_budget`)."""

    def full(self, size: int) -> bool:
        """Whether a body more would be too much."""
        return size <= LARGE_BYTES and self.bytes + size > self.bytes_max

    def add(self, size: int, sign: int) -> None:
        """One more, or one less."""
        if size <= LARGE_BYTES:
            self.bytes += sign * size


class Queue:
    """The parked Calls of one Model."""

    __slots__ = ("_heap", "_lanes", "_numbers", "_parked_here", "bytes", "lines", "model", "waiting")

    def __init__(self, model: ModelName, parked: Parked | None = None) -> None:
        self.model = model
        self._parked_here = parked or Parked()
        self.lines: dict[tuple[TenantName, int], TenantQueue] = {}
        """At most Tenants x priorities of the catalogue; all are forgotten whenever the Model has no Call."""
        self.waiting = 0
        self.bytes = 0
        self._lanes: dict[int, PriorityBand] = {}
        self._heap: list[tuple[int, float, int, TenantQueue]] = []
        """(-priority, tag, number, line): one valid entry per line. Stale ones come from moved Calls and emptied lines
        only, and go when they reach the top or when nothing waits."""
        self._numbers = count()

    def open(self, tenant: TenantName, priority: int, account: Account, step: float) -> TenantQueue:
        """A new line, level with the least served one."""
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = PriorityBand(priority)
        line = self.lines[tenant, priority] = TenantQueue(self.model, lane, account, step)
        return line

    def full(self, call: Call, limits: QueueLimits) -> bool:
        """Whether the Call would break a bound."""
        if self._parked_here.full(call.body_bytes):
            return True
        return self.waiting >= limits.calls_max or self.bytes + call.body_bytes > limits.bytes_max

    def park(self, line: TenantQueue, call: Call) -> None:
        """The Call waits behind those of its line; a line that comes back starts level with the least served one."""
        if not line.calls:
            line.tag = max(line.tag, line.lane.tag)
        line.tickets += 1
        line.calls[call] = line.tickets
        self._parked(line, call, next(self._numbers))

    def park_first(self, line: TenantQueue, call: Call) -> None:
        """A granted Call comes back to the head of its line, and the line gets back what the grant cost it."""
        line.tag = max(line.tag, line.lane.tag) - line.step
        line.calls[call] = line.calls[line.first()] - 1 if line.calls else line.tickets
        line.calls.move_to_end(call, last=False)
        self._parked(line, call, -next(self._numbers))  # before all that are level with it

    def _parked(self, line: TenantQueue, call: Call, number: int) -> None:
        self.waiting += 1
        self.bytes += call.body_bytes
        self._parked_here.add(call.body_bytes, 1)
        heappush(line.deadlines, (call.deadline_s, number, call))
        line.compact()
        if line.entry != line.tag:
            line.entry = line.tag
            heappush(self._heap, (-line.lane.priority, line.tag, number, line))

    def remove(self, line: TenantQueue, call: Call) -> None:
        """The Call leaves from wherever it is in its line."""
        del line.calls[call]
        self._removed(line, call)

    def pop(self) -> tuple[TenantQueue, Call]:
        """The next Call in order, charged to its line. Raises IndexError when nothing waits."""
        heap = self._heap
        while True:
            _, tag, _, line = heap[0]
            if tag == line.entry and line.calls:
                break
            if tag == line.entry:
                line.entry = None
            heappop(heap)
        call, _ = line.calls.popitem(last=False)
        line.lane.tag = max(line.lane.tag, line.tag)
        line.tag += line.step
        if line.calls:
            line.entry = line.tag
            heapreplace(heap, (-line.lane.priority, line.tag, next(self._numbers), line))
        else:
            line.entry = None
            heappop(heap)
        self._removed(line, call)
        return line, call

    def charge(self, line: TenantQueue) -> None:
        """A grant to a Call that never parked costs its line the same."""
        lane = line.lane
        lane.tag = max(lane.tag, line.tag)
        line.tag = lane.tag + line.step

    def _removed(self, line: TenantQueue, call: Call) -> None:
        self.waiting -= 1
        self.bytes -= call.body_bytes
        self._parked_here.add(call.body_bytes, -1)
        line.compact()
        if not self.waiting:
            for _, _, _, stale in self._heap:
                stale.entry = None
            self._heap.clear()

    def forget(self) -> None:
        """The Model has no Call: what its Tenants were served is history."""
        self.lines.clear()
        self._lanes.clear()


class Deadlines:
    """Lines by the time at which they are to be looked at: never later than their soonest deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TenantQueue]] = []
        """An entry is valid while its time is the line's `watch_s`."""
        self._watched = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, line: TenantQueue, deadline_s: float) -> None:
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

    def due(self, now_s: float) -> Iterator[TenantQueue]:
        """The lines with an overdue Call; who iterates takes those Calls out before going on."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            yield self._heap[0][2]
