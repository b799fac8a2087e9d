"""Decides which weights each node of a cluster needs. Pure.

Builds the requests to node agents. Their reports are in `autoscaler.weights.replica_weights`, inspections in
`autoscaler.weights.inspection`.

Some weights do not need an agent: an engine that gets a Hub artifact by name fetches it itself, with its own login,
into its own pod. No engine supports a pattern of files (`?include=`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from autoscaler.agent_contract import (
    OWN,
    FabricWant,
    ImageWant,
    NodeWant,
    NodeWants,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.contract import ModelName
from autoscaler.spec.engines import ENGINES, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NodeId, Replica, World
from autoscaler.weights import mount_choice
from autoscaler.weights.mount_choice import ArtifactFacts


def find_unfetched_artifact(model: Model) -> str | None:
    """Return the model's artifact, unless its engine fetches it or there is none (None)."""
    artifact = model.spec.artifact
    return None if artifact is None or is_fetched_by_engine(artifact, ENGINES[model.spec.engine]) else artifact


WANTS_BYTES_MAX = 768 << 10
"""Maximum size of the weights requests to one node, encoded. Requests of the Models with the least bytes are sent
first, so that a Model with many long names delays only itself. The rest is sent later.
"""
BEGINS = frozenset((S.PENDING, S.STARTING))
NO_IMAGES: Mapping[NodeId, tuple[ImageWant, ...]] = {}
NO_FABRIC: Mapping[NodeId, tuple[FabricWant, ...]] = {}


def build_weights_requests(world: World, model: Model) -> dict[str, WeightsRequest]:
    """Like `collect_weights_requests`, but weights that the current settings mount as an image are only inspected."""
    settings, facts = world.settings, world.nodes.mounting
    return {
        name: request._replace(look=mount_choice.is_image_mount(request.artifact, settings, facts))
        for name, request in collect_weights_requests(model).items()
    }


def find_artifact_facts(world: World, model: Model, part: str = OWN) -> ArtifactFacts | None:
    """Return the known facts about an artifact of the Model, on any node. None: no agent has inspected it."""
    request = collect_weights_requests(model).get(part)
    said = None if request is None else world.learned.looked.get(request._replace(look=True))
    return None if said is None else ArtifactFacts(said.digest, image=said.image, why=said.no_image)


def node_of(world: World, replica: Replica) -> NodeId | None:
    """Return the node of a replica. None: its scheduler chooses one."""
    if not replica.resources.slices:
        return None
    slice_ = world.nodes.slices.get(replica.resources.slices[0])
    return NodeId(replica.resources.slices[0].partition("/")[0]) if slice_ is None else slice_.node


def list_promised_placements(world: World, unmet: Iterable[Unmet]) -> tuple[tuple[ModelName, NodeId], ...]:
    """Return the nodes promised to unplaced models that have waiting requests or are required by `replicas.min`."""
    at = ((one.model, world.nodes.slices[id].node) for one in unmet for id in one.slices if id in world.nodes.slices)
    return tuple(sorted({(name, node) for name, node in at if name in world.models}))


def build_node_wants(
    world: World,
    early: Iterable[tuple[ModelName, NodeId]] = (),
    images: Mapping[NodeId, tuple[ImageWant, ...]] = NO_IMAGES,
    inspections: Iterable[tuple[NodeId, WeightsRequest]] = (),
    fabric: Mapping[NodeId, tuple[FabricWant, ...]] = NO_FABRIC,
) -> dict[NodeId, NodeWants]:
    """Return the wants of each node that has any.

    `early`: from `list_promised_placements`; `images`: from `autoscaler.weights.image_prepull`; `inspections`: from
    `autoscaler.weights.inspection`; `fabric`: from `autoscaler.capacity.agent_device_requests`.
    """
    waiting: dict[NodeId, dict[WeightsRequest, list[Replica]]] = {}
    held: dict[NodeId, set[str]] = {}
    models = {
        model.name: (model, asked)
        for model in world.models.values()
        if (asked := frozenset(build_weights_requests(world, model).values()))
    }
    for replica in world.replicas.values():
        known = models.get(replica.model)
        node = node_of(world, replica) if known is not None or replica.runtime.weights else None
        if node is None:
            continue
        if replica.runtime.weights:
            held.setdefault(node, set()).update(replica.runtime.weights)
        if known is not None and replica.state in BEGINS and replica.spec_hash == known[0].spec_hash():
            for request in known[1]:
                waiting.setdefault(node, {}).setdefault(request, []).append(replica)
    for name, node in early:
        for request in models[name][1] if name in models else ():
            waiting.setdefault(node, {}).setdefault(request, [])
    looked: dict[NodeId, set[WeightsRequest]] = {}
    for node, request in inspections:
        waiting.setdefault(node, {}).setdefault(request, [])
        looked.setdefault(node, set()).add(request)
    asked_by_model = {name: asked for name, (_, asked) in models.items()}
    return {
        node: NodeWants(
            epoch=world.epoch,
            wants=_limit_wants(
                [
                    NodeWant(**request._asdict(), replicas=tuple(sorted(one.id for one in replicas)))
                    for request, replicas in sorted(waiting.get(node, {}).items())
                ],
                asked_by_model, looked.get(node, frozenset()),
            ),
            images=images.get(node, ()),
            held=tuple(sorted(held.get(node, ()))),
            weights=world.settings.weights,
            fabric=fabric.get(node, ()),
        )
        for node in sorted({*waiting, *held, *images, *fabric})
    }  # fmt: skip


_encode = msgspec.json.Encoder().encode


def _limit_wants(
    wants: Sequence[NodeWant],
    asked_by_model: Mapping[ModelName, Collection[WeightsRequest]],
    inspections: Collection[WeightsRequest],
) -> tuple[NodeWant, ...]:
    """Return the wants that fit into WANTS_BYTES_MAX: assigned inspections, of which there are at most LOOKS_MAX,
    then weights that replicas wait for, then prefetches.
    """
    sizes = {want: len(_encode(want)) + 1 for want in wants}
    if sum(sizes.values()) <= WANTS_BYTES_MAX:
        return tuple(wants)
    models: dict[WeightsRequest, tuple[int, ModelName]] = {}
    for name, asked in asked_by_model.items():
        model = sum(len(request.artifact) for request in asked), name
        for request in asked:
            models[request] = min(model, models.get(request, model))

    def order(want: NodeWant) -> tuple[bool, bool, tuple[int, ModelName], WeightsRequest]:
        request = read_weights_request(want)
        is_prefetch = not want.replicas
        return request not in inspections, is_prefetch, models.get(request, (0, ModelName(""))), request

    left, chosen = WANTS_BYTES_MAX, set[NodeWant]()
    for want in sorted(wants, key=order):
        if sizes[want] <= left:
            left -= sizes[want]
            chosen.add(want)
    return tuple(want for want in wants if want in chosen)
