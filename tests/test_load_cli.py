"""The load commands as a person runs them: figures on stdout, progress on stderr, and the three exit codes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from loadtest.cli import load, request_body
from loadtest.client import LoadError
from loadtest.coldstart import coldstart
from loadtest.result import Ending
from tests.kit.fake_process import fake_engine

Serve = Callable[[web.Application], Awaitable[TestServer]]
FAST = ("--name", "ada", "--tokens-per-s", "0")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(load, arguments)


def test_a_run_that_holds_exits_0_and_ends_with_its_verdict(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "20", "--within", "0.05", "--report", str(page)
        )
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == (
        "verdict holds: 20 calls, 20 completed, 0 failed, 0 abandoned, 0 lost, 0 truncated"
    )
    assert "verdict holds: 20 calls" in page.read_text()


def test_a_run_with_one_cut_stream_exits_1_and_says_why(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "bad-chunk", "--once", str(tmp_path / "once")) as engine:
        done = invoke("run", "--url", engine.url, "--model", "ada", "--burst", "5")
    assert done.exit_code == 1
    assert "1 x the response is not HTTP/1.1" in done.stdout
    assert "verdict DOES NOT HOLD: 5 calls, 4 completed" in done.stdout


def test_a_run_as_json_is_one_document_and_models_take_turns(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "a", "--model", "b", "--arrivals", "constant",
            "--rate", "40", "--seconds", "0.2", "--no-stream", "--output", "json",
        )  # fmt: skip
        served = {call["model"] for call in engine.calls()}
    document = json.loads(done.stdout)
    assert (done.exit_code, document["verdict"]["holds"], document["verdict"]["admitted"]) == (0, True, 8)
    assert [call["model"] for call in document["calls"]] == ["a", "b"] * 4
    assert served == {"a", "b"}


def test_the_key_comes_from_the_environment_and_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-canary")
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "1", "--key-env", "A_KEY", "--output", "json"
        )
        (call,) = engine.calls()
    assert '"authorization": "Bearer sk-canary"' in json.dumps(call["headers"])
    assert "canary" not in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--url", "nowhere", "--model", "m", "--burst", "1"], "give http://HOST:PORT"),
        (["run", "--url", "http://h", "--model", "m"], "either --rate"),
        (["run", "--url", "http://h", "--model", "m", "--rate", "1", "--burst", "1"], "either --rate"),
        (["run", "--url", "http://h", "--model", "m", "--rate", "0"], "--rate"),
        (["run", "--url", "http://h", "--model", "m", "--burst", "1", "--key-env", "NO_SUCH"], "NO_SUCH is not set"),
        (["coldstart", "--url", "http://h", "--model", "m", "--ops", "nowhere"], "give http://HOST:PORT"),
        (["coldstart", "--url", "http://h"], "--model"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "cached"], "--from cached: is not in force yet"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "asleep"], "--from asleep: is not in force yet"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "warm"], "'gone', 'cached', 'asleep'"),
    ],
)
def test_wrong_usage_exits_2_naming_the_option(arguments: list[str], says: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize("command", ["run", "coldstart"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example:  pilotlight load {command} --url http://" in invoke(command, "--help").stdout


def test_a_prompt_has_the_bytes_that_were_asked_for() -> None:
    for size in (1, 64, 5000):
        body = json.loads(request_body("m", 1, size, stream=True))
        assert len(body["messages"][0]["content"]) == size


class ColdServer:
    """An inference port and an operations port of a Model that needs some looks until it is at zero again."""

    def __init__(self, *, looks: int = 2, timing: str = "queue;dur=1, load;dur=20, ready;dur=2") -> None:
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
        return web.json_response({"name": "ada", "replicas": {"scrubbing": 1} if self.left > 0 else {}})

    async def call(self, _: web.Request) -> web.Response:
        self.left, self.calls = self.looks, self.calls + 1
        text = 'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, headers={"Server-Timing": self.timing, "Content-Type": "text/event-stream"})


@pytest.mark.parametrize("with_ops", [False, True])
async def test_each_round_waits_for_zero_and_keeps_the_phases(aiohttp_server: Serve, with_ops: bool) -> None:
    server = ColdServer()
    url = str((await aiohttp_server(server.app)).make_url("/")).rstrip("/")
    said: list[str] = []
    starts = await coldstart(url, "ada", 3, url if with_ops else None, say=said.append)
    assert (server.calls, starts.warm, starts.verdict.completed, starts.verdict.holds) == (3, 0, 3, True)
    assert list(starts.spreads_ms) == ["queue", "load", "ready", "first byte", "total"]
    assert starts.spreads_ms["load"].median == 20.0
    assert all(one.waited_s >= 0.1 for one in starts.rounds)
    assert [line.split(":")[0] for line in said] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert all(re.search(r": waited 0\.[1-9] s for zero, first byte after ", line) for line in said)


async def test_the_operations_port_is_believed_and_gets_no_key(aiohttp_server: Serve) -> None:
    keys: list[str | None] = []

    async def entry(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"name": "ada", "replicas": {"ready": 0, "scrubbing": 0}})

    app = web.Application()
    app.router.add_get("/api/v1/models/ada", entry)
    ops = str((await aiohttp_server(app)).make_url("/"))
    server = ColdServer(looks=10_000)
    url = str((await aiohttp_server(server.app)).make_url("/"))
    starts = await coldstart(url, "ada", 2, ops, key="pl-secret")
    assert (server.calls, starts.verdict.holds, keys) == (2, True, [None, None])
    assert server.left == server.looks, "the inference port is not asked"


async def test_an_operations_url_that_is_another_port_is_one_error(aiohttp_server: Serve) -> None:
    async def entry(_: web.Request) -> web.Response:
        return web.json_response({"id": "ada", "pilotlight": {"state": "zero"}})

    app = web.Application()
    app.router.add_get("/api/v1/models/ada", entry)
    url = str((await aiohttp_server(app)).make_url("/"))
    with pytest.raises(LoadError, match=r"is --ops the operations port\?"):
        await coldstart(url, "ada", 1, url)


async def test_a_start_that_was_not_cold_is_told(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer(timing="upstream;dur=2").app)).make_url("/"))
    starts = await coldstart(url, "ada", 1)
    assert (starts.warm, starts.rounds[0].cold, starts.rounds[0].ending) == (1, False, Ending.COMPLETED)


@pytest.mark.parametrize(("model", "says"), [("absent", "no such model"), ("other", "does not tell the model's state")])
async def test_a_server_that_cannot_tell_zero_is_one_error(aiohttp_server: Serve, model: str, says: str) -> None:
    url = str((await aiohttp_server(ColdServer().app)).make_url("/"))
    with pytest.raises(LoadError, match=says):
        await coldstart(url, model, 1)


async def test_the_coldstart_command_prints_phases_and_exits_0(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer().app)).make_url("/"))
    done = await asyncio.to_thread(invoke, "coldstart", "--url", url, "--model", "ada", "--rounds", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["queue", "load", "ready", "first", "total", "verdict"]
    assert lines[1].split()[1:5] == ["min", "20.0", "median", "20.0"]
    assert re.search(r"round 2 of 2: waited 0\.\d s for zero, first byte after", done.stderr)


def test_a_server_that_is_not_there_exits_1_in_one_line() -> None:
    done = invoke("coldstart", "--url", "http://127.0.0.1:9", "--model", "ada")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "is the server up" in done.stderr
