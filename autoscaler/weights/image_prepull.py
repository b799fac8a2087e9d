"""Selects engine images that nodes pull before a start, so that no request waits for a pull. Pure.

Agents pull them (`pilotlight.agent.kubelet.image_pull`); a kubelet pulls a missing image at the start. A node needs an
image if a replica starts on it (in parallel with its weights), or if an unplaced request will be placed on it. Models
in use get their image also on enough other suitable nodes, so that the next start finds it on any of them. Images that
a node has are not requested, nor are images from a node without an agent or for an unused model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Set
from heapq import nsmallest
from math import inf
from typing import Final

from autoscaler.agent_contract import ImageWant
from autoscaler.contract import ModelName
from autoscaler.placement.model.predicates import has_matching_labels, node_exclusion_reason
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, NodeConstraints, slice_class_of
from autoscaler.spec.model import Model
from autoscaler.state.images import NONE, Whereabouts, normalize_image_name
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import RequestShape
from autoscaler.state.world import NodeId, SliceId, World

NODES_ENOUGH: Final = 2
"""The number of suitable nodes with the image of a model in use: the node of one replica, and one more."""
NODE_MAX: Final = 8
"""Images requested from one node at the same time: those of replicas that start first."""
ALIKE_MAX: Final = 1024
"""Maximum number of kinds of requests whose nodes are cached."""
BEGINS: Final = frozenset({S.PENDING, S.STARTING})


class ImageWants:
    """Computes the images that nodes should pull. Results do not depend on earlier calls."""

    def __init__(self) -> None:
        self._where = Whereabouts()
        self._asked: tuple[object, ...] = ()
        self._spare: dict[NodeId, list[ImageWant]] = {}
        self._place: tuple[object, ...] = ()
        self._places = 0
        """The number of changes of `_place`."""
        self._could: dict[tuple[RequestShape, NodeConstraints], Set[NodeId]] = {}
        """Suitable nodes by kind of request. It does not depend on images, which change often."""

    def of(self, world: World, ahead: Iterable[tuple[ModelName, NodeId]] = ()) -> dict[NodeId, tuple[ImageWant, ...]]:
        """Return the images of each node, most urgent first. `ahead`: where unplaced requests will be placed."""
        if not world.nodes.agents:
            return {}
        found: dict[NodeId, dict[ImageWant, None]] = {}
        begin = [
            one
            for one in world.replicas.values()
            if one.state in BEGINS and one.times.started_s is None and one.resources.slices
        ]
        for replica in sorted(begin, key=lambda one: (one.times.created_s, one.id)):
            model = world.models.get(replica.model)
            if model is not None:
                _add(found, _node_of(world, replica.resources.slices[0]), model)
        for name, node in ahead:
            if name in world.models:
                _add(found, node, world.models[name])
        for node, wants in self._spares(world).items():
            for want in wants:
                found.setdefault(node, {})[want] = None
        there = ((node, _lacking(world, node, wants)) for node, wants in sorted(found.items()))
        return {node: lacking for node, lacking in there if lacking}

    def _spares(self, world: World) -> Mapping[NodeId, list[ImageWant]]:
        """Return images for models in use, from a cache that expires when an input changes."""
        self._where.update(world.nodes.images)
        used = frozenset(name for name, model in world.models.items() if model.spec.image and _used(world, model))
        place = world.nodes.slices, world.settings, frozenset(world.nodes.agents)
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
                # The order of the nodes is stable, and differs by image so that images spread over nodes.
                those = ((zlib.crc32(f"{model.spec.image} {node}".encode()), node) for node in could - has - chosen)
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
    """Return the image of the Model's engine."""
    return ImageWant(image=model.spec.image, pull_secret=model.spec.pull_secret or "")


def _add(found: dict[NodeId, dict[ImageWant, None]], node: NodeId, model: Model) -> None:
    if model.spec.image:
        found.setdefault(node, {})[model_want(model)] = None


def _lacking(world: World, node: NodeId, wants: Iterable[ImageWant]) -> tuple[ImageWant, ...]:
    """Return the images that the node's agent should pull."""
    if node not in world.nodes.agents:
        return ()
    has = {name for some in world.nodes.images.get(node, NONE) for one in some for name in one.names}
    return tuple(want for want in wants if normalize_image_name(want.image) not in has)[:NODE_MAX]


def _used(world: World, model: Model) -> bool:
    """Return whether replicas of the Model exist, or are always required."""
    return not model.spec.paused and bool(model.spec.replicas.min or world.by_model.get(model.name))


def _differ(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return not before or any(one is not other and one != other for one, other in zip(before, now, strict=True))


def _could_hold(world: World, kind: RequestShape, choice: NodeConstraints) -> set[NodeId]:
    """Return the nodes with an agent and a slice that could hold the request if it were empty."""
    if not kind.devices:
        return set()
    lanes: dict[object, bool] = {}
    found: set[NodeId] = set()
    for slice_ in world.nodes.slices.values():
        if slice_.node in found or slice_.node not in world.nodes.agents or slice_.closed or not slice_.healthy:
            continue
        lane = slice_class_of(slice_, whole=True)
        if lane not in lanes:
            lanes[lane] = kind.rank(lane.product) is not None and kind.least.takes(lane) is not None
        if lanes[lane] and has_matching_labels(choice.selector, slice_) and not node_exclusion_reason(choice, slice_):
            found.add(slice_.node)
    return found


def _node_of(world: World, id: SliceId) -> NodeId:
    known = world.nodes.slices.get(id)
    return NodeId(id.partition("/")[0]) if known is None else known.node
