"""Our own processes are killed or stopped while engines run and clients call: gateway, autoscaler, supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from autoscaler.drivers.local.replica_processes import read_process
from loadtest.arrivals import constant_arrivals
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.previous_version import older
from tests.support.harness.serve.client_load import connected
from tests.support.harness.serve.serve import Serving, fake, full_s, most_at_once, running, serving, shot, transcript
from tests.support.waiting import until

HOLDS_BACK_S = 10.0
"""Slots held by a dead process are available again within this time."""
BUSY_S = 25.0
"""Margin that a busy machine may add to a deadline: it may pause a process for 20 s."""


def kept(one: Serving, gateway: str) -> bytes:
    """Return the state that a gateway stores on disk once a second."""
    path = one.state / "run" / f"{gateway}.kept.json"
    return path.read_bytes() if path.exists() else b""


class Death(NamedTuple):
    """The death of a gateway, in seconds since the traffic began: last seen alive, and first seen dead."""

    name: str
    killed_s: float
    dead_s: float


class Warm:
    """Steady short requests to ada, half of them streams, and the gateways that were killed meanwhile."""

    def __init__(self, one: Serving, rate_per_s: float, seconds: float) -> None:
        moments = constant_arrivals(rate_per_s, seconds)
        shots = [shot("ada", at_s=at_s, tokens=4, stream=i % 2 == 0) for i, at_s in enumerate(moments)]
        self._one = one
        self._deaths: list[Death] = []
        self._hurt: list[tuple[float, Result]] = []
        self._began_s = time.monotonic()
        self.results = one.begin(*shots, on_result=self._ended)

    def _past_s(self) -> float:
        return time.monotonic() - self._began_s

    def _ended(self, result: Result) -> None:
        if result.ending is not Ending.COMPLETED:
            self._hurt.append((self._past_s(), result))

    async def kill(self, name: str) -> None:
        """Kill a gateway and wait until another process has replaced it."""
        before = self._one.gateways()[name]
        killed_s = self._past_s()
        os.kill(before, signal.SIGKILL)
        await until(f"{name} is dead", lambda: not running(before))
        self._deaths.append(Death(name, killed_s, self._past_s()))
        await until(f"{name} is replaced", lambda: self._one.gateways().get(name, before) != before)

    async def assert_only_in_flight(self) -> None:
        """Only requests in flight on a dead gateway (running or queued) fail: no later ones, none on other gateways."""
        await self.results
        assert {result.status for _, result in self._hurt} <= {0, 200}, f"an error was made up: {self._hurt}"
        astray = [each for each in self._hurt if not any(_took(death, *each) for death in self._deaths)]
        assert not astray, (astray, self._deaths)


def _took(death: Death, ended_s: float, hurt: Result) -> bool:
    """Return whether the gateway had this request when it died."""
    its = hurt.headers.get("x-request-id", f"{death.name}-").startswith(f"{death.name}-")
    return its and hurt.at_s + hurt.lateness_s <= death.dead_s and ended_s >= death.killed_s


@pytest.mark.case("7")
@pytest.mark.standard
async def test_killed_gateway_loses_only_its_running_requests(tmp_path: Path) -> None:
    slots = 16
    # The streams last 30 s: they still run when a test that was paused for 20 s kills the gateway.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "2", "--tokens", "60", slots=slots)
    async with serving(tmp_path, ada, options=("--gateways", "3")) as one:
        streams = one.begin(*(shot("ada", tokens=60) for _ in range(slots)))
        await until("all run", lambda: one.busy("ada") == slots)
        name, victim = max(one.gateways().items(), key=lambda each: connected(one, each[1]))
        killed_s = time.time()
        os.kill(victim, signal.SIGKILL)
        await until("the engine has none of its requests", lambda: one.busy("ada") < slots)
        more = one.begin(*(shot("ada", tokens=4) for _ in range(2 * slots)))
        results = await streams
        ids = [result.headers.get("x-request-id") for result in results]
        through = [id is None or id.startswith(f"{name}-") for id in ids]  # None: killed before its first byte
        assert 0 < sum(through) < slots
        for was_its, result in zip(through, results, strict=True):
            assert result.ending is (Ending.LOST if was_its else Ending.COMPLETED)
        assert judge_run(2 * slots, await more).completed == 2 * slots
        assert one.gateways()[name] != victim, "it is replaced"
        assert one.starts("ada") == 1
    calls = transcript(tmp_path, "ada")
    assert full_s(calls, slots, killed_s) - killed_s < HOLDS_BACK_S + BUSY_S, "its holds belong to a gateway again"
    assert most_at_once(calls) <= slots


async def test_killing_two_gateways_in_turn_loses_only_in_flight_requests(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "100")
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        traffic = Warm(one, 25, 4)
        for name in ("gateway-2", "gateway-1"):
            await asyncio.sleep(0.7)
            await traffic.kill(name)
        await traffic.assert_only_in_flight()
        assert one.starts("ada") == 1


async def test_restart_after_sigkill_of_serve_adopts_running_engines(tmp_path: Path) -> None:
    # The streams last 32 s, and an idle engine stays for 30 s: both are longer than a pause of the test.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0.25", idleSeconds=30)
    bob = fake(tmp_path, "bob", "--start-delay", "8", "--tokens-per-s", "0", idleSeconds=30)
    async with serving(tmp_path, ada, bob, options=("--gateways", "2")) as one:
        assert (await one.call("ada", tokens=1)).ending is Ending.COMPLETED
        running_calls = one.begin(*(shot("ada") for _ in range(2)))
        starting = one.begin(shot("bob"))
        await until("bob starts", lambda: len(one.engines("bob")) == 1)
        await until("ada works", lambda: one.busy("ada") == 2)
        before = (one.engines("ada"), one.engines("bob"))
        await one.kill()
        assert {result.ending for result in [*await running_calls, *await starting]} == {Ending.LOST}
        assert (one.engines("ada"), one.engines("bob")) == before, "engines live on"
        await one.start()
        asked = [await one.call("ada", tokens=1), await one.call("bob")]
        assert [result.ending for result in asked] == [Ending.COMPLETED] * 2
        assert (one.engines("ada"), one.engines("bob")) == before, "adopted, the one that was starting too"
        assert (one.starts("ada"), one.starts("bob")) == (1, 1)
        for name in ("ada", "bob"):
            await one.zero(name)
        assert one.marked() == []
    assert {call.pid for call in transcript(tmp_path, "ada")} == set(before[0])


async def test_restart_kills_the_child_of_an_engine_that_died_during_downtime(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "leaves-child:60")
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await one.kill()
        (engine,) = one.engines()
        os.kill(engine, signal.SIGKILL)
        await until("only its child is left", lambda: len(one.marked()) == 1)
        orphan = one.marked()[0]
        await one.start()
        await until("the orphan is removed", lambda: not running(orphan))
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert one.starts("ada") == 2


@pytest.mark.parametrize("same_start_time", [False, True])
async def test_process_that_reuses_a_recorded_pid_is_never_signalled(tmp_path: Path, same_start_time: bool) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await one.kill()
        os.kill(one.engines()[0], signal.SIGKILL)
        await until("the engine is dead", lambda: not one.marked())
        foreign = subprocess.Popen(["sleep", "600"], start_new_session=True)  # also if the test is paused
        try:
            (path,) = (one.state / "replicas").glob("*.json")
            record = json.loads(path.read_text())
            found = read_process(foreign.pid)
            assert found is not None
            record["pid"] = foreign.pid
            record["start_ticks"] = found.start_ticks if same_start_time else record["start_ticks"]
            path.write_text(json.dumps(record))
            await one.start()
            await one.zero("ada")
            assert (await one.call("ada")).ending is Ending.COMPLETED
            assert one.starts("ada") == 2
            assert await one.stop() == 0
            assert foreign.poll() is None, "another user's process still runs"
        finally:
            foreign.kill()
            foreign.wait()


def replaced(one: Serving, autoscaler: int) -> bool:
    return one.autoscaler() not in {0, autoscaler}


def keeps_ready(one: Serving, gateway: str) -> bool:
    return b'"ready"' in kept(one, gateway)


@pytest.mark.case("29")
@pytest.mark.standard
async def test_killing_the_autoscaler_twice_loses_no_request_to_a_ready_model(tmp_path: Path) -> None:
    slots = 6
    # An idle engine stays for longer than a pause of the test between two requests.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "100", slots=slots, idleSeconds=25)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0", idleSeconds=25)
    async with serving(tmp_path, ada, bob, options=("--gateways", "2")) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        (engine,) = one.engines("ada")
        traffic = Warm(one, 25, 4)
        for _ in range(2):
            before = one.autoscaler()
            await asyncio.sleep(0.5)
            os.kill(before, signal.SIGKILL)
            await until("it is replaced", partial(replaced, one, before))
        await until("it answers", one.answers)
        cold = await one.call("bob")
        assert (cold.ending, (cold.first_byte_s or 99) < HOLDS_BACK_S + BUSY_S) == (Ending.COMPLETED, True)
        assert judge_run(100, await traffic.results).completed == 100
        again_s = time.time()
        assert judge_run(3 * slots, await one.send(*(shot("ada") for _ in range(3 * slots)))).completed == 3 * slots
        assert (one.engines("ada"), one.starts("ada"), one.starts("bob")) == ([engine], 1, 1)
        await one.zero("ada")
        await one.zero("bob")
        await until("what was adopted is reaped", lambda: one.children() == 3)
    calls = transcript(tmp_path, "ada")
    assert full_s(calls, slots, again_s) - again_s < HOLDS_BACK_S + BUSY_S, "all Slots are used again"
    assert most_at_once(calls) <= 2 * slots - 1, "what gateways may use of a leader that is silent for more than 5 s"
    assert [call.pid for call in calls].count(engine) == 101 + 3 * slots


async def test_killing_the_autoscaler_during_a_cold_start_loses_no_request(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--start-delay", "2", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        waiting = one.begin(*(shot("ada", stream=i % 2 == 0) for i in range(10)))
        await until("it starts", one.engines)
        before = one.engines()
        for _ in range(2):
            killed = one.autoscaler()
            os.kill(killed, signal.SIGKILL)
            await until("it is replaced", partial(replaced, one, killed))
        assert judge_run(10, await waiting).completed == 10, "who waits does not notice"
        assert (one.engines(), one.starts("ada")) == (before, 1)


@pytest.mark.case("25")
@pytest.mark.standard
async def test_ready_models_serve_requests_while_the_autoscaler_is_paused(tmp_path: Path) -> None:
    """Static stability by the silent-leader rule after 5 s; requests for cold models fail at their deadline."""
    slots, seconds = 4, 20
    ada = fake(tmp_path, "ada", "--tokens-per-s", "100", slots=slots)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, bob, options=("--gateways", "2")) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        autoscaler = one.autoscaler()
        for name in one.gateways():
            await until("the Route is kept", partial(keeps_ready, one, name))
        freeze(autoscaler)
        try:
            traffic = Warm(one, 20, seconds)
            wait = (("Prefer", "wait=3"),)
            cold = await one.send(*(shot("bob", headers=wait, stream=i % 2 == 0) for i in range(6)))
            for result in cold:
                assert (result.status, result.code) == (503, "model_starting")
                assert 2.9 < (result.last_byte_s or 0) < 3.0 + BUSY_S, "at its deadline"
                assert int(result.headers["retry-after"]) >= 1
            await asyncio.sleep(5)  # by now the gateways consider the leader silent
            burst = await one.send(*(shot("ada", tokens=8) for _ in range(20)))
            assert judge_run(20, burst).completed == 20
            await traffic.kill("gateway-1")  # it restarts with only its stored state
            await until("it serves from that", lambda: "event=serving_from_snapshot" in one.output())
            await traffic.assert_only_in_flight()
            late = await one.send(*(shot("ada", at_s=i * 0.02) for i in range(30)))
            assert judge_run(30, late).completed == 30
            used = {result.headers["x-request-id"].rsplit("-", 3)[0] for result in late}
            assert used == {"gateway-1", "gateway-2"}, "the one that came back serves too"
        finally:
            os.kill(autoscaler, signal.SIGCONT)
        assert (await one.call("bob")).ending is Ending.COMPLETED, "control is back"
        assert (one.autoscaler(), one.starts("ada"), one.starts("bob")) == (autoscaler, 1, 1)
    bound = slots + max(slots, 2) - 1
    assert most_at_once(transcript(tmp_path, "ada")) <= bound


@pytest.mark.case("30")
@pytest.mark.standard
async def test_upgrade_and_rollback_of_serve_keep_the_running_engine(tmp_path: Path) -> None:
    """Whichever version stops, the other takes over engine, models and learned data from the state directory."""
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    tree = older(tmp_path)
    async with serving(tmp_path, ada, start=False, options=("--gateways", "2", "--keep-engines")) as one:
        engines = None
        for version in (tree, None, tree, None):
            one.tree = version
            await one.start()
            assert (await one.call("ada")).ending is Ending.COMPLETED
            engines = engines or one.engines("ada")
            assert (one.engines("ada"), one.starts("ada")) == (engines, 1)
            if version is None:
                traffic = await one.send(*(shot("ada", at_s=i * 0.02, tokens=2) for i in range(20)))
                assert judge_run(20, traffic).completed == 20
            assert await one.stop() == 0
        one.options = ("--gateways", "2")
        await one.start()
        assert await one.stop() == 0
        assert one.marked() == []
