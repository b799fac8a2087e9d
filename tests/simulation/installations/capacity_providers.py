"""A town with a fabric: devices are attached to its node when they are ordered and detached when they are released.

Connects a fake Provider (`tests.support.fakes.provider`) to the machine's Slices; the real code places the orders.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from autoscaler.providers.runner import Observation, ProviderRunner
from autoscaler.state.capacity import Offer
from autoscaler.state.events import SlicesSeen
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.world import Slice
from tests.simulation.environment.machine import Machine, Manners
from tests.simulation.installations.installation import Autoscaler, Town
from tests.support.fakes.provider import FakeProvider, Fate

GIB = 1 << 30
ATTACH_S = 6.0
OFFER = Offer(
    provider="rack", name="local", node="local", product="A100", memory_bytes=16 * GIB, devices_max=4, shared=True,
    bought="fabric", price_per_hour=1.0, expected_s=ATTACH_S,
)  # fmt: skip
CLOUD_S = 20.0
ADDED = Offer(
    provider="cloud", name="g4", product="A100", memory_bytes=16 * GIB, devices_min=1, devices_max=1, many=4,
    shared=True, bought="spot", price_per_hour=2.0, expected_s=CLOUD_S,
)  # fmt: skip


class RackTown(Town):
    """One node to which devices can be attached. `taints`: by node."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """A machine with its own devices and the attached ones."""
        self.own = slices
        loop = asyncio.get_running_loop()
        self.rack = FakeProvider(
            "rack", loop.time, loop.call_later, (OFFER,), 4, lambda order: Fate(after_s=ATTACH_S, commits_s=4.0),
            self._in_use, self.show,
        )  # fmt: skip
        self.providers = {"rack": self.rack}
        self.taints = dict[str, tuple[Taint, ...]]()
        return super().make_machine(slices, manners)

    def supplying(self, autoscaler: Autoscaler) -> ProviderRunner:
        """The ProviderRunner of that process."""

        def observe(seen: tuple[Observation, ...]) -> None:
            autoscaler.loop.observe(seen)  # the loop exists by the time of the first observation

        return ProviderRunner(self.providers, observe, self.now)

    def show(self) -> None:
        """Publish the Slices and nodes to all watchers."""
        there = (*self.own, *(one for provider in self.providers.values() for one in provider.slices))
        self.machine.slices = tuple(replace(one, taints=self.taints.get(one.node, ())) for one in there)
        for observe in self.machine.watching:
            observe((SlicesSeen(slices=self.machine.slices),))

    def taint(self, node: str, key: str) -> None:
        """Taint a node, as a component does that is going to remove it."""
        self.taints[node] = (Taint(key, "", "NoSchedule"),)
        self.show()

    def _in_use(self, slices: tuple[Slice, ...]) -> bool:
        ids = {one.id for one in slices}
        return any(not ids.isdisjoint(engine.replica.resources.slices) for engine in self.machine.engines.values())


class CloudTown(RackTown):
    """Nodes can be added as well; they cost more and take longer."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """As in RackTown, with nodes that can be added."""
        made, loop = super().make_machine(slices, manners), asyncio.get_running_loop()
        self.cloud = FakeProvider(
            "cloud", loop.time, loop.call_later, (ADDED,), 4, lambda order: Fate(after_s=CLOUD_S, commits_s=10.0),
            self._in_use, self.show,
        )  # fmt: skip
        self.providers["cloud"] = self.cloud
        return made
