"""Faults of waking and waiting, on real processes (reliability, section 5 A), each test named after its case.

tests/simulation asserts the seconds and shares that the cases promise, where time is exact. The wall-time limits here
are wide, to allow for a busy machine: they detect hangs and do not prove the figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from loadtest import tiny_gguf
from loadtest.client import Client
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.serve.serve import Document, Serving, fake, model, most_at_once, serving, shot, transcript
from tests.support.waiting import until

BURST = pytest.mark.xdist_group("burst")
"""Tests with many concurrent requests run one at a time."""
BACK_OFF_S = 60.0
BUSY_S = 30.0
"""Margin for a busy machine, which may pause a process for 20 s."""
DIES_S_MAX = 60.0
"""An engine that exits at once uses up all its start attempts within this time, also if a process is paused."""
HELD = 'until test -e "$0"; do sleep 0.1; done; exec "$@"'
"""A shell script that runs a command once a file exists."""


def codes(results: Sequence[Result]) -> set[tuple[int, str]]:
    return {(result.status, result.code) for result in results}


@pytest.mark.case("1")
@BURST
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.standard
async def test_thousand_simultaneous_requests_start_only_the_planned_replicas(tmp_path: Path, replicas: int) -> None:
    """One replica would need 5 s or 20 s for all, far longer than a start takes, so the allowed maximum is planned."""
    speed = ("--tokens-per-s", "200" if replicas == 1 else "50")
    ada = fake(tmp_path, "ada", *speed, slots=8, gpu={"memory": "20Mi"}, replicas={"max": replicas})
    async with serving(tmp_path, ada, options=("--gateways", "3")) as one:
        results = await one.send(*(shot("ada", at_s=i * 0.000_05, tokens=8) for i in range(1000)))
        verdict = judge_run(1000, results)
        assert (verdict.completed, verdict.holds) == (1000, True), verdict.line()
        used = {result.headers["x-request-id"].rsplit("-", 3)[0] for result in results}
        assert used == {"gateway-1", "gateway-2", "gateway-3"}
        assert one.starts("ada") == one.states("ada").count("starting") == replicas, "as planned, not times three"
    calls = transcript(tmp_path, "ada")
    assert len(calls) == len({call.id for call in calls}) == 1000, "every Call was on exactly one engine, once"
    assert most_at_once(calls) <= 8
    assert max(call.queued_s for call in calls) < 1.0, "none waited inside an engine"


def cannot_start(folder: Path, how: str) -> Document:
    """Return a Model whose start cannot succeed."""
    start: Document = {"secondsMax": 2.5}
    if how == "dies":  # the attempts run out before the deadline
        return fake(folder, "bad", "--fail", "dies-on-start:3", start={"secondsMax": DIES_S_MAX})
    if how == "never-ready":
        return fake(folder, "bad", "--fail", "never-ready", start=start)
    if how == "no-program":
        return model("bad", engine="command", command=["/nowhere/engine", "{port}"], start=start)
    if how == "broken-file":
        tiny_gguf.make_model(folder / "bad.gguf", "Never said.")
        (folder / "bad.gguf").write_bytes((folder / "bad.gguf").read_bytes()[:300_000])
    return model("bad", engine="llama.cpp", artifact=f"file://{folder}/bad.gguf", start=start)


@pytest.mark.case("2")
@pytest.mark.parametrize("how", ["dies", "never-ready", "no-program", "missing-file", "broken-file"])
@pytest.mark.standard
async def test_model_that_cannot_start_fails_its_requests_with_503(tmp_path: Path, how: str) -> None:
    good = fake(tmp_path, "good", "--tokens-per-s", "0")
    async with serving(tmp_path, cannot_start(tmp_path, how), good, options=("--gateways", "2")) as one:
        began_s = time.monotonic()
        waiting = one.begin(*(shot("bad", stream=i % 2 == 0) for i in range(10)))
        other = await one.call("good")
        assert other.ending is Ending.COMPLETED
        results = await waiting
        assert codes(results) == {(503, "model_start_failed")}
        assert all(result.errors == 1 and result.clear for result in results)
        assert all(0 < int(result.headers["retry-after"]) <= 120 for result in results)
        seconds_max = DIES_S_MAX if how == "dies" else 2.5
        assert max(result.last_byte_s or 99 for result in results) < seconds_max + BUSY_S, "start.secondsMax"
        tried = one.starts("bad")
        assert tried == {"dies": 4, "never-ready": 1}.get(how, tried)
        await one.zero("bad")
        went = one.states("bad")
        again = await one.call("bad")
        assert codes([again]) == {(503, "model_start_failed")}
        past_s = time.monotonic() - began_s  # the back-off began within this time
        assert int(again.headers["retry-after"]) >= min(31, BACK_OFF_S - past_s)
        assert (await one.call("good")).ending is Ending.COMPLETED
        assert (one.starts("bad"), one.states("bad")) == (tried, went), "refused while it backs off, without a start"


@pytest.mark.case("2")
async def test_failed_start_is_retried_only_after_the_back_off_time(tmp_path: Path) -> None:
    """The failure cannot be predicted: the engine exits until its cause is fixed."""
    gate = f'test -e {tmp_path}/mended || exit 3; exec "$@"'
    words = command("--name", "bad", "--port", "{port}", "--sentence", "At last I am here.")
    mended = model("bad", engine="command", command=["/bin/sh", "-c", gate, "sh", *words])
    async with serving(tmp_path, mended) as one:
        began_s = time.monotonic()  # after the failure the test may be paused
        assert (await one.call("bad")).code == "model_start_failed"
        (tmp_path / "mended").touch()
        assert (await one.call("bad")).code == "model_start_failed", "half-open is later"
        await until("clients may wait again", lambda: one.reported_state("bad") != "failed", BACK_OFF_S + 60, 0.2)
        assert time.monotonic() - began_s > BACK_OFF_S - 5
        answer = await one.call("bad", stream=False)
        assert answer.text.strip() == "At last I am here."


@pytest.mark.case("4")
@pytest.mark.standard
async def test_replica_without_clients_stays_for_its_minimum_residency_time(tmp_path: Path) -> None:
    residency_s = 3.0
    words = command("--name", "ada", "--port", "{port}", "--transcript", str(tmp_path / "ada.jsonl"))
    held = ["/bin/sh", "-c", HELD, str(tmp_path / "begin"), *words]  # it starts when all clients are gone
    ada = model("ada", engine="command", command=held, idleSeconds=0.5, residencySeconds=residency_s)
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        client = Client(one.url)

        async def leave() -> None:
            await until("all wait", lambda: one.demand("ada")["waiting"] == 40)
            client.stop.request()

        results, _ = await asyncio.gather(client.run([shot("ada") for _ in range(40)]), leave())
        await until("no request waits", lambda: one.demand("ada")["waiting"] == 0)
        assert [result.ending for result in results] == [Ending.ABANDONED] * 40
        (tmp_path / "begin").touch()
        await until("it was ready", lambda: "ready" in one.states("ada"))
        await one.zero("ada")
        moves = one.moves("ada")
        assert [move.state for move in moves] == ["starting", "ready", "draining", "stopping", "gone"]
        assert moves[2].at_s - moves[1].at_s > residency_s - 0.1, "what has started is held for its residency"
        assert one.starts("ada") == 1
    assert transcript(tmp_path, "ada") == [], "no grant to a client that has disconnected"


async def test_retrying_clients_complete_after_a_slow_cold_start(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--start-delay", "9", "--tokens-per-s", "0", residencySeconds=20)

    async def insist(one: Serving) -> list[Result]:
        tries = [await one.call("ada", timeout_s=4.0)]
        while tries[-1].ending is not Ending.COMPLETED:
            assert len(tries) < 20
            if tries[-1].ending is Ending.FAILED:  # rejected by an estimate: retry after the given time
                await asyncio.sleep(int(tries[-1].headers["retry-after"]))
            tries.append(await one.call("ada", timeout_s=4.0))
        return tries

    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        everybody = await asyncio.gather(*(insist(one) for _ in range(10)))
        assert all(len(tries) > 1 for tries in everybody)
        assert one.starts("ada") == 1
    # A client that was paused abandons a response that has arrived, and sends its request again.
    assert sum(call.finished for call in transcript(tmp_path, "ada")) >= 10


async def test_request_with_a_short_wait_limit_fails_early_but_starts_the_model(tmp_path: Path) -> None:
    # After the second start there is no request for a while: the residency is longer than a pause of the test.
    ada = fake(tmp_path, "ada", "--start-delay", "8", "--tokens-per-s", "0", idleSeconds=5, residencySeconds=30)
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await one.zero("ada")
        hurried = await one.send(shot("ada", headers=(("Prefer", "wait=7"),)))
        assert codes(hurried) == {(503, "model_starting")}, "hopeless by the estimate"
        # Retry-After is the estimate: over 7 s when the request arrives, and 1 s at its own deadline.
        assert int(hurried[0].headers["retry-after"]) >= 8, "before its own deadline"
        await one.ready("ada")
        assert (await one.send(shot("ada", headers=(("Prefer", "wait=4"),))))[0].ending is Ending.COMPLETED
        assert one.starts("ada") == 2


@pytest.mark.case("9")
@pytest.mark.standard
async def test_two_models_on_one_device_alternate_without_failed_requests(tmp_path: Path) -> None:
    residency_s, rounds = 0.5, 6
    names = ("ada", "bob")
    both = [
        fake(tmp_path, name, "--tokens-per-s", "50", gpu={"memory": "64Mi"}, residencySeconds=residency_s)
        for name in names
    ]
    async with serving(tmp_path, *both, options=("--gateways", "2")) as one:
        began_s = time.monotonic()
        results = [await one.call(names[i % 2], tokens=10) for i in range(rounds)]

        async def hammer(name: str) -> list[Result]:
            return [await one.call(name, tokens=10) for _ in range(15)]

        for hammered in await asyncio.gather(*map(hammer, names)):
            results += hammered
        past_s = time.monotonic() - began_s
        assert judge_run(rounds + 30, results).completed == rounds + 30
        starts = sum(map(one.starts, names))
        assert 4 <= starts <= past_s / residency_s + 1, f"{starts} starts in {past_s:.1f} s"
        assert max(result.first_byte_s or 99 for result in results) < 2 * BUSY_S, "every model was served"
    calls = [call for name in names for call in transcript(tmp_path, name)]
    assert [call for call in calls if not call.finished] == [], "no running Call was cut"
    assert len(calls) == rounds + 30


def went(one: Serving, times: int) -> bool:
    return one.states("ada").count("gone") == times


@pytest.mark.case("12")
@pytest.mark.parametrize("start_s", [0.0, 0.5])
@pytest.mark.standard
async def test_idle_timeout_counts_from_the_end_of_a_long_generation(tmp_path: Path, start_s: float) -> None:
    idle_s = 0.5
    knobs = ("--start-delay", str(start_s), "--tokens-per-s", "10", "--tokens", "20")
    ada = fake(tmp_path, "ada", *knobs, idleSeconds=idle_s)
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        for number, stream in enumerate((True, False), 1):
            assert (await one.call("ada", tokens=20, stream=stream)).ending is Ending.COMPLETED
            await until("it is gone", partial(went, one, number))
        drains_s = [move.at_s for move in one.moves("ada") if move.state == "draining"]
        assert one.starts("ada") == 2
    calls = transcript(tmp_path, "ada")
    assert [call.finished for call in calls] == [True, True]
    for call, drain_s in zip(calls, drains_s, strict=True):
        assert call.ended_s - call.began_s > 3 * idle_s
        assert drain_s - call.ended_s > idle_s - 0.05, "idle runs from the finish"
