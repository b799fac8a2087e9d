"""The progress of the weights of one replica, and the file that its engine loads. Pure.

A failure or a copy counts only for the replicas that the agent names. So a retry is a new attempt, and a replica that
has no permission for the weights does not get an existing copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.agent_contract import (
    OWN,
    Laid,
    LaidAdapter,
    WeightsReport,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.documents.document_rules import ADAPTER_PATH
from autoscaler.queries.agent_reports import is_report_fresh
from autoscaler.spec.engine_definition import EngineError
from autoscaler.spec.model import Model
from autoscaler.state.world import ClusterFacts, NodeAgentStatus, Replica, World
from autoscaler.text import format_size
from autoscaler.weights import mount_choice
from autoscaler.weights.desired import build_weights_requests, node_of
from autoscaler.weights.mount_choice import ArtifactFacts

AGENT_S_MAX = 30.0
"""How long a replica waits for a node agent that does not report before its start fails. Replacing an agent takes less.
"""


class WeightsPending(NamedTuple):
    """The weights are not complete yet."""

    words: str
    """The progress."""


class WeightsFailed(NamedTuple):
    """The weights could not be provided."""

    reason: str


def assess_weights(
    world: World, replica: Replica, model: Model, since_s: float, now_s: float
) -> Laid | WeightsPending | WeightsFailed:
    """Return the progress of the weights of a replica that has waited for them since `since_s`."""
    name = node_of(world, replica)
    if name is None:
        return WeightsFailed(explain_no_node(model))
    node = world.nodes.agents.get(name)
    if node is None or not is_report_fresh(node, now_s) or not node.report.brings:
        words = f"no agent reports that it pulls weights to node {name}"
        heard_s = node.seen_s if node is not None and node.report.brings else since_s
        if now_s >= max(since_s, heard_s) + AGENT_S_MAX:
            return WeightsFailed(f"{words}: run one on it (agent.enabled of the chart), or mount the weights")
        return WeightsPending(words)
    asked = build_weights_requests(world, model)
    said = {part: one for part, request in asked.items() if (one := _said(node, request, replica)) is not None}
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
        return WeightsFailed("its Model was changed during the pull")  # `build_node_wants` no longer requests them
    return WeightsPending(_so_far(node, set(asked.values())))


def _said(node: NodeAgentStatus, request: WeightsRequest, replica: Replica) -> WeightsReport | None:
    """Return the agent's report about the weights for this replica."""
    return next(
        (one for one in node.report.weights if replica.id in one.replicas and read_weights_request(one) == request),
        None,
    )


def _unseen(world: World, said: WeightsReport) -> str:
    """Explain why pods cannot mount the inspected artifact. Empty: they can, or it was pulled."""
    if not said.look or said.image is not None or not said.digest:
        return ""
    settings, facts = world.settings, world.nodes.mounting or ClusterFacts()
    return mount_choice.choose_mount(
        said.artifact, settings, facts, found=ArtifactFacts(said.digest, why=said.no_image)
    ).reason


def _so_far(node: NodeAgentStatus, requests: set[WeightsRequest]) -> str:
    """Return the total progress of these pulls, for any replica."""
    coming = {
        request: one
        for one in node.report.weights
        if (request := read_weights_request(one)) in requests and one.total_bytes
    }.values()
    if not coming:
        return "requested"
    came, total = (
        format_size(sum(column)) for column in zip(*((one.bytes, one.total_bytes) for one in coming), strict=True)
    )
    return f"{came} of {total}, {format_size(round(sum(one.bytes_per_s for one in coming)))} a second"


def _laid(said: Mapping[str, WeightsReport], model: Model) -> Laid:
    """Describe complete weights. Raises EngineError."""
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
    """Explain why weights cannot be pulled for a replica whose node a scheduler chooses."""
    artifact = next(iter(collect_weights_requests(model).values())).artifact
    return f"{artifact} is pulled to one node, but a scheduler may choose any node: request a device (spec.gpu)"


def choose_gguf(ggufs: Sequence[str], model: Model) -> str:
    """Return the GGUF file that the engine loads. Empty: the directory. Raises EngineError."""
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise EngineError(
            f"{model.spec.artifact} contains {len(ggufs)} GGUF files: {', '.join(sorted(ggufs)[:4])}; package only one"
        )
    if model.spec.engine == "llama.cpp":
        raise EngineError(f"{model.spec.artifact} contains no GGUF file, which llama.cpp requires")
    return ""


def choose_adapter(found: Sequence[str], name: str) -> str:
    """Return the file or directory of the artifact that is the adapter. Raises EngineError."""
    if len(found) != 1:
        what = (
            f"{len(found)} adapters: {', '.join(sorted(found)[:4])}" if found else "no adapter (GGUF, or PEFT's files)"
        )
        raise EngineError(f"adapter {name}: its artifact contains {what}; package only one")
    if not ADAPTER_PATH.fullmatch(f"file:///{found[0] or '.'}"):
        odd = f"{found[0]} contains a character that engines interpret"
        raise EngineError(f'adapter {name}: {odd} (, : = or "); rename it')
    return found[0]
