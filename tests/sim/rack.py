"""A town with a fabric: Devices that are attached to its node when they are ordered, and go when they are given back.

Owns the wiring of a played Provider (`tests.kit.fakeprovider`) to the machine's Slices; what orders is the real code.
"""

from __future__ import annotations

import asyncio

from autoscaler.capacity.supplying import Supplying, Told
from autoscaler.leases import Offer
from autoscaler.observations import SlicesSeen
from autoscaler.world import Slice
from tests.kit.fakeprovider import FakeProvider, Fate
from tests.sim.machine import Machine, Manners
from tests.sim.town import Autoscaler, Town

GIB = 1 << 30
ATTACH_S = 6.0
OFFER = Offer(
    provider="rack", name="local", node="local", product="A100", memory_bytes=16 * GIB, devices_max=4, shared=True,
    bought="fabric", price_per_hour=1.0, expected_s=ATTACH_S,
)  # fmt: skip


class RackTown(Town):
    """One node, to which Devices can be attached."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """Beside its own it has what is attached."""
        self.own = slices
        loop = asyncio.get_running_loop()
        self.rack = FakeProvider(
            "rack", loop.time, loop.call_later, (OFFER,), 4, lambda order: Fate(after_s=ATTACH_S, commits_s=4.0),
            self._in_use, self.show,
        )  # fmt: skip
        return super().make_machine(slices, manners)

    def supplying(self, autoscaler: Autoscaler) -> Supplying:
        """Of that process."""

        def observe(seen: tuple[Told, ...]) -> None:
            autoscaler.loop.observe(seen)  # which is there by the time that something is seen

        return Supplying({"rack": self.rack}, observe, self.now)

    def show(self) -> None:
        """All that watch hear what there is."""
        self.machine.slices = (*self.own, *self.rack.slices)
        for observe in self.machine.watching:
            observe((SlicesSeen(slices=self.machine.slices),))

    def _in_use(self, slices: tuple[Slice, ...]) -> bool:
        ids = {one.id for one in slices}
        return any(not ids.isdisjoint(engine.replica.slices) for engine in self.machine.engines.values())
