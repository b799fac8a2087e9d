"""Operators' cordons of nodes and their devices in a cluster: stored on the Node, seen by every autoscaler. I/O.

Writes `spec.unschedulable` and the annotation `pilotlight.dev/cordon` as ordered by an operator. A node is cordoned if
and only if it is unschedulable (`kubectl cordon` is an order, too). The annotation stores drains and the cordons of
devices; concurrent writes to it are not lost. The kubelet chooses a pod's GPU, so a cordon of a whole GPU means one GPU
less on its node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from autoscaler.drivers.driver import CordonError
from autoscaler.drivers.local.cordon_file import Kept, Observe, decode_cordon, encode_cordon
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.state.events import CordonsSeen
from autoscaler.state.world import Cordon, CordonTarget

ANNOTATION = "pilotlight.dev/cordon"
TRIES = 20
"""Maximum attempts of a conflicting write: kubelets write to nodes, too."""

_log = logging.getLogger("pilotlight.autoscaler.inventory")
_decode = msgspec.json.Decoder(tuple[Kept, ...]).decode


class NodeOrders(NamedTuple):
    """The orders stored on a Node."""

    name: str
    closed: bool
    kept: tuple[Kept, ...]


class NodeCordons:
    """The cordons of a cluster. `writes` may be fenced; `reads` need not be."""

    def __init__(
        self,
        writes: Api,
        reads: Api,
        observe: Observe,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._writes = writes
        self._reads = reads
        self._observe = observe
        self._clock = clock
        self._wall = wall or reads.unix_s
        self._nodes = Watched(reads, NODES, read_node_orders, self._changed)

    async def run(self) -> None:
        """Observe until cancelled."""
        await self._nodes.run()

    async def put(self, cordon: Cordon) -> None:
        """Store a cordon, as in `autoscaler.drivers.driver.Cordons`."""
        mine = encode_cordon(cordon, self._wall() - self._clock())
        await self._change(cordon.node, cordon.place, mine)

    async def lift(self, place: CordonTarget) -> None:
        """Remove a cordon, as in `autoscaler.drivers.driver.Cordons`."""
        for node in tuple(self._nodes.items.values()):
            if place == CordonTarget("node", node.name) or any(one.place == place for one in node.kept):
                await self._change(node.name, place, None)

    async def _change(self, node: str, place: CordonTarget, order: Kept | None) -> None:
        """Write the order about a target (None: remove it) on its node. Raises `CordonError`."""
        path = f"{NODES}/{node}"
        try:
            for left in range(TRIES - 1, -1, -1):
                found = await self._reads.get(path)
                try:
                    await self._writes.patch(path, build_cordon_patch(found, place, order))
                except ApiError as error:
                    if error.reason != "Conflict" or not left:
                        raise
                else:
                    return
        except ApiError as error:
            fix = ": grant the permission to patch nodes (chart value `cordon.enabled`)" if error.status == 403 else ""
            raise CordonError(f"node {node}: {error.reason}{fix}") from error
        except (UnreachableError, FencedError) as error:
            raise CordonError(f"node {node}: the API server could not be reached: try again") from error

    def _changed(self, changes: list[Change[NodeOrders]]) -> None:
        if any((old or NOTHING)[1:] != (new or NOTHING)[1:] for _, old, new in changes):
            from_unix_s = self._clock() - self._wall()
            orders = [one for node in self._nodes.items.values() for one in list_active_cordons(node)]
            self._observe((CordonsSeen(cordons=tuple(decode_cordon(one, from_unix_s) for one in orders)),))


NOTHING = NodeOrders("", closed=False, kept=())


def read_node_orders(node: Object) -> NodeOrders:
    """Parse the orders stored on a Node."""
    name, text = node["metadata"]["name"], (node["metadata"].get("annotations") or {}).get(ANNOTATION, "")
    try:
        orders = _decode(text) if text else ()
    except (msgspec.DecodeError, RecursionError) as error:
        _log.warning("event=annotation_invalid node=%s annotation=%s error=%s", name, ANNOTATION, error)
        orders = ()
    return NodeOrders(name, bool(node["spec"].get("unschedulable", False)), orders)


def list_active_cordons(node: NodeOrders) -> list[Kept]:
    """Return the orders in force: at most one about the node itself, only while it is unschedulable."""
    place = CordonTarget("node", node.name)
    devices = [one for one in node.kept if one.place != place]
    if not node.closed:
        return devices
    return [next((one for one in node.kept if one.place == place), Kept(place, node.name, 0.0)), *devices]


def build_cordon_patch(found: Object, place: CordonTarget, order: Kept | None) -> Object:
    """Return the merge patch that sets `order` for `place`, provided that the Node is unchanged since it was read."""
    before = read_node_orders(found)
    orders = [one for one in before.kept if one.place != place] + ([order] if order is not None else [])
    text = msgspec.json.encode(orders).decode() if orders else None
    metadata = {"resourceVersion": found["metadata"]["resourceVersion"], "annotations": {ANNOTATION: text}}
    wanted: Object = {"metadata": metadata}
    if place.kind == "node":
        wanted["spec"] = {"unschedulable": True if order is not None else None}
    return wanted
