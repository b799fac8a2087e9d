"""Which engine images nodes are to have ahead of a start, so that no Call waits for one. Pure: of a snapshot.

Owns what agents are told of images; they bring them (`pilotlight.agent.kubelet.image_pull`), and a kubelet pulls what
they have not. An image is wanted where a Replica begins, beside its weights and not after them; where who waits for
room will be; and, of a Model that is used, on so many more nodes that could hold it that the next start finds it,
wherever that is. What a node has, or its agent is not known, is not asked for. Of a Model that nobody uses nothing is
brought.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Set
from heapq import nsmallest
from math import inf
from typing import Final

from autoscaler.agent_contract import ImageWant
from autoscaler.contract import ModelName
from autoscaler.placement.model.bins import build_placement_request
from autoscaler.placement.model.predicates import has_matching_labels, node_exclusion_reason
from autoscaler.placement.model.types import EvictionLevel, NodeConstraints, slice_class_of
from autoscaler.spec.model import Model
from autoscaler.state.images import NONE, Whereabouts, normalize_image_name
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import RequestShape
from autoscaler.state.world import NodeId, SliceId, World

NODES_ENOUGH: Final = 2
"""Of a Model that is used: on so many nodes that could hold it its image is to be, one more than a Replica needs."""
NODE_MAX: Final = 8
"""Images told to one node at once: those of Replicas that begin first."""
ALIKE_MAX: Final = 1024
"""Different things to ask for whose nodes are kept."""
BEGINS: Final = frozenset({S.PENDING, S.STARTING})


class ImageWants:
    """Knows nothing at first; what it says does not depend on what it was asked before."""

    def __init__(self) -> None:
        self._where = Whereabouts()
        self._asked: tuple[object, ...] = ()
        self._spare: dict[NodeId, list[ImageWant]] = {}
        self._place: tuple[object, ...] = ()
        self._places = 0
        """How often that changed."""
        self._could: dict[tuple[RequestShape, NodeConstraints], Set[NodeId]] = {}
        """Where what is asked for alike could be. Images come and go all the time, and change nothing of that."""

    def of(self, world: World, ahead: Iterable[tuple[ModelName, NodeId]] = ()) -> dict[NodeId, tuple[ImageWant, ...]]:
        """By node, the most urgent first. `ahead`: where who waits for room will be."""
        if not world.nodes:
            return {}
        found: dict[NodeId, dict[ImageWant, None]] = {}
        begin = [one for one in world.replicas.values() if one.state in BEGINS and one.started_s is None and one.slices]
        for replica in sorted(begin, key=lambda one: (one.created_s, one.id)):
            model = world.models.get(replica.model)
            if model is not None:
                _add(found, _node_of(world, replica.slices[0]), model)
        for name, node in ahead:
            if name in world.models:
                _add(found, node, world.models[name])
        for node, wants in self._spares(world).items():
            for want in wants:
                found.setdefault(node, {})[want] = None
        there = ((node, _lacking(world, node, wants)) for node, wants in sorted(found.items()))
        return {node: lacking for node, lacking in there if lacking}

    def _spares(self, world: World) -> Mapping[NodeId, list[ImageWant]]:
        """Of Models that are used; worked out again where anything is another that it depends on."""
        self._where.tell(world.images)
        used = frozenset(name for name, model in world.models.items() if model.spec.image and _used(world, model))
        place = world.slices, world.settings, frozenset(world.nodes)
        if _differ(self._place, place):
            self._place, self._places, self._could = place, self._places + 1, {}
        asked = self._places, world.models, used, self._where.version
        if _differ(self._asked, asked):
            self._asked, self._spare = asked, self._chosen(world, [world.models[name] for name in sorted(used)])
        return self._spare

    def _chosen(self, world: World, used: Iterable[Model]) -> dict[NodeId, list[ImageWant]]:
        found: dict[NodeId, list[ImageWant]] = {}
        for model in used:
            has, could, want = self._where.of(model.spec.image), self._could_hold(world, model), model_want(model)
            chosen = {node for node, wants in found.items() if node in could and want in wants}
            lacks = NODES_ENOUGH - len(could & has) - len(chosen)
            if lacks > 0:
                those = ((_order(model.spec.image, node), node) for node in could - has - chosen)
                for _, node in nsmallest(lacks, those):
                    found.setdefault(node, []).append(want)
        return found

    def _could_hold(self, world: World, model: Model) -> Set[NodeId]:
        want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod)
        alike = want.kind, want.choice
        if alike not in self._could:
            if len(self._could) >= ALIKE_MAX:
                self._could.clear()
            self._could[alike] = _could_hold(world, *alike)
        return self._could[alike]


def model_want(model: Model) -> ImageWant:
    """Its engine's."""
    return ImageWant(image=model.spec.image, pull_secret=model.spec.pull_secret or "")


def _add(found: dict[NodeId, dict[ImageWant, None]], node: NodeId, model: Model) -> None:
    if model.spec.image:
        found.setdefault(node, {})[model_want(model)] = None


def _lacking(world: World, node: NodeId, wants: Iterable[ImageWant]) -> tuple[ImageWant, ...]:
    """Of those, what an agent there is to bring."""
    if node not in world.nodes:
        return ()
    has = {name for some in world.images.get(node, NONE) for one in some for name in one.names}
    return tuple(want for want in wants if normalize_image_name(want.image) not in has)[:NODE_MAX]


def _used(world: World, model: Model) -> bool:
    """Replicas of it are there, or always wanted."""
    return not model.spec.paused and bool(model.spec.replicas.min or world.by_model.get(model.name))


def _differ(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return not before or any(one is not other and one != other for one, other in zip(before, now, strict=True))


def _could_hold(world: World, kind: RequestShape, choice: NodeConstraints) -> set[NodeId]:
    """Nodes with an agent and a Slice that could hold it, were nobody there."""
    if not kind.devices:
        return set()
    lanes: dict[object, bool] = {}
    found: set[NodeId] = set()
    for slice_ in world.slices.values():
        if slice_.node in found or slice_.node not in world.nodes or slice_.closed or not slice_.healthy:
            continue
        lane = slice_class_of(slice_, whole=True)
        if lane not in lanes:
            lanes[lane] = kind.rank(lane.product) is not None and kind.least.takes(lane) is not None
        if lanes[lane] and has_matching_labels(choice.selector, slice_) and not node_exclusion_reason(choice, slice_):
            found.add(slice_.node)
    return found


def _node_of(world: World, id: SliceId) -> NodeId:
    known = world.slices.get(id)
    return NodeId(id.partition("/")[0]) if known is None else known.node


def _order(image: str, node: NodeId) -> int:
    """Another of each image, so that not all come to one node; and the same at each asking."""
    return zlib.crc32(f"{image} {node}".encode())
