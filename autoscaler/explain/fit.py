"""Explains how much memory a Model needs and where it fits: the answer of `pilotlight explain fit`. Pure.

The caller reads the artifact and passes the result as `Needs`. `autoscaler.placement.model.predicates` determines what
fits, by the same rules as for a placement.
"""

from __future__ import annotations

from math import inf

from autoscaler.contract import ModelName
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.placement.model.bin_builder import build_bins, build_empty_bins, build_hosts
from autoscaler.placement.model.predicates import (
    count_fitting_devices,
    find_required_amount,
    group_occupants_by_domain,
    rejection_reason,
)
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.topology import link_shortage_reason
from autoscaler.placement.model.types import Bin, EvictionLevel, PlacementRequest
from autoscaler.queries import granted_memory, measured_memory
from autoscaler.spec.model import Model
from autoscaler.state import StateRecord
from autoscaler.state.world import SliceId, Used, World
from autoscaler.text import format_count, format_size

PLACES_LISTED_MAX = 8
"""Maximum number of slices in sentences; `Fit.places` has all."""


class MemoryPart(StateRecord, frozen=True):
    """One part of a replica's memory, such as its weights. `host`: it is always in host memory."""

    name: str
    bytes: int
    words: str
    host: bool = False


class Needs(StateRecord, frozen=True):
    """The memory requirement of a Model according to its artifact."""

    source: str = ""
    """The source of the numbers: `Its GGUF header (gemma3)`. Empty: they are unknown, and `problem` is the reason."""
    problem: str = ""
    parts: tuple[MemoryPart, ...] = ()
    slot_bytes: int = 0
    token_bytes: int = 0
    context_tokens: int = 0
    """Maximum context of one request."""
    share: float = 0.0
    """Fraction of each device that an engine with a paged cache reserves at its start. 0: the engine allocates only
    what it needs.
    """


class Place(StateRecord, frozen=True):
    """One slice, and whether a replica fits there."""

    slice: SliceId
    fits: bool
    """Whether the replica fits if the slice is empty."""
    words: str
    calls: int | None = None
    """For an engine with a paged cache: the number of concurrent requests with full context."""


class Fit(StateRecord, frozen=True):
    """How much memory one replica of a Model needs, and where it fits."""

    model: ModelName
    engine: str
    memory_bytes: int
    """Planned memory on each device. 0: the whole device."""
    basis: str
    """Source of that number: `document`, `artifact`, `measured` or `device`."""
    used_bytes: int
    """Maximum measured device memory of replicas with the current spec. 0: not measured."""
    needs: Needs
    places: tuple[Place, ...]
    sentences: tuple[str, ...]
    least_bytes: int = 0
    """Minimum memory of a replica (`gpu.elastic`). 0: it is not elastic."""
    most_bytes: int = 0
    """Maximum memory that a replica can use (`gpu.growth`). 0: no more than requested."""


def explain_fit(world: World, model: Model, needs: Needs, now_s: float) -> Fit:
    """Explain the memory requirement, and for each slice whether a replica fits there."""
    if model.name in list_quarantined_models(world):
        fault = world.learned.faults[model.name]
        why = f"Quarantined because of an internal error ({fault.reason}), so it is unknown where it fits."
        return Fit(
            model=model.name, engine=model.spec.engine, memory_bytes=model.memory_bytes, basis=_basis(model),
            used_bytes=0, needs=needs, places=(), sentences=(why,),
        )  # fmt: skip
    world = mask_quarantined(world)
    want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod)
    history = world.learned.histories.get(model.name)
    used = None if history is None else measured_memory.find_measured_memory(history, model)
    places = () if want.kind.devices == 0 else tuple(_places(world, model, want, needs, now_s))
    listed = [f"{place.slice}: {place.words}." for place in places[:PLACES_LISTED_MAX]]
    more = len(places) - len(listed)
    parts = [f"  {part.name} {format_size(part.bytes)}: {_part(part)}." for part in needs.parts]
    rest = [f"{format_count(more, 'more slice')} not listed."] if more else []
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
            *_elastic(model, want), *_growth(model, want), *_granted(world, model), *listed, *rest,
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
        head = f"{model.name} requests no device (gpu.count is 0)"
    elif model.spec.gpu.memory_bytes:
        head = f"{model.name} is assumed to need {format_size(model.memory_bytes)}, as set in its document (gpu.memory)"
    elif _basis(model) == "measured":
        estimated = f"the estimate from its artifact is {format_size(model.estimated_bytes)}"
        head = f"{model.name} is assumed to need {format_size(model.memory_bytes)}, as measured; {estimated}"
    elif model.memory_bytes:
        head = f"{model.name} is assumed to need {format_size(model.memory_bytes)}, estimated from its artifact"
    else:
        head = f"{model.name} is assumed to need all memory of each of its devices"
    return f"{head}; {needs.problem}." if needs.problem else f"{head}. {needs.source} gives this estimate:"


def _part(part: MemoryPart) -> str:
    return f"{part.words}, in host memory" if part.host else part.words


def _costs(needs: Needs) -> list[str]:
    """Describe the total, and the cost of another slot and of more context."""
    if not needs.parts:
        return []
    total, host = (
        format_size(sum(part.bytes for part in needs.parts)),
        sum(part.bytes for part in needs.parts if part.host),
    )
    apart = f", of which {format_size(host)} are always in host memory" if host else ""
    token = f"each additional token of context per slot takes {format_size(needs.token_bytes)}"
    slot = f"each additional slot takes {format_size(needs.slot_bytes)}" if needs.slot_bytes else ""
    costs = ", ".join(filter(None, (slot, token if needs.token_bytes else "")))
    return [f"Total: {total}{apart}.", *([f"{costs[0].upper()}{costs[1:]}."] if costs else [])]


def _measured(model: Model, used: Used | None) -> list[str]:
    """Describe the measured memory."""
    if used is None:
        return []
    if granted_memory.is_memory_minimum(model):
        beyond = format_size(used.bytes - model.estimated_bytes)
        return [f"Measured: the engine uses {beyond} in addition to its memory limit."]
    until = "after it had served for some time" if used.served else "before it had served for some time"
    return [f"Measured: a replica uses at most {format_size(used.bytes)} of a device, {until}."]


def _manner(model: Model, needs: Needs) -> list[str]:
    """Describe how the engine uses the memory."""
    if needs.share and granted_memory.is_memory_minimum(model):
        alone = f"alone on a slice, it reserves {needs.share:.0%}"
        return [f"On a shared device, {model.spec.engine} is limited to that amount; {alone}."]
    if needs.share:
        taken = f"{model.spec.engine} always reserves {needs.share:.0%} of its devices at its start"
        return [f"{taken}; the rest after weights and activations is its paged cache, shared by its requests."]
    if needs.parts:
        return [f"{model.spec.engine} allocates its memory at its start, for all slots."]
    return []


def _elastic(model: Model, want: PlacementRequest) -> list[str]:
    """Describe the minimum memory."""
    rigid = granted_memory.explain_rigid_memory(model)
    if rigid:
        return [f"It is always granted the full amount, despite gpu.elastic: {rigid}."]
    if not want.kind.spare_bytes:
        return []
    return [
        (
            f"It can run with {format_size(want.least.kind.memory_bytes)} for a tighter fit (gpu.elastic): "
            f"{_less(model)}."
        )
    ]


def _growth(model: Model, want: PlacementRequest) -> list[str]:
    """Describe the maximum memory."""
    why = granted_memory.explain_no_growth(model)
    if why:
        return [f"It is never granted more, despite gpu.growth: {why}."]
    if not want.growth.most_bytes:
        return []
    most = format_size(want.kind.memory_bytes + want.growth.most_bytes)
    return [f"It is granted up to {most} where no other Model can use that memory (gpu.growth): {_larger(model)}."]


def _granted(world: World, model: Model) -> list[str]:
    """Describe replicas that were granted less or more than requested."""
    replicas = (world.replicas[id] for id in world.by_model.get(model.name, ()))
    grants = ((one.id, granted_memory.describe_granted_memory(model, one)) for one in replicas)
    return [f"{id} was {words}." for id, words in grants if words]


def _larger(model: Model) -> str:
    """Describe what additional memory is used for."""
    if model.cache is None:
        return "its engine accepts a memory limit"
    if model.spec.context_tokens is not None:
        most = granted_memory.compute_slots(model, model.memory_bytes + granted_memory.compute_growth(model).most_bytes)
        return f"its engine is started with more slots, at most {most}"
    return "its slots share a larger context"


def _less(model: Model) -> str:
    """Describe what is reduced if it has less memory."""
    if model.cache is None:
        return "its engine accepts a memory limit"
    if model.spec.context_tokens is not None:
        least = granted_memory.compute_slots(model, model.memory_bytes - granted_memory.spare_bytes(model))
        return f"its engine is started with fewer slots, at least {least}"
    return "its slots share a smaller context"


def _places(world: World, model: Model, want: PlacementRequest, needs: Needs, now_s: float) -> list[Place]:
    """Return every slice: whether a replica fits there, and what prevents a placement now."""
    want, found = want.least, build_bins(world, now_s)
    occupants, hosts, teams = (
        group_occupants_by_domain(found), build_hosts(world, now_s), count_fitting_devices(want, found),
    )  # fmt: skip
    pairs = zip(build_empty_bins(world), found, strict=True)
    return [
        _place(
            model,
            want,
            needs,
            empty,
            rejection_reason(want, now, now_s, occupants, hosts.get(now.slice.node), teams=teams),
            apart=bool(link_shortage_reason(now.slice, want.kind.link, teams, want.kind.devices)),
        )
        for empty, now in pairs
    ]


def _place(model: Model, want: PlacementRequest, needs: Needs, empty: Bin, words: str, *, apart: bool) -> Place:
    """Return one place. `words`: what prevents a placement now; `apart`: the slice lacks the required link."""
    slice_ = empty.slice
    fits = not apart and find_required_amount(want, empty) is not None and want.kind.rank(slice_.product) is not None
    calls = None
    if fits and needs.share and needs.parts:
        is_limited = granted_memory.is_memory_minimum(model) and slice_.shared and not slice_.device_bytes
        given = want.kind.memory_bytes if is_limited else int(slice_.memory_bytes * needs.share)
        spent = sum(part.bytes for part in needs.parts if part.name not in {"cache", "reserve"})
        each = want.kind.devices if granted_memory.is_memory_minimum(model) else 1  # its parts are per device
        given, rest = given * want.kind.devices, given * want.kind.devices - spent * each
        calls = max(0, rest) // max(1, needs.token_bytes * needs.context_tokens)
        fits = calls > 0
        room = (
            f"fits {format_count(calls, 'request')} of {needs.context_tokens} tokens at once, with {model.slots} slots"
        )
        small = f"{model.spec.engine} would reserve {format_size(given)}, too little for one request with full context"
        words = "; ".join(filter(None, (room if fits else small, words)))
    return Place(slice=slice_.id, fits=fits, words=words or "nothing prevents a placement", calls=calls)
