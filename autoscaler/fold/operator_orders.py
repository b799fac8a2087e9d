"""What a change of leadership does to the World: what was ordered and granted before counts for nothing any more.

Owns that one step. Who begins to lead has the World of a process that starts: no Replica is known until the driver says
(again) what there is, no gateway has reported in this epoch, and holds stand still until all have. Demand, documents,
histories and who the gateways are stay: every autoscaler folds them, whoever leads. Who ends to lead only ends.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.fold import capacity, mig
from autoscaler.fold.draft import Draft
from autoscaler.state.world import World


def leads(draft: Draft, epoch: int) -> None:
    """We lead, in `epoch`."""
    for replica in tuple(draft.replicas.now.values()):
        draft.drop_replica(replica)
    for gateway in tuple(draft.gateways.now.values()):
        draft.gateways.put(gateway.id, replace(gateway, in_epoch=False, grants={}))
    mig.forget(draft)
    capacity.forget(draft)
    draft.change(epoch=epoch, leads=True, leading_since_s=draft.now_s, synced=False, handed_over=False)
    draft.news = True


def follows(draft: Draft) -> None:
    """Another leads, or nobody."""
    mig.forget(draft)
    draft.change(leads=False)
    draft.news = True


def heard(world: World) -> frozenset[int]:
    """The epochs that gateways and agents of nodes say that they have heard of: a lower one is nothing to them.

    Where there are several agents the highest of their words is not believed unless another says as much: one of a node
    that was broken into could have leaders deposed again and again, until no epoch is left.
    """
    gateways = {one.report.epoch for one in world.gateways.values() if one.report is not None}
    agents = sorted((one.report.epoch for one in world.nodes.values()), reverse=True)
    return frozenset(gateways.union(agents[1:] or agents))
