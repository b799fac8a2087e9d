"""Status and Events of Models on a real API server: their content, their state after a restart, and their cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.kubernetes.api import MERGE, Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.kubernetes.resources import event_writer, status_writer
from autoscaler.kubernetes.resources.events import MINUTE_MAX
from autoscaler.kubernetes.resources.status_writer import CHANGE_S, NEWS_S
from autoscaler.state.actions import FailStart, Plan
from autoscaler.state.events import FollowingSeen, LeadingSeen, Seen, Synced
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.custom_resources import model
from tests.integration.cluster.support.installations.manual_loop import (
    UNIX0,
    WAIT_S_MAX,
    House,
    at_rest,
    condition,
    has_condition,
    looks,
    until,
)

EXITED = "ended with status 3: no CUDA device"
ADA = ModelName("ada")


@pytest.fixture
async def counted(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """The product's client, which counts requests; status writers check often."""
    monkeypatch.setattr(status_writer, "LOOK_S", 0.02)
    monkeypatch.setattr(status_writer, "LOOK_S_MAX", 0.04)
    monkeypatch.setattr(status_writer, "PER_S", 500.0)
    monkeypatch.setattr(event_writer, "PER_S", 500.0)
    async with Api(await load_api_access(kubeconfig)) as one:
        yield one


@pytest.fixture
async def models(api: Api, namespace: str) -> str:
    """The path of the Models of a fresh namespace."""
    await custom_resources.install(api)
    return custom_resources.models(namespace)


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.mark.standard
async def test_ready_condition_changes_from_idle_to_starting_serving_and_back(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada", idleSeconds=5, residencySeconds=0))
    async with House(counted, namespace).running() as house:
        idle = await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        assert idle["status"]["observedGeneration"] == 1
        house.later(NEWS_S)
        house.call(2)
        house.see(Seen.STARTING)
        starting = await until(api, f"{models}/ada", has_condition("Ready", "Starting"))
        assert "1 waiting" in condition(starting, "Starting")["message"]
        assert condition(starting, "Placed")["message"] == "on gpu0"
        house.later(4.0)
        house.see(Seen.READY)
        house.call(3, 0)
        serving = await until(api, f"{models}/ada", has_condition("Ready", "Serving"))
        assert (serving["status"]["replicas"]["ready"], serving["status"]["lastStart"]["seconds"]) == (1, 4.0)
        assert condition(serving, "Starting")["status"] == "False"
        house.later(6.0)
        house.call(4, 0)
        house.later(1.0)
        house.see(Seen.CLEAN)
        house.later(NEWS_S)
        last = await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        assert last["status"]["learned"]["startSeconds"] == [4.0]
        assert last["metadata"]["generation"] == 1, "a status is no change of the spec"


async def test_manual_edits_do_not_conflict_with_status_updates(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    ada = model("ada")
    await api.apply(f"{models}/ada", ada, "person", force=False)
    async with House(counted, namespace).running() as house:
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        house.later(NEWS_S)
        ada["spec"]["paused"] = True
        await api.apply(f"{models}/ada", ada, "person", force=False)
        paused = await until(api, f"{models}/ada", has_condition("Ready", "Paused"))
        assert paused["status"]["observedGeneration"] == 2
        house.later(NEWS_S)
        edit = {"status": {"observedGeneration": 7}, "spec": {"paused": False}}
        await api.patch(f"{models}/ada", edit, MERGE, fieldManager="person")
        idle = await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        assert idle["status"]["observedGeneration"] == 3
    owners = {(one["manager"], one.get("subresource", "")) for one in idle["metadata"]["managedFields"]}
    assert ("pilotlight", "status") in owners
    assert ("pilotlight", "") not in owners


async def test_status_of_a_model_with_a_taken_name_shows_the_conflict(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada"))
    await api.create(models, model("ben", aliases=["ada"]))
    async with House(counted, namespace).running() as house:
        taken = await until(api, f"{models}/ben", has_condition("Ready", "NameTaken"))
        assert f"belongs to Model {namespace}/ada" in condition(taken, "Ready")["message"]
        house.later(NEWS_S)
        await api.delete(f"{models}/ada")
        await until(api, f"{models}/ben", has_condition("Ready", "Idle"))


async def test_recreated_model_does_not_keep_the_status_of_the_deleted_one(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada"))
    async with House(counted, namespace).running() as house:
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        await api.delete(f"{models}/ada")
        await api.create(models, model("ada", paused=True))
        house.later(NEWS_S)
        await until(api, f"{models}/ada", has_condition("Ready", "Paused"))
        assert not house.statuses.trouble


# --- cost -------------------------------------------------------------------------------------------------------------


async def test_idle_models_cause_no_api_server_requests_even_after_a_restart(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    for number in range(40):
        await api.create(models, model(f"m{number}"))
    async with House(counted, namespace).running():
        await until(api, models, lambda found: all(has_condition("Ready", "Idle")(one) for one in found["items"]))
    versions = [one["metadata"]["resourceVersion"] for one in (await api.get(models))["items"]]
    async with House(counted, namespace, now_s=50.0, unix_now_s=UNIX0 + 3600.3).running() as house:
        await looks(house)
        await at_rest(counted)
        asked = counted.requests
        for _ in range(5):
            house.later(CHANGE_S)
            await looks(house, 1)
        assert counted.requests == asked
    assert [one["metadata"]["resourceVersion"] for one in (await api.get(models))["items"]] == versions


async def test_status_writes_are_limited_per_second_and_per_minute(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada"))
    async with House(counted, namespace).running() as house:
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        house.call(2)
        house.see(Seen.STARTING)
        house.see(Seen.READY)
        await looks(house)
        assert has_condition("Ready", "Idle")(await api.get(f"{models}/ada")), "not within a second of the first"
        house.later(NEWS_S)
        await until(api, f"{models}/ada", has_condition("Ready", "Serving"))
        events_path = f"/api/v1/namespaces/{namespace}/events"
        await until(api, events_path, lambda found: {one["reason"] for one in found["items"]} >= {"Woken", "Started"})
        asked = counted.requests
        for number in range(3, 8):
            house.later(NEWS_S)
            house.call(number, number)
            await looks(house, 1)
        assert counted.requests == asked, "more Calls are no news"
        house.stepped.now_s += CHANGE_S
        house.call(8, 7)
        await until(api, f"{models}/ada", lambda found: found["status"]["demand"]["waiting"] == 7)
        await looks(house)
        assert counted.requests == asked + 1
        house.call(9, 8)
        await looks(house)
    await house.statuses.flush(WAIT_S_MAX)
    assert (await api.get(f"{models}/ada"))["status"]["demand"]["waiting"] == 8, "the end does not wait for its minute"


async def test_follower_writes_no_status_until_leading_and_synced(
    kubeconfig: Path, api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada"))
    writes_s = 0.0
    async with Api(await load_api_access(kubeconfig), lambda: writes_s) as fenced:
        house = House(fenced, namespace)
        async with house.running():
            house.stepped.step(FollowingSeen())
            await looks(house)
            house.stepped.step(LeadingSeen(epoch=2), Synced())
            await looks(house)  # it considers itself the leader, but may not write
            assert "conditions" not in (await api.get(f"{models}/ada")).get("status", {})
            writes_s = 60.0
            house.stepped.step()
            await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
            house.stepped.step(LeadingSeen(epoch=3))
            house.later(NEWS_S)
            house.call(2)
            await looks(house)
            assert has_condition("Ready", "Idle")(await api.get(f"{models}/ada")), "what there is is not known yet"
            house.stepped.step(Synced())
            await until(api, f"{models}/ada", has_condition("Ready", "Starting"))


# --- state that survives a restart ------------------------------------------------------------------------------------


async def test_start_back_off_of_a_model_survives_an_autoscaler_restart(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    """Its start failed before; the next process, with another clock, starts nothing until the recorded time."""
    await api.create(models, model("ada", start={"retries": 0}))
    async with House(counted, namespace).running() as house:
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        house.later(NEWS_S)
        house.call(2)
        house.see(Seen.EXITED, reason=EXITED)
        house.see(Seen.CLEAN)
        failed = await until(api, f"{models}/ada", has_condition("Ready", "CrashLoop"))
        assert EXITED in condition(failed, "Ready")["message"]
        assert condition(failed, "Degraded")["status"] == "True"
        kept = failed["status"]["learned"]
        assert (kept["episodes"], kept["failure"]) == (1, EXITED)
        assert kept["retryAt"] == kept["refusedUntil"]
    async with House(counted, namespace, now_s=5000.0, unix_now_s=UNIX0 + 30).running() as house:
        history = house.stepped.loop.world.learned.histories[ADA]
        assert (history.episodes, history.failure) == (1, EXITED)
        assert history.retry_at_s == pytest.approx(5000.0 + 31, abs=1.0)
        house.call(2)
        assert house.stepped.driver.started == []
        house.later(29.0)
        house.call(3)
        assert house.stepped.driver.started == []
        house.later(4.0)
        house.call(4)
        assert [one.model for one in house.stepped.driver.started] == ["ada"]


async def test_new_leader_keeps_the_start_back_off_of_the_former_leader(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    """It ran all the time, but did not observe the failed start itself."""
    await api.create(models, model("ada", start={"retries": 0}))
    async with (
        House(counted, namespace).running() as leader,
        House(counted, namespace, now_s=7.0).running() as next_one,
    ):
        next_one.stepped.step(FollowingSeen())
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        leader.later(NEWS_S)
        leader.call(2)
        leader.see(Seen.EXITED, EXITED)
        async with asyncio.timeout(WAIT_S_MAX):
            while not next_one.stepped.loop.world.learned.histories[ADA].refused_until_s:
                await asyncio.sleep(0.02)
        next_one.stepped.step(LeadingSeen(epoch=2), Synced())
        next_one.call(2)
        assert next_one.stepped.driver.started == []
        next_one.later(63.0)
        next_one.call(3)
        assert [one.model for one in next_one.stepped.driver.started] == ["ada"]


# --- Events -----------------------------------------------------------------------------------------------------------


async def test_events_of_a_model_life_cycle_are_recorded_on_the_model(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    uid = (await api.create(models, model("ada", idleSeconds=5, residencySeconds=0)))["metadata"]["uid"]
    about = (
        f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name%3Dada%2C"
        f"involvedObject.kind%3DModel%2CinvolvedObject.uid%3D{uid}"
    )
    async with House(counted, namespace).running() as house:
        house.call(2)
        house.see(Seen.STARTING)
        house.see(Seen.READY)
        house.call(3, 0)
        house.later(6.0)
        house.call(4, 0)
        house.later(1.0)
        house.see(Seen.CLEAN)
        events = await until(api, about, lambda found: len(found["items"]) == 4)
    by_reason = {one["reason"]: one for one in events["items"]}
    assert set(by_reason) == {"Woken", "Started", "Drained", "Stopped"}
    assert "1 waiting" in by_reason["Woken"]["message"]
    assert all((one["type"], one["count"]) == ("Normal", 1) for one in events["items"])
    assert all(one["source"] == {"component": "pilotlight"} for one in events["items"])
    assert by_reason["Woken"]["lastTimestamp"] == "2027-01-15T08:00:00Z"


async def test_repeated_start_failures_update_the_count_of_one_event(
    api: Api, counted: Api, namespace: str, models: str
) -> None:
    await api.create(models, model("ada"))
    path = f"/api/v1/namespaces/{namespace}/events"
    async with House(counted, namespace).running() as house:
        await until(api, f"{models}/ada", has_condition("Ready", "Idle"))
        at, asked = house.stepped.loop.world, counted.requests

        def fail(number: int) -> None:
            action = FailStart(model=ADA, reason=f"no engine, look {number}")
            house.events.on_step(LoopStep(at, at, Plan(), (action,), (), 0.0, 0.0, 0.0))

        for number in range(1, 61):
            fail(number)
            await asyncio.sleep(0.01)
        await until(api, path, lambda found: found["items"])
        assert counted.requests - asked <= MINUTE_MAX
        house.stepped.now_s += 60.0
        fail(61)
        events = await until(api, path, lambda found: found["items"] and found["items"][0]["count"] == 61)
        assert len(events["items"]) == 1
        assert events["items"][0]["message"] == "cannot start: no engine, look 61"
        assert events["items"][0]["type"] == "Warning"
        await api.delete(f"{path}/{events['items'][0]['metadata']['name']}")
        fail(62)
        await until(api, path, lambda found: [one["count"] for one in found["items"]] == [1])
        assert house.events.dropped == 0
