"""Where the other Replicas of a Model are, for one that is to be elsewhere, or near: by a label of nodes, its domain.

Owns who counts. Pure. It is a liking, never a rule (`autoscaler.placement.index.request`): where no other domain has
room, two share one, and where theirs has none it is in another.
"""

from __future__ import annotations

from collections.abc import Collection

from autoscaler.contract import ReplicaId
from autoscaler.demand.desired_replicas import live
from autoscaler.placement.model.types import Want
from autoscaler.queries.cordons import must_go
from autoscaler.queries.stranded_pods import nodes_of
from autoscaler.state.world import World


def apart(world: World, want: Want, going: Collection[ReplicaId] = ()) -> Want:
    """The Want, told of the nodes of those that stay: not of who goes, nor of a spec that another replaces."""
    model = world.models.get(want.model)
    if want.spread is None or model is None:
        return want
    stay = (
        one
        for one in live(world, model.name)
        if one.id not in going and one.spec_hash == model.spec_hash() and not must_go(world, one)
    )
    nodes = sorted(node for one in stay for node in nodes_of(world, one))
    return want._replace(spread=want.spread._replace(nodes=tuple(nodes)))
