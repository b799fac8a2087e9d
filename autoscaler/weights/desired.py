"""Decides which weights the nodes of a cluster are to have, and tracks those of a replica. Pure: of a snapshot.

Covers what agents are asked and what they report about weights, and which of them an engine loads. A failure, and a
copy, count only for the replica that the agent names: a retry is a new try, and a replica without permission does not
get weights just because they are there.

Not all weights come from a node's store: an artifact of the Hub that is passed to an engine by name is fetched by the
engine, with its own login, into its own pod, and needs no agent. No engine supports a pattern of files (`?include=`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autoscaler.agent_contract import (
    OWN,
    FabricWant,
    ImageWant,
    Laid,
    LaidAdapter,
    NodeWant,
    NodeWants,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.contract import ModelName, WeightsReport
from autoscaler.documents.validation import ADAPTER_PATH
from autoscaler.queries.device_health import is_report_fresh
from autoscaler.spec.engines import ENGINES, EngineError, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.operator_orders import NodeAgentStatus
from autoscaler.state.world import ClusterFacts, NodeId, Replica, World
from autoscaler.text import format_size
from autoscaler.weights import mounts
from autoscaler.weights.mounts import ArtifactFacts


def find_unfetched_artifact(model: Model) -> str | None:
    """The model's artifact, if its engine does not fetch it itself; None: it does, or there is none."""
    artifact = model.spec.artifact
    return None if artifact is None or is_fetched_by_engine(artifact, ENGINES[model.spec.engine]) else artifact


AGENT_S_MAX = 30.0
"""How long a replica waits for an agent that reports nothing about its node's weights before its start fails. An agent
that is replaced is back sooner."""
BEGINS = frozenset((S.PENDING, S.STARTING))
NO_IMAGES: Mapping[NodeId, tuple[ImageWant, ...]] = {}
NO_FABRIC: Mapping[NodeId, tuple[FabricWant, ...]] = {}


class WeightsPending(NamedTuple):
    """Weights that are not there yet."""

    words: str
    """How far they are."""


class WeightsFailed(NamedTuple):
    """Weights that could not be provided."""

    reason: str


def build_wishes(world: World, model: Model) -> dict[str, WeightsRequest]:
    """As `collect_weights_requests`, by the present settings: weights mounted as an image are inspected, not pulled."""
    settings, facts = world.settings, world.nodes.mounting
    return {
        name: wish._replace(look=mounts.is_image_mount(wish.artifact, settings, facts))
        for name, wish in collect_weights_requests(model).items()
    }


def find_artifact_facts(world: World, model: Model, part: str = OWN) -> ArtifactFacts | None:
    """What is known of an artifact of it, on any node; None if no agent has inspected it."""
    wish = collect_weights_requests(model).get(part)
    said = None if wish is None else world.learned.looked.get(wish._replace(look=True))
    return None if said is None else ArtifactFacts(said.digest, image=said.image, why=said.no_image)


def should_read_header(model: Model) -> bool:
    """Whether the artifact's header has what its document lacks: its memory, or what that consists of."""
    gpu = model.spec.gpu
    made = gpu.elastic_percent is not None or gpu.growth_percent is not None or ENGINES[model.spec.engine].pages
    return gpu.count > 0 and (made or not gpu.memory_bytes)


def node_of(world: World, replica: Replica) -> NodeId | None:
    """Where it is placed; None if its scheduler chooses."""
    if not replica.resources.slices:
        return None
    slice_ = world.nodes.slices.get(replica.resources.slices[0])
    return NodeId(replica.resources.slices[0].partition("/")[0]) if slice_ is None else slice_.node


def list_promised_placements(world: World, unmet: Iterable[Unmet]) -> tuple[tuple[ModelName, NodeId], ...]:
    """Nodes promised to models that lack room: models with waiting requests or required by `replicas.min`."""
    at = ((one.model, world.nodes.slices[id].node) for one in unmet for id in one.slices if id in world.nodes.slices)
    return tuple(sorted({(name, node) for name, node in at if name in world.models}))


def build_node_wants(
    world: World,
    early: Iterable[tuple[ModelName, NodeId]] = (),
    images: Mapping[NodeId, tuple[ImageWant, ...]] = NO_IMAGES,
    looks: Iterable[tuple[NodeId, WeightsRequest]] = (),
    fabric: Mapping[NodeId, tuple[FabricWant, ...]] = NO_FABRIC,
) -> dict[NodeId, NodeWants]:
    """What each node is to have; nodes without any are left out.

    `early`: from `list_promised_placements`; `images`: from `autoscaler.weights.image_prepull`; `looks`: from
    `autoscaler.weights.inspection`; `fabric`: from `autoscaler.capacity.fabric_agents`.
    """
    waiting: dict[NodeId, dict[WeightsRequest, list[Replica]]] = {}
    held: dict[NodeId, set[str]] = {}
    models = {
        model.name: (model, asked)
        for model in world.models.values()
        if (asked := frozenset(build_wishes(world, model).values()))
    }
    for replica in world.replicas.values():
        known = models.get(replica.model)
        node = node_of(world, replica) if known is not None or replica.runtime.weights else None
        if node is None:
            continue
        if replica.runtime.weights:
            held.setdefault(node, set()).update(replica.runtime.weights)
        if known is not None and replica.state in BEGINS and replica.spec_hash == known[0].spec_hash():
            for wish in known[1]:
                waiting.setdefault(node, {}).setdefault(wish, []).append(replica)
    for name, node in early:
        for wish in models[name][1] if name in models else ():
            waiting.setdefault(node, {}).setdefault(wish, [])
    for node, wish in looks:
        waiting.setdefault(node, {}).setdefault(wish, [])
    return {
        node: NodeWants(
            epoch=world.epoch,
            wants=tuple(
                NodeWant(**wish._asdict(), replicas=tuple(sorted(one.id for one in replicas)))
                for wish, replicas in sorted(waiting.get(node, {}).items())
            ),
            images=images.get(node, ()),
            held=tuple(sorted(held.get(node, ()))),
            weights=world.settings.weights,
            fabric=fabric.get(node, ()),
        )
        for node in sorted({*waiting, *held, *images, *fabric})
    }


def assess_weights(
    world: World, replica: Replica, model: Model, since_s: float, now_s: float
) -> Laid | WeightsPending | WeightsFailed:
    """Progress of the weights of a replica that has waited for them since `since_s`."""
    name = node_of(world, replica)
    if name is None:
        return WeightsFailed(explain_no_node(model))
    node = world.nodes.agents.get(name)
    if node is None or not is_report_fresh(node, now_s) or not node.report.brings:
        words = f"no agent says that it brings weights to node {name}"
        heard_s = node.seen_s if node is not None and node.report.brings else since_s
        if now_s >= max(since_s, heard_s) + AGENT_S_MAX:
            return WeightsFailed(f"{words}: let one run there (the chart's agent.enabled), or mount the weights")
        return WeightsPending(words)
    asked = build_wishes(world, model)
    said = {part: one for part, wish in asked.items() if (one := _said(node, wish, replica)) is not None}
    for part, one in said.items():
        if why := one.failed or _unseen(world, one):
            return WeightsFailed(f"adapter {part}: {why}" if part else why)
    if len(said) == len(asked) and all(one.folder or one.digest for one in said.values()):
        try:
            return _laid(said, model)
        except EngineError as error:
            return WeightsFailed(str(error))
    now = world.models.get(model.name)
    if now is not None and now.spec_hash() != replica.spec_hash:
        return WeightsFailed("its Model was changed while they came")  # `build_node_wants` no longer requests them
    return WeightsPending(_so_far(node, set(asked.values())))


def _said(node: NodeAgentStatus, wish: WeightsRequest, replica: Replica) -> WeightsReport | None:
    """What its agent reports about them for this replica."""
    return next(
        (one for one in node.report.weights if replica.id in one.replicas and read_weights_request(one) == wish), None
    )


def _unseen(world: World, said: WeightsReport) -> str:
    """Why pods cannot mount what was inspected; empty: they can, or it was pulled."""
    if not said.look or said.image is not None or not said.digest:
        return ""
    settings, facts = world.settings, world.nodes.mounting or ClusterFacts()
    return mounts.choose_mount(
        said.artifact, settings, facts, found=ArtifactFacts(said.digest, why=said.no_image)
    ).reason


def _so_far(node: NodeAgentStatus, wishes: set[WeightsRequest]) -> str:
    """Total progress of these pulls, whichever replicas they are for."""
    coming = {
        wish: one for one in node.report.weights if (wish := read_weights_request(one)) in wishes and one.total_bytes
    }.values()
    if not coming:
        return "asked for"
    came, total = (
        format_size(sum(column)) for column in zip(*((one.bytes, one.total_bytes) for one in coming), strict=True)
    )
    return f"{came} of {total}, {format_size(round(sum(one.bytes_per_s for one in coming)))} a second"


def _laid(said: Mapping[str, WeightsReport], model: Model) -> Laid:
    """Describe weights that are all there. Raises EngineError."""
    adapters = tuple(
        LaidAdapter(name, one.folder, choose_adapter(one.adapters, name), one.digest, one.image)
        for name, one in said.items()
        if name
    )
    own = said.get(OWN)
    if own is None:
        return Laid("", "", adapters)
    return Laid(own.folder, choose_gguf(own.ggufs, model), adapters, own.digest, own.image)


def explain_no_node(model: Model) -> str:
    """Why weights cannot be pulled for a replica whose scheduler chooses the node."""
    artifact = next(iter(collect_weights_requests(model).values())).artifact
    return f"{artifact} is brought to one node, and a scheduler chooses among all: ask for a device (gpu)"


def choose_gguf(ggufs: Sequence[str], model: Model) -> str:
    """Which GGUF file of its artifact an engine loads; empty: the directory. Raises EngineError."""
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise EngineError(
            f"{model.spec.artifact} holds {len(ggufs)} GGUF files: {', '.join(sorted(ggufs)[:4])}; pack one"
        )
    if model.spec.engine == "llama.cpp":
        raise EngineError(f"{model.spec.artifact} holds no GGUF file, and llama.cpp loads no other")
    return ""


def choose_adapter(found: Sequence[str], name: str) -> str:
    """Which of these files or directories of its artifact is the adapter. Raises EngineError."""
    if len(found) != 1:
        what = (
            f"{len(found)} adapters: {', '.join(sorted(found)[:4])}" if found else "no adapter (GGUF, or PEFT's files)"
        )
        raise EngineError(f"adapter {name}: its artifact holds {what}; pack one")
    if not ADAPTER_PATH.fullmatch(f"file:///{found[0] or '.'}"):
        raise EngineError(f"adapter {name}: {found[0]} has one of , : = in it, which engines read as something else")
    return found[0]
