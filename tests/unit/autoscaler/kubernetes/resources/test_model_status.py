"""The status of a Model: one reason per situation, timestamps that change only if needed, and restoring from it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.fold.fold import fold
from autoscaler.kubernetes.resources import model_status as statuses
from autoscaler.kubernetes.resources.document_merge import CUSTOMS
from autoscaler.kubernetes.resources.document_watcher import ModelObject
from autoscaler.kubernetes.resources.model_conditions import ConditionValue, SpecProblem, StatusInput, build_conditions
from autoscaler.kubernetes.resources.model_status import NO_STATUS, ClockReading, Status, Subject, list_subjects
from autoscaler.kubernetes.watch import ObjectKey
from autoscaler.schema import crds
from autoscaler.spec.document_names import Origin, Settled
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, ModelLoad
from tests.support.builders.worlds import T0, drain, gateway, level, model, replace_fields, replica, world
from tests.support.example_budget import examples

ADA = model("ada")
ONE = Subject("default", "ada", "u1", 3, ModelName("ada"))
UNIX0 = 1_800_000_000.0
NOW = ClockReading(T0, UNIX0)
EXITED = "ended with status 3: no CUDA device"


def case(**fields: Any) -> StatusInput:
    """An idle Model at zero; `fields` replace any fields of `StatusInput`."""
    return StatusInput(3, ADA, (), ModelLoad(), History())._replace(**fields)


def starting(waits: str = "") -> StatusInput:
    return case(replicas=(replica(ADA, "r", state=S.STARTING, reason="wake ada: 3 waiting", waits=waits),))


def sent(status: Status) -> dict[str, Any]:
    """The status as JSON for the API server."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(statuses.encode_status(status)))
    return made


def unmet(reason: str, *, never: bool = False) -> Unmet:
    return Unmet(model=ADA.name, reason=reason, never=never)


def condition_of(of: StatusInput, type: str) -> ConditionValue:
    (one,) = [one for one in build_conditions(of) if one.type == type]
    return one


SITUATIONS = {
    "Idle": (case(), "True"),
    "Serving": (case(replicas=(replica(ADA, "r"),)), "True"),
    "Paused": (case(model=model("ada", paused=True), replicas=(replica(ADA, "r"),)), "False"),
    "Starting": (starting(), "False"),
    "WaitingForRoom": (case(unmet=unmet("gpu0 is full"), load=ModelLoad(waiting=1)), "False"),
    "NoDeviceFits": (case(unmet=unmet("needs 90Gi; the largest has 80Gi", never=True)), "False"),
    "CannotStart": (case(obstacle="no engine vllm"), "False"),
    "StartFailed": (case(history=History(failure="not ready after 900 s (start.secondsMax)")), "False"),
    "CrashLoop": (case(history=History(failure=EXITED, tries=2)), "False"),
    "OOMKilled": (case(history=History(failure="was killed for lack of memory (OOMKilled)")), "False"),
    "ImagePullBackOff": (starting(waits="ErrImagePull: not found"), "False"),
    "Unschedulable": (starting(waits="Unschedulable: 0/3 nodes are available"), "False"),
    "CreateContainerConfigError": (starting(waits='CreateContainerConfigError: secret "x" not found'), "False"),
    "Unready": (case(replicas=(replica(ADA, "r", state=S.UNREADY),)), "False"),
    "Draining": (case(replicas=(replica(ADA, "r", state=S.DRAINING, drain=drain()),)), "False"),
    "NameTaken": (case(model=None, problem=SpecProblem("NameTaken", "team-a/ada has it")), "False"),
    "Invalid": (case(model=None, problem=SpecProblem("Invalid", "spec.slots: expected a number")), "False"),
    "NotInForce": (case(model=None), "False"),
}


@pytest.mark.parametrize("reason", SITUATIONS)
def test_each_model_state_has_its_own_ready_condition_reason(reason: str) -> None:
    of, status = SITUATIONS[reason]
    ready = condition_of(of, "Ready")
    assert (ready.reason, ready.status) == (reason, status)
    assert ready.message


def test_conditions_of_any_model_state_have_valid_kubernetes_fields() -> None:
    quarantined = [case(fault="KeyError: 7"), case(fault="KeyError: 7", replicas=(replica(ADA, "r"),))]
    for of in (*(of for of, _ in SITUATIONS.values()), *quarantined):
        conditions = build_conditions(of)
        types = ["Ready", "Placed", "WeightsReady", "Starting", "Degraded", "Adopted", "Faulty"]
        assert [one.type for one in conditions] == types
        assert all(one.reason.isalpha() and one.status in ("True", "False", "Unknown") for one in conditions)


def test_model_with_a_fault_is_faulty_and_stays_ready_while_it_serves() -> None:
    cold, warm = case(fault="KeyError: 7"), case(fault="KeyError: 7", replicas=(replica(ADA, "r"),))
    assert condition_of(cold, "Ready")[1:3] == ("False", "Faulty")
    assert condition_of(warm, "Ready")[1:3] == ("True", "Serving")
    assert [condition_of(of, "Faulty")[1:3] for of in (cold, warm)] == [("True", "InternalError")] * 2
    assert "KeyError: 7" in condition_of(warm, "Faulty").message
    assert condition_of(case(), "Faulty")[1:3] == ("False", "NoFault")


def test_model_waiting_for_capacity_is_not_degraded() -> None:
    waits = starting(waits="Unschedulable: 0/3 nodes are available")
    assert condition_of(waits, "Ready").message == "waiting for capacity: Unschedulable: 0/3 nodes are available"
    assert (condition_of(waits, "Placed").status, condition_of(waits, "Starting").status) == ("False", "True")
    assert condition_of(waits, "Degraded").status == "False"


def test_model_whose_pod_pulls_its_image_is_not_degraded() -> None:
    waits = starting(waits="node n1 prepares its image and volumes")
    assert condition_of(waits, "Ready")[1:] == ("False", "Starting", "node n1 prepares its image and volumes")
    assert condition_of(waits, "Degraded").status == "False"
    assert condition_of(starting(waits="ErrImagePull: not found"), "Degraded").reason == "ImagePullBackOff"


def test_first_exit_is_start_failed_and_repeated_exits_are_crash_loop() -> None:
    first = case(history=History(failure=EXITED, tries=1))
    assert condition_of(first, "Ready").reason == "StartFailed"
    assert condition_of(case(history=History(failure=EXITED, episodes=1)), "Ready").reason == "CrashLoop"


def test_serving_model_with_failing_start_is_ready_and_degraded() -> None:
    of = case(replicas=(replica(ADA, "r"),), history=History(failure=EXITED, tries=1))
    assert condition_of(of, "Ready").reason == "Serving"
    assert (condition_of(of, "Degraded").status, condition_of(of, "Degraded").reason) == ("True", "StartFailed")


def test_long_message_of_a_model_condition_is_truncated() -> None:
    assert len(condition_of(case(obstacle="x" * 5000), "Ready").message) == 1024


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_serving_model_has_its_replicas_demand_and_last_start() -> None:
    served = replica(ADA, "r1", created_s=T0 - 30, started_s=T0 - 25, ready_s=T0 - 9, wanted_s=T0 - 30.4,
                     reason="wake ada: 3 waiting, tenant acme")  # fmt: skip
    at = world(
        [ADA], replicas=[served, replica(ADA, "r2", state=S.FALLING_ASLEEP)],
        gateways=[gateway(levels=[level("ada", 2, 4)])],
        histories={"ada": History(starts_s=(16.0,), retry_at_s=0.0, last_activity_s=T0 - 2)},
    )  # fmt: skip
    made = sent(statuses.render_status(statuses.build_status_input(at, {}, ONE), NO_STATUS, NOW))
    assert made["observedGeneration"] == 3
    assert {state: count for state, count in made["replicas"].items() if count} == {"ready": 1, "fallingAsleep": 1}
    assert made["demand"] == {"waiting": 2, "running": 4}
    assert made["lastStart"] == {
        "seconds": 21.4, "phases": {"decide": 0.4, "place": 5.0, "load": 16.0},
        "reason": "wake ada: 3 waiting, tenant acme",
    }  # fmt: skip
    assert made["learned"] == {"startSeconds": [16.0], "lastActivity": "2027-01-15T07:59:58Z"}
    assert made["conditions"][0] == {
        "type": "Ready", "status": "True", "reason": "Serving", "message": "1 replica serves requests",
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }  # fmt: skip


def test_status_with_all_fields_has_exactly_those_of_the_crd_schema() -> None:
    """The schema has no other fields either; the API server rejects a status with a field that has no schema."""
    full = History((1.0,), T0, tries=1, retry_at_s=T0, episodes=1, refused_until_s=T0, failure="x")
    made = sent(statuses.render_status(case(replicas=(replica(ADA, "r"),), history=full), NO_STATUS, NOW))
    assert keys(made) | {("conditions", "observedGeneration")} == places(crds.MODEL_STATUS)


def keys(value: object, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of the leaves, including those in lists; the keys of `phases` are not checked."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {path for one in value for path in keys(one, at)}
    if not isinstance(value, dict) or at[-1:] == ("phases",):
        return {at}
    return {path for key, one in value.items() for path in keys(one, (*at, key))}


def places(schema: Any, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The same for a schema."""
    inner = schema.get("items", schema)
    if "properties" not in inner:
        return {at}
    return {path for key, one in inner["properties"].items() for path in places(one, (*at, key))}


def test_transition_time_changes_only_with_condition_status() -> None:
    first = statuses.render_status(case(), NO_STATUS, NOW)
    later = ClockReading(T0 + 50, UNIX0 + 50)
    serving = statuses.render_status(case(replicas=(replica(ADA, "r"),)), first, later)
    assert serving.conditions[0].reason == "Serving"
    assert serving.conditions[0].last_transition_time == datetime.fromtimestamp(UNIX0, UTC), "True all along"
    paused = statuses.render_status(case(model=model("ada", paused=True)), serving, later)
    assert paused.conditions[0].last_transition_time == datetime.fromtimestamp(UNIX0 + 50, UTC)


def test_last_start_stays_in_the_status_after_the_replica_ends() -> None:
    seen = statuses.render_status(case(replicas=(replica(ADA, "r", started_s=T0 - 105),)), NO_STATUS, NOW)
    assert statuses.encode_status(seen)["lastStart"]
    assert statuses.render_status(case(), seen, NOW).last_start == seen.last_start
    found = statuses.render_status(case(replicas=(replica(ADA, "r", found=True),)), NO_STATUS, NOW)
    assert "lastStart" not in statuses.encode_status(found)


def test_invalid_or_renamed_model_object_shows_the_reason_and_no_replicas() -> None:
    objects = {
        ObjectKey("default", "ada"): ModelObject("u1", 1, ADA, ""),
        ObjectKey("team-a", "ada"): ModelObject("u2", 2, ADA, ""),
        ObjectKey("team-b", "ada"): ModelObject("u3", 3, None, "spec.slots: expected a number"),
    }
    names = {
        Origin(CUSTOMS, "default", "ada"): ModelName("ada"), Origin(CUSTOMS, "team-a", "ada"): ModelName("team-a/ada")
    }  # fmt: skip
    taken = {Origin(CUSTOMS, "team-a", "ada"): "`ada` belongs to Model default/ada"}
    at = world([ADA, model("team-a/ada")], replicas=[replica(ADA, "r")])
    statuses_ = [
        statuses.render_status(statuses.build_status_input(at, {}, one), NO_STATUS, NOW)
        for one in list_subjects(objects, Settled((), names, taken), lambda *_: "")
    ]
    assert [(one.observed_generation, one.conditions[0].reason, one.replicas.ready) for one in statuses_] == [
        (1, "Serving", 1), (2, "NameTaken", 0), (3, "Invalid", 0),
    ]  # fmt: skip
    assert statuses_[1].conditions[0].message == "`ada` belongs to Model default/ada"


def test_model_gets_no_status_until_its_serving_installation_is_known() -> None:
    objects = {
        ObjectKey(name, "ada"): ModelObject(name, 1, None if name == "wrong" else ADA, "no" if name == "wrong" else "")
        for name in ("ours", "wrong", "theirs", "unknown")
    }
    whose = {"ours": "", "wrong": "", "theirs": "b/x serves it", "unknown": None}
    names = {Origin(CUSTOMS, key.namespace, key.name): ModelName("ada") for key in objects}
    found = list(list_subjects(objects, Settled((), names, {}), lambda namespace, _: whose[namespace]))
    assert [(one.namespace, one.model, one.elsewhere) for one in found] == [
        ("ours", "ada", ""), ("wrong", "ada", ""), ("theirs", None, "b/x serves it")
    ]  # fmt: skip


def test_served_elsewhere_condition_is_ignored_when_status_is_read() -> None:
    fields = {
        "type": "ServedElsewhere",
        "status": "True",
        "reason": "r",
        "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    assert statuses.read_status({"conditions": [fields]}) == NO_STATUS


@pytest.mark.parametrize("reason", SITUATIONS)
def test_summary_of_status_input_equals_that_of_the_rendered_status(reason: str) -> None:
    of, _ = SITUATIONS[reason]
    assert statuses.summarize_input(of) == statuses.summarize_status(statuses.render_status(of, NO_STATUS, NOW))


def test_change_of_message_or_demand_leaves_the_status_summary_equal() -> None:
    light = case(unmet=unmet("r is resident 2 s"), load=ModelLoad(waiting=1))
    same = case(unmet=unmet("r is resident 3 s"), load=ModelLoad(waiting=7))
    assert statuses.summarize_input(light) == statuses.summarize_input(same)
    assert statuses.summarize_input(light) != statuses.summarize_input(case())


# --- round trip -------------------------------------------------------------------------------------------------------

MOMENTS = st.none() | st.floats(-1e6, T0 + 1e6).filter(bool)
HISTORIES = st.builds(
    History, starts_s=st.lists(st.floats(0, 1e4), max_size=32).map(tuple), tries=st.integers(0, 9),
    episodes=st.integers(0, 9), failure=st.text(max_size=9), last_activity_s=MOMENTS,
    retry_at_s=MOMENTS.map(lambda at: at or 0.0), refused_until_s=MOMENTS.map(lambda at: at or 0.0),
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(HISTORIES, st.floats(1, 1e6), st.floats(-0.4, 0.4))
def test_history_in_a_status_is_restored_on_a_machine_with_another_clock(
    history: History, boot_s: float, jitter_s: float
) -> None:
    """Restored an hour later with the monotonic clock of another machine and a slightly different wall clock."""
    written = statuses.render_status(case(history=history), NO_STATUS, NOW)
    known = statuses.read_status(statuses.encode_status(written))
    assert known == written
    back = statuses.restore_history(known, boot_s, UNIX0 + 3600)
    again = ClockReading(boot_s + 10, UNIX0 + 3610 + jitter_s)
    assert statuses.build_learned(back, again) == known.learned
    for moment in ("retry_at_s", "refused_until_s", "last_activity_s"):
        was, now = getattr(history, moment), getattr(back, moment)
        assert bool(was) == bool(now)
        if was:
            assert now - boot_s + 3600 == pytest.approx(was - T0, abs=0.51)


def test_history_restored_from_a_status_keeps_its_retry_count() -> None:
    known = statuses.render_status(case(history=History(tries=2, first_try_s=T0 - 9, failure=EXITED)), NO_STATUS, NOW)
    back = statuses.restore_history(known, 50.0, UNIX0 + 9)
    assert (back.tries, back.first_try_s) == (2, 50.0)


def test_empty_status_restores_no_history_and_invalid_one_raises() -> None:
    assert statuses.restore_history(statuses.read_status({}), 1.0, UNIX0) == History()
    assert statuses.read_status({"conditions": [], "later": 1}) == Status()
    with pytest.raises(ValueError, match="tries"):
        statuses.read_status({"learned": {"tries": "many"}})


def test_follower_takes_history_from_status_and_leader_keeps_its_own() -> None:
    mine = History(starts_s=(9.0,), tries=2, first_try_s=T0 - 5, failure="x", last_activity_s=T0 - 1, regrets=1)
    known = statuses.render_status(
        case(history=History((3.0,), T0 - 4, episodes=2, refused_until_s=T0 + 60)), NO_STATUS, NOW
    )
    seen, _ = statuses.restore_histories({ADA.name: sent(known)}, T0, UNIX0)
    at = world([ADA], histories={"ada": mine})
    assert fold(at, seen, T0)[0].learned.histories[ADA.name] == mine
    following, _ = fold(replace_fields(at, leads=False), seen, T0)
    assert following.learned.histories[ADA.name] == History(
        starts_s=(3.0,), last_activity_s=T0 - 1, episodes=2, refused_until_s=T0 + 60, regrets=1
    )


def test_invalid_status_loses_history_of_its_own_model_only() -> None:
    known = sent(statuses.render_status(case(history=History(episodes=2)), NO_STATUS, NOW))
    seen, wrong = statuses.restore_histories({ADA.name: {"learned": 1}, ModelName("ben"): known}, T0, UNIX0)
    assert [(one.model, one.history.episodes) for one in seen] == [("ben", 2)]
    assert len(wrong) == 1
    assert wrong[0].startswith("status of Model ada: Expected `object`")


# --- changes ----------------------------------------------------------------------------------------------------------


def test_model_counts_as_changed_if_any_input_of_its_status_changes() -> None:
    ben, cleo, dora = model("ben"), model("cleo"), model("dora")
    before = world([ADA, ben, cleo, dora], replicas=[replica(ADA, "r")])
    assert statuses.list_changed_models(before, before) == set()
    after = replace(
        before, replicas={}, by_model={}, loads={ModelName("ben"): ModelLoad(waiting=1)},
        models={**before.models, cleo.name: model("cleo", paused=True)},
    )  # fmt: skip
    assert statuses.list_changed_models(before, after) == {"ada", "ben", "cleo"}
    assert statuses.list_changed_models(before, replace_fields(before, obstacles={dora.name: "no image"})) == {"dora"}
