"""Repartitioning status of a MIG node: idle, in progress, failed, or abandoned. Pure.

Defines the state machine and its texts. An order is decided (`World.nodes.cutting`), then recorded on its node (label
and annotation, so that any leader can read it). Then mig-manager reports pending, rebooting, and success or failed. The
slices exist when the device plug-in lists them. An order is tried TRIES_MAX times; then the node is abandoned until
its label changes. `autoscaler.rearrange.mig_repartition` decides by this. Nothing is placed on a node while it
is repartitioned, or after a failure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from autoscaler.state.mig import FAILED, SUCCESS, MigNode
from autoscaler.state.world import NodeId, World

TRIES_MAX = 3
RETRY_S = (120.0, 600.0)
"""Time from one order to the next, after this many failures."""
CUT_S_MAX = 1800.0
"""Seconds after which an incomplete order has failed. mig-manager waits 5 times 5 minutes, and a node may reboot."""
CONFIGS = 3
"""Number of names of one layout: mig-manager ignores a label value that it has applied before."""
PREFIX = "pilotlight-"
LABEL = "nvidia.com/mig.config"
"""Label that sets a node's layout. If another component changes it, recorded failures are dropped."""


class RepartitionStage(Enum):
    """Stage of the repartitioning of a node."""

    IDLE = "idle"
    IN_PROGRESS = "in progress"
    FAILED = "failed"
    """The order failed and is retried."""
    ABANDONED = "abandoned"
    """The order failed TRIES_MAX times."""
    FOREIGN = "foreign"
    """Another component manages its layout, or no mig-manager runs."""


class RepartitionStatus(NamedTuple):
    """The stage, and the time at which it ends if nothing else has to happen."""

    stage: RepartitionStage
    until_s: float | None = None


def determine_repartition_status(
    world: World, node: MigNode, there: Mapping[str, int], now_s: float
) -> RepartitionStatus:
    """Determine the status of a node. `there`: how many slices of each profile it shows."""
    intent, order = world.nodes.cutting.get(node.name), node.order
    if intent is not None and not intent.refused:
        return RepartitionStatus(RepartitionStage.IN_PROGRESS)
    if order is None:
        return RepartitionStatus(RepartitionStage.IDLE if node.state == SUCCESS else RepartitionStage.FOREIGN)
    late_s = order.asked_s + CUT_S_MAX
    if node.state == SUCCESS:
        shown = now_s >= late_s or not Counter(list_profiles(order.cuts)) - Counter(there)
        return (
            RepartitionStatus(RepartitionStage.IDLE)
            if shown
            else RepartitionStatus(RepartitionStage.IN_PROGRESS, late_s)
        )
    if node.state != FAILED and now_s < late_s:
        return RepartitionStatus(RepartitionStage.IN_PROGRESS, late_s)
    if order.tries >= TRIES_MAX:
        return RepartitionStatus(RepartitionStage.ABANDONED)
    return RepartitionStatus(RepartitionStage.FAILED, order.asked_s + RETRY_S[order.tries - 1])


def list_profiles(cuts: Iterable[Iterable[str]]) -> list[str]:
    """Return the profiles of all GPUs of a node together."""
    return [profile for gpu in cuts for profile in gpu]


def count_shown_profiles(world: World) -> dict[str, Counter[str]]:
    """By node that may be repartitioned: how many slices of each profile it shows."""
    found = {name: Counter[str]() for name in world.nodes.cuttable}
    for slice_ in world.nodes.slices.values():
        if slice_.kind == "mig" and slice_.node in found:
            profile = slice_.id.rpartition("/mig-")[2].rpartition("-")[0]
            found[slice_.node][profile] += 1
    return found


def explain_closed_node(world: World, node: NodeId) -> str:
    """Explain why nothing new is placed on a node that may be repartitioned; empty if repartitioning does not prevent
    it.
    """
    seen, intent = world.nodes.cuttable.get(node), world.nodes.cutting.get(node)
    if seen is None:
        return ""
    if intent is not None and not intent.refused:
        return "its node is being repartitioned"
    if seen.order is None or seen.state == SUCCESS:
        return ""
    return (
        f"its node {describe_repartition_failure(seen)}"
        if seen.state == FAILED
        else f"its node is being repartitioned: {seen.state}"
    )


def describe_repartition_failure(node: MigNode) -> str:
    """Describe the failure, and after the last attempt how to fix it."""
    tries = 1 if node.order is None else node.order.tries
    head = f"could not be repartitioned (attempt {tries} of {TRIES_MAX})"
    return head if tries < TRIES_MAX else (
        f"could not be repartitioned in {tries} attempts: see the log of its mig-manager, "
        f"then set its label {LABEL} to a layout that it supports"
    )  # fmt: skip


def config_of(cuts: tuple[tuple[str, ...], ...], last: str) -> str:
    """Return a name of the layout that differs from the last one of its node."""
    names = configs_of(cuts)
    return names[(names.index(last) + 1) % CONFIGS] if last in names else names[0]


def configs_of(cuts: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return all names of a layout."""
    digest = hashlib.sha256(repr(cuts).encode()).hexdigest()[:10]
    return [f"{PREFIX}{digest}-{number}" for number in range(1, CONFIGS + 1)]
