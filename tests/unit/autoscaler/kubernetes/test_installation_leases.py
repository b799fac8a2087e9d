"""Which installation serves the Models of a namespace: several installations on one API server, in virtual time."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, Report
from autoscaler.controller import loop as loop_module
from autoscaler.kubernetes.api import UNREADABLE, Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.installation_leases import GRACE_S, LOOK_S, RETRY_S, WITHOUT, ModelClaims
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, UNKNOWN, Installation
from autoscaler.kubernetes.unreadable_objects import UnreadableObjects
from autoscaler.spec.document_names import Origin
from autoscaler.spec.installation_ownership import CLAIM_S, RENEW_S, Claim, explain_not_served, installation_title
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.events import DocumentsSeen, FaultSeen, Reported
from autoscaler.state.lifecycle import ReplicaState as S
from tests.support.builders.worlds import T0, device, level, replica, world
from tests.support.harness.manual_loop import SteppedLoop

BLUE, GREEN = installation_title("blue", "pilotlight"), installation_title("green", "pilotlight")
HOUR_S = 3600


class Server:
    """Leases by path with conditional writes, and errors to raise instead."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.writes = 0
        self.raises: list[Exception] = []
        self.unreadable = UnreadableObjects()
        self.cannot_decode: set[str] = set()
        """Namespaces whose Lease cannot be decoded."""
        self.refuses: Exception | None = None
        """Raised by each write."""
        self.cannot_write: set[str] = set()
        """Namespaces in which each write fails."""
        self.hangs: set[str] = set()
        """Namespaces whose requests get no response before `resumes`."""
        self.resumes = asyncio.Event()

    async def get(self, path: str) -> Object:
        """Like `Api.get`."""
        if path.split("/")[5] in self.hangs:
            await self.resumes.wait()
        if self.raises:
            raise self.raises.pop(0)
        if path.split("/")[5] in self.cannot_decode:
            raise ApiError(UNREADABLE, "Unreadable", f"{path}: nested too deeply")
        if path not in self.leases:
            raise ApiError(404, "NotFound", path)
        return copy.deepcopy(self.leases[path])

    async def create(self, path: str, body: Object) -> Object:
        """Like `Api.create`."""
        at = f"{path}/{body['metadata']['name']}"
        if at in self.leases:
            raise ApiError(409, "AlreadyExists", at)
        return self._put(at, body)

    async def replace(self, path: str, body: Object) -> Object:
        """Like `Api.replace`."""
        if body["metadata"]["resourceVersion"] != self.leases[path]["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", path)
        return self._put(path, body)

    def _put(self, path: str, body: Object) -> Object:
        if self.refuses is not None:
            raise self.refuses
        if path.split("/")[5] in self.cannot_write:
            raise ApiError(500, "InternalError", "failed calling webhook")
        self.writes += 1
        made = copy.deepcopy(body)
        made["metadata"]["resourceVersion"] = str(self.writes)
        self.leases[path] = made
        return copy.deepcopy(made)


def model(namespace: str, named: str | None = None) -> tuple[Origin, Model]:
    spec = ModelSpec(engine="vllm", installation=named)
    return Origin(CUSTOMS, namespace, "ada"), Model(name=ModelName("ada"), spec=spec, namespace=namespace)


class House:
    """One process of an installation: its claims, and the Models that it serves."""

    def __init__(self, server: Server, me: str, *models: tuple[Origin, Model]) -> None:
        self.now_s = 0.0
        self.serves: set[Origin] = set()
        self.keeps: set[Origin] = set()
        """Models that are quarantined: their replicas are neither started nor stopped."""
        self.documents = DocumentsSeen()
        self.changes = 0
        self.claims = ModelClaims(cast("Api", server), me, self._held, lambda: self.now_s)
        self.installation = Installation(self._tell, {CUSTOMS}, title=me, request_claims=self.claims.ask)
        self.due_s = 0.0
        self.installation.put(CUSTOMS, dict(models))

    def _held(self, holders: dict[str, str | None]) -> None:
        self.installation.put_holders(holders)

    def _tell(self, seen: DocumentsSeen, statuses: object) -> None:
        del statuses
        self.documents = seen
        self.changes += 1
        names, faults = self.installation.settled.names, self.installation.faults
        self.serves = {origin for origin, name in names.items() if name not in faults}
        self.keeps = {origin for origin, name in names.items() if name in faults}

    async def look(self) -> None:
        """Poll until nothing is due, and wait for the results."""
        async with asyncio.TaskGroup() as tasks:
            self.claims.look(tasks)
        async with asyncio.TaskGroup() as tasks:
            self.due_s = self.now_s + self.claims.look(tasks)

    async def at(self, now_s: float) -> None:
        """Poll if a poll is due."""
        self.now_s = now_s
        if now_s >= self.due_s:
            await self.look()


def seconds(until_s: float) -> Iterator[float]:
    yield from (second / 2 for second in range(int(2 * until_s)))


async def test_models_are_not_served_before_their_lease_was_read() -> None:
    server = Server()
    house = House(server, BLUE, model("a"))
    server.raises = [UnreachableError("GET: no")]
    await house.at(0.0)
    assert (house.changes, house.due_s) == (0, RETRY_S)
    await house.at(RETRY_S)
    assert (house.changes, house.serves) == (1, {model("a")[0]})


async def test_other_namespaces_are_served_while_a_new_one_awaits_its_lease() -> None:
    server = Server()
    house = House(server, BLUE, model("a"))
    await house.at(0.0)
    house.installation.put(CUSTOMS, dict([model("a"), model("b")]))
    assert (house.changes, house.serves) == (2, {model("a")[0]})
    assert house.installation.whose("b", None) is None
    await house.look()
    assert house.serves == {model("a")[0], model("b")[0]}
    house.installation.put(CUSTOMS, dict([model("a"), model("b"), model("c")]))
    server.raises = [ApiError(500, "InternalError", "no")]
    await house.look()
    assert house.installation.whose("c", None) is None
    assert house.serves == {model("a")[0], model("b")[0]}


async def test_model_is_served_by_the_lease_holder_or_the_installation_it_names() -> None:
    server = Server()
    models = (model("a"), model("b", GREEN), model("c", "red/x"))
    blue, green = House(server, BLUE, *models), House(server, GREEN, *models)
    await blue.at(0.0)
    await green.at(0.0)
    assert (blue.serves, green.serves) == ({models[0][0]}, {models[1][0]})
    assert f"installation {BLUE} serves the Models of namespace a" in str(green.installation.whose("a", None))
    assert str(green.installation.whose("c", "red/x")).startswith("spec.installation is red/x")
    assert server.writes == 1, "a Model that names its installation needs no Lease"


@pytest.mark.parametrize("seed", range(8))
async def test_two_installations_never_serve_one_model_despite_random_restarts(seed: int) -> None:
    """Two processes of one installation and one of another start, restart and exit at random."""
    dice, server, models = random.Random(seed), Server(), (model("a"), model("b"))
    make = {"blue 1": BLUE, "blue 2": BLUE, "green": GREEN}
    houses: dict[str, House] = {}
    gone_s = dice.uniform(600, 1200)
    for now_s in seconds(HOUR_S):
        if now_s < gone_s and dice.random() < 0.01:
            name = dice.choice(sorted(make))
            houses[name] = House(server, make[name], *models)
            houses[name].due_s = now_s
        elif now_s >= gone_s:
            houses = {name: one for name, one in houses.items() if make[name] == GREEN}
            houses.setdefault("green", House(server, GREEN, *models))
        for name in dice.sample(sorted(houses), len(houses)):
            await houses[name].at(now_s)
        for origin, _ in models:
            serving = {make[name] for name, one in houses.items() if origin in one.serves}
            assert len(serving) <= 1, (now_s, serving)
        if now_s > gone_s + CLAIM_S + LOOK_S + 1:
            assert houses["green"].serves == {origin for origin, _ in models}
    assert server.writes / len(models) <= HOUR_S / 60, "at most one a minute for each namespace, with all restarts"


async def test_lease_is_renewed_only_while_models_exist() -> None:
    server = Server()
    house = House(server, BLUE, model("a"))
    for now_s in seconds(RENEW_S + 1):
        await house.at(now_s)
    assert server.writes == 2
    house.installation.put(CUSTOMS, {})
    for now_s in seconds(CLAIM_S):
        await house.at(RENEW_S + now_s)
    assert server.writes == 2


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_models_are_not_served_while_lease_writes_fail_with_429_or_5xx(status: int) -> None:
    """Two installations that start meanwhile would both serve them."""
    server = Server()
    server.refuses = ApiError(status, "Busy", "later")
    blue, green = House(server, BLUE, model("a")), House(server, GREEN, model("a"))
    for now_s in seconds(3 * GRACE_S):
        await blue.at(now_s)
        await green.at(now_s)
        assert not blue.serves | green.serves
    server.refuses = None
    for now_s in seconds(LOOK_S):
        await blue.at(3 * GRACE_S + now_s)
        await green.at(3 * GRACE_S + now_s)
    assert len(blue.serves) + len(green.serves) == 1


async def test_undecodable_lease_leaves_only_models_of_its_namespace_unserved() -> None:
    server = Server()
    server.cannot_decode = {"b"}
    house = House(server, BLUE, model("a"), model("b"))
    await house.at(0.0)
    assert (house.serves, house.keeps) == ({model("a")[0]}, {model("b")[0]})
    assert server.unreadable.counts() == {"Lease": 1}
    server.cannot_decode.clear()
    await house.at(LOOK_S)
    assert (house.serves, house.keeps) == ({model("a")[0], model("b")[0]}, set())
    assert not server.unreadable.counts()


async def test_lease_write_failure_delays_other_namespaces_by_the_grace_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A webhook that is unavailable and fails closed returns 500."""
    server = Server()
    server.cannot_write = {"b"}
    house = House(server, BLUE, model("a"), model("b"))
    for now_s in seconds(GRACE_S):
        await house.at(now_s)
        assert not house.changes
    for now_s in seconds(2 * LOOK_S):
        await house.at(GRACE_S + now_s)
        assert (house.serves, house.keeps) == ({model("a")[0]}, {model("b")[0]})
    (fault,) = house.installation.faults.items()
    assert (fault[0], fault[1].reason) == (house.installation.settled.names[model("b")[0]], UNKNOWN.format("b"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("event=model_lease_unavailable lease=models.pilotlight.dev namespace=b ")
    server.cannot_write.clear()
    await house.at(GRACE_S + 2 * LOOK_S + RETRY_S)
    assert (house.serves, house.keeps) == ({model("a")[0], model("b")[0]}, set())


async def test_hanging_lease_request_delays_other_namespaces_by_the_grace_time() -> None:
    server = Server()
    server.hangs = {"b"}
    house = House(server, BLUE, model("a"), model("b"))
    async with asyncio.TaskGroup() as tasks:
        house.claims.look(tasks)
        await asyncio.sleep(0.01)
        assert house.claims.look(tasks) == GRACE_S
        house.now_s = GRACE_S
        assert not house.changes
        house.claims.look(tasks)
        assert (house.serves, house.keeps) == ({model("a")[0]}, {model("b")[0]})
        house.now_s = RENEW_S
        house.claims.look(tasks)
        await asyncio.sleep(0.01)
        assert server.writes == 2, "the Lease of the other namespace is renewed"
        server.resumes.set()
    assert (house.serves, house.keeps) == ({model("a")[0], model("b")[0]}, set())


async def test_restart_with_an_unreadable_lease_stops_and_replaces_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    await House(server, BLUE, model("a")).at(0.0)
    server.cannot_decode = {"a"}
    again = House(server, BLUE, model("a"))
    await again.at(0.0)
    (of,) = again.documents.models
    running = replica(of, "ada-1", ["gpu0"], S.READY, since_s=T0, ready_s=T0, spec_hash="of another spec")
    waits = Report(gateway=GatewayId("g1"), boot="b", sequence=1, epoch=1, levels=(level(of.name, 9, wait_s=99.0),))
    faults = [FaultSeen(model=name, reason=fault.reason) for name, fault in again.installation.faults.items()]
    monkeypatch.setattr(loop_module, "report_fault", lambda *_: None)  # the quarantine is expected
    loop = SteppedLoop(world([], [device("gpu0", 24), device("gpu1", 24)], [running]))
    loop.step(again.documents, *faults)
    loop.now_s += 30.0
    loop.step(Reported(report=waits))
    assert (loop.driver.started, loop.driver.stopped) == ([], [])
    assert [one.state for one in loop.loop.world.replicas.values()] == [S.READY]
    unlisted = SteppedLoop(world([], [device("gpu0", 24), device("gpu1", 24)], [running]))
    unlisted.step(replace(again.documents, models=()))
    assert [one.state for one in unlisted.loop.world.replicas.values()] != [S.READY], "the test can fail"


async def test_unreadable_lease_of_a_namespace_without_models_is_not_counted() -> None:
    server = Server()
    server.cannot_decode = {"b"}
    house = House(server, BLUE, model("a"), model("b"))
    await house.at(0.0)
    house.installation.put(CUSTOMS, dict([model("a")]))
    async with asyncio.TaskGroup() as tasks:
        house.claims.look(tasks)
    assert not server.unreadable.counts()


async def test_rejected_lease_is_logged_again_when_models_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    server.refuses = ApiError(403, "Refused", "no")
    house = House(server, BLUE, model("a"))
    for now_s in seconds(2 * GRACE_S):
        await house.at(now_s)
    house.installation.put(CUSTOMS, {})
    async with asyncio.TaskGroup() as tasks:
        house.claims.look(tasks)
    house.installation.put(CUSTOMS, dict([model("a")]))
    house.due_s = 0.0
    for now_s in seconds(2 * GRACE_S):
        await house.at(2 * GRACE_S + now_s)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("event=model_lease_refused ") for line in lines] == [True, True]


@pytest.mark.parametrize("status", [403, 422])
async def test_models_are_served_after_grace_time_if_lease_write_is_rejected(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing permission or a rejecting webhook must not stop the installation; the log reports it once."""
    server = Server()
    server.refuses = ApiError(status, "Refused", "no")
    house = House(server, BLUE, model("a"))
    for now_s in seconds(GRACE_S):
        await house.at(now_s)
        assert not house.changes
    for now_s in seconds(2 * LOOK_S):
        await house.at(GRACE_S + now_s)
    assert house.serves == {model("a")[0]}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("event=model_lease_refused lease=models.pilotlight.dev namespace=a ")
    assert line.endswith(f" effect={WITHOUT!r} error={status} Refused: no")


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_starting_process_serves_no_models_while_lease_reads_fail(status: int) -> None:
    """Another installation may serve the Models; without reading the Lease, both would serve them."""
    server = Server()
    await House(server, GREEN, model("a")).at(0.0)
    blue = House(server, BLUE, model("a"))
    for now_s in seconds(3 * GRACE_S):
        server.raises = [ApiError(status, "Busy", "later")]
        await blue.at(now_s)
        assert not blue.serves
        assert blue.keeps == ({model("a")[0]} if now_s >= GRACE_S else set())
    server.raises = []
    await blue.at(4 * GRACE_S)
    assert (blue.changes, blue.serves, blue.keeps) == (2, set(), set())


@pytest.mark.parametrize("status", [401, 403, 404, 409, 429, 500, 503])
async def test_serving_installation_does_not_change_during_api_errors(status: int) -> None:
    server = Server()
    blue, green = House(server, BLUE, model("a")), House(server, GREEN, model("a"))
    await blue.at(0.0)
    await green.at(0.0)
    for now_s in seconds(2 * LOOK_S):
        server.raises = [ApiError(status, "Busy", "later")] if status != 404 else []
        server.refuses = ApiError(404, "NotFound", "deleted meanwhile") if status == 404 else None
        await green.at(now_s)
    assert (blue.serves, green.serves) == ({model("a")[0]}, set())
    server.raises = []
    await blue.at(RENEW_S + LOOK_S)
    assert blue.serves == {model("a")[0]}


async def test_restarted_lease_holder_serves_even_if_lease_writes_fail() -> None:
    server = Server()
    await House(server, BLUE, model("a")).at(0.0)
    server.refuses = ApiError(500, "InternalError", "failed calling webhook")
    again = House(server, BLUE, model("a"))
    await again.at(0.0)
    assert again.serves == {model("a")[0]}


async def test_deleted_lease_is_acquired_by_first_installation_to_poll() -> None:
    server = Server()
    blue, green = House(server, BLUE, model("a")), House(server, GREEN, model("a"))
    await blue.at(0.0)
    await green.at(0.0)
    server.leases.clear()
    await green.at(LOOK_S)
    assert green.serves == {model("a")[0]}
    await blue.at(LOOK_S)
    assert blue.serves == set()


TITLES = st.sampled_from(["", BLUE, GREEN])


@given(TITLES, st.floats(0, 1000), st.floats(0, 1000))
def test_lease_is_acquired_only_when_free_or_expired(holder: str, since_s: float, now_s: float) -> None:
    does = Claim(holder, "x", CLAIM_S, since_s).next(BLUE, now_s)
    if holder == BLUE:
        assert does == ("renew" if now_s - since_s >= RENEW_S else "keep")
    else:
        assert (does == "take") == (not holder or now_s - since_s >= CLAIM_S)


@given(st.sampled_from([None, BLUE, GREEN]), TITLES)
def test_exactly_one_installation_serves_a_model_with_a_known_owner(named: str | None, holder: str) -> None:
    serving = [me for me in (BLUE, GREEN) if not explain_not_served(named, holder, me, "a")]
    assert len(serving) == (2 if named is None and not holder else 1)
