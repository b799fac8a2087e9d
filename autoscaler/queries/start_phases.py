"""Phases of a start: decide, pull, place, image and load, as far as they were observed.

Defines the names and bounds of these phases. Routes carry them to gateways (Server-Timing), and metrics sum them. The
gateway adds `ready`: from the readiness of the engine to the dispatch of the request. The parts of `place`, such as
`place.write`, are reported in addition to it, but not to gateways, which add up phases.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaler.state.world import Replica

PARTS = ("place.write", "place.schedule", "place.kubelet")


def phases_s(replica: Replica) -> dict[str, float]:
    """Seconds per phase of a replica that became ready; empty if its start was not observed.

    * decide: from the arrival of the first request to the order, including evictions. Only if a request caused it.
    * pull: from the order until its weights are on the node. Only if they are pulled from a registry.
    * place: from the end of the pull, or from the order, to the running process, or until only its image was missing.
    * image: from the end of `place` to the running process. Only if that was observed.
    * load: from the running process to readiness.
    """
    created_s, started_s = replica.times.created_s, replica.times.started_s
    if replica.runtime.found or replica.times.ready_s is None or started_s is None or created_s > started_s:
        return {}
    prepared_s = _prepared_s(replica)
    decide = {} if replica.times.wanted_s is None else {"decide": max(0.0, created_s - replica.times.wanted_s)}
    image = {} if prepared_s is None else {"image": started_s - prepared_s}
    pulled_s = _pulled_s(replica)
    ends_s = started_s if prepared_s is None else prepared_s
    pull = {} if pulled_s is None else {"pull": pulled_s - created_s}
    place_s = ends_s - created_s - sum(pull.values())
    return {**decide, **pull, "place": place_s, **image, "load": replica.times.ready_s - started_s}


def parts_s(replica: Replica) -> dict[str, float]:
    """Seconds per part of `place`, each if its beginning and end were observed.

    write: from the order, or the end of the pull, to the API server's answer. schedule: from there to a node. kubelet:
    from there to the end.
    """
    times = replica.times
    ends_s = (_pulled_s(replica) or times.created_s, times.placing.asked_s, times.placing.bound_s,
              _prepared_s(replica) or times.started_s)  # fmt: skip
    pairs = zip(PARTS, ends_s, ends_s[1:], strict=False)
    return {
        name: end_s - began_s
        for name, began_s, end_s in pairs
        if began_s is not None and end_s is not None and replica.times.created_s <= began_s <= end_s
    }


def phases_with_parts_s(replica: Replica) -> dict[str, float]:
    """Phases, with the parts of `place` after it; empty if no phase is known."""
    found: dict[str, float] = {}
    for name, took_s in phases_s(replica).items():
        found[name] = took_s
        if name == "place":
            found |= parts_s(replica)
    return found


def last_start(replicas: Iterable[Replica]) -> Replica | None:
    """Return the replica whose start ended last, of those with an observed start."""
    seen = (replica for replica in replicas if phases_s(replica))
    return max(seen, key=lambda replica: (replica.times.ready_s or 0.0, replica.id), default=None)


def last_phases_ms(replicas: Iterable[Replica]) -> dict[str, float]:
    """Milliseconds per phase of the start that ended last; empty if none was observed."""
    last = last_start(replicas)
    return {} if last is None else {name: took_s * 1e3 for name, took_s in phases_s(last).items()}


def _pulled_s(replica: Replica) -> float | None:
    """Return when its weights were on the node; None: they are not pulled, or that was not observed in time."""
    pulled_s, ends_s = replica.times.placing.pulled_s, _prepared_s(replica) or replica.times.started_s
    if pulled_s is None or ends_s is None or not replica.times.created_s <= pulled_s <= ends_s:
        return None
    return pulled_s


def _prepared_s(replica: Replica) -> float | None:
    """Return when only its image was missing on the node; None: that was not observed before its process ran."""
    prepared_s, started_s = replica.times.placing.prepared_s, replica.times.started_s
    if prepared_s is None or started_s is None or not replica.times.created_s <= prepared_s <= started_s:
        return None
    return prepared_s
