"""Watches PodDisruptionBudgets of our pods (policy/v1) and reports the replicas that may not be evicted now. I/O.

Matches budgets to pods by labels. The allowance is the API server's count, applied as in its eviction API: a budget
whose status is outdated allows nothing, and neither do two budgets of one pod. Without budgets the pods are not
watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
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
    seen = pod_state.read_replica_pod(pod)
    return None if seen is None else LabelledPod(seen.replica, pod["metadata"].get("labels") or {})


def is_selected(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a selector matches these labels. No selector matches nothing; an empty one matches everything."""
    if selector is None:
        return False
    same: Mapping[str, str] = selector.get("matchLabels") or {}
    return same.items() <= labels.items() and all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    return {
        "In": value in values, "NotIn": value not in values, "Exists": value is not None, "DoesNotExist": value is None,
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
            lambda _: self._report(),
            labelSelector=owner.engines,
        )
        self._observe = observe
        self._any = asyncio.Event()
        """Set once a budget exists."""
        self._reported: dict[ReplicaId, str] = {}

    async def run(self) -> None:
        """Watch until cancelled. Without the permission to read budgets, no replica is protected."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._budgets.run())
            await self._any.wait()
            tasks.create_task(self._pods.run())

    def _budgets_changed(self, _: list[Change[DisruptionBudget]]) -> None:
        self._any.set()
        self._report()

    def _report(self) -> None:
        now = list_protected_replicas(self._budgets.items.values(), self._pods.items.values())
        if now != self._reported:
            self._reported = now
            self._observe((DisruptionsSeen(undisturbed=now),))
