"""Nodes with a GPU that a simulated mig-manager repartitions: its labels, durations and failures.

Holds the true state of these nodes, which outlives autoscalers as labels do, and records whether an engine of anybody
was running on a node when it was repartitioned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from autoscaler.drivers.driver import Cutter
from autoscaler.slicing import slicers
from autoscaler.state.events import SlicesSeen
from autoscaler.state.mig import FAILED, SUCCESS, CutOrder, CutRefused, CuttableSeen, MigNode
from autoscaler.state.world import NodeId, Slice
from tests.simulation.environment.machine import Machine, Manners
from tests.simulation.installations.installation import Autoscaler, Town
from tests.support.builders.slices import mig_node

PRODUCT = "NVIDIA-H100-80GB-HBM3"
CUT_S = 90.0
"""Time that mig-manager takes."""


@dataclass(eq=False)
class Node:
    """One node."""

    name: str
    cuts: tuple[str, ...]
    config: str = "as-it-was"
    state: str = SUCCESS
    order: CutOrder | None = None
    fate: Callable[[int], str] = lambda tries: SUCCESS
    """Result of an order as a function of its number of tries: success, failed, or a state that persists."""
    orders: list[CutOrder] = field(default_factory=list)
    """All orders that were given."""

    def slices(self) -> tuple[Slice, ...]:
        """The Slices that its device plug-in reports: none during repartitioning."""
        if self.state not in {SUCCESS, FAILED}:
            return ()
        many = {f"_{one.replace('.', '_')}": str(self.cuts.count(one)) for one in self.cuts}
        facts = mig_node(PRODUCT, {"nvidia.com/mig.config.state": self.state}, **many)
        found = slicers.list_slices(facts._replace(name=NodeId(self.name)))
        return tuple(replace(one, labels_known=True) for one in found)

    def shown(self) -> MigNode:
        """The node as its labels describe it."""
        return MigNode(
            name=self.name, product=PRODUCT, gpus=1, config=self.config, state=self.state, strategy="mixed",
            order=self.order,
        )  # fmt: skip


class CutTown(Town):
    """Two nodes, each with a GPU that is partitioned into seven small instances."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """Its Slices are those of the nodes."""
        del slices
        self.nodes = {name: Node(name, ("1g.10gb",) * 7) for name in ("n1", "n2")}
        self.others: dict[str, int] = {}
        """Number of devices in use by pods of other owners on the nodes, by `Slice.counted`."""
        self.managers: list[MigManager] = []
        self.harmed: list[str] = []
        """Engines that were running on a node when it was repartitioned."""
        return super().make_machine(self._there(), manners)

    def cutter(self, autoscaler: Autoscaler) -> Cutter:
        """The MigManager of that process."""
        manager = MigManager(self, autoscaler)
        self.managers.append(manager)
        asyncio.get_running_loop().call_soon(manager.tell)
        return manager

    def show(self) -> None:
        """Publish the Slices and nodes to all watchers."""
        self.machine.slices = self._there()
        for observe in self.machine.watching:
            observe((SlicesSeen(slices=self.machine.slices, others=dict(self.others)),))
        for manager in self.managers:
            manager.tell()

    def on_node(self, name: str) -> list[str]:
        """Engines on that node."""
        return [
            id for id, one in self.machine.engines.items() if one.replica.resources.slices[0].startswith(f"{name}/")
        ]

    def _there(self) -> tuple[Slice, ...]:
        return tuple(one for node in self.nodes.values() for one in node.slices())


class MigManager:
    """The view of mig-manager in one autoscaler process."""

    def __init__(self, town: CutTown, autoscaler: Autoscaler) -> None:
        self._town = town
        self._autoscaler = autoscaler

    def tell(self) -> None:
        """Report all nodes to its process."""
        nodes = tuple(node.shown() for node in self._town.nodes.values())
        self._autoscaler.loop.observe([CuttableSeen(nodes=nodes)])

    def cut(self, order: CutOrder) -> None:
        """Repartition the node, as by the real driver's label: only if the node is still in the expected state."""
        node = self._town.nodes[order.node]
        if node.config != order.before:
            self._autoscaler.loop.observe(
                [CutRefused(node=order.node, reason="another client changed its MIG configuration")]
            )
            return
        node.orders.append(order)
        node.config, node.order, node.state = order.config, order, "pending"
        self._town.harmed += self._town.on_node(order.node)
        self._town.note(f"{order.node} is cut as {order.config}")
        self._town.show()
        asyncio.get_running_loop().call_later(CUT_S, self._done, node, order)

    def _done(self, node: Node, order: CutOrder) -> None:
        if node.order is not order:
            return
        node.state = node.fate(order.tries)
        self._town.harmed += self._town.on_node(order.node)
        if node.state == SUCCESS:
            node.cuts = tuple(order.cuts[0])
        self._town.show()
