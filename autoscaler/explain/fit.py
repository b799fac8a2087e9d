"""How much memory a Model needs, part by part, and where that would fit: what `pilotlight explain fit` shows. Pure.

Owns the sentences and the types of the answer. What an artifact says is given (`Needs`), since artifacts are not read
in this room; Slices rule by `autoscaler.placement.model.predicates`, as for a placement.
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
from autoscaler.queries import memory
from autoscaler.spec.model import Model
from autoscaler.state.world import Fact, SliceId, Used, World
from autoscaler.text import format_count, format_size

PLACES_TOLD = 8
"""Slices that are told in sentences; all are in the data."""


class Part(Fact, frozen=True):
    """One part of what a Replica takes. `host`: it is in the host's memory, wherever the rest is."""

    name: str
    bytes: int
    words: str
    host: bool = False


class Needs(Fact, frozen=True):
    """What the artifact of a Model says of its memory."""

    source: str = ""
    """What says it, in words; empty: nothing does, and `problem` says why."""
    problem: str = ""
    parts: tuple[Part, ...] = ()
    slot_bytes: int = 0
    token_bytes: int = 0
    context_tokens: int = 0
    """Of one Call, at most."""
    share: float = 0.0
    """Of each of its Devices that the engine takes at its start, with its cache in pages; 0: what it needs."""


class Place(Fact, frozen=True):
    """One Slice as a place for a Replica."""

    slice: SliceId
    fits: bool
    """Were it empty."""
    words: str
    calls: int | None = None
    """Of an engine that pages its cache: Calls of the whole context for which there is room at once."""


class Fit(Fact, frozen=True):
    """How much memory one Replica of a Model needs, and where it would fit."""

    model: ModelName
    engine: str
    memory_bytes: int
    """What the plan counts on each of its Devices; 0: the whole Device."""
    basis: str
    """What that number comes from: `document`, `artifact`, `measured` or `device`."""
    used_bytes: int
    """The most that a Replica of it as it is now was seen to use of a Device; 0: nobody has looked."""
    needs: Needs
    places: tuple[Place, ...]
    sentences: tuple[str, ...]
    least_bytes: int = 0
    """With which a Replica makes do (`gpu.elastic`); 0: with nothing less."""
    most_bytes: int = 0
    """Of which a Replica makes use (`gpu.growth`); 0: of nothing more."""


def explain_fit(world: World, model: Model, needs: Needs, now_s: float) -> Fit:
    """The answer, from what is known now."""
    want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod)
    history = world.learned.histories.get(model.name)
    used = None if history is None else memory.find_measured_memory(history, model)
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
    """What the plan counts, and why."""
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
    """What more would cost."""
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
    """What was seen of its use."""
    if used is None:
        return []
    if memory.is_memory_minimum(model):
        return [
            f"It was seen to use {format_size(used.bytes - model.estimated_bytes)} beside what it was told to take."
        ]
    until = "after it had served for a while" if used.served else "so far; it has not served for long"
    return [f"The most that a Replica was seen to use of a Device is {format_size(used.bytes)}, {until}."]


def _manner(model: Model, needs: Needs) -> list[str]:
    """What the engine makes of it."""
    if needs.share and memory.is_memory_minimum(model):
        alone = f"of a Slice of its own it takes {needs.share:.0%}"
        return [f"{model.spec.engine} is told to take that where others share its Device; {alone}."]
    if needs.share:
        taken = f"{model.spec.engine} takes {needs.share:.0%} of its Devices at its start, whatever it needs"
        return [f"{taken}: after weights and activation the rest is its cache, in pages that its Calls share."]
    if needs.parts:
        return [f"{model.spec.engine} takes its memory at its start, for all slots."]
    return []


def _elastic(model: Model, want: PlacementRequest) -> list[str]:
    """With how much less it makes do."""
    rigid = memory.explain_rigid_memory(model)
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
    """Of how much more it makes use."""
    why = memory.explain_no_growth(model)
    if why:
        return [f"It is never granted more than that (gpu.growth): {why}."]
    if not want.growth.most_bytes:
        return []
    most = format_size(want.kind.memory_bytes + want.growth.most_bytes)
    return [f"It is granted up to {most} where nobody else could use that (gpu.growth): {_larger(model)}."]


def _granted(world: World, model: Model) -> list[str]:
    """Who has less or more than it asks for."""
    replicas = (world.replicas[id] for id in world.by_model.get(model.name, ()))
    others = ((one.id, memory.describe_granted_memory(model, one)) for one in replicas)
    return [f"{id} was {words}." for id, words in others if words]


def _larger(model: Model) -> str:
    """What becomes larger then."""
    if model.cache is None:
        return "its engine is told how much to take"
    if model.spec.context_tokens is not None:
        most = memory.compute_slots(model, model.memory_bytes + memory.compute_growth(model).most_bytes)
        return f"its engine is given more slots, {most} at most"
    return "its slots share more context"


def _less(model: Model) -> str:
    """What becomes smaller then."""
    if model.cache is None:
        return "its engine is told how much to take"
    if model.spec.context_tokens is not None:
        least = memory.compute_slots(model, model.memory_bytes - memory.spare_bytes(model))
        return f"its engine is given fewer slots, {least} at least"
    return "its slots share less context"


def _places(world: World, model: Model, want: PlacementRequest, needs: Needs, now_s: float) -> list[Place]:
    """Every Slice: whether it could be there at all, and what stands in its way now."""
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
    """`words`: what stands in its way now; `apart`: it lacks the link that it needs."""
    slice_ = empty.slice
    fits = not apart and find_required_amount(want, empty) is not None and want.kind.rank(slice_.product) is not None
    calls = None
    if fits and needs.share and needs.parts:
        told = memory.is_memory_minimum(model) and slice_.shared and not slice_.device_bytes
        given = want.kind.memory_bytes if told else int(slice_.memory_bytes * needs.share)
        spent = sum(part.bytes for part in needs.parts if part.name not in {"cache", "reserve"})
        each = want.kind.devices if memory.is_memory_minimum(model) else 1  # its parts are those of one Device
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
