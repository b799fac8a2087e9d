"""The load commands as a person runs them: figures on stdout, progress on stderr, and the three exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from loadtest.cli import load, request_body
from loadtest.client import LoadError
from loadtest.coldstart import FAILED, INTERRUPTED, coldstart
from loadtest.result import Ending
from loadtest.stopping import Stop
from tests.kit.fake_process import fake_engine
from tests.kit.waiting import until

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


@pytest.mark.parametrize("page", ["/nonexistent/x.html", "/etc/hostname/x.html"])
def test_a_report_that_cannot_be_written_is_known_before_the_run(page: str) -> None:
    done = invoke("run", "--url", "http://127.0.0.1:9", "--model", "ada", "--burst", "1", "--report", page)
    assert done.exit_code == 2
    assert "is not a folder" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_disk_that_is_full_at_the_end_costs_the_page_and_not_the_verdict(tmp_path: Path, output: str) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "3", "--report", "/dev/full", "--output", output
        )
    assert done.exit_code == 1
    assert ("verdict holds: 3 calls" in done.stdout) is (output == "text")
    assert output == "text" or json.loads(done.stdout)["verdict"]["holds"]
    assert done.stderr.endswith("--report /dev/full: No space left on device; the verdict above is whole\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_is_judged_over_what_was_sent(tmp_path: Path, number: signal.Signals) -> None:
    """Some Calls are answered, one is under way, most are not sent yet."""
    page = tmp_path / "out.html"
    with fake_engine(tmp_path, "--name", "ada", "--tokens-per-s", "20", "--tokens", "2000", "--slots", "64") as engine:
        words = (
            "--url",
            engine.url,
            "--arrivals",
            "constant",
            "--rate",
            "20",
            "--seconds",
            "600",
            "--report",
            str(page),
        )
        command = [sys.executable, "-m", "pilotlight", "load", "run", *words, "--model", "ada", "--max-tokens", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            deadline_s = time.monotonic() + 20
            while len(engine.calls()) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.02)
            run.send_signal(number)
            said, _ = run.communicate(timeout=20)
    assert run.returncode == 130
    *_, note, verdict = said.splitlines()
    found = re.fullmatch(r"interrupted: (\d+) of 12000 calls were sent, and those under way were given up", note)
    assert found is not None, said
    counts = re.fullmatch(
        r"verdict holds: (\d+) calls, (\d+) completed, 0 failed, (\d+) abandoned, 0 lost, .*", verdict
    )
    assert counts is not None, said
    sent, completed, abandoned = map(int, counts.groups())
    assert sent == int(found[1]) == completed + abandoned
    assert completed >= 3
    assert note in page.read_text()


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


async def test_rounds_that_were_made_are_told_when_it_is_stopped(aiohttp_server: Serve) -> None:
    url = str((await aiohttp_server(ColdServer(looks=3).app)).make_url("/"))
    stop = Stop()

    def say(line: str) -> None:
        if line.startswith("round 2 of 20"):
            asyncio.get_running_loop().call_later(0.05, stop.tell)  # while it waits for zero

    starts = await coldstart(url, "ada", 20, say=say, stop=stop)
    assert (len(starts.rounds), starts.ended, starts.verdict.admitted, starts.verdict.holds) == (
        2,
        INTERRUPTED,
        2,
        True,
    )
    assert starts.spreads_ms["load"].count == 2


async def test_a_round_that_is_under_way_is_given_up_when_it_is_stopped(aiohttp_server: Serve) -> None:
    server, stop = ColdServer(), Stop()

    async def hang(_: web.Request) -> web.Response:
        asyncio.get_running_loop().call_later(0.05, stop.tell)
        await asyncio.sleep(20)
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models/ada", server.entry)
    app.router.add_post("/v1/chat/completions", hang)
    url = str((await aiohttp_server(app)).make_url("/"))
    starts = await coldstart(url, "ada", 20, stop=stop)
    assert [one.ending for one in starts.rounds] == [Ending.ABANDONED]
    assert (starts.ended, starts.verdict.holds) == (INTERRUPTED, True)


@pytest.mark.parametrize("rounds_before", [0, 1])
async def test_the_coldstart_command_ends_with_its_verdict_at_ctrl_c(aiohttp_server: Serve, rounds_before: int) -> None:
    server = ColdServer(looks=2 if rounds_before else 10_000)
    url = str((await aiohttp_server(server.app)).make_url("/"))
    words = ("-m", "pilotlight", "load", "coldstart", "--url", url, "--model", "ada", "--rounds", "9")
    run = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE, stderr=PIPE)
    await until("it looks", lambda: server.calls >= rounds_before and server.left < server.looks)
    server.left = 10_000
    run.send_signal(signal.SIGINT)
    said = (await run.communicate())[0].decode().splitlines()
    assert run.returncode == 130
    assert re.fullmatch(rf"ended after [{rounds_before}-9] of 9 rounds: interrupted", said[-2])
    assert said[-1].startswith("verdict holds: ")


async def failed(_: web.Request) -> web.Response:
    return web.json_response({"id": "ada", "pilotlight": {"state": "failed"}, "replicas": {}})


async def refuse(_: web.Request) -> web.Response:
    error = {"message": "The model failed to start.", "code": "model_start_failed", "type": "x"}
    return web.json_response({"error": error}, status=503)


async def test_a_model_that_failed_is_one_clear_error_at_once(aiohttp_server: Serve) -> None:
    app = web.Application()
    app.router.add_get("/v1/models/ada", failed)
    url = str((await aiohttp_server(app)).make_url("/"))
    done = await asyncio.to_thread(invoke, "coldstart", "--url", url, "--model", "ada")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the model failed to start" in done.stderr
    assert "pilotlight explain" in done.stderr


async def test_a_model_that_fails_in_a_round_ends_the_measurement_there(aiohttp_server: Serve) -> None:
    app = web.Application()
    app.router.add_get("/api/v1/models/ada", failed)
    app.router.add_post("/v1/chat/completions", refuse)
    url = str((await aiohttp_server(app)).make_url("/"))
    done = await asyncio.to_thread(invoke, "coldstart", "--url", url, "--model", "ada", "--rounds", "5", "--ops", url)
    assert done.exit_code == 1
    *_, ended, codes, verdict = done.stdout.splitlines()
    assert ended.startswith("ended after 1 of 5 rounds: the model failed to start")
    assert codes == "  1 x model_start_failed"
    assert verdict.startswith("verdict holds: 1 call, 0 completed, 1 failed")


async def test_what_goes_wrong_after_some_rounds_does_not_lose_them(aiohttp_server: Serve) -> None:
    server = ColdServer()

    async def entry(request: web.Request) -> web.Response:
        return await (server.entry(request) if server.calls < 2 else failed(request))

    app = web.Application()
    app.router.add_get("/v1/models/ada", entry)
    app.router.add_post("/v1/chat/completions", server.call)
    starts = await coldstart(str((await aiohttp_server(app)).make_url("/")), "ada", 5)
    assert (len(starts.rounds), starts.ended, starts.verdict.completed) == (2, FAILED, 2)


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
