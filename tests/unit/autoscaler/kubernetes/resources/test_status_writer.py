"""The writer of statuses and Events with a fake API server: the order of writes, and the effect of rejected writes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.kubernetes.api import JSON, Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.resources import event_writer, status_writer
from autoscaler.kubernetes.resources import model_status as status
from autoscaler.kubernetes.resources.document_watcher import StatusSeen
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.kubernetes.resources.model_status import NO_STATUS, Subject
from autoscaler.kubernetes.resources.status_writer import CHANGE_S, NEWS_S, PER_S, RETRY_S, Statuses
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.provisioning.unplaceable_models import Fitting
from autoscaler.spec.model import Model
from autoscaler.state.actions import FailStart, Plan
from autoscaler.state.world import ModelLoad, World
from tests.support.builders.mig_nodes import town
from tests.support.builders.worlds import T0, device, model, replace_fields, replica, world
from tests.support.harness.faults.contained_faults import raised
from tests.support.harness.faults.fault_injection import concerns, inject

WAIT_S_MAX = 5.0
MODELS = [replace(model(f"m{number}"), uid=f"u{number}") for number in range(60)]
SUBJECTS = [Subject("default", one.name, one.uid, 1, one.name) for one in MODELS]
REFUSED = ApiError(422, "Invalid", "status.replicas: no")
AWAY = UnreachableError("PATCH: ClientConnectorError")


class Paper(Api):
    """An empty fake API server that accepts all writes after raising each of `refusals` once."""

    def __init__(self) -> None:
        self.wrote: list[Object] = []
        self.owners: list[tuple[str, str]] = []
        """For each write: the field manager, and whether it takes over fields of other managers."""
        self.refusals: list[Exception] = []
        self.version = 100
        """Resource version of the last write."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Runs before a write returns."""

    def unix_s(self) -> float:
        return time.time()

    async def _ask(  # noqa: PLR0917  the signature of Api._ask
        self,
        method: str,
        path: str,
        body: Object | list[Object] | None = None,
        kind: str = JSON,
        query: Mapping[str, str] | None = None,
        within_s: float | None = None,
        bytes_max: int | None = None,
    ) -> bytes:
        if method == "GET":
            return b'{"items":[],"metadata":{}}'
        if self.refusals:
            raise self.refusals.pop(0)
        assert isinstance(body, dict)
        self.wrote.append(body)
        self.owners.append(((query or {}).get("fieldManager", ""), (query or {}).get("force", "")))
        self.version += 1
        answer = {"metadata": {"resourceVersion": str(self.version)}}
        self.meanwhile()
        return msgspec.json.encode(answer)


class House:
    """A status writer without a task; the test moves its clock and its `World`."""

    def __init__(self, fault: Callable[[ModelName, str, Exception], None] = raised) -> None:
        self.now_s = T0
        self.paper = Paper()
        self.at = world(MODELS)
        self.statuses = Statuses(
            self.paper, clock=lambda: self.now_s, wall=lambda: self.now_s, fault=fault, installation="me"
        )
        self.statuses.put(SUBJECTS)
        self.show(self.at)

    def show(self, at: World) -> None:
        self.at = at
        self.statuses.on_step(step(at))
        self.statuses._look({})

    def pause(self, *ones: Model) -> None:
        """Toggle `spec.paused` of these Models, so that their status changes."""
        turned = {one.name: self.at.models[one.name] for one in ones}
        made = {n: replace(m, spec=replace(m.spec, paused=not m.spec.paused)) for n, m in turned.items()}
        self.show(replace(self.at, models={**self.at.models, **made}))

    def readiness(self, of: Model) -> tuple[str, str]:
        """Status and reason of the Ready condition that was written last."""
        (kept,) = [kept for kept in self.statuses._kept.values() if kept.subject.model == of.name]
        return kept.status.conditions[0].status, kept.status.conditions[0].reason

    def due(self) -> list[str]:
        return [kept.subject.name for kept in self.statuses._due()]

    async def write(self) -> list[str]:
        """One round: the names whose status was written."""
        return [kept.subject.name for kept in self.statuses._due() if await self.statuses._write(kept)]

    async def settle(self) -> None:
        """Write all pending statuses."""
        while await self.write():
            pass


def step(at: World, *actions: FailStart) -> LoopStep:
    return LoopStep(at, at, Plan(), actions, (), 0.0, 0.0, 0.0)


# --- order of writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    ["status_writer:Statuses._apply", "status_writer:_Kept.see", "model_status:encode_status"],
)
async def test_model_whose_status_raises_is_reported_and_others_are_written(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, faults = Counter[str](), Counter[str]()

    def about(*args: object, **_: object) -> bool:
        calls.update(["encode"] * ("encode" in point))
        return calls["encode"] == 1 or any(concerns("m5")(one) for one in args)

    inject(monkeypatch, f"autoscaler.kubernetes.resources.{point}", about, expected=False)
    house = House(lambda name, *_: faults.update([name]))
    first = house.due()[0]
    await house.settle()
    broken = first if "encode" in point else "m5"
    written = {body["metadata"]["name"] for body in house.paper.wrote}
    assert {one.name for one in MODELS} - {broken} <= written
    assert faults.keys() == {broken}
    if "see" not in point:
        assert broken not in written


async def test_stored_status_that_cannot_be_decoded_counts_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        {"metadata": {"uid": f"u{number}", "resourceVersion": "7"}, "status": {"observedGeneration": number}}
        for number in (1, 2)
    ]
    house = House()

    async def pages(path: str, **_: object) -> AsyncIterator[ListPage]:
        del path
        yield ListPage("", "", items, [], ("", ""))

    monkeypatch.setattr(house.paper, "pages", pages)
    inject(
        monkeypatch,
        "autoscaler.kubernetes.resources.model_status:read_status",
        lambda seen: seen == {"observedGeneration": 1},
        expected=False,
    )
    assert {
        uid: (status == NO_STATUS, version) for uid, (status, version) in (await house.statuses._read()).items()
    } == {"u1": (True, 7), "u2": (False, 7)}


async def test_status_writes_are_rate_limited_and_ordered_by_waiting_time() -> None:
    house = House()
    assert len(house.due()) == int(PER_S)
    await house.settle()
    assert len(house.paper.wrote) == len(MODELS)
    house.now_s += NEWS_S
    house.pause(*MODELS[40:])
    house.now_s += 0.1
    house.pause(*MODELS[:40])
    first, second = await house.write(), await house.write()
    assert sorted(first) == sorted(one.name for one in MODELS[40:])
    assert first != second
    assert not set(first) & set(second)


async def test_model_served_elsewhere_gets_only_the_served_elsewhere_condition() -> None:
    house = House()
    await house.settle()
    house.paper.wrote.clear()
    there = SUBJECTS[0]._replace(model=None, elsewhere="installation a/b serves it")
    for shown in ("", "installation a/b serves it"):
        house.statuses.put([there._replace(shown=shown), *SUBJECTS[1:]])
        house.show(house.at)
        await house.settle()
        for one in house.statuses._elsewhere:
            await house.statuses._write_elsewhere(one)
    (written,) = house.paper.wrote
    (condition,) = written["status"]["conditions"]
    assert (condition["type"], condition["message"]) == ("ServedElsewhere", "installation a/b serves it")
    assert house.paper.owners[-1] == ("pilotlight-me", "false"), "of its own, and it takes nothing of the other's"


async def test_removal_of_a_served_elsewhere_condition_stops_after_a_conflict() -> None:
    house = House()
    await house.settle()
    house.paper.wrote.clear()
    house.paper.refusals = [ApiError(409, "Conflict", "another source reports it")]
    for _ in range(3):
        house.statuses.put([SUBJECTS[0]._replace(shown="installation a/b serves it"), *SUBJECTS[1:]])
        house.show(house.at)
        for one in house.statuses._elsewhere:
            await house.statuses._write_elsewhere(one)
    assert (house.paper.wrote, house.paper.refusals, house.statuses.trouble) == ([], [], "")


async def test_served_elsewhere_condition_is_retried_after_a_429_response() -> None:
    house = House()
    await house.settle()
    house.paper.wrote.clear()
    house.paper.refusals = [ApiError(429, "TooManyRequests", "later")]
    house.statuses.put([SUBJECTS[0]._replace(model=None, elsewhere="b/x serves it"), *SUBJECTS[1:]])
    for pause_s, wanted in ((0.0, 1), (RETRY_S / 2, 0), (RETRY_S, 1)):
        house.now_s += pause_s
        house.show(house.at)
        assert len(house.statuses._elsewhere) == wanted
        for one in house.statuses._elsewhere:
            await house.statuses._write_elsewhere(one)
    assert len(house.paper.wrote) == 1


async def test_model_taken_from_another_installation_keeps_its_stored_status() -> None:
    house = House()
    await house.settle()
    foreign = SUBJECTS[0]._replace(model=None, elsewhere="b/x serves it", shown="b/x serves it")
    found: dict[str, tuple[status.Status, int]] = {}
    house.statuses.put([foreign, *SUBJECTS[1:]])
    house.statuses.on_step(step(house.at))
    house.statuses.hear(StatusSeen(foreign.uid, 200, {"observedGeneration": 7}))
    house.statuses._look(found)
    house.statuses.put(SUBJECTS)
    house.statuses.on_step(step(house.at))
    house.statuses._look(found)
    assert house.statuses._kept[foreign.uid].status.observed_generation == 7


async def test_exception_in_fit_check_of_one_model_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, never, bad, huge = list[str](), Fitting.never, MODELS[0], MODELS[1]

    def raising(self: Fitting, of: Model) -> str:
        if of.name == bad.name:
            raise ValueError("bad memory")
        return never(self, of)

    monkeypatch.setattr(Fitting, "never", raising)
    house = House(lambda name, what, error: faults.append(f"{what} of {name}: {error}"))
    house.show(world(MODELS, [device(memory_gi=4)]))
    await house.settle()
    assert set(faults) == {f"status of {bad.name}: bad memory"}
    assert house.readiness(huge) == ("False", "NoDeviceFits")


async def test_model_that_fits_no_device_is_not_ready_until_one_fits() -> None:
    house, huge = House(), MODELS[0]
    small = world(MODELS, [device(memory_gi=4)])
    house.show(small)
    await house.settle()
    assert house.readiness(huge) == ("False", "NoDeviceFits")
    house.now_s += CHANGE_S
    house.show(replace(house.at, version=house.at.version + 1))
    assert house.due() == [], "it is known already"
    house.show(world(MODELS, [device()]))
    await house.settle()
    assert house.readiness(huge) == ("True", "Idle")
    house.now_s += CHANGE_S
    house.show(world(MODELS, [device(memory_gi=4)], [replica(huge, "r")]))
    await house.settle()
    assert (house.readiness(huge), house.readiness(MODELS[1])) == (("True", "Serving"), ("False", "NoDeviceFits"))


async def test_model_that_fits_only_after_mig_repartitioning_is_ready_and_idle() -> None:
    house, huge = House(), MODELS[0]
    cut = replace_fields(town(), models=house.at.models, cuttable={})
    house.show(replace_fields(cut, slices={"g": device("g", 4)}))
    await house.settle()
    assert house.readiness(huge) == ("False", "NoDeviceFits")
    house.now_s += CHANGE_S
    house.show(replace_fields(house.at, cuttable=town().nodes.cuttable))
    await house.settle()
    assert house.readiness(huge) == ("True", "Idle")


async def test_frequent_status_changes_of_a_model_do_not_delay_those_of_another() -> None:
    house = House()
    await house.settle()
    asked = Counter[str]()
    for tick in range(100):
        house.now_s += 0.1
        house.pause(MODELS[0])
        if tick % 20 == 0:
            house.pause(MODELS[1])
        asked.update(await house.write())
    assert asked[MODELS[0].name] <= 10
    assert asked[MODELS[1].name] == 5
    assert len(asked) == 2


async def test_demand_only_status_write_is_delayed_and_skipped_if_reverted() -> None:
    house = House()
    await house.settle()
    busy = {MODELS[0].name: ModelLoad(running=1)}
    house.show(replace(house.at, loads=busy))
    house.now_s += CHANGE_S - 1
    assert house.due() == []
    house.now_s += 1
    assert await house.write() == [MODELS[0].name]
    house.show(replace(house.at, loads={}))
    house.show(replace(house.at, loads=busy))
    house.now_s += CHANGE_S
    assert await house.write() == []
    assert house.due() == []


async def test_recreated_model_object_gets_a_new_status() -> None:
    house = House()
    house.statuses.put(SUBJECTS[:3])
    house.show(house.at)
    await house.settle()
    house.statuses.put(())
    house.show(house.at)
    house.statuses.put([SUBJECTS[0]._replace(uid="new")])
    house.show(house.at)
    assert await house.write() == [MODELS[0].name], "though the last of its name had the same status"
    assert [one["metadata"]["uid"] for one in house.paper.wrote] == ["u0", "u1", "u2", "new"]


# --- writes of others -------------------------------------------------------------------------------------------------


def heard(house: House, version: int, fields: Mapping[str, object]) -> list[str]:
    """The names due for a write some time after the watch reported this status of the first Model."""
    house.statuses.hear(StatusSeen(MODELS[0].uid, version, fields))
    house.now_s += NEWS_S
    house.show(house.at)
    return house.due()


@pytest.fixture
async def house() -> House:
    """A writer with one Model whose status is written."""
    one = House()
    one.statuses.put(SUBJECTS[:1])
    one.show(one.at)
    await one.settle()
    return one


async def test_late_status_of_previous_leader_is_overwritten(house: House) -> None:
    own, version = house.paper.wrote[-1]["status"], house.paper.version
    assert heard(house, version, own) == [], "this installation owns it"
    assert heard(house, version - 1, {}) == [], "its version is older than the written one"
    assert heard(house, version + 1, {**own, "replicas": {"ready": 9}}) == ["m0"]
    await house.settle()
    assert house.paper.wrote[-1]["status"]["replicas"]["ready"] == 0
    house.now_s += CHANGE_S
    house.show(house.at)
    assert house.due() == []


async def test_invalid_status_is_overwritten(house: House) -> None:
    assert heard(house, house.paper.version + 1, {"replicas": "many"}) == ["m0"]


async def test_status_overwritten_by_another_writer_is_written_again(house: House) -> None:
    """A watch event that echoes our own write causes no write; a later write of another writer does."""

    def echo(status: Mapping[str, object], later: int) -> None:
        house.paper.version += later
        house.statuses.hear(StatusSeen(MODELS[0].uid, house.paper.version, status))

    house.paper.meanwhile = lambda: echo(house.paper.wrote[-1]["status"], 0)
    house.now_s += NEWS_S
    house.pause(MODELS[0])
    assert await house.write() == ["m0"]
    house.now_s += NEWS_S
    house.show(house.at)
    assert house.due() == []
    house.paper.meanwhile = lambda: echo({}, 1)
    house.pause(MODELS[0])
    assert await house.write() == ["m0"]
    house.paper.meanwhile = lambda: None
    house.show(house.at)
    assert house.due() == [], "not at once"
    house.now_s += NEWS_S
    assert await house.write() == ["m0"], "another wrote after us"
    house.now_s += CHANGE_S
    house.show(house.at)
    assert house.due() == []


@pytest.mark.parametrize("late", [True, False])
async def test_newer_status_from_the_watch_overrides_the_listed_status(house: House, late: bool) -> None:
    """It happens when leadership begins."""
    uid, version = MODELS[0].uid, house.paper.version
    listed = status.read_status(house.paper.wrote[-1]["status"])
    house.statuses._kept.clear()
    if late:
        house.statuses.hear(StatusSeen(uid, version + 1, {"replicas": {"ready": 9}}))
    house.statuses._look({uid: (listed, version)})
    assert await house.write() == (["m0"] if late else [])


# --- rejected writes --------------------------------------------------------------------------------------------------


async def test_rejected_status_write_is_retried_and_does_not_block_others() -> None:
    house = House()
    house.paper.refusals = [REFUSED]
    await house.write()
    assert house.paper.wrote[0]["metadata"]["name"] == "m1", "the next one was written"
    house.paper.refusals = []
    await house.settle()
    assert len(house.paper.wrote) == len(MODELS) - 1
    house.now_s += RETRY_S
    assert await house.write() == ["m0"]
    assert not house.statuses.trouble


@pytest.mark.parametrize("code", [404, 409])
async def test_status_write_to_a_deleted_or_replaced_model_is_not_an_error(code: int) -> None:
    house = House()
    house.paper.refusals = [ApiError(code, "x", "y")]
    await house.write()
    assert not house.statuses.trouble


async def test_status_writes_resume_after_server_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "RETRY_S", 0.01)
    monkeypatch.setattr(status_writer, "PER_S", 1000.0)
    house = House()
    house.paper.refusals = [AWAY, FencedError("another leads"), AWAY]
    run = asyncio.create_task(house.statuses.run())
    async with asyncio.timeout(WAIT_S_MAX):
        while len(house.paper.wrote) < len(MODELS):
            house.statuses.on_step(step(house.at))
            await asyncio.sleep(0.005)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_follower_flushes_no_statuses() -> None:
    house = House()
    house.statuses._epoch = house.at.epoch
    house.show(replace_fields(house.at, leads=False))
    await house.statuses.flush(WAIT_S_MAX)
    assert house.paper.wrote == []
    house.show(replace_fields(house.at, leads=True))
    await house.statuses.flush(WAIT_S_MAX)
    assert len(house.paper.wrote) == len(MODELS)


# --- Events -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "PER_S", 1000.0)
    monkeypatch.setattr(event_writer, "RETRY_S", 0.01)


async def send_events(refusals: list[Exception], *, leads: bool = True) -> tuple[list[str], int]:
    """Two Models fail in turn while the server raises `refusals`; (the reported Models, the number of lost Events)."""
    paper, at = Paper(), replace_fields(world(MODELS), leads=leads)
    paper.refusals = refusals
    sender = Events(paper)
    for one in MODELS[:2]:
        sender.on_step(step(at, FailStart(model=one.name, reason="no engine")))
    run = asyncio.create_task(sender.run())
    async with asyncio.timeout(WAIT_S_MAX):
        while len(sender._book) or paper.refusals or len(paper.wrote) + sender.dropped < 2 * leads:
            await asyncio.sleep(0.005)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    return [one["involvedObject"]["name"] for one in paper.wrote], sender.dropped


@pytest.mark.usefixtures("fast")
async def test_rejected_event_is_dropped_and_the_next_one_is_sent() -> None:
    assert await send_events([ApiError(403, "Forbidden", "events")]) == (["m1"], 1)


@pytest.mark.usefixtures("fast")
async def test_events_are_sent_once_an_unavailable_api_server_responds_again() -> None:
    assert await send_events([AWAY, AWAY]) == (["m0", "m1"], 0)


@pytest.mark.usefixtures("fast")
async def test_events_are_dropped_when_leadership_is_lost() -> None:
    assert await send_events([FencedError("another leads")]) == ([], 2)
    assert await send_events([], leads=False) == ([], 0)
