"""Plans MIG repartitioning: selects an idle node and its layout for requests that fit no existing MIG slice. Pure.

Only nodes that the Settings allow are repartitioned, and none that any pod uses or that is not yet proven clean.
Labels cannot select a layout per GPU, and mig-manager stops the device plug-in and GPU monitoring of the whole node. So
a node is repartitioned as a whole and only if it is idle; nothing is evicted for that. One order at a time is in flight
per node. No order is made for a request that an order in flight will serve or that lacks only CPU or memory of the
node, nor for an unchanged layout. Requested profiles are placed first, then existing ones as far as they fit, then
recently requested ones. `autoscaler.slicing.mig_placement` places the profiles; `autoscaler.queries.mig_status` tracks
the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.placement.learning.expected_demand import build_demand_histogram
from autoscaler.placement.mig_candidates import RepartitionCandidate, Sites
from autoscaler.placement.model.bin_builder import list_start_locks
from autoscaler.placement.model.predicates import host_shortage_reason, node_exclusion_reason
from autoscaler.placement.model.types import PlacementRequest, Unplaced
from autoscaler.queries.mig_status import RepartitionStage, config_of, describe_repartition_failure, list_profiles
from autoscaler.queries.operator_orders import cordons_on
from autoscaler.slicing.mig_geometry import Geometry
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.state.actions import CutNode
from autoscaler.state.mig import CutOrder
from autoscaler.state.resources import HostResources
from autoscaler.state.world import DeviceId, SliceId, World
from autoscaler.text import format_count

WAIT_S = 15.0
"""Minimum time that a request for waiting clients is unplaced before an order; shortages during starts are short."""
EVERY_S = 60.0
"""Minimum interval between any two orders."""
NODE_EVERY_S = 600.0
"""Minimum interval between two orders for one node, the first of which succeeded."""
WANTS_MAX, NODES_MAX = 64, 64
"""Maximum numbers of requests and of nodes that are considered. First the best node of each request is selected, then
its second best, and so on."""


class RepartitionPlan(NamedTuple):
    """The order, if any, and the unplaced requests with updated reasons."""

    order: CutNode | None
    unmet: tuple[Unplaced, ...]
    next_s: float = inf
    """When the plan changes without a new observation."""


def plan_repartition(
    unmet: tuple[Unplaced, ...], world: World, now_s: float, taken: Collection[SliceId] = ()
) -> RepartitionPlan:
    """Plan at most one order. `taken`: slices that this plan assigns."""
    if not world.nodes.cuttable or not unmet:
        return RepartitionPlan(None, unmet)
    return _Look(world, now_s, taken).cut(unmet)


class _Look:
    """Plans the MIG repartitioning for one snapshot of the `World`."""

    def __init__(self, world: World, now_s: float, taken: Collection[SliceId]) -> None:
        self.world, self.now_s = world, now_s
        self.next_s = inf
        self.sites = Sites(world, now_s, taken)
        self.nodes: Sequence[RepartitionCandidate] = ()
        self._same = set[str]()

    def cut(self, unmet: tuple[Unplaced, ...]) -> RepartitionPlan:
        """Compute the plan; see `plan_repartition`."""
        updated = list(unmet)
        alone = [at for at, missing in enumerate(unmet) if not missing.promised and missing.want.kind.devices == 1]
        looked = sorted(alone, key=lambda at: self.sites.some_day(unmet[at].want) is None)[:WANTS_MAX]
        self.nodes = self.sites.nearest([unmet[at].want for at in looked], NODES_MAX)
        coming = {
            node.seen.name: (Counter(list_profiles(self._ordered(node))) - node.there, node.host)
            for node in self.nodes
            if node.standing.stage is RepartitionStage.IN_PROGRESS
        }
        left = list[int]()
        for at in looked:
            node = self._is_coming(unmet[at].want, coming)
            if node is None:
                left.append(at)
            else:
                updated[at] = _with_reason(
                    unmet[at], f"node {node.seen.name} is being repartitioned and will have room for it"
                )
        order = self._order([unmet[at].want for at in left if self._is_due(unmet[at].want)])
        for at in left:
            updated[at] = self._explain_candidate(unmet[at], order)
        for at in alone:
            updated[at] = self._mark_possible(updated[at]) if updated[at].never else updated[at]
        for node in self.nodes:
            self._later(node.standing.until_s)
        return RepartitionPlan(order, tuple(updated), self.next_s)

    def _ordered(self, node: RepartitionCandidate) -> tuple[tuple[str, ...], ...]:
        """The layout of the order in flight."""
        intent = self.world.nodes.cutting.get(node.seen.name)
        order = node.seen.order if intent is None or intent.refused else intent.order
        return () if order is None else order.cuts

    def _later(self, at_s: float | None) -> None:
        if at_s is not None and self.now_s < at_s < self.next_s:
            self.next_s = at_s

    def _is_due(self, want: PlacementRequest) -> bool:
        """Whether the request has waited for WAIT_S or, if no client waits for it, whether nothing is being started."""
        if want.urgency.unserved_since_s == inf:
            return not list_start_locks(self.world, self.now_s)
        self._later(want.urgency.unserved_since_s + WAIT_S)
        return self.now_s >= want.urgency.unserved_since_s + WAIT_S

    def _is_coming(
        self, want: PlacementRequest, coming: dict[str, tuple[Counter[str], HostResources | None]]
    ) -> RepartitionCandidate | None:
        """Return the node being repartitioned that will have a slice for the request, and reserve that slice."""
        for node in self.nodes:
            left, host = coming.get(node.seen.name, (Counter[str](), None))
            for profile in self.sites.fitting(want, node, host) if left else ():
                if left[profile] > 0:
                    left[profile] -= 1
                    coming[node.seen.name] = left, None if host is None else host.without(want.kind.host_request)
                    return node
        return None

    def _order(self, wants: Sequence[PlacementRequest]) -> CutNode | None:
        """Order for the node that serves the most requests; nodes with a failed order are considered last."""
        free_s = self._last_s() + EVERY_S
        if not wants or self.now_s < free_s:
            self._later(free_s if wants else None)
            return None
        found = list[tuple[tuple[bool, int, float, str], RepartitionCandidate, list[tuple[PlacementRequest, str]]]]()
        for node in self.nodes:
            wanted = self._wanted(wants, node) if node.idle and self._may(node) else []
            if wanted:
                failed, price = (
                    node.standing.stage is RepartitionStage.FAILED,
                    self.sites.shelf(node, wanted[0][1]).price,
                )
                found.append(((failed, -len(wanted), price, node.seen.name), node, wanted))
        for _, node, wanted in sorted(found, key=lambda one: one[0]):
            order = self._cut(node, wanted)
            if order is not None:
                return order
            self._same.add(node.seen.name)
        return None

    def _wanted(
        self, wants: Sequence[PlacementRequest], node: RepartitionCandidate
    ) -> list[tuple[PlacementRequest, str]]:
        """Requests that the node would serve within its CPU and memory, and their profiles."""
        found, host = list[tuple[PlacementRequest, str]](), node.host
        for want in wants:
            fitting = self.sites.fitting(want, node, host)
            if fitting and not self.sites.shows(want, node):
                found.append((want, fitting[0]))
                host = None if host is None else host.without(want.kind.host_request)
        return found

    def _may(self, node: RepartitionCandidate) -> bool:
        """Whether the node may be repartitioned now. Whether the node is in use is not checked here."""
        seen, order = node.seen, node.seen.order
        intent = self.world.nodes.cutting.get(seen.name)
        slice_ = self.sites.shelf(node, node.plain[0].name).slice
        if not seen.usable or seen.strategy == "single" or any(cordons_on(self.world, slice_)):
            return False
        free_s = 0.0 if intent is None else intent.again_s
        if node.standing.stage is RepartitionStage.FAILED:
            free_s = max(free_s, node.standing.until_s or 0.0)
        elif node.standing.stage is not RepartitionStage.IDLE:
            return False
        elif order is not None:
            free_s = max(free_s, order.asked_s + NODE_EVERY_S)
        self._later(free_s)
        return self.now_s >= free_s

    def _last_s(self) -> float:
        """The time of the last order."""
        given = [node.order.asked_s for node in self.world.nodes.cuttable.values() if node.order is not None]
        cutting = self.world.nodes.cutting.values()
        return max([*given, *(one.since_s for one in cutting if not one.refused)], default=-inf)

    def _cut(self, node: RepartitionCandidate, wanted: Sequence[tuple[PlacementRequest, str]]) -> CutNode | None:
        """Build the order; None if the node already has that layout. A failed node always gets an order, since it is
        closed until one succeeds.
        """
        seen, (first, _) = node.seen, wanted[0]
        cuts = allocate_profiles(node.geometry, seen.gpus, [name for _, name in wanted], node.there, self._shares(node))
        if node.standing.stage is RepartitionStage.IDLE and Counter(list_profiles(cuts)) == node.there:
            return None
        failed = node.standing.stage is RepartitionStage.FAILED and seen.order is not None
        order = CutOrder(
            node=seen.name, config=config_of(cuts, seen.config), cuts=cuts, asked_s=self.now_s, before=seen.config,
            tries=seen.order.tries + 1 if failed and seen.order is not None else 1,
        )  # fmt: skip
        what = ", ".join(f"{many} of {name}" for name, many in sorted(Counter(list_profiles(cuts)).items()))
        many = format_count(len(wanted), "replica")
        return CutNode(order=order, reason=f"{many} will fit, the first of Model {first.model}; devices: {what}")

    def _shares(self, node: RepartitionCandidate) -> dict[str, float]:
        """How often each profile was requested recently, by models that could use this node."""
        shares = Counter[str]()
        for wanted in build_demand_histogram(self.world, self.now_s):
            fitting = self.sites.fitting(PlacementRequest(ModelName(""), kind=wanted.kind), node)
            if fitting:
                shares[fitting[0]] += wanted.weight
        return {name: float(weight) for name, weight in shares.items()}

    def _explain_candidate(self, missing: Unplaced, order: CutNode | None) -> Unplaced:
        """Add the node that could serve an unplaced request after repartitioning to its reason."""
        words, want = list[str](), missing.want
        for node in self.nodes:
            if not self.sites.fitting(want, node) or (node.idle and self.sites.shows(want, node)):
                continue
            lacks = host_shortage_reason(want, node.host, "it")
            if order is not None and order.order.node == node.seen.name and not lacks:
                return _with_reason(missing, f"node {node.seen.name} is being repartitioned")
            if node.standing.stage is RepartitionStage.ABANDONED:
                words.append(f"node {node.seen.name} {describe_repartition_failure(node.seen)}")
            elif not node.may_ever:
                words.append(f"node {node.seen.name} could be repartitioned for it, {self._obstacle(node, lacks)}")
            else:
                return _with_reason(
                    missing, f"node {node.seen.name} could be repartitioned for it, {self._obstacle(node, lacks)}"
                )
        return missing._replace(reason="; ".join([missing.reason, *words[:1]]))

    def _mark_possible(self, missing: Unplaced) -> Unplaced:
        """Clear `never` of a request that some node could serve after repartitioning, now or later."""
        found = self.sites.some_day(missing.want)
        if found is None:
            return missing
        node, slice_ = found
        bar = node_exclusion_reason(missing.want.choice, slice_)
        but = f"but {bar}" if bar else "but not now"
        return _with_reason(missing, f"node {node.seen.name} could be repartitioned for it, {but}")

    def _obstacle(self, node: RepartitionCandidate, lacks: str) -> str:
        """Why the node is not repartitioned for it now."""
        intent, seen = self.world.nodes.cutting.get(node.seen.name), node.seen
        if seen.strategy == "single":
            return "but its device plug-in has MIG strategy single: set it to mixed"
        if node.standing.stage is RepartitionStage.FOREIGN:
            return "but its label nvidia.com/mig.config.state is not success: check mig-manager on the node"
        if intent is not None and intent.refused:
            return f"but {intent.refused}"
        if node.standing.stage is RepartitionStage.FAILED:
            return f"and {describe_repartition_failure(seen)}; it is retried"
        if not node.idle:
            return "once it is idle"
        same = "but its GPUs have that layout already" if node.seen.name in self._same else ""
        return f"but {lacks}" if lacks else same or "but not now"


def allocate_profiles(
    geometry: Geometry, gpus: int, wanted: Sequence[str], there: Mapping[str, int], shares: Mapping[str, float]
) -> tuple[tuple[str, ...], ...]:
    """Return the profiles for each GPU of an empty node. The requested profiles are placed first, in order, as far as
    they fit; then existing ones, largest first; then others in proportion to their demand (`shares`).
    """
    asked = Counter(wanted)
    weights = dict(shares) or {name: float(many) for name, many in asked.items()}
    fleet = Fleet(weights)
    for number in range(gpus):
        fleet.add(_gpu(number), geometry)
    made = Counter[str]()
    kept = sorted((name for name in there if geometry.has(name)), key=lambda name: (-geometry.profile(name).size, name))
    for name in [*wanted, *(one for one in kept for _ in range(there[one] - asked[one]))]:
        made[name] += isinstance(fleet.start(name), MigPlacement)
    open_ = {name for name, weight in weights.items() if weight > 0 and geometry.has(name)}
    while open_:
        name = min(open_, key=lambda one: ((made[one] + 1) / weights[one], one))
        if isinstance(fleet.start(name), MigPlacement):
            made[name] += 1
        else:
            open_.discard(name)
    return tuple(tuple(sorted(one.profile for one in fleet.used(_gpu(number)))) for number in range(gpus))


def _gpu(number: int) -> DeviceId:
    return DeviceId(f"{number:03}")


def _with_reason(missing: Unplaced, what: str) -> Unplaced:
    return missing._replace(reason=f"{missing.reason}; {what}", never=False)
