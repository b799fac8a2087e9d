"""Faults while replicas stop and move, on real processes; named after cases of reliability B and C.

tests/simulation asserts the exact promises of the cases in virtual time; the times here allow for a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.harness.serve.gateway_clients import gates
from tests.support.harness.serve.serve import fake, serving, shot, transcript
from tests.support.waiting import until

SENTENCE = "Hello, I am ada, asleep until you called."
TOLD_S = 45.0
"""Case 16: from an engine's death to the error on its streams. This takes milliseconds on an idle machine; a busy one
may pause a process for 20 s. The limit is below the 60 s after which a silent stream fails."""


# --- B: stopping and moving -------------------------------------------------------------------------------------------


@pytest.mark.case("10")
@pytest.mark.standard
async def test_scale_down_interrupts_no_running_stream(tmp_path: Path) -> None:
    # The streams last 60 and 30 s: a test that was paused for 20 s still sees all of them run, and then the long ones.
    knobs = ("--tokens-per-s", "2", "--tokens", "120")
    ada = fake(tmp_path, "ada", *knobs, slots=2, idleSeconds=0.15, replicas={"max": 2}, residencySeconds=0)
    pair = [shot("ada", tokens=tokens, timeout_s=180) for tokens in (120, 60)]
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        first = one.begin(*pair)
        await one.ready("ada")
        more = one.begin(*pair)
        await until("a long stream and a short one run on each", lambda: one.busy("ada") == 4)
        await until("one drains while two streams run", lambda: "draining" in one.states("ada"))
        assert one.busy("ada") == 2
        late = [await one.call("ada", tokens=1) for _ in range(4)]
        results = [*await first, *await more, *late]
        assert judge_run(8, results).completed == 8
        await one.zero("ada")
        assert one.starts("ada") == 2
    assert not any(call.aborted for call in transcript(tmp_path, "ada"))


@pytest.mark.case("10")
async def test_evicted_replica_finishes_its_streams_before_it_stops(tmp_path: Path) -> None:
    gpu = {"memory": "64Mi"}
    # The streams last 27 s: they still run when a test that was paused for 20 s looks at them.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0.3", gpu=gpu, residencySeconds=0.2, idleSeconds=600)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0", gpu=gpu)
    async with serving(tmp_path, ada, bob, options=("--gateways", "2")) as one:
        streams = one.begin(*(shot("ada", tokens=8) for _ in range(4)))
        await until("all run", lambda: one.demand("ada")["running"] == 4)
        answer = await one.call("bob")
        assert answer.ending is Ending.COMPLETED, "it waits for ada's streams, and not until ada is idle, 600 s"
        assert judge_run(4, await streams).completed == 4
        states = one.states("ada")
        assert states[:2] == ["starting", "ready"]
        assert "draining" in states
    assert all(call.finished for call in transcript(tmp_path, "ada"))


@pytest.mark.case("11")
@pytest.mark.standard
async def test_requests_that_arrive_as_a_drain_begins_all_complete(tmp_path: Path) -> None:
    rounds, tries, idle_s = 30, 300, 0.3
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", idleSeconds=idle_s, residencySeconds=0)
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        results: list[Result] = [await one.call("ada")]
        while len(results) <= rounds or (one.starts("ada") == 1 and len(results) < tries):
            await asyncio.sleep(idle_s - 0.005 + 0.001 * len(results))  # sweeps over the moment of the drain
            results.append(await one.call("ada"))
        assert judge_run(len(results), results).completed == len(results)
        assert 1 < one.starts("ada") <= len(results), "the drain was hit, and cost one start each time at most"
    assert [call.finished for call in transcript(tmp_path, "ada")] == [True] * len(results)


# --- C: replicas ------------------------------------------------------------------------------------------------------


@pytest.mark.case("16")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.standard
async def test_unanswered_requests_are_retried_after_their_engine_is_killed(tmp_path: Path, stream: bool) -> None:
    once = ("--once", str(tmp_path / "once"))
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "hangs-before-first-byte", *once, slots=1)
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        calling = one.begin(*(shot("ada", stream=stream) for _ in range(5)))
        await until("the engine hangs", (tmp_path / "once").exists)
        (engine,) = one.engines()
        os.kill(engine, signal.SIGKILL)
        results = await calling
        assert judge_run(5, results).completed == 5, "no client has seen anything"
        assert {result.text for result in results} == {SENTENCE}
        assert one.starts("ada") == 2
    assert len([call for call in transcript(tmp_path, "ada") if call.finished]) == 5


@pytest.mark.case("16")
async def test_requests_are_retried_when_the_engine_dies_before_the_first_byte(tmp_path: Path) -> None:
    once = ("--once", str(tmp_path / "once"))
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "dies-before-first-byte", *once, slots=8)
    async with serving(tmp_path, ada) as one:
        results = await one.send(*(shot("ada", stream=i % 2 == 0) for i in range(8)))
        assert judge_run(8, results).completed == 8
        assert one.starts("ada") == 2


@pytest.mark.case("16")
async def test_engine_killed_mid_stream_ends_each_stream_with_one_error(tmp_path: Path) -> None:
    # The streams last 32 s: they still run when a test that was paused for 20 s kills the engine.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0.25", idleSeconds=1)
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        async with gates(one.url) as gate:
            streams = [await gate.send(f"gateway-{1 + i % 2}", shot("ada")) for i in range(4)]
            await until("all run", lambda: one.demand("ada")["running"] == 4)
            parked = one.begin(*(shot("ada", stream=False, tokens=1) for _ in range(2)))
            await until("two wait", lambda: one.demand("ada") == {"waiting": 2, "running": 4})
            await until("each has a word", lambda: all(stream.connection.answer.text for stream in streams))
            (engine,) = one.engines()
            killed_s = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            await asyncio.wait([stream.done for stream in streams], timeout=TOLD_S)
            assert time.monotonic() - killed_s < TOLD_S
        for answer in (stream.connection.answer for stream in streams):
            assert (answer.status, answer.errors, answer.code) == (200, 1, "upstream_error"), answer
            assert (answer.saw_done, answer.finish_reason, answer.broken) == (False, "", "")
            assert SENTENCE.startswith(answer.text)
        assert judge_run(2, await parked).completed == 2, "who had no byte was not hurt"
        assert one.starts("ada") == 2


@pytest.mark.case("16")
async def test_engine_killed_during_a_json_response_resets_the_connection(tmp_path: Path) -> None:
    """The head promised a length: a truncated body must not look complete."""
    ada = fake(
        tmp_path, "ada", "--tokens-per-s", "0", "--fail", "hangs-after-first-byte", "--once", str(tmp_path / "o")
    )
    async with serving(tmp_path, ada) as one:
        async with gates(one.url) as gate:
            cut = await gate.send("gateway-1", shot("ada", stream=False))
            await until("it has the first bytes", lambda: cut.began_s)
            os.kill(one.engines()[0], signal.SIGKILL)
            await cut.done
        assert (cut.connection.answer.status, cut.cut) == (200, True), "a reset reports it"
        assert (await one.call("ada", stream=False)).text == SENTENCE


@pytest.mark.case("16")
async def test_engine_killed_after_the_last_byte_leaves_the_answer_complete(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada) as one:
        for stream in (True, False):
            result = await one.call("ada", stream=stream)
            (engine,) = one.engines()
            os.kill(engine, signal.SIGKILL)
            assert (result.ending, result.text) == (Ending.COMPLETED, SENTENCE)
        again = await one.call("ada")
        assert (again.ending, again.text) == (Ending.COMPLETED, SENTENCE), "its dead connections are not used"
        assert one.starts("ada") == 3
