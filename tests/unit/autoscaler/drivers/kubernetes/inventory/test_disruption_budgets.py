"""PodDisruptionBudgets for our pods: which pods they select, and when they allow no disruption."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.inventory.disruption_budgets import (
    DisruptionBudget,
    LabelledPod,
    is_selected,
    list_protected_replicas,
    read_budget,
)

ALL: dict[str, Any] = {}


def budget(allowed: int | None, generation: int = 1, seen: int = 1, selector: Any = ALL) -> Any:
    status = {} if allowed is None else {"disruptionsAllowed": allowed, "observedGeneration": seen}
    return {"metadata": {"name": "b", "generation": generation}, "spec": {"selector": selector}, "status": status}


@pytest.mark.parametrize(
    ("found", "allows"),
    [
        (budget(1), True), (budget(0), False), (budget(None), False), (budget(3, generation=2, seen=1), False),
        (budget(3, generation=2, seen=2), True),
    ],
)  # fmt: skip
def test_disruption_budget_allows_eviction_only_if_its_current_status_does(found: Any, allows: bool) -> None:
    assert read_budget(found) == DisruptionBudget("b", ALL, allows)


@pytest.mark.parametrize(
    ("selector", "covers"),
    [
        (None, False), ({}, True),
        ({"matchLabels": {"app": "ada"}}, True), ({"matchLabels": {"app": "ada", "team": "ml"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["bob", "ada"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["bob"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["ada"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["ml"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, True),
        ({"matchLabels": {"app": "ada"}, "matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    ],
)  # fmt: skip
def test_pod_is_selected_as_kubernetes_evaluates_its_label_selector(selector: Any, covers: bool) -> None:
    assert is_selected(selector, {"app": "ada"}) is covers


def test_replica_is_protected_by_a_forbidding_budget_or_by_two_budgets() -> None:
    own = [LabelledPod(ReplicaId("r1"), {"app": "ada"}), LabelledPod(ReplicaId("r2"), {"app": "bob"})]
    ada, bob = {"matchLabels": {"app": "ada"}}, {"matchLabels": {"app": "bob"}}
    assert list_protected_replicas(
        [DisruptionBudget("a", ada, allows=False), DisruptionBudget("b", bob, allows=True)], own
    ) == {"r1": "a"}
    both = [DisruptionBudget("b", {}, allows=True), DisruptionBudget("a", ada, allows=True)]
    assert list_protected_replicas(both, own) == {"r1": "a, b"}, (
        "two budgets select one pod: Kubernetes never evicts it"
    )
    assert list_protected_replicas([], own) == {}
