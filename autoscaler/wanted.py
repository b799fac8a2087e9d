"""Which weights the nodes of a cluster are to have, and how far those of a Replica are. Pure: of a snapshot.

Owns both sides of what agents are told and say of weights. Promises: a failure, and a Copy, count only for the Replica
that the agent names, so that another try is one, and whoever may not have weights is not given them because they are
there. Which of the weights an engine loads is decided here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autoscaler.actions import Unmet
from autoscaler.contract import ModelName, WeightsReport
from autoscaler.engines import EngineError
from autoscaler.model import Model
from autoscaler.nodes import fresh
from autoscaler.nodewants import ImageWant, Laid, NodeWant, NodeWants
from autoscaler.states import ReplicaState as S
from autoscaler.stored import stored
from autoscaler.words import size
from autoscaler.world import NodeId, Replica, World

AGENT_S_MAX = 30.0
"""A Replica waits so long for an agent that says nothing of its node's weights; then its start has failed. One that is
replaced is back sooner."""
BEGINS = frozenset((S.PENDING, S.STARTING))
NO_IMAGES: Mapping[NodeId, tuple[ImageWant, ...]] = {}


class Coming(NamedTuple):
    """Weights that are not there yet."""

    words: str
    """How far they are."""


class Failed(NamedTuple):
    """Weights that did not come."""

    reason: str


def brought(model: Model) -> bool:
    """Whether a node's store is to have its weights."""
    return stored(model.spec.artifact, model.spec.engine)


def node_of(world: World, replica: Replica) -> NodeId | None:
    """Where it is placed; None: its scheduler chooses."""
    if not replica.slices:
        return None
    slice_ = world.slices.get(replica.slices[0])
    return NodeId(replica.slices[0].partition("/")[0]) if slice_ is None else slice_.node


def ahead(world: World, unmet: Iterable[Unmet]) -> tuple[tuple[ModelName, NodeId], ...]:
    """Where who waits for room will be: who Calls wait for, or `replicas.min` asks for, and has a place promised."""
    at = ((one.model, world.slices[id].node) for one in unmet for id in one.slices if id in world.slices)
    return tuple(sorted({(name, node) for name, node in at if name in world.models}))


def wanted(
    world: World,
    early: Iterable[tuple[ModelName, NodeId]] = (),
    images: Mapping[NodeId, tuple[ImageWant, ...]] = NO_IMAGES,
) -> dict[NodeId, NodeWants]:
    """What each node is to have, where that is anything. `early`: of `ahead`. `images`: see `autoscaler.prepull`."""
    waiting: dict[NodeId, dict[tuple[str, str], list[Replica]]] = {}
    held: dict[NodeId, set[str]] = {}
    models = {model.name: model for model in world.models.values() if brought(model)}
    for replica in world.replicas.values():
        model = models.get(replica.model)
        node = node_of(world, replica) if model is not None or replica.weights else None
        if node is None:
            continue
        if replica.weights:
            held.setdefault(node, set()).add(replica.weights)
        if model is not None and replica.state in BEGINS and replica.spec_hash == model.spec_hash():
            waiting.setdefault(node, {}).setdefault(_key(model), []).append(replica)
    for name, node in early:
        if name in models:
            waiting.setdefault(node, {}).setdefault(_key(models[name]), [])
    return {
        node: NodeWants(
            epoch=world.epoch,
            wants=tuple(
                NodeWant(artifact=artifact, pull_secret=secret, replicas=tuple(sorted(one.id for one in replicas)))
                for (artifact, secret), replicas in sorted(waiting.get(node, {}).items())
            ),
            images=images.get(node, ()),
            held=tuple(sorted(held.get(node, ()))),
            weights=world.settings.weights,
        )
        for node in sorted({*waiting, *held, *images})
    }


def _key(model: Model) -> tuple[str, str]:
    return model.spec.artifact or "", model.spec.pull_secret or ""


def standing(world: World, replica: Replica, model: Model, since_s: float, now_s: float) -> Laid | Coming | Failed:
    """How far the weights of a Replica are that waits for them since `since_s`."""
    name = node_of(world, replica)
    if name is None:
        return Failed(nowhere(model))
    node = world.nodes.get(name)
    if node is None or not fresh(node, now_s) or not node.report.brings:
        words = f"no agent says that it brings weights to node {name}"
        heard_s = node.seen_s if node is not None and node.report.brings else since_s
        if now_s >= max(since_s, heard_s) + AGENT_S_MAX:
            return Failed(f"{words}: let one run there (the chart's agent.enabled), or mount the weights")
        return Coming(words)
    said = next((one for one in node.report.weights if replica.id in one.replicas and _is_of(one, model)), None)
    if said is not None and said.failed:
        return Failed(said.failed)
    if said is not None and said.folder:
        try:
            return Laid(said.folder, loaded(said.ggufs, model))
        except EngineError as error:
            return Failed(str(error))
    now = world.models.get(model.name)
    if now is not None and now.spec_hash() != replica.spec_hash:
        return Failed("its Model was changed while they came")  # `wanted` speaks of it no more
    under_way = said or next((one for one in node.report.weights if _is_of(one, model)), None)
    if under_way is None or not under_way.total_bytes:
        return Coming("asked for")
    so_far = f"{size(under_way.bytes)} of {size(under_way.total_bytes)}"
    return Coming(f"{so_far}, {size(round(under_way.bytes_per_s))} a second")


def _is_of(said: WeightsReport, model: Model) -> bool:
    return (said.artifact, said.pull_secret) == _key(model)


def nowhere(model: Model) -> str:
    """Of one whose node is its scheduler's choice."""
    return f"{model.spec.artifact} is brought to one node, and a scheduler chooses among all: ask for a device (gpu)"


def loaded(ggufs: Sequence[str], model: Model) -> str:
    """Which of these GGUF files an engine loads, of all in its artifact; empty: the folder. Raises EngineError."""
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise EngineError(
            f"{model.spec.artifact} holds {len(ggufs)} GGUF files: {', '.join(sorted(ggufs)[:4])}; pack one"
        )
    if model.spec.engine == "llama.cpp":
        raise EngineError(f"{model.spec.artifact} holds no GGUF file, and llama.cpp loads no other")
    return ""
