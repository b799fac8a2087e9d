"""Cold starts measured from outside: what a round waits for, the progress messages, and how a measurement ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

import loadtest.coldstart
from loadtest.cli import load
from loadtest.client import LoadError
from loadtest.coldstart import AWAY, FAILED, INTERRUPTED, KEPT, SHORTEN, STAY, Beginning, measure_cold_starts
from loadtest.result import Ending
from loadtest.stop_signals import Stop
from tests.support.waiting import until

pytestmark = pytest.mark.standard

Serve = Callable[[web.Application], Awaitable[TestServer]]
Handler = Callable[[web.Request], Awaitable[web.Response]]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(load, arguments)


def returns(body: dict[str, object]) -> Handler:
    """Return a handler whose response is this JSON document."""

    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body)

    return handler


async def serve(start: Serve, *, state: Handler | None = None, entry: Handler | None = None, **call: Handler) -> str:
    """Run a server with handlers for the model's state (operations port), its entry, and `call`; return the URL."""
    app = web.Application()
    if state is not None:
        app.router.add_get("/api/v1/models/ada", state)
    if entry is not None:
        app.router.add_get("/v1/models/ada", entry)
    for handler in call.values():
        app.router.add_post("/v1/chat/completions", handler)
    return str((await start(app)).make_url("/")).rstrip("/")


class ColdServer:
    """The inference port and operations port of a model that is at zero again only after some polls."""

    def __init__(self, *, looks: int = 2, timing: str = "queue;dur=1, place;dur=5, load;dur=20, ready;dur=2") -> None:
        self.looks, self.timing, self.left, self.calls = looks, timing, looks, 0
        self.app = web.Application()
        self.app.router.add_get("/v1/models/ada", self.entry)
        self.app.router.add_get("/v1/models/other", self.other)
        self.app.router.add_get("/api/v1/models/ada", self.status)
        self.app.router.add_post("/v1/chat/completions", self.call)

    async def entry(self, _: web.Request) -> web.Response:
        self.left -= 1
        return web.json_response({"id": "ada", "pilotlight": {"state": "ready" if self.left > 0 else "zero"}})

    async def other(self, _: web.Request) -> web.Response:
        return web.json_response({"id": "other", "object": "model"})

    async def status(self, _: web.Request) -> web.Response:
        self.left -= 1
        started = {"place": 0.005, "place.write": 0.002, "place.schedule": 0.003, "load": 0.02}
        left = {"scrubbing": 1} if self.left > 0 else {}
        return web.json_response({"name": "ada", "replicas": left, "last_start_phases": started})

    async def call(self, _: web.Request) -> web.Response:
        self.left, self.calls = self.looks, self.calls + 1
        text = 'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, headers={"Server-Timing": self.timing, "Content-Type": "text/event-stream"})


@pytest.mark.parametrize("with_ops", [False, True])
async def test_each_round_waits_for_zero_replicas_and_records_the_phases(aiohttp_server: Serve, with_ops: bool) -> None:
    server = ColdServer(looks=3 if with_ops else 2)
    url = str((await aiohttp_server(server.app)).make_url("/")).rstrip("/")
    messages: list[str] = []
    starts = await measure_cold_starts(url, "ada", 3, url if with_ops else None, say=messages.append)
    assert (server.calls, starts.warm, starts.verdict.completed, starts.verdict.holds) == (3, 0, 3, True)
    parts = ["place.write", "place.schedule"] if with_ops else []
    assert list(starts.spreads_ms) == ["queue", "place", *parts, "load", "ready", "first byte", "total"]
    assert starts.spreads_ms["load"].median == 20.0
    assert not with_ops or starts.spreads_ms["place.write"].median == 2.0
    assert all(one.waited_s >= 0.1 for one in starts.rounds)
    assert messages[0].startswith(
        "3 rounds, about 7 min and the starts: each round waits until no replica is left (60 s without a request, "
    )
    assert messages[1] == SHORTEN
    assert [line.split(":")[0] for line in messages[2:]] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert all(re.search(r": waited 0\.[1-9] s for zero, first byte after ", line) for line in messages[2:])


async def test_from_gone_option_delays_a_round_until_no_node_has_the_weights(
    aiohttp_server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights stay until someone removes them; a progress message states it."""
    monkeypatch.setattr(loadtest.coldstart, "SAY_EVERY_S", 0.0)
    server = ColdServer(looks=0)
    weights = ["absent", "here", "here"]

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"name": "ada", "replicas": {}, "weights": weights.pop() if weights else "absent"})

    url, messages = await serve(aiohttp_server, state=status, call=server.call), list[str]()
    await measure_cold_starts(url, "ada", 1, url, since="gone", say=messages.append)
    assert (weights, server.calls) == ([], 1)
    assert sum(STAY in line for line in messages) == 2


@pytest.mark.parametrize(
    ("since", "weights", "error"),
    [
        ("cached", "absent", AWAY), ("cached", "failed", AWAY), ("cached", "here", ""), ("cached", "", ""),
        ("gone", "absent", ""), ("gone", "", ""), ("zero", "here", ""), ("zero", "absent", ""),
    ],
)  # fmt: skip
async def test_round_starts_only_with_weights_in_the_requested_state(
    aiohttp_server: Serve, since: Beginning, weights: str, error: str
) -> None:
    server = ColdServer(looks=0)
    state = returns({"name": "ada", "replicas": {}, "weights": weights})
    url = await serve(aiohttp_server, state=state, call=server.call)
    refused = ""
    try:
        await measure_cold_starts(url, "ada", 1, url, since=since)
    except LoadError as known:
        refused = str(known)
    assert (refused, server.calls) == (error, 0 if error else 1)


@pytest.mark.parametrize(
    ("rounds", "entry", "message"),
    [
        (
            20,
            {"idle_seconds": 60.0, "idle_auto": True, "last_start_seconds": 21.4},
            "20 rounds, about 4 h 7 min: each round waits until no replica is left (60 s without a request, longer in",
        ),
        (
            5,
            {"idle_seconds": 2.0, "last_start_seconds": 0.5},
            (
                "5 rounds, about 10 s: each round waits until no replica is left (2 s without a request), then for one "
                "start (0.5 s)"
            ),
        ),
        (
            2,
            {"idle_seconds": 1800.0},
            "2 rounds, about 30 min and the starts: each round waits until no replica is left (1800 s without a ",
        ),
        (1, {"idle_seconds": 60.0, "last_start_seconds": 21.4}, "1 round, about 21 s: one start (21.4 s)"),
        (1, {}, "1 round: one start"),
    ],
)
async def test_first_output_line_states_the_rounds_and_expected_duration(
    aiohttp_server: Serve, rounds: int, entry: dict[str, object], message: str
) -> None:
    """The model is at zero, so the first round begins at once."""
    messages, stop = list[str](), Stop()

    def say(line: str) -> None:
        messages.append(line)
        stop.request()

    url = await serve(aiohttp_server, state=returns({"name": "ada", "replicas": {}, **entry}))
    await measure_cold_starts(url, "ada", rounds, url, say=say, stop=stop)
    assert messages[0].startswith(message)
    assert messages[1:2] == ([SHORTEN] if rounds > 1 else messages[1:2])


async def test_model_state_is_read_from_operations_port_without_the_api_key(aiohttp_server: Serve) -> None:
    keys: list[str | None] = []

    async def entry(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"name": "ada", "replicas": {"ready": 0, "scrubbing": 0}})

    ops = await serve(aiohttp_server, state=entry)
    server = ColdServer(looks=10_000)
    url = str((await aiohttp_server(server.app)).make_url("/"))
    starts = await measure_cold_starts(url, "ada", 2, ops, key="pl-secret")
    assert (server.calls, starts.verdict.holds, keys) == (2, True, [None] * 4)
    assert server.left == server.looks, "the inference port is not asked"


async def test_operations_url_of_the_inference_port_is_rejected(aiohttp_server: Serve) -> None:
    url = await serve(aiohttp_server, state=returns({"id": "ada", "pilotlight": {"state": "zero"}}))
    with pytest.raises(LoadError, match=r"is --ops the operations port\?"):
        await measure_cold_starts(url, "ada", 1, url)


@pytest.mark.parametrize(("with_ops", "state"), [(True, "its replicas: 1 scrubbing"), (False, "the model is ready")])
async def test_measurement_fails_if_the_model_does_not_scale_to_zero_in_time(
    aiohttp_server: Serve, monkeypatch: pytest.MonkeyPatch, *, with_ops: bool, state: str
) -> None:
    monkeypatch.setattr(loadtest.coldstart, "SAY_EVERY_S", 0.0)  # at the first poll, however slow the machine is
    monkeypatch.setattr(loadtest.coldstart, "ZERO_S_MAX", 0.15)
    url = str((await aiohttp_server(ColdServer(looks=100).app)).make_url("/"))
    messages: list[str] = []
    with pytest.raises(LoadError) as caught:
        await measure_cold_starts(url, "ada", 1, url if with_ops else None, say=messages.append)
    assert str(caught.value) == f"not at zero after 0 s, {state}: {KEPT}"
    assert f"waiting for zero for 0 s, {state}" in messages


async def test_response_without_cold_start_phases_is_classified_as_warm(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer(timing="upstream;dur=2").app)).make_url("/"))
    starts = await measure_cold_starts(url, "ada", 1)
    assert (starts.warm, starts.rounds[0].cold, starts.rounds[0].ending) == (1, False, Ending.COMPLETED)


async def test_stopped_coldstart_measurement_reports_the_completed_rounds(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer(looks=3).app)).make_url("/"))
    stop = Stop()

    def say(line: str) -> None:
        if line.startswith("round 2 of 20"):
            asyncio.get_running_loop().call_later(0.05, stop.request)  # while it waits for zero

    starts = await measure_cold_starts(url, "ada", 20, say=say, stop=stop)
    assert (len(starts.rounds), starts.ended, starts.verdict.admitted, starts.verdict.holds) == (
        2,
        INTERRUPTED,
        2,
        True,
    )
    assert starts.spreads_ms["load"].count == 2


async def test_stopped_coldstart_measurement_abandons_the_round_in_progress(aiohttp_server: Serve) -> None:
    server, stop = ColdServer(), Stop()

    async def hang(_: web.Request) -> web.Response:
        asyncio.get_running_loop().call_later(0.05, stop.request)
        await asyncio.sleep(20)
        return web.Response()

    url = await serve(aiohttp_server, entry=server.entry, call=hang)
    starts = await measure_cold_starts(url, "ada", 20, stop=stop)
    assert [one.ending for one in starts.rounds] == [Ending.ABANDONED]
    assert (starts.ended, starts.verdict.holds) == (INTERRUPTED, True)


@pytest.mark.parametrize("rounds_before", [0, 1])
async def test_interrupted_coldstart_prints_its_verdict_if_a_round_was_measured(
    aiohttp_server: Serve, rounds_before: int
) -> None:
    server = ColdServer(looks=2 if rounds_before else 10_000)
    url = str((await aiohttp_server(server.app)).make_url("/"))
    words = ("-m", "pilotlight", "load", "coldstart", "--url", url, "--model", "ada", "--rounds", "9")
    run = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE, stderr=PIPE)
    await until("it looks", lambda: server.calls >= rounds_before and server.left < server.looks)
    server.left = 10_000
    run.send_signal(signal.SIGINT)
    output = (await run.communicate())[0].decode().splitlines()
    assert run.returncode == 130
    assert re.fullmatch(rf"ended after [{rounds_before}-9] of 9 rounds: interrupted", output[-2])
    measured = not output[-2].startswith("ended after 0 ")
    assert output[-1].startswith("verdict holds: " if measured else "no verdict: nothing was measured")


FAILED_STATE = returns({"id": "ada", "pilotlight": {"state": "failed"}, "replicas": {}})


async def refuse(_: web.Request) -> web.Response:
    error = {"message": "The model failed to start.", "code": "model_start_failed", "type": "x"}
    return web.json_response({"error": error}, status=503)


async def test_coldstart_of_a_failed_model_exits_1_before_the_first_round(aiohttp_server: Serve) -> None:
    url = await serve(aiohttp_server, entry=FAILED_STATE)
    done = await asyncio.to_thread(invoke, "coldstart", "--url", url, "--model", "ada")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the model failed to start" in done.stderr
    assert "pilotlight explain" in done.stderr


async def test_model_failure_in_a_round_ends_the_measurement(aiohttp_server: Serve) -> None:
    url = await serve(aiohttp_server, state=FAILED_STATE, call=refuse)
    done = await asyncio.to_thread(invoke, "coldstart", "--url", url, "--model", "ada", "--rounds", "5", "--ops", url)
    assert done.exit_code == 1
    *_, ended, codes, verdict = done.stdout.splitlines()
    assert ended.startswith("ended after 1 of 5 rounds: the model failed to start")
    assert codes == "  1 x model_start_failed"
    assert verdict.startswith("verdict holds: 1 request, 0 completed, 1 failed")


async def test_model_failure_in_a_later_round_keeps_the_completed_rounds(aiohttp_server: Serve) -> None:
    server = ColdServer()

    async def entry(request: web.Request) -> web.Response:
        return await (server.entry(request) if server.calls < 2 else FAILED_STATE(request))

    starts = await measure_cold_starts(await serve(aiohttp_server, entry=entry, call=server.call), "ada", 5)
    assert (len(starts.rounds), starts.ended, starts.verdict.completed) == (2, FAILED, 2)


@pytest.mark.parametrize(
    ("model", "message"), [("absent", "no such model"), ("other", "does not contain the state of the model")]
)
async def test_coldstart_fails_if_the_server_reports_no_model_state(
    aiohttp_server: Serve, model: str, message: str
) -> None:
    url = str((await aiohttp_server(ColdServer().app)).make_url("/"))
    with pytest.raises(LoadError, match=message):
        await measure_cold_starts(url, model, 1)


async def test_coldstart_command_prints_phases_and_writes_its_page(aiohttp_server: Serve, tmp_path: Path) -> None:
    url, page = str((await aiohttp_server(ColdServer().app)).make_url("/")), tmp_path / "out.html"
    words = ("coldstart", "--url", url, "--model", "ada", "--rounds", "2", "--report", str(page))
    done = await asyncio.to_thread(invoke, *words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] in page.read_text()
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["queue", "place", "load", "ready", "first", "total", "verdict"]
    assert lines[2].split()[1:5] == ["min", "20.0", "median", "20.0"]
    assert re.search(r"round 2 of 2: waited 0\.\d s for zero, first byte after", done.stderr)


async def test_coldstart_prints_its_json_to_stdout_and_the_estimate_to_stderr(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer().app)).make_url("/"))
    words = ("coldstart", "--url", url, "--model", "ada", "--rounds", "2", "--output", "json")
    done = await asyncio.to_thread(invoke, *words)
    assert len(json.loads(done.stdout)["rounds"]) == 2
    assert done.stderr.startswith("2 rounds, about 3 min and the starts: each round waits until no replica is left (")


def test_coldstart_of_an_unreachable_server_exits_1_with_one_error_line() -> None:
    done = invoke("coldstart", "--url", "http://127.0.0.1:9", "--model", "ada")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "check that the server runs" in done.stderr
