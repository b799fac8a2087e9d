"""Where a node stands that may be cut anew: at rest, on its way, failed, or given up. Pure.

Owns the state machine and its sentences: an order is decided (`World.cutting`), then stands on its node (label and
annotation, so that any leader knows), then mig-manager says pending, rebooting, and success or failed; and the cuts are
there when its device plug-in shows them. What fails is tried TRIES_MAX times, then the node is out until a person tells
it something else. `autoscaler.rearrange.mig_repartition` decides by it; nothing is placed on a node that is not at
rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from autoscaler.state.mig import FAILED, SUCCESS, MigNode
from autoscaler.state.world import NodeId, Slice, World

TRIES_MAX = 3
RETRY_S = (120.0, 600.0)
"""From one order to the next, after so many that failed."""
CUT_S_MAX = 1800.0
"""What is not done then has failed: mig-manager waits five times 5 minutes itself, and a node may start anew."""
CONFIGS = 3
"""Names of one layout: mig-manager does nothing when it is told what it was told before."""
PREFIX = "pilotlight-"
LABEL = "nvidia.com/mig.config"
"""By which a node is told its cuts. Whoever sets it to something else makes us forget what failed."""


class RepartitionStage(Enum):
    """Of a node."""

    REST = "rest"
    ON_ITS_WAY = "on its way"
    FAILED = "failed"
    """It is tried again."""
    OUT = "out"
    """It was tried often enough."""
    FOREIGN = "foreign"
    """Somebody else has it cut, or nobody who could cut it is there."""


class RepartitionStatus(NamedTuple):
    """Where it stands, and until when if only time must pass."""

    stage: RepartitionStage
    until_s: float | None = None


def determine_repartition_status(
    world: World, node: MigNode, there: Mapping[str, int], now_s: float
) -> RepartitionStatus:
    """`there`: how many Slices of each profile it shows."""
    intent, order = world.cutting.get(node.name), node.order
    if intent is not None and not intent.refused:
        return RepartitionStatus(RepartitionStage.ON_ITS_WAY)
    if order is None:
        return RepartitionStatus(RepartitionStage.REST if node.state == SUCCESS else RepartitionStage.FOREIGN)
    late_s = order.asked_s + CUT_S_MAX
    if node.state == SUCCESS:
        shown = now_s >= late_s or not Counter(list_profiles(order.cuts)) - Counter(there)
        return (
            RepartitionStatus(RepartitionStage.REST)
            if shown
            else RepartitionStatus(RepartitionStage.ON_ITS_WAY, late_s)
        )
    if node.state != FAILED and now_s < late_s:
        return RepartitionStatus(RepartitionStage.ON_ITS_WAY, late_s)
    if order.tries >= TRIES_MAX:
        return RepartitionStatus(RepartitionStage.OUT)
    return RepartitionStatus(RepartitionStage.FAILED, order.asked_s + RETRY_S[order.tries - 1])


def list_profiles(cuts: Iterable[Iterable[str]]) -> list[str]:
    """Of all GPUs of a node together."""
    return [profile for gpu in cuts for profile in gpu]


def count_shown_profiles(world: World) -> dict[str, Counter[str]]:
    """By node that may be cut anew: how many Slices of each profile it shows."""
    found = {name: Counter[str]() for name in world.cuttable}
    for slice_ in world.slices.values():
        if slice_.kind == "mig" and slice_.node in found:
            found[slice_.node][profile_of(slice_)] += 1
    return found


def profile_of(slice_: Slice) -> str:
    """What its profile is called."""
    return slice_.id.rpartition("/mig-")[2].rpartition("-")[0]


def explain_closed_node(world: World, node: NodeId) -> str:
    """Why nothing new is put on a node that may be cut anew, in words; empty: that stands in nobody's way."""
    seen, intent = world.cuttable.get(node), world.cutting.get(node)
    if seen is None:
        return ""
    if intent is not None and not intent.refused:
        return "its node is being cut anew"
    if seen.order is None or seen.state == SUCCESS:
        return ""
    return (
        f"its node {describe_repartition_failure(seen)}"
        if seen.state == FAILED
        else f"its node is being cut anew: {seen.state}"
    )


def describe_repartition_failure(node: MigNode) -> str:
    """`could not be cut anew in 3 tries`, and what to do."""
    tries = 1 if node.order is None else node.order.tries
    head = f"could not be cut anew, at try {tries} of {TRIES_MAX}"
    return head if tries < TRIES_MAX else (
        f"could not be cut anew in {tries} tries: see the log of its mig-manager, "
        f"then set its label {LABEL} to what it can be"
    )  # fmt: skip


def config_of(cuts: tuple[tuple[str, ...], ...], told: str) -> str:
    """What a layout is called, unlike what its node was told last."""
    names = configs_of(cuts)
    return names[(names.index(told) + 1) % CONFIGS] if told in names else names[0]


def configs_of(cuts: tuple[tuple[str, ...], ...]) -> list[str]:
    """All names of a layout."""
    digest = hashlib.sha256(repr(cuts).encode()).hexdigest()[:10]
    return [f"{PREFIX}{digest}-{number}" for number in range(1, CONFIGS + 1)]
