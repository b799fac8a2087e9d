"""The condition that an adopted workload shows, and when it is written, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.annotations import Hand, Others, read_model
from autoscaler.drivers.kubernetes.adoption.objects import (
    ReleasedWorkload,
    ShownCondition,
    WorkloadKey,
    WorkloadSeen,
    read_workload,
)
from autoscaler.drivers.kubernetes.adoption.status import AGAIN_S, NEWS_S, Sign, build_condition
from autoscaler.kubernetes.resources.model_conditions import MESSAGE_MAX, ConditionValue
from tests.support.builders.adoption_workload import annotated

SET = WorkloadKey("StatefulSet", "default", "ada")
BY_HAND = Others("", Hand(3, "kubectl", 0.0), 600.0)
BY_HPA = Others("HorizontalPodAutoscaler ada")
TAKEN = "name `ada` belongs to Model x/ada; this Model is renamed to `default/ada`"


def shown(
    others: Others | None = None, called: str | None = "ada", taken: str = "", problem: str = "", **seen: Any
) -> tuple[str, str, str] | None:
    """(status, reason, message) for a workload with valid annotations."""
    model = read_model(annotated(**seen), others or Others())
    reported = build_condition(problem, model, None if called is None else ModelName(called), taken)
    return None if reported is None else reported[1:]


def condition(reason: str = "Scaled", status: str = "True") -> ConditionValue:
    return ConditionValue("pilotlight.dev/Adopted", status, reason, "")


# --- reasons and messages ---------------------------------------------------------------------------------------------


def test_adopted_condition_does_not_change_with_the_replica_count() -> None:
    usual = ("True", "Scaled", "its scale follows the requests for Model ada")
    assert [shown(replicas=replicas, version=1 + replicas) for replicas in (0, 1, 7)] == [usual] * 3


def test_manual_scale_condition_names_its_end_time() -> None:
    message = "scaled to 3 by kubectl; holds until 1970-01-01T00:10:00Z"
    assert shown(BY_HAND) == ("True", "ScaledByHand", message)


def test_condition_names_an_autoscaler_that_also_scales_the_workload() -> None:
    message = "HorizontalPodAutoscaler ada also scales it: Pilotlight decides only between zero and not zero"
    assert shown(BY_HPA) == ("True", "ScaledByAnother", message)


def test_condition_shows_a_name_conflict_together_with_other_reasons() -> None:
    usual = f"its scale follows the requests for Model default/ada; {TAKEN}"
    assert shown(called="default/ada", taken=TAKEN) == ("True", "NameTaken", usual)
    by_hand = shown(BY_HAND, "default/ada", TAKEN)
    assert by_hand is not None
    assert (by_hand[1], TAKEN in by_hand[2], "holds until" in by_hand[2]) == ("ScaledByHand", True, True)


def test_workload_whose_model_names_are_all_taken_is_not_served() -> None:
    assert shown(called=None, taken="both belong to others") == ("False", "NameTaken", "both belong to others")


def test_condition_for_invalid_annotation_says_if_older_values_apply() -> None:
    assert shown(problem="x is wrong") == (
        "False", "WrongAnnotation", "x is wrong; the last valid annotations stay in force",
    )  # fmt: skip
    alone = build_condition("x is wrong", None, None, "")
    assert alone == ("pilotlight.dev/Adopted", "False", "WrongAnnotation", "x is wrong; it is not served")


def test_long_message_of_an_adoption_condition_is_truncated() -> None:
    long = shown(problem="x" * 40_000)
    assert long is not None
    assert len(long[2]) == MESSAGE_MAX


def test_statefulset_has_no_condition_while_scaling_is_normal() -> None:
    """The StatefulSet controller drops the condition whenever it writes the status itself."""
    assert shown(key=SET) is None
    reasons = [
        shown(BY_HAND, key=SET),
        shown(BY_HPA, key=SET),
        shown(taken=TAKEN, key=SET),
        shown(problem="x", key=SET),
    ]
    assert [one and one[1] for one in reasons] == ["ScaledByHand", "ScaledByAnother", "NameTaken", "WrongAnnotation"]


# --- when it is written -----------------------------------------------------------------------------------------------


def test_adopted_transition_time_changes_only_with_condition_status() -> None:
    sign = Sign("u")
    sign.see(None, 1, condition())
    assert sign.due_s() == float("-inf")
    assert sign.next("t1") == ShownCondition(condition(), "t1")
    sign.wrote(sign.next("t1"), 5, 100.0)
    sign.see(None, 4, condition())
    assert sign.due_s() is None, "that was before it was written"
    sign.see(ShownCondition(condition(), "t1"), 6, condition("ScaledByHand"))
    assert (sign.due_s(), sign.next("t2")) == (100.0 + NEWS_S, ShownCondition(condition("ScaledByHand"), "t1"))
    sign.see(ShownCondition(condition(), "t1"), 6, condition("WrongAnnotation", "False"))
    assert sign.next("t2") == ShownCondition(condition("WrongAnnotation", "False"), "t2")


def test_unchanged_condition_is_not_written_again_by_a_new_leader() -> None:
    sign = Sign("u")
    sign.see(ShownCondition(condition(), "t0"), 1, condition())
    assert sign.due_s() is None


def test_removed_condition_is_written_again_after_a_delay() -> None:
    sign = Sign("u")
    sign.see(None, 1, condition())
    sign.wrote(sign.next("t1"), 5, 100.0)
    sign.see(None, 6, condition())
    assert sign.due_s() == 100.0 + AGAIN_S


def test_rejected_condition_is_retried_on_change_or_new_leadership() -> None:
    sign = Sign("u")
    sign.see(None, 1, condition())
    sign.refused()
    sign.see(None, 2, condition())
    assert sign.due_s() is None
    sign.lead()
    assert sign.due_s() is not None
    sign.refused()
    sign.see(None, 3, condition("ScaledByHand"))
    assert sign.due_s() is not None


def test_condition_is_removed_when_the_workload_is_released() -> None:
    sign = Sign("u")
    sign.see(ShownCondition(condition(), "t0"), 1, None)
    assert (sign.due_s() is not None, sign.next("t1"), sign.empty) == (True, None, False)
    sign.wrote(None, 2, 100.0)
    assert (sign.due_s(), sign.empty) == (None, True)


# --- parsing ----------------------------------------------------------------------------------------------------------


def found(notes: dict[str, str], *conditions: dict[str, str], **metadata: str) -> dict[str, Any]:
    """A Deployment as the API server returns it."""
    facts = {"namespace": "n", "name": "ada", "uid": "u", "resourceVersion": "7", "annotations": notes, **metadata}
    template = {"spec": {"containers": [{"name": "engine"}]}}
    return {
        "metadata": facts, "spec": {"selector": {"matchLabels": {"app": "ada"}}, "template": template},
        "status": {"conditions": [{"type": "Available", "status": "True"}, *conditions]},
    }  # fmt: skip


OURS = {
    "type": "pilotlight.dev/Adopted", "status": "True", "reason": "Scaled", "message": "", "lastTransitionTime": "t0",
}  # fmt: skip


@pytest.mark.parametrize(("conditions", "there"), [((), None), ((OURS,), ShownCondition(condition(), "t0"))])
def test_only_the_condition_of_pilotlight_is_read_from_a_workload(
    conditions: tuple[dict[str, str], ...], there: ShownCondition | None
) -> None:
    seen = read_workload("Deployment", found({"pilotlight.dev/models": "ada"}, *conditions))
    assert isinstance(seen, WorkloadSeen)
    assert seen.shown == there


def test_workload_without_annotation_but_with_condition_counts_as_released() -> None:
    key = WorkloadKey("Deployment", "n", "ada")
    assert read_workload("Deployment", found({}, OURS)) == ReleasedWorkload(
        key, "u", 7, ShownCondition(condition(), "t0")
    )
    assert read_workload("Deployment", found({})) is None
    assert read_workload("Deployment", found({}, OURS, deletionTimestamp="t")) is None
