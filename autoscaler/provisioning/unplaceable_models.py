"""Determines whether a model fits any device, even without a request for it. Pure.

The result depends on the model's document and on the slices that exist, that repartitioning could create, or that
capacity providers offer; `is_fit_unchanged` compares these inputs. It does not depend on free capacity. The reason is
the packer's (`UnschedulableReasons.never`), the same that clients get. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from math import inf

from msgspec.structs import replace

from autoscaler.capacity.remaining_offers import find_offer_backoff, has_current_offers
from autoscaler.contract import ModelName
from autoscaler.exception_handling import Failure, attempt
from autoscaler.placement.capacity_simulation import list_obtainable_slices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.mig_candidates import list_mig_candidates
from autoscaler.placement.model.bin_builder import build_empty_bins
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.placement.partitionable_gpus import list_rejoinable_gpus
from autoscaler.spec.model import Model
from autoscaler.state.world import Slice, SliceId, World


class Fitting:
    """Checks whether a model could ever be placed: on any slice if it were empty, or on one that can be created.

    Before the driver has listed the slices, no model counts as unplaceable.
    """

    def __init__(self, world: World) -> None:
        self._listed = world.leadership.synced
        added = {one.id: one for one in list_obtainable_slices(world)}
        there = build_empty_bins(_with_slices(world, {**world.nodes.slices, **added}) if added else world)
        self._yard = SliceIndex((*there, *list_mig_candidates(world), *list_rejoinable_gpus(world)), world.nodes.hosts)
        self._defaults = world.settings.pod

    def never(self, model: Model) -> str:
        """Return why no device could hold a replica of `model`, even if it were free; an empty text if one could."""
        want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", self._defaults)
        if not self._listed or want.kind.devices == 0:
            return ""
        return self._yard.why.never(want) or ""


def _with_slices(world: World, slices: dict[SliceId, Slice]) -> World:
    return replace(world, nodes=replace(world.nodes, slices=slices))


def build_future_fit_check(world: World, now_s: float) -> Callable[[ModelName], bool]:
    """Return a check whether a model that fits no existing device may fit later, so that its requests are not rejected.

    Counts offers, orders and capacity being released, with all slices of their nodes, even those in use. Does not count
    offers in back-off or of a silent provider, so that requests are rejected at once, but counts a silent provider's
    orders.
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
    there = {id: one for id, one in world.nodes.slices.items() if one.node in nodes}
    fitting = Fitting(_with_slices(world, there)) if added else None

    def one(name: ModelName) -> bool:
        model = world.models.get(name)
        return fitting is not None and model is not None and not fitting.never(model)

    return one


def is_fit_unchanged(before: World, after: World) -> bool:
    """Whether no input of this check changed. A change of a node's CPU alone is detected with the next other change."""
    return (
        before.models is after.models
        and before.nodes.slices is after.nodes.slices
        and before.settings is after.settings
        and before.nodes.cuttable is after.nodes.cuttable
        and before.nodes.cutting is after.nodes.cutting
        and (before.capacity is after.capacity or _to_come(before) == _to_come(after))
    )


def _to_come(world: World) -> Set[SliceId]:
    if not (world.capacity.offers or world.capacity.leases):
        return frozenset()
    return {one.id for one in list_obtainable_slices(world)}


def list_unplaceable_models(
    world: World, fault: Callable[[ModelName, Exception], None] | None = None
) -> dict[ModelName, str]:
    """Return the Models that fit no device, with the reason, ordered by name.
    `fault` is called with each model whose check raises, so that the others are still checked; None: raise.
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
