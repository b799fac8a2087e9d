"""The Plan of an autoscaler that ends: every Replica is drained and stopped, nothing is started.

Pure. For one machine, where the gateways have drained and ended before the autoscaler does, so that no drain needs an
acknowledgement. A cluster's autoscaler just ends: another one leads.
"""

from __future__ import annotations

from autoscaler.state.actions import Action, DrainReplica, Plan, StopReplica
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import World

REASON = "pilotlight is stopping"
_RUNS = {ReplicaState.STARTING, ReplicaState.READY, ReplicaState.UNREADY}
_STOPS = {ReplicaState.DRAINING, ReplicaState.PENDING, ReplicaState.FAILED}


def wind_down(world: World, grace_s: float) -> Plan:
    """The next actions towards nothing; none when all stops are out. `grace_s` is what engines get after SIGTERM."""
    actions: list[Action] = []
    for replica in world.replicas.values():
        if replica.state in _RUNS:
            actions.append(DrainReplica(replica=replica.id, reason=REASON))
        elif replica.state in _STOPS:
            actions.append(StopReplica(replica=replica.id, grace_s=grace_s, reason=REASON))
    return Plan(actions=tuple(actions))
