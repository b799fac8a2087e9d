"""Watches PodDisruptionBudgets over our pods (policy/v1): the replicas that may not be evicted for another now. I/O.

Matches budgets to pods and reports as soon as a budget or our pods' labels change the result. The allowance is the API
server's own count, read as for its evictions: a budget not processed since its last change allows nothing, nor do two
budgets over one pod. Makes no decisions. Without budgets the pods are not watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import replica_pod as pods
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.ownership import ANYBODYS, Ownership
from autoscaler.state.events import DisruptionsSeen

Observe = Callable[[tuple[DisruptionsSeen, ...]], None]


class DisruptionBudget(NamedTuple):
    """The facts kept about a PodDisruptionBudget."""

    name: str
    selector: Mapping[str, Any] | None
    allows: bool
    """A pod may be evicted now."""


class LabelledPod(NamedTuple):
    """The facts kept about a pod of ours."""

    replica: ReplicaId
    labels: Mapping[str, str]


def read_budget(found: Object) -> DisruptionBudget:
    """Parse a budget. A status of an older generation than the object's does not count."""
    status, metadata = found.get("status") or {}, found["metadata"]
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return DisruptionBudget(
        metadata["name"], found["spec"].get("selector"), seen and status.get("disruptionsAllowed", 0) > 0
    )


def read_labelled_pod(pod: Object) -> LabelledPod | None:
    """Parse a pod; None if it is not ours."""
    seen = pods.read_replica_pod(pod)
    return None if seen is None else LabelledPod(seen.replica, pod["metadata"].get("labels") or {})


def is_selected(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a selector matches these labels: a missing one matches nothing, an empty one everything."""
    if selector is None:
        return False
    same: Mapping[str, str] = selector.get("matchLabels") or {}
    return same.items() <= labels.items() and all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    said, values = labels.get(expression["key"]), expression.get("values") or ()
    return {
        "In": said in values, "NotIn": said not in values, "Exists": said is not None, "DoesNotExist": said is None,
    }[expression["operator"]]  # fmt: skip


def list_protected_replicas(budgets: Iterable[DisruptionBudget], ours: Iterable[LabelledPod]) -> dict[ReplicaId, str]:
    """Return the replicas that may not be evicted now, with the names of the budgets that protect them."""
    there, found = sorted(budgets), dict[ReplicaId, str]()
    for pod in ours:
        over = [one for one in there if is_selected(one.selector, pod.labels)]
        if len(over) > 1 or not all(one.allows for one in over):
            found[pod.replica] = ", ".join(one.name for one in over)
    return found


class Disruptions:
    """Budgets and pods of one namespace."""

    def __init__(self, api: Api, namespace: str, observe: Observe, owner: Ownership = ANYBODYS) -> None:
        self._budgets = Watched(
            api, f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets", read_budget, self._budgets_changed,
            optional=True,
        )  # fmt: skip
        self._pods = Watched(
            api,
            f"/api/v1/namespaces/{namespace}/pods",
            read_labelled_pod,
            self._pods_changed,
            labelSelector=owner.engines,
        )
        self._observe = observe
        self._any = asyncio.Event()
        """Set once a budget exists."""
        self._told: dict[ReplicaId, str] = {}

    async def run(self) -> None:
        """Watch until cancelled. Without the permission to read budgets none is known."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._budgets.run())
            await self._any.wait()
            tasks.create_task(self._pods.run())

    def _budgets_changed(self, _: list[Change[DisruptionBudget]]) -> None:
        self._any.set()
        self._tell()

    def _pods_changed(self, _: list[Change[LabelledPod]]) -> None:
        self._tell()

    def _tell(self) -> None:
        now = list_protected_replicas(self._budgets.items.values(), self._pods.items.values())
        if now != self._told:
            self._told = now
            self._observe((DisruptionsSeen(undisturbed=now),))
