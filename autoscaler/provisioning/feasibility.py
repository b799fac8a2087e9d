"""Whether a Model fits on any Device at all: known without a Call, from its document and the Slices that exist, that
nodes could be cut into, or that providers of capacity offer.

Owns the question, and what it depends on (`is_fit_unchanged`); the answer is the packer's own (`WhyNot.never`), so that
people read what a Call gets. Keeps nothing: a Device that comes, or a document that changes, gives another answer at
once. It must not ask what is free now.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from math import inf

from msgspec.structs import replace

from autoscaler.capacity.availability import find_offer_backoff, has_current_offers
from autoscaler.contract import ModelName
from autoscaler.faults import Failure, attempt
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.mig_candidates import list_mig_candidates
from autoscaler.placement.model.bins import build_empty_bins, build_placement_request
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest
from autoscaler.placement.partitioned_gpus import list_rejoinable_gpus
from autoscaler.placement.simulate import list_obtainable_slices
from autoscaler.spec.model import Model
from autoscaler.state.world import SliceId, World


class Fitting:
    """The Slices of one World, as if nobody were on them, and what could be cut. Nothing is said before the driver has
    listed them.
    """

    def __init__(self, world: World) -> None:
        self._listed = world.synced
        added = {one.id: one for one in list_obtainable_slices(world)}
        there = build_empty_bins(replace(world, slices={**world.slices, **added}) if added else world)
        self._yard = SliceIndex((*there, *list_mig_candidates(world), *list_rejoinable_gpus(world)), world.hosts)
        self._defaults = world.settings.pod

    def never(self, model: Model) -> str:
        """Why no Device could hold a Replica of `model`, however empty; empty text: one could."""
        want = self._want(model)
        if not self._listed or want.devices == 0:
            return ""
        return self._yard.why.never(want) or ""

    def _want(self, model: Model) -> PlacementRequest:
        return build_placement_request(model, 0, inf, EvictionLevel.NONE, "", self._defaults)


def build_future_fit_check(world: World, now_s: float) -> Callable[[ModelName], bool]:
    """Whether a Model that fits on no Device that is there fits on what could come, comes, or was here and goes, beside
    what its nodes have: then it is not refused, though all of that is another's now. What is left alone since it did
    not come is no hope, nor is what a provider could bring that is away: its Calls are told at once. What was ordered
    of that one may still come.
    """
    capacity = world.capacity
    answering = {provider for provider in capacity.providers if has_current_offers(capacity, provider, now_s)}
    open_ = {
        provider: tuple(one for one in offers if find_offer_backoff(capacity, one.id, now_s) is None)
        for provider, offers in capacity.offers.items()
        if provider in answering
    }
    leases = {
        id: one
        for id, one in capacity.leases.items()
        if not one.leaving or (one.here_s is not None and id.provider in answering)
    }
    added = list_obtainable_slices(replace(world, capacity=replace(capacity, offers=open_, leases=leases)))
    nodes = {one.node for one in added}
    there = {id: one for id, one in world.slices.items() if one.node in nodes}
    fitting = Fitting(replace(world, slices=there)) if added else None

    def one(name: ModelName) -> bool:
        model = world.models.get(name)
        return fitting is not None and model is not None and not fitting.never(model)

    return one


def is_fit_unchanged(before: World, after: World) -> bool:
    """Whether nothing has changed by which other Models may fit on no Device. That a node has less or more CPU beside
    its Devices comes with its Slices, or at the next look.
    """
    return (
        before.models is after.models
        and before.slices is after.slices
        and before.settings is after.settings
        and before.cuttable is after.cuttable
        and before.cutting is after.cutting
        and (before.capacity is after.capacity or _to_come(before) == _to_come(after))
    )


def _to_come(world: World) -> Set[SliceId]:
    if not (world.capacity.offers or world.capacity.leases):
        return frozenset()
    return {one.id for one in list_obtainable_slices(world)}


def list_unplaceable_models(
    world: World, fault: Callable[[ModelName, Exception], None] | None = None
) -> dict[ModelName, str]:
    """The Models of the documents that fit on no Device -> why, in order of names.

    `fault` gets each Model that raises an exception, which then does not affect the others; None: it is raised.
    """
    fitting, found = Fitting(world), dict[ModelName, str]()
    for name in sorted(world.models):
        reason = attempt(partial(fitting.never, world.models[name]))
        if not isinstance(reason, Failure):
            found |= {name: reason} if reason else {}
        elif fault is None:
            raise reason.error
        else:
            fault(name, reason.error)
    return found
