"""Decides which weights each node of a cluster needs, and tracks the weights of a replica. Pure.

Covers requests to agents, their reports about weights, and the choice of the file that an engine loads. A failure or a
copy counts only for the replicas that the agent names. So a retry is a new attempt, and a replica that has no
permission for the weights does not get an existing copy of them.

Some weights do not need an agent: an engine that gets a Hub artifact by name fetches it itself, with its own login,
into its own pod. No engine supports a pattern of files (`?include=`).

An artifact that no agent has inspected is assigned to one agent. A connected agent that reports nothing about its task
is replaced within SILENT_S, one without a result within SLOW_S. So a problem of one node (an unreachable registry, an
inspection that hangs) delays a model no longer than that, and all agents take part.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from autoscaler.agent_contract import (
    OWN,
    FabricWant,
    ImageWant,
    Laid,
    LaidAdapter,
    NodeWant,
    NodeWants,
    WeightsReport,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.contract import ModelName
from autoscaler.documents.document_rules import ADAPTER_PATH
from autoscaler.queries.device_health import is_report_fresh
from autoscaler.spec.engines import ENGINES, EngineError, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import ClusterFacts, NodeAgentStatus, NodeId, Replica, World
from autoscaler.text import format_size
from autoscaler.weights import mount_choice
from autoscaler.weights.mount_choice import ArtifactFacts


def find_unfetched_artifact(model: Model) -> str | None:
    """Return the model's artifact, unless its engine fetches it or there is none (None)."""
    artifact = model.spec.artifact
    return None if artifact is None or is_fetched_by_engine(artifact, ENGINES[model.spec.engine]) else artifact


AGENT_S_MAX = 30.0
"""How long a replica waits for a node agent that does not report before its start fails. Replacing an agent takes less.
"""
WANTS_BYTES_MAX = 768 << 10
"""Maximum size of the weights requests to one node, encoded. Requests of the Models with the least bytes are sent
first, so that a Model with many long names delays only itself. The rest is sent later.
"""
BEGINS = frozenset((S.PENDING, S.STARTING))
NO_IMAGES: Mapping[NodeId, tuple[ImageWant, ...]] = {}
NO_FABRIC: Mapping[NodeId, tuple[FabricWant, ...]] = {}


class WeightsPending(NamedTuple):
    """The weights are not complete yet."""

    words: str
    """The progress."""


class WeightsFailed(NamedTuple):
    """The weights could not be provided."""

    reason: str


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


def should_read_header(model: Model) -> bool:
    """Return whether the artifact's header has data that the document lacks: the memory of a replica, or the parts
    of this memory (weights, cache).
    """
    gpu = model.spec.gpu
    made = gpu.elastic_percent is not None or gpu.growth_percent is not None or ENGINES[model.spec.engine].pages
    return gpu.count > 0 and (made or not gpu.memory_bytes)


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
    looks: Iterable[tuple[NodeId, WeightsRequest]] = (),
    fabric: Mapping[NodeId, tuple[FabricWant, ...]] = NO_FABRIC,
) -> dict[NodeId, NodeWants]:
    """Return the wants of each node that has any.

    `early`: from `list_promised_placements`; `images`: from `autoscaler.weights.image_prepull`; `looks`: from
    `autoscaler.weights.desired`; `fabric`: from `autoscaler.capacity.agent_device_requests`.
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
    for node, request in looks:
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
    looks: Collection[WeightsRequest],
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
        return request not in looks, is_prefetch, models.get(request, (0, ModelName(""))), request

    left, chosen = WANTS_BYTES_MAX, set[NodeWant]()
    for want in sorted(wants, key=order):
        if sizes[want] <= left:
            left -= sizes[want]
            chosen.add(want)
    return tuple(want for want in wants if want in chosen)


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


SILENT_S = 6.0
"""An agent reports its task within one or two seconds; `autoscaler.planner.reconcile` waits for two agents."""
SLOW_S = 60.0
"""Equal to the time for which an agent waits between two attempts of its own."""


LOOKS_MAX = 128
"""Maximum number of inspections assigned to an agent; the others are assigned when one ends."""


class _Turn(NamedTuple):
    node: NodeId
    since_s: float | None
    """None before any step."""
    tried: frozenset[NodeId] = frozenset()
    """Nodes that had the task before and found no result."""


class InspectionAssigner:
    """Assignments by one process, to the agents that are connected to it."""

    def __init__(self) -> None:
        self._turns: dict[WeightsRequest, _Turn] = {}
        self.next_s = inf
        """The time at which an assignment changes without an observation."""

    def looks(
        self, world: World, agents: Collection[NodeId], now_s: float | None
    ) -> Iterator[tuple[NodeId, WeightsRequest]]:
        """Yield the current assignments. `agents`: the connected agents; `now_s`: None before the first step.

        If an agent has LOOKS_MAX assignments, further artifacts wait: those that were never assigned are next, the
        first ones of each Model before the second ones, and then those whose assignment ended first.
        """
        before, self._turns, self.next_s = self._turns, {}, inf
        live = frozenset(agents if now_s is None else (one for one in agents if _lives(world, one, now_s)))
        counts: Counter[NodeId] = Counter()
        positions = list_uninspected_artifacts(world) if agents else {}

        def order(request: WeightsRequest) -> tuple[float, int, WeightsRequest]:
            turn = before.get(request)
            if turn is None:
                return 0.0, positions[request], request
            ended = _has_ended(world, turn, request, now_s)
            return (turn.since_s or 0.0) if ended else -1.0, 0, request

        for request in sorted(positions, key=order):
            turn = _turn(world, before.get(request), request, live or frozenset(agents), now_s)
            if counts[turn.node] >= LOOKS_MAX:
                if request in before:
                    self._turns[request] = before[request]
                continue
            counts[turn.node] += 1
            self._turns[request] = turn
            if turn.since_s is not None:
                self.next_s = min(self.next_s, _ends_s(world, turn, request))
            yield turn.node, request


def list_uninspected_artifacts(world: World) -> dict[WeightsRequest, int]:
    """Return the artifacts that an agent must inspect, because no agent has reported all required facts yet, with the
    lowest position of each one among the artifacts of a Model.
    """
    found: dict[WeightsRequest, int] = {}
    for model in world.models.values():
        header = should_read_header(model)
        for position, request in enumerate(build_weights_requests(world, model).values()):
            look = request._replace(look=True)
            if not _known(world, look, image=request.look, header=header):
                found[look] = min(position, found.get(look, position))
    return found


def _known(world: World, look: WeightsRequest, *, image: bool, header: bool) -> bool:
    """Return whether all required facts are known. `header`: the data in the artifact's header is required. `image`:
    the artifact must be an image. Until it is one, no pod starts with it, so only an inspection detects a new push.
    """
    said = world.learned.looked.get(look) or WeightsReport(artifact=look.artifact)
    return not (image and said.image is None) and (not header or bool(said.header or said.no_header))


def _turn(
    world: World, before: _Turn | None, request: WeightsRequest, live: frozenset[NodeId], now_s: float | None
) -> _Turn:
    tried, ended = frozenset[NodeId]() if before is None else before.tried, False
    if before is not None and _has_ended(world, before, request, now_s):
        tried, ended = tried | {before.node}, True
    left = live - tried
    if not left:  # all had the task: restart the rotation
        tried, left = frozenset(), live
    node = min(left, key=lambda one: (zlib.crc32(f"{one} {request}".encode()), one))
    same = not ended and before is not None and before.node == node and before.tried == tried
    since_s = before.since_s if before is not None and same and before.since_s is not None else now_s
    return _Turn(node, since_s, tried)


def _has_ended(world: World, turn: _Turn, request: WeightsRequest, now_s: float | None) -> bool:
    return turn.since_s is not None and (now_s or 0.0) >= _ends_s(world, turn, request)


def _ends_s(world: World, turn: _Turn, request: WeightsRequest) -> float:
    node = world.nodes.agents.get(turn.node)
    says = node is not None and any(read_weights_request(one) == request for one in node.report.weights)
    return (turn.since_s or 0.0) + (SLOW_S if says else SILENT_S)


def _lives(world: World, name: NodeId, now_s: float) -> bool:
    node = world.nodes.agents.get(name)
    return node is not None and is_report_fresh(node, now_s) and node.report.brings
