"""What nodes have beside their devices: what of that pods of others request, kept as pods come and go. Pure.

Owns the sum of a pod's requests, as the kube-scheduler counts it
(https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers), and the
sums of nodes. A pod of ours without Slices counts as another's: only its cluster knows where it is. The limit on the
number of a node's pods is not in it: the scheduler keeps that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoscaler.kubernetes.api import Object
from autoscaler.queries.pod_requests import parse_resource_list
from autoscaler.state.resources import NOTHING, Beside, HostResources
from autoscaler.state.world import NodeId

Resourced = Mapping[str, Any]
"""What has `resources`: a container, or a pod's spec."""


def sum_pod_requests(spec: Object) -> Beside:
    """What a pod has of its node: its containers' together and those beside them that stay, or what one of the first
    ones needs while it runs, where that is more; or what is said of the pod as a whole; and what running it costs.
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
    amounts = Beside(
        said.cpu_milli if "cpu" in whole else amounts.cpu_milli,
        said.host_bytes if "memory" in whole else amounts.host_bytes,
    )
    return amounts.plus(parse_resource_list(spec.get("overhead") or {}))


def _asked(container: Resourced) -> Beside:
    return parse_resource_list(dict(_requests(container)))


def _requests(of: Resourced) -> Mapping[str, str | int]:
    found: Mapping[str, str | int] = of.get("resources", {}).get("requests") or {}
    return found


class Hosts:
    """Of each node, what others have; what is left of it is worked out where either has changed."""

    def __init__(self) -> None:
        self._taken: dict[str, Beside] = {}
        self._known: dict[NodeId, HostResources] = {}

    def take(self, node: str, amounts: Beside) -> bool:
        """A pod of others is there. Whether that makes a difference."""
        return self._add(node, amounts)

    def give_back(self, node: str, amounts: Beside) -> bool:
        """It is there no more."""
        return self._add(node, NOTHING.less(amounts))

    def _add(self, node: str, amounts: Beside) -> bool:
        if not any(amounts):
            return False
        after = self._taken.get(node, NOTHING).plus(amounts)
        if any(after):
            self._taken[node] = after
        else:
            self._taken.pop(node, None)
        return True

    def seen(self, nodes: Mapping[NodeId, Beside]) -> dict[NodeId, HostResources]:
        """`nodes`: what all of theirs may have. One that did not change is the very one that it was."""
        found: dict[NodeId, HostResources] = {}
        for node, amounts in nodes.items():
            host = HostResources(*amounts, *amounts).without(self._taken.get(node, NOTHING))
            before = self._known.get(node)
            found[node] = before if before is not None and before == host else host
        self._known = found
        return found
