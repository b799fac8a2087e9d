"""PodDisruptionBudgets of people over our pods (policy/v1): which Replicas nobody may end for another's sake now. I/O.

Owns what covers whom, and when that is told: as soon as a budget or the labels of our pods make it otherwise. What is
allowed is the API server's own count, read as its eviction does: a budget that it has not looked at since it changed
allows nothing, nor do two over one pod. Decides nothing. Where there is no budget, pods are not watched for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import pod as pods
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.ownership import ANYBODYS, Ownership
from autoscaler.state.events import DisruptionsSeen

Observe = Callable[[tuple[DisruptionsSeen, ...]], None]


class DisruptionBudget(NamedTuple):
    """What is kept of a PodDisruptionBudget."""

    name: str
    selector: Mapping[str, Any] | None
    allows: bool
    """Somebody may be ended now."""


class LabelledPod(NamedTuple):
    """What is kept of a pod of ours."""

    replica: ReplicaId
    labels: Mapping[str, str]


def read_budget(found: Object) -> DisruptionBudget:
    """What is told of an older generation than the object's is not told of what it says now."""
    status, metadata = found.get("status") or {}, found["metadata"]
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return DisruptionBudget(
        metadata["name"], found["spec"].get("selector"), seen and status.get("disruptionsAllowed", 0) > 0
    )


def read_labelled_pod(pod: Object) -> LabelledPod | None:
    """None of one that is not ours."""
    seen = pods.read_replica_pod(pod)
    return None if seen is None else LabelledPod(seen.replica, pod["metadata"].get("labels") or {})


def is_selected(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector is true of these labels: one that is not there of none, an empty one of all."""
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
    """Whom nobody may end now, and the budgets that say so."""
    there, found = sorted(budgets), dict[ReplicaId, str]()
    for pod in ours:
        over = [one for one in there if is_selected(one.selector, pod.labels)]
        if len(over) > 1 or not all(one.allows for one in over):
            found[pod.replica] = ", ".join(one.name for one in over)
    return found


class Disruptions:
    """Of one namespace."""

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
        """There was a budget."""
        self._told: dict[ReplicaId, str] = {}

    async def run(self) -> None:
        """Until cancelled. Without the right to read budgets none is known."""
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
