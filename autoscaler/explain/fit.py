"""Explains how much memory a Model needs and where it fits: the answer of `pilotlight explain fit`. Pure.

Owns the sentences and the types of the answer. The caller reads the artifact (`Needs`).
`autoscaler.placement.model.predicates` decides what fits, as for a placement.
"""

from __future__ import annotations

from math import inf

from autoscaler.contract import ModelName
from autoscaler.placement.model.bins import build_bins, build_empty_bins, build_hosts, build_placement_request
from autoscaler.placement.model.predicates import (
    count_fitting_devices,
    find_required_amount,
    group_occupants_by_domain,
    rejection_reason,
)
from autoscaler.placement.model.topology import link_shortage_reason
from autoscaler.placement.model.types import Bin, EvictionLevel, PlacementRequest
from autoscaler.queries import measured_memory
from autoscaler.spec.model import Model
from autoscaler.state.world import Fact, SliceId, Used, World
from autoscaler.text import format_count, format_size

PLACES_TOLD = 8
"""The maximum number of slices in sentences. The data contain all."""


class Part(Fact, frozen=True):
    """One part of a replica's memory. `host`: it is always in host memory."""

    name: str
    bytes: int
    words: str
    host: bool = False


class Needs(Fact, frozen=True):
    """The memory requirements of a Model according to its artifact."""

    source: str = ""
    """What the numbers come from, as text. Empty: they are unknown, and `problem` is the reason."""
    problem: str = ""
    parts: tuple[Part, ...] = ()
    slot_bytes: int = 0
    token_bytes: int = 0
    context_tokens: int = 0
    """The maximum context of one request."""
    share: float = 0.0
    """The fraction of each device that the engine reserves at its start, for an engine with a paged cache. 0: the
    engine uses only what it needs.
    """


class Place(Fact, frozen=True):
    """One slice as a place for a replica."""

    slice: SliceId
    fits: bool
    """Whether the replica would fit if the slice were empty."""
    words: str
    calls: int | None = None
    """The number of concurrent requests with full context, for an engine with a paged cache."""


class Fit(Fact, frozen=True):
    """How much memory one replica of a Model needs, and where it fits."""

    model: ModelName
    engine: str
    memory_bytes: int
    """The planned memory on each device. 0: the whole device."""
    basis: str
    """The source of that number: `document`, `artifact`, `measured` or `device`."""
    used_bytes: int
    """The maximum device memory that was measured for a replica of the current spec. 0: not measured."""
    needs: Needs
    places: tuple[Place, ...]
    sentences: tuple[str, ...]
    least_bytes: int = 0
    """The minimum memory of a replica (`gpu.elastic`). 0: it is not elastic."""
    most_bytes: int = 0
    """The maximum memory that a replica can use (`gpu.growth`). 0: no more than requested."""


def explain_fit(world: World, model: Model, needs: Needs, now_s: float) -> Fit:
    """Explain the memory requirements and the places with the current knowledge."""
    want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod)
    history = world.learned.histories.get(model.name)
    used = None if history is None else measured_memory.find_measured_memory(history, model)
    places = () if want.kind.devices == 0 else tuple(_places(world, model, want, needs, now_s))
    told = [f"{place.slice}: {place.words}." for place in places[:PLACES_TOLD]]
    more = len(places) - len(told)
    parts = [f"  {part.name} {format_size(part.bytes)}: {_part(part)}." for part in needs.parts]
    rest = [f"And {format_count(more, 'Slice')} more."] if more else []
    return Fit(
        model=model.name,
        engine=model.spec.engine,
        memory_bytes=model.memory_bytes,
        basis=_basis(model),
        used_bytes=0 if used is None else used.bytes,
        needs=needs,
        places=places,
        sentences=(
            _counted(model, needs), *parts, *_costs(needs), *_measured(model, used), *_manner(model, needs),
            *_elastic(model, want), *_growth(model, want), *_granted(world, model), *told, *rest,
        ),
        least_bytes=want.least.kind.memory_bytes if want.kind.spare_bytes else 0,
        most_bytes=want.kind.memory_bytes + want.growth.most_bytes if want.growth.most_bytes else 0,
    )  # fmt: skip


def _basis(model: Model) -> str:
    if model.spec.gpu.memory_bytes:
        return "document"
    if model.estimated_bytes and model.memory_bytes != model.estimated_bytes:
        return "measured"
    return "artifact" if model.memory_bytes else "device"


def _counted(model: Model, needs: Needs) -> str:
    """Describe the planned memory and its source."""
    if model.spec.gpu.count == 0:
        head = f"{model.name} wants no Device (gpu.count is 0)"
    elif model.spec.gpu.memory_bytes:
        head = f"{model.name} is counted with {format_size(model.memory_bytes)}: its document says so (gpu.memory)"
    elif _basis(model) == "measured":
        estimated = f"{format_size(model.estimated_bytes)} by its artifact"
        head = f"{model.name} is counted with {format_size(model.memory_bytes)}, as measured; {estimated}"
    elif model.memory_bytes:
        head = f"{model.name} is counted with {format_size(model.memory_bytes)}, by its artifact"
    else:
        head = f"{model.name} is counted with the whole of each of its Devices"
    return f"{head}; {needs.problem}." if needs.problem else f"{head}. {needs.source} says:"


def _part(part: Part) -> str:
    return f"{part.words}, in the host's memory" if part.host else part.words


def _costs(needs: Needs) -> list[str]:
    """Describe the cost of more slots and more context."""
    if not needs.parts:
        return []
    total, host = (
        format_size(sum(part.bytes for part in needs.parts)),
        sum(part.bytes for part in needs.parts if part.host),
    )
    apart = f", {format_size(host)} of it in the host's memory wherever the rest is" if host else ""
    token = f"one more token of context of a slot {format_size(needs.token_bytes)}" if needs.token_bytes else ""
    slot = f"One more slot takes {format_size(needs.slot_bytes)}" if needs.slot_bytes else ""
    costs = ", ".join(filter(None, (slot, token)))
    return [f"Together {total}{apart}.", *([f"{costs[0].upper()}{costs[1:]}."] if costs else [])]


def _measured(model: Model, used: Used | None) -> list[str]:
    """Describe the measured memory."""
    if used is None:
        return []
    if measured_memory.is_memory_minimum(model):
        return [
            f"It was seen to use {format_size(used.bytes - model.estimated_bytes)} beside what it was told to take."
        ]
    until = "after it had served for a while" if used.served else "so far; it has not served for long"
    return [f"The most that a Replica was seen to use of a Device is {format_size(used.bytes)}, {until}."]


def _manner(model: Model, needs: Needs) -> list[str]:
    """Describe how the engine uses the memory."""
    if needs.share and measured_memory.is_memory_minimum(model):
        alone = f"of a Slice of its own it takes {needs.share:.0%}"
        return [f"{model.spec.engine} is told to take that where others share its Device; {alone}."]
    if needs.share:
        taken = f"{model.spec.engine} takes {needs.share:.0%} of its Devices at its start, whatever it needs"
        return [f"{taken}: after weights and activation the rest is its cache, in pages that its Calls share."]
    if needs.parts:
        return [f"{model.spec.engine} takes its memory at its start, for all slots."]
    return []


def _elastic(model: Model, want: PlacementRequest) -> list[str]:
    """Describe the minimum memory."""
    rigid = measured_memory.explain_rigid_memory(model)
    if rigid:
        return [f"It is granted all of that and never less (gpu.elastic): {rigid}."]
    if not want.kind.spare_bytes:
        return []
    return [
        (
            f"It makes do with {format_size(want.least.kind.memory_bytes)} where that fills a hole (gpu.elastic): "
            f"{_less(model)}."
        )
    ]


def _growth(model: Model, want: PlacementRequest) -> list[str]:
    """Describe the maximum memory."""
    why = measured_memory.explain_no_growth(model)
    if why:
        return [f"It is never granted more than that (gpu.growth): {why}."]
    if not want.growth.most_bytes:
        return []
    most = format_size(want.kind.memory_bytes + want.growth.most_bytes)
    return [f"It is granted up to {most} where nobody else could use that (gpu.growth): {_larger(model)}."]


def _granted(world: World, model: Model) -> list[str]:
    """Describe replicas that got less or more than requested."""
    replicas = (world.replicas[id] for id in world.by_model.get(model.name, ()))
    others = ((one.id, measured_memory.describe_granted_memory(model, one)) for one in replicas)
    return [f"{id} was {words}." for id, words in others if words]


def _larger(model: Model) -> str:
    """Describe what additional memory is used for."""
    if model.cache is None:
        return "its engine is told how much to take"
    if model.spec.context_tokens is not None:
        most = measured_memory.compute_slots(
            model, model.memory_bytes + measured_memory.compute_growth(model).most_bytes
        )
        return f"its engine is given more slots, {most} at most"
    return "its slots share more context"


def _less(model: Model) -> str:
    """Describe what less memory reduces."""
    if model.cache is None:
        return "its engine is told how much to take"
    if model.spec.context_tokens is not None:
        least = measured_memory.compute_slots(model, model.memory_bytes - measured_memory.spare_bytes(model))
        return f"its engine is given fewer slots, {least} at least"
    return "its slots share less context"


def _places(world: World, model: Model, want: PlacementRequest, needs: Needs, now_s: float) -> list[Place]:
    """Return every slice: whether the replica can fit there, and what prevents it now."""
    want, found = want.least, build_bins(world, now_s)
    there, left, teams = group_occupants_by_domain(found), build_hosts(world, now_s), count_fitting_devices(want, found)
    pairs = zip(build_empty_bins(world), found, strict=True)
    return [
        _place(
            model,
            want,
            needs,
            empty,
            rejection_reason(want, now, now_s, there, left.get(now.slice.node), teams=teams),
            apart=bool(link_shortage_reason(now.slice, want.kind.link, teams, want.kind.devices)),
        )
        for empty, now in pairs
    ]


def _place(model: Model, want: PlacementRequest, needs: Needs, empty: Bin, words: str, *, apart: bool) -> Place:
    """Return one place. `words`: what prevents it now; `apart`: it lacks the required link."""
    slice_ = empty.slice
    fits = not apart and find_required_amount(want, empty) is not None and want.kind.rank(slice_.product) is not None
    calls = None
    if fits and needs.share and needs.parts:
        is_limited = measured_memory.is_memory_minimum(model) and slice_.shared and not slice_.device_bytes
        given = want.kind.memory_bytes if is_limited else int(slice_.memory_bytes * needs.share)
        spent = sum(part.bytes for part in needs.parts if part.name not in {"cache", "reserve"})
        each = want.kind.devices if measured_memory.is_memory_minimum(model) else 1  # its parts are per device
        given, rest = given * want.kind.devices, given * want.kind.devices - spent * each
        calls = max(0, rest) // max(1, needs.token_bytes * needs.context_tokens)
        fits = calls > 0
        room = (
            f"room for {format_count(calls, 'Call')} of {needs.context_tokens} tokens at once, of {model.slots} slots"
        )
        small = (
            f"{format_size(given)} is given to {model.spec.engine}, which is too little for one Call of the "
            f"whole context"
        )
        words = "; ".join(filter(None, (room if fits else small, words)))
    return Place(slice=slice_.id, fits=fits, words=words or "nothing stands in the way", calls=calls)
