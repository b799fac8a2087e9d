"""CPU and memory of nodes: the sum of other pods' requests per node, updated with each pod. Pure.

Computes a pod's requests as the kube-scheduler does:
https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers. A pod of ours
without slices counts as another's, because the scheduler chooses its node. The limit of pods per node is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoscaler.kubernetes.api import Object
from autoscaler.queries.pod_requests import parse_resource_list
from autoscaler.state.resources import NOTHING, HostAmount, HostResources
from autoscaler.state.world import NodeId

Resourced = Mapping[str, Any]
"""Has `resources`: a container, or a pod's spec."""


def sum_pod_requests(spec: Object) -> HostAmount:
    """Return a pod's requests: the higher of the sum over containers and sidecars and the peak while an init container
    runs. Pod-level requests replace this; the pod overhead is added.
    """
    staying, peak = NOTHING, NOTHING
    for one in spec.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            staying = staying.plus(_asked(one))
            peak = peak.most(staying)
        else:
            peak = peak.most(staying.plus(_asked(one)))
    for one in spec["containers"]:
        staying = staying.plus(_asked(one))
    amounts, whole = staying.most(peak), _requests(spec)
    said = parse_resource_list(dict(whole))
    amounts = HostAmount(
        said.cpu_milli if "cpu" in whole else amounts.cpu_milli,
        said.host_bytes if "memory" in whole else amounts.host_bytes,
    )
    return amounts.plus(parse_resource_list(spec.get("overhead") or {}))


def _asked(container: Resourced) -> HostAmount:
    return parse_resource_list(dict(_requests(container)))


def _requests(of: Resourced) -> Mapping[str, str | int]:
    found: Mapping[str, str | int] = of.get("resources", {}).get("requests") or {}
    return found


class Hosts:
    """The requests of other pods per node."""

    def __init__(self) -> None:
        self._taken: dict[str, HostAmount] = {}
        self._known: dict[NodeId, HostResources] = {}

    def take(self, node: str, amounts: HostAmount) -> bool:
        """Add a pod of others. Return whether it has requests."""
        return self._add(node, amounts)

    def give_back(self, node: str, amounts: HostAmount) -> bool:
        """Remove a pod of others. Return whether it had requests."""
        return self._add(node, NOTHING.less(amounts))

    def _add(self, node: str, amounts: HostAmount) -> bool:
        if not any(amounts):
            return False
        after = self._taken.get(node, NOTHING).plus(amounts)
        if any(after):
            self._taken[node] = after
        else:
            self._taken.pop(node, None)
        return True

    def seen(self, nodes: Mapping[NodeId, HostAmount]) -> dict[NodeId, HostResources]:
        """Return the remainder per node; `nodes`: allocatable amounts. An unchanged entry is the same object."""
        found: dict[NodeId, HostResources] = {}
        for node, amounts in nodes.items():
            host = HostResources(*amounts, *amounts).without(self._taken.get(node, NOTHING))
            before = self._known.get(node)
            found[node] = before if before is not None and before == host else host
        self._known = found
        return found
