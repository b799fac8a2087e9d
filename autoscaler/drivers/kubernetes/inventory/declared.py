"""Devices where nodes may not be read (scope `namespace`): those that the Settings' `nodes` declare. Pure.

Each entry of `nodes` stands for one node, which the scheduler chooses by the entry's labels, so these Slices have names
that no node can have; of cards that HAMi shares HAMi chooses which one. Where nothing is declared, a ResourceQuota says
how many devices there may be. Promises: no more is offered than every quota leaves; while the scheduler finds no node
for a Replica of ours, nothing more is offered where that one waits. What is held stays what it is: to evict an idle
Replica is still a way.

What a namespace says of the devices in it, where nodes may not be read: its ResourceQuotas, for `declared`. I/O.

Owns when the Slices are told: as soon as the World, the Settings or a quota make them others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.driver import Observe
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources.loop_step import Decided
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.queries.stranded_pods import is_unschedulable
from autoscaler.slicing import registry
from autoscaler.slicing.base import NodeFacts, PodFields, in_mib
from autoscaler.slicing.hami import ALONE, NVIDIA, TASKS, Hami
from autoscaler.slicing.nvidia_sharing import UNKNOWN_BYTES
from autoscaler.spec.pod import GPU
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, PriorityClass
from autoscaler.state.events import SlicesSeen
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import NodeId, Replica, Slice, SliceId, World

DEVICES_MAX = 1000
"""That a quota stands for where nothing is declared."""
UNTOLD = (
    "Settings `nodes` say that its devices are {kind}, whose parts only nodes tell, and these may not be read in scope "
    "`namespace`: leave `slicing` out, or use scope `cluster`"
)
WAITS_MAX = 200
"""Characters of what the scheduler says."""
_HARD = f"requests.{GPU}"
_DECLARED, _QUOTA = re.compile(r"nodes\[([0-9]+)\]"), "quota[]"


class Quota(NamedTuple):
    """What a ResourceQuota says of GPUs."""

    name: str
    hard: int
    used: int


def read_quota(found: Object) -> Quota | None:
    """None: it says nothing of GPUs, or not of all pods."""
    spec, used = found["spec"], found.get("status", {}).get("used", {})
    if _HARD not in spec.get("hard", {}) or spec.get("scopes") or spec.get("scopeSelector"):
        return None
    return Quota(found["metadata"]["name"], _count(spec["hard"][_HARD]), _count(used.get(_HARD, "0")))


def _count(amount: object) -> int:
    return int(text) if (text := str(amount)).isdecimal() else 0


def build_declared_slices(
    kinds: Sequence[NodeKind], quotas: Sequence[Quota], replicas: Mapping[ReplicaId, Replica]
) -> tuple[Slice, ...]:
    """All of them; closed is what may not be used now. `replicas` are all that are known."""
    places = {f"nodes[{position}]": kind for position, kind in enumerate(kinds)} or _of_quota(quotas)
    holders = {id: replica for replica in replicas.values() for id in replica.slices}
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
    """Labels of the nodes that will do for what was placed on Slices of here; None: they are of a real node."""
    node = slices[0].partition("/")[0] if slices else ""
    declared = _DECLARED.fullmatch(node)
    if declared is None:
        return {} if node == _QUOTA else None
    position = int(declared[1])
    return kinds[position].selector if position < len(kinds) else {}


def find_pod_fields(kinds: Sequence[NodeKind], replica: Replica, ranked: PriorityClass | None) -> PodFields | None:
    """What the pod of a Replica asks for; None: its Slices are not declared (any more). `ranked`: by its priority."""
    asks = registry.build_pod_fields(replica, {one.id: one for one in build_declared_slices(kinds, (), {})}, ranked)
    if asks is None:
        return None
    return asks._replace(annotations={name: said for name, said in asks.annotations.items() if name != NVIDIA.use})


def _of_quota(quotas: Sequence[Quota]) -> dict[str, NodeKind]:
    """Devices of which nothing is known but how many there may be."""
    if not quotas or not _hard(quotas):
        return {}
    device = NodeDevice(model="", memory_bytes=Bytes(UNKNOWN_BYTES), count=min(_hard(quotas), DEVICES_MAX))
    return {_QUOTA: NodeKind(selector={}, device=device)}


def _of(node: str, kind: NodeKind, hard: int) -> Iterator[Slice]:
    """The Slices of an entry, as if a node had what it says."""
    slicing = kind.slicing
    shares = (slicing.replicas if slicing is not None else None) or 1
    many, said = min(kind.device.count * shares, hard), slicing.kind if slicing is not None else ""
    of_cards = slicing is not None and said == Hami().kind and not slicing.template
    told = {NVIDIA.register: _cards(kind.device, many)} if of_cards else {}
    facts = NodeFacts(NodeId(node), annotations=told, allocatable={GPU: str(many)}, declared=kind)
    closed = UNTOLD.format(kind=said) if said in registry.GIVERS and not told else ""
    return (replace(one, labels=kind.selector, closed=closed or one.closed) for one in registry.list_slices(facts))


def _cards(device: NodeDevice, many: int) -> str:
    """As HAMi would register them; what it calls each is not known, so none can be asked for by its name."""
    card = {
        "count": TASKS,
        "devmem": in_mib(device.memory_bytes),
        "devcore": ALONE,
        "type": device.model,
        "health": True,
    }
    return msgspec.json.encode([{"id": f"card-{at}", **card} for at in range(many)]).decode()


def _waiting(replicas: Iterable[Replica]) -> Iterator[tuple[str, str]]:
    """(node, why) of each Replica that the scheduler finds no node for."""
    for replica in replicas:
        if replica.slices and is_unschedulable(replica.waits):
            why = f"{replica.model} waits for such a node already: {replica.waits[:WAITS_MAX]}"
            yield replica.slices[0].partition("/")[0], why


def _hard(quotas: Sequence[Quota]) -> int:
    """How many devices every quota allows."""
    return min((quota.hard for quota in quotas), default=DEVICES_MAX)


def _left(quotas: Sequence[Quota], holders: Iterable[Replica]) -> tuple[float, str]:
    """(how many devices more every quota allows, what is said when there are none)."""
    ours = sum(replica.state is not ReplicaState.SCRUBBING for replica in holders)  # one per device; no pod, no quota
    left = [(quota.hard - max(quota.used, ours), quota) for quota in quotas]
    if not left:
        return inf, ""
    least, quota = min(left)
    return least, f"ResourceQuota {quota.name} allows {quota.hard} {GPU} in all, and they are in use"


def _labels(kind: NodeKind) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(kind.selector.items()))


class DeclaredDevices:
    """Of one namespace. `world` gives the World as it is."""

    def __init__(self, api: Api, namespace: str, observe: Observe, world: Callable[[], World]) -> None:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        self._quotas = Watched(api, path, read_quota, self._changed)
        self._observe = observe
        self._world = world

    async def run(self) -> None:
        """Until cancelled. Without the right to read quotas none is known: what one forbids waits at the API server."""
        await self._quotas.run()

    def on_step(self, step: Decided) -> None:
        """What a step of the loop changed."""
        before, after = step.before, step.after
        now = (after.settings, after.replicas, after.slices)
        if any(one is not was for one, was in zip(now, (before.settings, before.replicas, before.slices), strict=True)):
            self._tell()

    def _changed(self, _: list[Change[Quota]]) -> None:
        self._tell()

    def _tell(self) -> None:
        world = self._world()
        declared = build_declared_slices(world.settings.nodes, list(self._quotas.items.values()), world.replicas)
        if {slice_.id: slice_ for slice_ in declared} != world.slices:
            self._observe((SlicesSeen(slices=declared),))
