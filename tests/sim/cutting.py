"""Nodes with a GPU that a played mig-manager cuts: what it says, how long it takes, and what goes wrong with it.

Owns the truth about these nodes: told, state and cuts, which outlive autoscalers as labels do, and whether anybody's
engine was on a node when it was cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from autoscaler.drivers.driver import Cutter
from autoscaler.slicing import registry
from autoscaler.state.events import SlicesSeen
from autoscaler.state.mig import FAILED, SUCCESS, CutOrder, CutRefused, CuttableSeen, MigNode
from autoscaler.state.world import NodeId, Slice
from tests.kit.sliced import mig_node
from tests.sim.machine import Machine, Manners
from tests.sim.town import Autoscaler, Town

PRODUCT = "NVIDIA-H100-80GB-HBM3"
CUT_S = 90.0
"""So long mig-manager takes."""


@dataclass(eq=False)
class Node:
    """One node."""

    name: str
    cuts: tuple[str, ...]
    config: str = "as-it-was"
    state: str = SUCCESS
    order: CutOrder | None = None
    fate: Callable[[int], str] = lambda tries: SUCCESS
    """What becomes of an order, by its tries: success, failed, or a state in which it stays."""
    orders: list[CutOrder] = field(default_factory=list)
    """All that were given."""

    def slices(self) -> tuple[Slice, ...]:
        """As its device plug-in shows them: none while it is being cut."""
        if self.state not in {SUCCESS, FAILED}:
            return ()
        many = {f"_{one.replace('.', '_')}": str(self.cuts.count(one)) for one in self.cuts}
        facts = mig_node(PRODUCT, {"nvidia.com/mig.config.state": self.state}, **many)
        found = registry.list_slices(facts._replace(name=NodeId(self.name)))
        return tuple(replace(one, labels_known=True) for one in found)

    def shown(self) -> MigNode:
        """As its labels show it."""
        return MigNode(
            name=self.name, product=PRODUCT, gpus=1, config=self.config, state=self.state, strategy="mixed",
            order=self.order,
        )  # fmt: skip


class CutTown(Town):
    """Two nodes, each with a GPU in seven small cuts."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """Its Slices are those of the nodes."""
        del slices
        self.nodes = {name: Node(name, ("1g.10gb",) * 7) for name in ("n1", "n2")}
        self.others: dict[str, int] = {}
        """What pods of others have of the nodes, by `Slice.counted`."""
        self.managers: list[MigManager] = []
        self.harmed: list[str] = []
        """Engines that were on a node when it was cut."""
        return super().make_machine(self._there(), manners)

    def cutter(self, autoscaler: Autoscaler) -> Cutter:
        """Of that process."""
        manager = MigManager(self, autoscaler)
        self.managers.append(manager)
        asyncio.get_running_loop().call_soon(manager.tell)
        return manager

    def show(self) -> None:
        """All that watch hear what there is."""
        self.machine.slices = self._there()
        for observe in self.machine.watching:
            observe((SlicesSeen(slices=self.machine.slices, others=dict(self.others)),))
        for manager in self.managers:
            manager.tell()

    def on_node(self, name: str) -> list[str]:
        """Engines there."""
        return [id for id, one in self.machine.engines.items() if one.replica.slices[0].startswith(f"{name}/")]

    def _there(self) -> tuple[Slice, ...]:
        return tuple(one for node in self.nodes.values() for one in node.slices())


class MigManager:
    """What one autoscaler process has of it."""

    def __init__(self, town: CutTown, autoscaler: Autoscaler) -> None:
        self._town = town
        self._autoscaler = autoscaler

    def tell(self) -> None:
        """Its process sees all nodes."""
        nodes = tuple(node.shown() for node in self._town.nodes.values())
        self._autoscaler.loop.observe([CuttableSeen(nodes=nodes)])

    def cut(self, order: CutOrder) -> None:
        """As the label that the real one writes: only where the node is still as it was thought to be."""
        node = self._town.nodes[order.node]
        if node.config != order.before:
            self._autoscaler.loop.observe([CutRefused(node=order.node, reason="somebody else has it cut")])
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
