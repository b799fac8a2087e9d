"""How `serve` stops, also with engines that resist: drained on SIGTERM, killed as a group, or kept on request."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from loadtest.result import Ending
from loadtest.run_verdict import judge_run
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.gateway_clients import gates
from tests.support.harness.serve.serve import fake, running, serving, settings, shot, transcript
from tests.support.waiting import until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.standard
async def test_stop_signal_finishes_running_and_rejects_queued_requests(tmp_path: Path, number: signal.Signals) -> None:
    # The streams last 27 s: they still run when a test that was paused for 20 s looks at them. The grace is longer.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0.3", slots=4)
    async with serving(tmp_path, ada, options=("--gateways", "2", "--grace", "60")) as one:
        streams = one.begin(*(shot("ada", stream=i % 2 == 0) for i in range(4)))
        await until("all run", lambda: one.demand("ada")["running"] == 4)
        parked = one.begin(*(shot("ada", stream=i % 2 == 0) for i in range(10)))
        await until("ten wait", lambda: one.demand("ada")["waiting"] == 10)
        assert one.process is not None
        one.process.send_signal(number)
        for result in await parked:
            assert (result.status, result.code, result.errors, result.clear) == (503, "shutting_down", 1, True)
            assert int(result.headers["retry-after"]) >= 1
        assert not streams.done(), "queued requests fail at once"
        late = await one.call("ada")
        assert late.ending is not Ending.COMPLETED, "nothing new begins"
        assert judge_run(4, await streams).completed == 4, "what runs ends as it should"
        assert await one.ended() == 0
        assert one.marked() == []
    assert [call.finished for call in transcript(tmp_path, "ada")] == [True] * 4


async def test_queued_stream_with_sent_headers_gets_the_shutdown_error_in_stream(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--start-delay", "3600")
    documents = (ada, settings(stream={"keepaliveSeconds": 0.3}))
    async with serving(tmp_path, *documents) as one:
        async with gates(one.url) as gate:
            early = await gate.send("gateway-1", shot("ada"))
            plain = one.begin(shot("ada", stream=False))
            await until("both wait", lambda: one.demand("ada")["waiting"] == 2)
            await until("the head and a comment are out", lambda: early.connection.answer.status == 200)
            assert await one.stop() == 0
            await early.done
        answer = early.connection.answer
        assert (answer.status, answer.code, answer.errors, answer.saw_done) == (200, "shutting_down", 1, False)
        assert not answer.broken
        assert [(result.status, result.code) for result in await plain] == [(503, "shutting_down")]
        assert one.starts("ada") == 1


async def test_requests_running_past_the_grace_period_fail_with_one_error(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "2", "--tokens", "200", slots=4)
    async with serving(tmp_path, ada, options=("--grace", "1.5")) as one:
        async with gates(one.url) as gate:
            stream = await gate.send("gateway-1", shot("ada", tokens=200))
            document = one.begin(shot("ada", tokens=200, stream=False, timeout_s=60))
            await until("both run", lambda: one.busy("ada") == 2)
            await until("the stream has its first tokens", lambda: stream.began_s)
            began_s = time.monotonic()
            assert await one.stop() == 0
            # The margin is for a process that a busy machine pauses for 20 s.
            assert time.monotonic() - began_s < 1.5 + 40.0, "what runs would take 98 s more"
            await stream.done
        answer = stream.connection.answer
        assert (answer.status, answer.code, answer.errors, answer.broken) == (200, "shutting_down", 1, "")
        assert [(result.status, result.code) for result in await document] == [(503, "shutting_down")]


async def test_second_signal_exits_at_once_and_the_next_start_stops_the_engine(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0.1", idleSeconds=0.5)
    async with serving(tmp_path, ada) as one:
        calling = one.begin(shot("ada"))
        await until("it runs", lambda: one.busy("ada") == 1)
        assert one.process is not None
        one.process.send_signal(signal.SIGINT)
        await until("it is stopping", lambda: "stopping" in one.output())
        began_s = time.monotonic()
        assert await one.stop(signal.SIGINT) == 1
        # The margin is for a process that a busy machine pauses for 20 s.
        assert time.monotonic() - began_s < 28.0, "neither the call, 80 s, nor the grace, 30 s, is waited for"
        assert (await calling)[0].ending is Ending.LOST
        (engine,) = one.engines()
        left = f"1 engine still running (pid {engine}): the next start adopts them"
        assert one.output().splitlines()[-1] == f"pilotlight: stopped at once; running requests were aborted; {left}"
        await one.start()
        await one.zero("ada")
        await until("nothing is left", lambda: one.marked() == [])


async def test_second_signal_during_engine_stop_reports_the_remaining_engine(tmp_path: Path) -> None:
    """The gateways have exited by then, and the autoscaler waits for an engine that stops slowly."""
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "ignores-sigterm")
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        (engine,) = one.engines()
        assert one.process is not None
        one.process.send_signal(signal.SIGINT)
        await until("engines get the stop signal", lambda: "stopping" in one.states("ada"))
        assert await one.stop(signal.SIGINT) == 1
        assert (
            one.output()
            .splitlines()[-1]
            .startswith("pilotlight: stopped at once; running requests were aborted; 1 engine still")
        )
        assert one.engines() == [engine], "as the documents say: the next start has it"
        await one.start()
        assert await one.stop() == 0
        assert one.marked() == []


async def test_serve_with_keep_engines_leaves_engines_that_the_next_start_adopts(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, options=("--keep-engines",)) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        before = one.engines()
        assert await one.stop() == 0
        assert one.engines() == before
        one.options = ()
        await one.start()
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert (one.engines(), one.starts("ada")) == (before, 1)
        assert await one.stop() == 0
        assert one.marked() == []


async def test_engine_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "ignores-sigterm", idleSeconds=0.5)
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        (first,) = transcript(tmp_path, "ada")
        engine = first.pid  # it is killed 10 s after SIGTERM: a test that was paused would not see it any more
        await until("it got the stop signal", lambda: "stopping" in one.states("ada"))
        waiting = await one.call("ada")
        assert waiting.ending is Ending.COMPLETED, "who comes meanwhile waits for the next one"
        second = max(call.pid for call in transcript(tmp_path, "ada") if call.pid != engine)
        await until("the old one is dead, 10 s after SIGTERM", lambda: not running(engine), 60)
        assert "did not end within its grace" in str(one.get("/api/v1/explain/last"))
        assert await one.stop() == 0
        assert not running(second)


async def test_child_left_by_an_engine_is_killed_before_its_device_is_reused(tmp_path: Path) -> None:
    gpu = {"memory": "64Mi"}
    # The idle engine stays for longer than a pause of the test.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "leaves-child:60", gpu=gpu, idleSeconds=25)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0", gpu=gpu)
    async with serving(tmp_path, ada, bob) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await until("the engine and its child", lambda: len(one.marked()) == 2)
        family = one.marked()
        await one.zero("ada")
        assert not [pid for pid in family if running(pid)], "the slice is free only after the child has ended too"
        assert (await one.call("ada")).ending is Ending.COMPLETED
        os.kill(one.engines()[0], signal.SIGKILL)
        assert (await one.call("bob")).ending is Ending.COMPLETED, "its place was cleaned first"
        assert len(one.marked()) == 1
        moves = [line for line in one.output().splitlines() if "  gone" in line or "bob  starting" in line]
        assert "bob" in moves[-1], moves


async def test_hanging_gateway_is_killed_when_serve_stops(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, options=("--gateways", "2", "--grace", "1")) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        freeze(one.gateways()["gateway-1"])
        assert await one.stop() == 1
        assert "event=process_killed process=gateway-1 timeout_s=6 " in one.output()
        assert one.marked() == [], "engines are stopped all the same"
