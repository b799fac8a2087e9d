"""What a start consisted of: decide, place and load, as far as they were seen.

Owns the names and bounds of these phases; Routes tell them to gateways (Server-Timing), the metrics sum them up. The
gateway adds `ready`, which only it can see: from the engine's readiness to the Call on its way there.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaler.world import Replica


def phases_s(replica: Replica) -> dict[str, float]:
    """Seconds per phase of a Replica that got ready; empty where it was not seen to start.

    decide: from the arrival of the first Call to the order, room that had to be made included; only where a Call was
    the reason. place: from the order to the running process. load: from there to readiness.
    """
    if replica.ready_s is None or replica.started_s is None or replica.created_s > replica.started_s:
        return {}
    phases = {"place": replica.started_s - replica.created_s, "load": replica.ready_s - replica.started_s}
    return phases if replica.wanted_s is None else {"decide": max(0.0, replica.created_s - replica.wanted_s)} | phases


def last_phases_ms(replicas: Iterable[Replica]) -> dict[str, float]:
    """Milliseconds per phase of the start that ended last; empty when none was seen."""
    seen = (replica for replica in replicas if phases_s(replica))
    last = max(seen, key=lambda replica: (replica.ready_s or 0.0, replica.id), default=None)
    return {} if last is None else {name: took_s * 1e3 for name, took_s in phases_s(last).items()}
