"""Devices in scope `namespace`, where nodes may not be read: those that `nodes` of the Settings declares. I/O.

Each entry of `nodes` represents one node, which the scheduler chooses by the entry's labels. The ids of these slices
therefore contain no real node name. HAMi chooses one of the cards that it shares. If nothing is declared, a
ResourceQuota gives the number of devices. `DeclaredDevices` reports the slices when the `World` or a quota changes
them.

Invariants: the open slices never exceed what every quota allows. While the scheduler finds no node for a replica, its
entry has no open slices. Held slices stay open, so that an idle replica can still be evicted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.inventory.resource_quotas import DEVICES_MAX, Quota, _hard, _left, read_quota
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.watch import Watched
from autoscaler.queries.unschedulable_replicas import is_unschedulable
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import ALONE, NVIDIA, TASKS, Hami
from autoscaler.slicing.nvidia_device_plugin import UNKNOWN_BYTES
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields
from autoscaler.spec.pod import GPU
from autoscaler.spec.quantity import Bytes, in_mib, whole_number
from autoscaler.spec.settings import NodeDevice, NodeKind, PriorityClass
from autoscaler.state.actions import Decided
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import NodeId, Replica, Slice, SliceId, World

UNKNOWN_PARTS = (
    "Settings `nodes` declare {kind} devices, and their parts are known only from nodes, which scope `namespace` does "
    "not read: remove `slicing`, or use scope `cluster`"
)
WAITS_MAX = 200
"""Characters kept of a scheduler message."""
_DECLARED, _QUOTA = re.compile(r"nodes\[([0-9]+)\]"), "quota[]"


def build_declared_slices(
    kinds: Sequence[NodeKind], quotas: Sequence[Quota], replicas: Mapping[ReplicaId, Replica]
) -> tuple[Slice, ...]:
    """Return all slices; those that are unavailable now are closed. `replicas`: all known replicas."""
    places = {f"nodes[{position}]": kind for position, kind in enumerate(kinds)} or _of_quota(quotas)
    holders = {id: replica for replica in replicas.values() for id in replica.resources.slices}
    waited_for = {_labels(places[node]): why for node, why in _waiting(replicas.values()) if node in places}
    left, full = _left(quotas, holders.values())
    found: list[Slice] = []
    for node, kind in places.items():
        for slice_ in _of(node, kind, _hard(quotas)):
            if slice_.id in holders:
                found.append(slice_)
                continue
            closed = waited_for.get(_labels(kind), "") or (full if left < 1 else "")
            found.append(replace(slice_, closed=closed) if closed else slice_)
            left -= not closed
    return tuple(found)


def find_node_selector(kinds: Sequence[NodeKind], slices: Sequence[SliceId]) -> dict[str, str] | None:
    """Return labels of suitable nodes for slices of this module; None if the slices belong to a real node."""
    node = slices[0].partition("/")[0] if slices else ""
    declared = _DECLARED.fullmatch(node)
    if declared is None:
        return {} if node == _QUOTA else None
    position = whole_number(declared[1])
    return kinds[position].selector if position is not None and position < len(kinds) else {}


def find_pod_fields(kinds: Sequence[NodeKind], replica: Replica, ranked: PriorityClass | None) -> PodFields | None:
    """Return a pod's device requests; None if its slices are not declared. `ranked`: its priority class."""
    asks = slicers.build_pod_fields(replica, {one.id: one for one in build_declared_slices(kinds, (), {})}, ranked)
    if asks is None:
        return None
    return asks._replace(annotations={name: said for name, said in asks.annotations.items() if name != NVIDIA.use})


def _of_quota(quotas: Sequence[Quota]) -> dict[str, NodeKind]:
    """Return an entry for the devices that a quota allows; their product and memory are unknown."""
    if not quotas or not _hard(quotas):
        return {}
    device = NodeDevice(model="", memory_bytes=Bytes(UNKNOWN_BYTES), count=min(_hard(quotas), DEVICES_MAX))
    return {_QUOTA: NodeKind(selector={}, device=device)}


def _of(node: str, kind: NodeKind, hard: int) -> Iterator[Slice]:
    """Return the slices of an entry, as of a node that has the declared devices."""
    slicing = kind.slicing
    shares = (slicing.replicas if slicing is not None else None) or 1
    many, scheme = min(kind.device.count * shares, hard), slicing.kind if slicing is not None else ""
    of_cards = slicing is not None and scheme == Hami().kind and not slicing.template
    annotations = {NVIDIA.register: _cards(kind.device, many)} if of_cards else {}
    facts = NodeFacts(NodeId(node), annotations=annotations, allocatable={GPU: str(many)}, declared=kind)
    closed = UNKNOWN_PARTS.format(kind=scheme) if scheme in slicers.UNDETECTED_REASONS and not annotations else ""
    return (replace(one, labels=kind.selector, closed=closed or one.closed) for one in slicers.list_slices(facts))


def _cards(device: NodeDevice, many: int) -> str:
    """Return the cards as HAMi would register them. Their names are unknown, so none can be requested by name."""
    card = {
        "count": TASKS,
        "devmem": in_mib(device.memory_bytes),
        "devcore": ALONE,
        "type": device.model,
        "health": True,
    }
    return msgspec.json.encode([{"id": f"card-{at}", **card} for at in range(many)]).decode()


def _waiting(replicas: Iterable[Replica]) -> Iterator[tuple[str, str]]:
    """Yield (node, reason) of each replica for which the scheduler finds no node."""
    for replica in replicas:
        if replica.resources.slices and is_unschedulable(replica.runtime.waits):
            why = f"{replica.model} already waits for a node of this kind: {replica.runtime.waits[:WAITS_MAX]}"
            yield replica.resources.slices[0].partition("/")[0], why


def _labels(kind: NodeKind) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(kind.selector.items()))


class DeclaredDevices:
    """Reports the declared devices of one namespace. `world` returns the current `World`."""

    def __init__(self, api: Api, namespace: str, observe: Observe, world: Callable[[], World]) -> None:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        self._quotas = Watched(api, path, read_quota, lambda _: self._report())
        self._observe = observe
        self._world = world

    async def run(self) -> None:
        """Run until cancelled. Without the permission to read quotas, a start that exceeds a quota waits until the API
        server accepts its pod.
        """
        await self._quotas.run()

    def on_step(self, step: Decided) -> None:
        """Report the slices if a step of the control loop changed them."""
        before, after = step.before, step.after
        now = (after.settings, after.replicas, after.nodes.slices)
        then = (before.settings, before.replicas, before.nodes.slices)
        if any(one is not was for one, was in zip(now, then, strict=True)):
            self._report()

    def _report(self) -> None:
        world = self._world()
        declared = build_declared_slices(world.settings.nodes, list(self._quotas.items.values()), world.replicas)
        if {slice_.id: slice_ for slice_ in declared} != world.nodes.slices:
            self._observe((SlicesSeen(slices=declared),))
