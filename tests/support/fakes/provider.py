"""A fake capacity Provider: a pool of devices, nodes to attach them to or to add, and every kind of fault.

Owns the actual state of its capacity orders. Time and timers are injected, so it runs in the virtual time of the
simulation as well as in that of a unit test. The outcome of an order is its Fate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from autoscaler.providers.provider import RefusedError
from autoscaler.state.capacity import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

AWAY = "the provider does not answer"


class Fate(NamedTuple):
    """The outcome of one order."""

    after_s: float = 60.0
    """From the order until the capacity is delivered."""
    commits_s: float = 30.0
    """From the order until it can no longer be cancelled."""
    refused: str = ""
    never: bool = False
    """The order is accepted and never delivered."""
    half: bool = False
    """Half of the devices are delivered, rounded down."""
    elsewhere: str = ""
    """The node that gets the devices instead of the requested one."""
    deaf: bool = False
    """The order is lost."""
    lost_reply: bool = False
    """The order is placed, but its response is lost."""
    late: bool = False
    """The capacity is delivered although the order was cancelled."""
    fails_s: float | None = None
    """From the order until it fails."""


@dataclass(eq=False)
class Held:
    """The actual state of one capacity order."""

    order: AcquireOrder
    fate: Fate
    asked_s: float
    phase: Literal["coming", "here", "leaving", "failed"] = "coming"
    committed: bool = False
    node: str = ""
    slices: tuple[Slice, ...] = ()
    ended_s: float | None = None
    cancelled: bool = False

    def shown(self) -> Listed:
        """The order as it is listed."""
        return Listed(
            name=self.order.id.name, offer=self.order.offer, devices=self.order.devices, owner=self.order.owner,
            phase=self.phase, committed=self.committed, node=self.node, epoch=self.order.epoch,
            device_ids=tuple(one.device for one in self.slices),
        )  # fmt: skip


@dataclass(eq=False)
class FakeProvider:
    """See the module. `at(delay, callback)` schedules a callback. `in_use`: whether a process uses one of these."""

    name: str
    now: Callable[[], float]
    at: Callable[[float, Callable[[], None]], object]
    could: tuple[Offer, ...]
    """What it offers while there are no orders."""
    pool: int = 8
    """Free devices while there are no orders."""
    fate: Callable[[AcquireOrder], Fate] = lambda order: Fate()
    in_use: Callable[[tuple[Slice, ...]], bool] = lambda slices: False
    changed: Callable[[], None] = lambda: None
    away: bool = False
    garbage: bool = False
    closed: str = ""
    """The error message returned instead of its offers."""
    mute: str = ""
    """The error message returned instead of its list."""
    stuck: bool = False
    """Detaching never completes."""
    held: dict[str, Held] = field(default_factory=dict)
    """The orders that it lists."""
    ever: list[Held] = field(default_factory=list)
    orders: int = 0
    """Calls of `acquire` that reached it."""
    releases: int = 0
    """Calls of `release` that reached it."""
    disturbed: list[str] = field(default_factory=list)
    """Orders that were released while in use."""
    forced: list[str] = field(default_factory=list)
    """Orders that were released by force, once per release."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All Slices that were delivered and are still there."""
        return tuple(one for held in self.ever for one in held.slices)

    @property
    def alive(self) -> list[Held]:
        """Orders that are delivered or about to be."""
        return [held for held in self.ever if held.ended_s is None]

    def offers_now(self) -> tuple[Offer, ...]:
        """The current offers."""
        self._answers()
        free = self.pool - sum(one.order.devices for one in self.alive)
        offered = (replace(one, devices_max=min(one.devices_max, free)) for one in self.could)
        return tuple(one for one in offered if one.devices_max >= one.devices_min)

    def acquire_now(self, order: AcquireOrder) -> None:
        """See Provider."""
        self._answers()
        self.orders += 1
        known = self.held.get(order.id.name)
        if known is not None:
            return
        taken_back = next((one for one in self.alive if one.cancelled and one.order.id == order.id), None)
        if taken_back is not None:  # the same object, still being delivered
            taken_back.cancelled, self.held[order.id.name] = False, taken_back
            return
        fate = self.fate(order)
        if fate.deaf:
            raise TimeoutError
        if fate.refused:
            raise RefusedError(fate.refused)
        if order.devices > self.pool - sum(one.order.devices for one in self.alive):
            raise RefusedError("the pool is empty")
        held = Held(order, fate, self.now())
        self.held[order.id.name] = held
        self.ever.append(held)
        self.at(min(fate.commits_s, fate.after_s), lambda: self._commit(held))
        if fate.fails_s is not None:
            self.at(fate.fails_s, lambda: self._fail(held))
        elif not fate.never:
            self.at(fate.after_s, lambda: self._deliver(held))
        if fate.lost_reply:
            raise TimeoutError

    def release_now(self, order: ReleaseOrder) -> None:
        """See Provider."""
        self._answers()
        self.releases += 1
        held = self.held.get(order.id.name)
        if held is None or (order.uncommitted and held.committed):
            return
        if order.force:
            self.forced.append(order.id.name)
        elif self.in_use(held.slices):
            self.disturbed.append(order.id.name)
            return
        if self.stuck and not order.force:
            held.phase = "leaving"
            return
        del self.held[order.id.name]
        if held.fate.late and held.phase == "coming":
            held.cancelled = True  # it is delivered all the same
            return
        self._end(held)

    def list_now(self) -> tuple[Listed, ...]:
        """See Provider."""
        self._answers()
        if self.garbage:
            raise ValueError("<html>")
        return tuple(self.held[name].shown() for name in sorted(self.held))

    async def offers(self) -> tuple[Offer, ...]:
        """See Provider."""
        if self.closed:
            raise RefusedError(self.closed)
        return self.offers_now()

    async def acquire(self, order: AcquireOrder) -> None:
        """See Provider."""
        self.acquire_now(order)

    async def release(self, order: ReleaseOrder) -> None:
        """See Provider."""
        self.release_now(order)

    async def list(self) -> tuple[Listed, ...]:
        """See Provider."""
        if self.mute:
            raise RefusedError(self.mute)
        return self.list_now()

    def detach(self, name: str) -> None:
        """Detaches the capacity of an order by hand, outside of the Provider."""
        self._end(self.held.pop(name))

    def _answers(self) -> None:
        if self.away:
            raise ConnectionError(AWAY)

    def _commit(self, held: Held) -> None:
        held.committed = held.committed or (held.ended_s is None and not held.cancelled)

    def _fail(self, held: Held) -> None:
        if held.ended_s is None:
            held.phase = "failed"

    def _deliver(self, held: Held) -> None:
        if held.ended_s is not None:
            return
        offer, name = held.order.offer, held.order.id.name
        many = held.order.devices // 2 if held.fate.half else held.order.devices
        held.node = held.fate.elsewhere or offer.node or name
        held.phase, held.committed = "here", True
        held.slices = tuple(
            Slice(
                id=SliceId(f"{held.node}/{self.name}-{name}-{number}"),
                device=DeviceId(f"{self.name}-{name}-{number}"), node=NodeId(held.node),
                memory_bytes=offer.memory_bytes, product=offer.product, shared=offer.shared,
            )
            for number in range(many)
        )  # fmt: skip
        held.cancelled, self.held[name] = False, held
        self.changed()

    def _end(self, held: Held) -> None:
        held.ended_s, held.slices = self.now(), ()
        self.changed()
