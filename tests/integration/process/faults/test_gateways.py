"""Faults of gateways and of their routes, on real processes: cases 13 to 15, 18 and 19 of the fault list.

The same cases are tested in virtual time in tests/simulation, and in a cluster in tests/integration/cluster/faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from gateway.dispatch.slots import SUSPECT_S
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.additional_gateway import outlying
from tests.support.harness.serve.client_load import counted
from tests.support.harness.serve.serve import Serving, fake, full_s, serving, settings, shot, transcript
from tests.support.waiting import until

SENTENCE = "Hello, I am ada, asleep until you called."
SLOTS = 24


def through(results: list[Result], gateway: str) -> list[Result]:
    """Return the results of requests that went through this gateway, by their request ids."""
    return [one for one in results if one.headers.get("x-request-id", "").startswith(f"{gateway}-")]


@pytest.mark.case("13")
@pytest.mark.standard
async def test_gateway_disconnected_during_a_drain_loses_only_running_streams(tmp_path: Path) -> None:
    """A new spec replaces the replica that serves its streams; the gateway is not informed.
    The drain waits for it up to its limit; then its stream gets one error, and requests without a first byte move.
    """
    # The drain lasts longer than a pause of the test, and the stream, 200 s, longer than the drain.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "5", "--tokens", "1000", drainSecondsMax=30)
    changed = fake(tmp_path, "ada", "--tokens-per-s", "0", drainSecondsMax=30)
    async with serving(tmp_path, ada) as one, outlying(one) as gateway:
        stream = gateway.begin(shot("ada", tokens=1000, timeout_s=180))
        await until("it runs", lambda: one.answers() and one.demand("ada")["running"] == 1, within_s=90)
        (old,) = one.engines("ada")
        gateway.cut()
        one.config.write_text(yaml.safe_dump_all([changed, settings()]))
        assert one.process is not None
        one.process.send_signal(signal.SIGHUP)
        await until("the old one drains", lambda: one.replicas("ada") == {"ready": 1, "draining": 1})
        (served,) = await gateway.begin(shot("ada", tokens=1))
        assert served.ending is Ending.COMPLETED, "it continues with its last known state"
        (cut,) = await stream
        assert (cut.ending, cut.errors, cut.code, cut.saw_done) == (Ending.FAILED, 1, "upstream_error", False)
        (stopped,) = (move for move in one.moves("ada") if move.state == "stopping")
        assert stopped.reason.endswith("its grace period has ended")
        waiting = gateway.begin(*(shot("ada", stream=n % 2 == 0) for n in range(4)))
        assert all(move.state != "failed" for move in one.moves("ada"))
        gateway.mend()
        assert {(result.ending, result.text) for result in await waiting} == {(Ending.COMPLETED, SENTENCE)}
        assert one.starts("ada") == 2
        assert old not in one.engines("ada")


async def all_run(one: Serving, tokens: int, calls: int) -> asyncio.Task[list[Result]]:
    """Start this many streams, spread over all gateways."""
    streams = one.begin(*(shot("ada", tokens=tokens, timeout_s=90) for _ in range(calls)))
    await until("all run", lambda: one.demand("ada")["running"] == calls, within_s=90)
    return streams


def replaced(one: Serving, gateway: str, pid: int) -> bool:
    return one.gateways().get(gateway, pid) != pid


@pytest.mark.case("14")
@pytest.mark.standard
async def test_replacing_gateways_one_by_one_interrupts_no_stream(tmp_path: Path) -> None:
    """100 streams on two gateways; the fault list has 200 on each: engine, gateways and clients share two cores."""
    # The streams last 35 s: they still run when a test that was paused for 20 s looks at them. The grace is longer.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "4", "--tokens", "140", slots=200)
    async with serving(tmp_path, ada, options=("--gateways", "2", "--grace", "80")) as one:
        streams = await all_run(one, 140, 100)
        over, short = asyncio.Event(), list[Result]()

        async def client() -> None:
            while not over.is_set():
                short.append(await one.call("ada", tokens=2))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(client())
            for name in ("gateway-1", "gateway-2"):
                before = one.gateways()[name]
                os.kill(before, signal.SIGTERM)
                await until("it is new", partial(replaced, one, name, before), 90)
            over.set()
        results = await streams
        assert judge_run(100, results).completed == 100
        assert through(results, "gateway-1")
        assert through(results, "gateway-2")
        assert judge_run(len(short), short).completed == len(short) > 0
    assert not any(call.aborted for call in transcript(tmp_path, "ada"))


@pytest.mark.case("15")
@pytest.mark.standard
async def test_killing_one_of_three_gateways_loses_only_its_own_requests(tmp_path: Path) -> None:
    """Only its own requests are lost; the others get its slots, and no engine keeps working for it."""
    # The streams last 30 s: they still run when a test that was paused for 20 s kills the gateway.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "2", "--tokens", "60", slots=SLOTS)
    async with serving(tmp_path, ada, options=("--gateways", "3")) as one:
        streams = await all_run(one, 60, SLOTS)
        killed_s = time.time()
        os.kill(one.gateways()["gateway-2"], signal.SIGKILL)
        await until("no engine works for it", lambda: one.busy("ada") < SLOTS)
        more = one.begin(*(shot("ada", tokens=8) for _ in range(SLOTS)))
        results = await streams
        lost = [result for result in results if result.ending is Ending.LOST]
        assert 0 < len(lost) < SLOTS
        assert judge_run(SLOTS, results).completed == SLOTS - len(lost)
        assert not any(through(lost, name) for name in ("gateway-1", "gateway-3"))
        assert judge_run(SLOTS, await more).completed == SLOTS
    calls = transcript(tmp_path, "ada")
    assert full_s(calls, SLOTS, killed_s), "its Slots are used"
    assert sum(call.aborted for call in calls) == len(lost)
    assert max(call.at_once for call in calls) <= SLOTS


@pytest.mark.case("18")
@pytest.mark.standard
async def test_dead_replica_fails_no_request_while_the_autoscaler_hangs(tmp_path: Path) -> None:
    """One of two replicas dies while the autoscaler hangs: the gateways detect it by themselves."""
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", replicas={"min": 2, "max": 2})
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        await one.ready("ada", 2)
        pid = one.autoscaler()
        victim, _ = one.engines("ada")
        freeze(pid)
        try:
            os.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            results = [await one.call("ada", stream=n % 2 == 0) for n in range(40)]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {(result.ending, result.text) for result in results} == {(Ending.COMPLETED, SENTENCE)}
        await until("another is in its place", lambda: victim not in one.engines("ada") and both_ready(one), 90)
        gone_s = time.monotonic() - killed_s
        tries = counted(one, "pilotlight_upstream_retries_total", 'reason="connect"')
        assert tries <= 2 * (1 + gone_s / SUSPECT_S), "one per gateway and SUSPECT_S"


def both_ready(one: Serving) -> bool:
    return one.answers() and one.replicas("ada").get("ready") == 2


@pytest.mark.case("19")
@pytest.mark.standard
async def test_address_of_a_dead_engine_is_not_reused_by_another_model(tmp_path: Path) -> None:
    """Two models keep displacing each other on one device, also by engine deaths, while both receive requests."""
    gpu = {"memory": "64Mi"}
    both = [fake(tmp_path, name, "--tokens-per-s", "0", gpu=gpu, residencySeconds=0) for name in ("ada", "bob")]
    async with serving(tmp_path, *both, options=("--gateways", "2")) as one:
        ports = set[tuple[str, int]]()
        for n in range(6):
            names = ("ada", "bob") if n % 2 else ("bob", "ada")
            results = await one.send(*(shot(name, timeout_s=60) for name in names for _ in range(4)))
            assert judge_run(8, results).completed == 8
            assert all(f"I am {result.model}," in result.text for result in results)
            ports |= {(record.id, record.port) for record in one.records()}
            for pid in one.engines():
                os.kill(pid, signal.SIGKILL)
        assert len({port for _, port in ports}) == len(ports) > 2
