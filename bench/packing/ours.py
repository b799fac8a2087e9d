"""Pilotlight in the experiment: the autoscaler's packer. It gets the workload's histogram of kinds, and the nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from autoscaler.contract import ModelName
from autoscaler.placement.index.elastic_requests import Elastic
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.node_search import NodeArrays, NodeCapacity
from autoscaler.placement.index.residual_waste_tables import Taught
from autoscaler.placement.learning.learner import Draw, Learner
from autoscaler.placement.model.types import Bin, Placement, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import EITHER, HostResources, RequestFrequency, RequestShape, ResourceAmount, SliceClass
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId
from bench.packing import openb
from bench.packing.openb import MILLI, NodeRow

OUTLOOK = RestartCosts()
MIB = 1 << 20


def node(row: NodeRow) -> NodeCapacity:
    """Convert a node. A GPU of the trace becomes a device with MILLI bytes of memory."""
    return NodeCapacity(row.name, (SliceClass(MILLI, row.model),) * row.gpus, row.cpu_milli, row.memory_mib * MIB)


def kind(one: openb.Kind) -> RequestShape:
    """Convert a request of the trace."""
    products = (EITHER.join(sorted(one.models)),) if one.models else ()
    return RequestShape(
        one.gpus, one.milli, products=products, cpu_milli=one.cpu_milli, host_bytes=one.memory_mib * MIB
    )


def draws(seed: int) -> Draw:
    """Return the random numbers for learning."""
    return random.Random(seed).randrange


def make_elastic(kind: RequestShape) -> RequestShape:
    """Return the shape with nine tenths of its memory as minimum. Requests for whole devices are returned unchanged."""
    if kind.devices != 1 or kind.memory_bytes <= 1:
        return kind
    return kind._replace(spare_bytes=kind.memory_bytes // 10)


def elastic(one: openb.Kind) -> RequestShape:
    """Convert a request of the trace. If it is for a part of a GPU, the result also accepts a little less."""
    return make_elastic(kind(one)) if one.shares else kind(one)


def learn(
    nodes: Sequence[NodeRow], pods: Sequence[openb.Kind], of: Callable[[openb.Kind], RequestShape] = kind
) -> Taught:
    """Return the best result of learning; takes about a minute."""
    demand = [RequestFrequency(one, count) for one, count in Counter(map(of, pods)).items()]
    learner = Learner([node(row) for row in nodes], demand, draws)
    best, _ = max(learner.lessons(), key=lambda lesson: lesson[1])
    return best


class Packer:
    """The policy for one replay: `autoscaler.placement.packer.pack`, one PlacementRequest at a time.

    It has its own SliceIndex; the replay keeps separate accounts to check it.
    """

    def __init__(self, nodes: Sequence[NodeRow], taught: Taught) -> None:
        names = [NodeId(f"{number:05}") for number in range(len(nodes))]  # the round's order breaks ties
        shelves = [_shelf(name, gpu, row) for name, row in zip(names, nodes, strict=True) for gpu in range(row.gpus)]
        hosts = {name: _host(row) for name, row in zip(names, nodes, strict=True)}
        self._yard = SliceIndex(shelves, hosts, taught)
        self._wants: dict[openb.Kind, PlacementRequest] = {}

    def choose(self, asked: openb.Kind) -> tuple[int, int] | None:
        """See Chooser."""
        want = self._wants.get(asked)
        if want is None:
            want = self._wants[asked] = _want(asked)
        packing = pack((want,), self._yard, frozenset(), OUTLOOK, 0.0)
        placement = packing.placements[0] if packing.placements else None
        node = None if placement is None else placement.node
        if placement is None or node is None:
            return None
        gpus = [self._take(id, placement) for id in placement.slices]
        host = self._yard.hosts[node]
        left = host.cpu_left_milli - want.kind.cpu_milli, host.left_bytes - want.kind.host_bytes
        self._yard.put_host(node, host._replace(cpu_left_milli=left[0], left_bytes=left[1]))
        return int(node), gpus[0] if gpus else 0

    def _take(self, id: SliceId, placement: Placement) -> int:
        """Record the placement; return the GPU of its node."""
        shelf = self._yard.shelves[id].copy()
        shelf.reserve(ResourceAmount(placement.memory_bytes, 0))
        self._yard.put(shelf)
        return int(id.rpartition("/")[2])


class Granter:
    """The elastic policy for one replay: `autoscaler.placement.index.elastic_requests`, as the packer calls it."""

    def __init__(self, nodes: Sequence[NodeRow], taught: Taught) -> None:
        self._elastic = Elastic(NodeArrays([node(row) for row in nodes], taught))
        self._kinds: dict[openb.Kind, RequestShape] = {}

    def choose(self, asked: openb.Kind) -> tuple[int, int, int] | None:
        """See Chooser."""
        wanted = self._kinds.get(asked)
        if wanted is None:
            wanted = self._kinds[asked] = elastic(asked)
        one = self._elastic.start(wanted)
        if one is None:
            return None
        lanes, granted = one.place.lanes, one.granted_bytes if one.asked_bytes else asked.milli
        return one.place.node, lanes[0] if lanes else 0, granted


def _want(asked: openb.Kind) -> PlacementRequest:
    return PlacementRequest(ModelName("model"), kind=kind(asked))


def _shelf(node: NodeId, gpu: int, row: NodeRow) -> Bin:
    id = f"{node}/{gpu}"
    slice_ = Slice(id=SliceId(id), device=DeviceId(id), node=node, memory_bytes=MILLI, product=row.model)
    return Bin(
        slice=slice_,
        whole=True,
        incumbents=(),
        free=ResourceAmount(MILLI, 100),
        coming=ResourceAmount(0, 0),
        locked=False,
    )


def _host(row: NodeRow) -> HostResources:
    host_bytes = row.memory_mib * MIB
    return HostResources(row.cpu_milli, host_bytes, row.cpu_milli, host_bytes)
