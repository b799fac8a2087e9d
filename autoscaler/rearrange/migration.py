"""Who is kept off its node for too long asks for a place elsewhere, and leaves for it if there is one. Pure.

Owns those Wants: they are asked of the packer beside all others and after them, and never placed. Where there is room
for one its Replica drains, and the next look starts another there; else it goes on waiting where it is
(`autoscaler.queries.stranded_pods`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.placement.model.bins import want_of
from autoscaler.placement.model.types import Force, Want
from autoscaler.queries.stranded_pods import STRANDED_S, avoided, gives_up_s, nodes_of
from autoscaler.state.actions import DrainReplica
from autoscaler.state.world import Replica, World
from autoscaler.text import seconds

REASON = "kept off its node"


class Elsewhere(NamedTuple):
    """The place elsewhere that each would take -> who that is; and when another asks, too."""

    by_want: Mapping[Want, Replica]
    next_s: float = inf


def elsewhere(world: World, now_s: float, going: Collection[ReplicaId], others: int) -> Elsewhere:
    """`going`: who leaves anyway; `others`: so many Wants go before these."""
    found, next_s = dict[Want, Replica](), inf
    for id in sorted(id for id, one in world.replicas.items() if one.stranded_s is not None):
        replica = world.replicas[id]
        due_s, model = gives_up_s(replica), world.models.get(replica.model)
        if due_s is not None and due_s > now_s:
            next_s = min(next_s, due_s)
        if due_s is None or now_s < due_s or id in going or model is None:
            continue
        avoids = tuple(sorted({*avoided(world, model.name, now_s), *nodes_of(world, replica)}))
        load = world.loads.get(model.name)
        force = Force.BUSY if load is not None and load.waiting else Force.LOWER
        found[want_of(model, others + len(found), inf, force, REASON, world.settings.pod, avoids)] = replica
    return Elsewhere(found, next_s)


def gives_up(replica: Replica) -> DrainReplica:
    """There is room elsewhere."""
    reason = f"kept off its node for more than {seconds(STRANDED_S)}, and there is room elsewhere: {replica.waits}"
    return DrainReplica(replica=replica.id, reason=reason, stranded=True)
