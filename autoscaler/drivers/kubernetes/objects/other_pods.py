"""Pods that are not ours, and what they take of nodes. Pure.

Only the node, devices, CPU and memory of such pods are kept, which are unavailable to us. Devices that our own pods
hold under ids that no longer exist, because the node's sharing changed, are counted in the same way. A pod of ours
without slices counts as another's, because the scheduler chooses its node.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

from autoscaler.kubernetes.api import Object
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.slicing.kai import KAI_RESERVES, count_kai_gpus
from autoscaler.slicing.nvidia_device_plugin import parse_number
from autoscaler.spec.pod import PLACE
from autoscaler.state.pod_requests import sum_pod_requests
from autoscaler.state.resources import NOTHING, HostAmount, HostResources
from autoscaler.state.world import NodeId

NO_AMOUNTS: Mapping[str, int] = {}


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


HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Selects pods that hold what they requested."""


class OtherPod(NamedTuple):
    """The facts kept about a pod that is not ours, or has no slice."""

    node: str
    amounts: Mapping[str, int] = {}
    """Requested units of each extended resource whose units are slices."""
    cards: tuple[HamiAllocation, ...] = ()
    """Its parts of cards that HAMi shares."""
    kai: int = 0
    """Number of GPUs of which KAI gave it a part."""
    reserves: bool = False
    """It reserves a GPU that KAI shares. Where KAI manages all GPUs, its users count instead of this pod."""
    lost: int = 0
    """Number of slices that it holds under ids that no longer exist."""
    cpu_memory: HostAmount = NOTHING
    """Its CPU and memory requests."""

    @property
    def has_devices(self) -> bool:
        """Whether it takes devices from us."""
        return bool(self.amounts or self.cards or self.kai or self.lost)


def read_other_pod(pod: Object) -> OtherPod | None:
    """Parse a pod; None if it holds nothing. A placeholder pod for a replica (`autoscaler.providers`) is ignored.
    Devices of containers are summed; of init containers, which run one after the other, the maximum counts.
    """
    spec = pod["spec"]
    node = spec.get("nodeName")
    if not node or PLACE in (pod.get("metadata", {}).get("labels") or {}):
        return None
    first: list[Object] = spec.get("initContainers") or []
    stay = Counter[str]()
    for one in (*spec["containers"], *(one for one in first if one.get("restartPolicy") == "Always")):
        stay.update(_asked(one))
    most = reduce(or_, map(_asked, first), stay)
    metadata = pod.get("metadata", {})
    notes: dict[str, str] = metadata.get("annotations") or {}
    cards, kai, cpu_memory = (
        slicers.parse_hami_allocations(notes),
        count_kai_gpus(notes),
        sum_pod_requests(spec),
    )
    reserves = metadata.get("namespace") == KAI_RESERVES
    found = OtherPod(sys.intern(node), dict(most) if most else NO_AMOUNTS, cards, kai, reserves, cpu_memory=cpu_memory)
    return found if found.has_devices or any(cpu_memory) else None


def _asked(container: Object) -> Counter[str]:
    limits = container.get("resources", {}).get("limits") or {}
    return +Counter({name: parse_number(many) for name, many in limits.items() if slicers.is_counted_resource(name)})
