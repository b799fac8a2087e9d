"""The load commands as run by a user: results on stdout, progress on stderr, and the three exit codes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loadtest.cli import load, request_body
from tests.support.fakes.engines.fake_engine_process import fake_engine
from tests.support.fakes.foreign_server import serving

pytestmark = pytest.mark.standard

FAST = ("--name", "ada", "--tokens-per-s", "0")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(load, arguments)


def test_load_run_without_lost_requests_exits_0_and_prints_its_verdict(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "20", "--within", "0.05", "--report", str(page)
        )
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == (
        "verdict holds: 20 requests, 20 completed, 0 failed, 0 abandoned, 0 lost, 0 truncated"
    )
    assert "verdict holds: 20 requests" in page.read_text()


def test_load_run_with_a_malformed_response_exits_1_with_the_reason(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "bad-chunk", "--once", str(tmp_path / "once")) as engine:
        done = invoke("run", "--url", engine.url, "--model", "ada", "--burst", "5")
    assert done.exit_code == 1
    assert "1 x the response is not HTTP/1.1" in done.stdout
    assert "verdict DOES NOT HOLD: 5 requests, 4 completed" in done.stdout


def test_load_run_with_two_models_alternates_between_them(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("words", [["run", "--burst", "1"], ["coldstart"]])
def test_unwritable_report_path_fails_before_the_run(words: list[str], page: str) -> None:
    done = invoke(*words, "--url", "http://127.0.0.1:9", "--model", "ada", "--report", page)
    assert done.exit_code == 2
    assert "is not a folder" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("output", ["text", "json"])
def test_verdict_is_printed_if_the_report_cannot_be_written(tmp_path: Path, output: str) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "3", "--report", "/dev/full", "--output", output
        )
    assert done.exit_code == 1
    assert ("verdict holds: 3 requests" in done.stdout) is (output == "text")
    assert output == "text" or json.loads(done.stdout)["verdict"]["holds"]
    assert done.stderr.endswith(
        "--report /dev/full cannot be written: No space left on device; the verdict above stays valid\n"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error":{"code":"\xff"}}', "the document is not JSON"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "the document is not JSON"),
        (b'{"error":{"code":"\\u009b31m\\u202e"}}', ""),
    ],
    ids=["not UTF-8", "deep", "control characters"],
)
def test_unframed_response_ends_with_its_connection_and_is_escaped(body: bytes, reason: str) -> None:
    def answer(link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 500 E\r\nContent-Type: application/json\r\n\r\n" + body)

    with serving(answer) as url:
        done = invoke("run", "--url", url, "--model", "ada", "--burst", "1", "--no-stream", "--output", "json")
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    (call,) = json.loads(done.stdout)["calls"]
    assert (call["ending"], call.get("broken", "")) == (("lost", reason) if reason else ("failed", ""))
    assert reason or call["code"] == "\u009b31m\u202e"


def test_json_report_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine, Path("/dev/full").open("wb") as full:
        words = ("run", "--url", engine.url, "--model", "ada", "--burst", "1", "--output", "json")
        command = [sys.executable, "-m", "pilotlight", "load", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("pilotlight: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr


ENOUGH = 20
"""Requests that the engine has answered before the signal: the client may not have read the last of them."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_load_command_prints_the_verdict_of_sent_requests(tmp_path: Path, number: signal.Signals) -> None:
    """Some requests are answered, one is in flight, most are not sent yet."""
    page = tmp_path / "out.html"
    with fake_engine(tmp_path, "--name", "ada", "--tokens-per-s", "20", "--tokens", "2000", "--slots", "64") as engine:
        words = (
            "--url",
            engine.url,
            *["--arrivals", "constant", "--rate", "20", "--seconds", "600", "--report"],
            str(page),
        )
        command = [sys.executable, "-m", "pilotlight", "load", "run", *words, "--model", "ada", "--max-tokens", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            deadline_s = time.monotonic() + 90
            while len(engine.calls()) < ENOUGH:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            run.send_signal(number)
            output, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    *_, note, verdict = output.splitlines()
    found = re.fullmatch(r"interrupted: (\d+) of 12000 requests were sent, and those in flight were abandoned", note)
    assert found is not None, output
    counts = re.fullmatch(
        r"verdict holds: (\d+) requests, (\d+) completed, 0 failed, (\d+) abandoned, 0 lost, .*", verdict
    )
    assert counts is not None, output
    sent, completed, abandoned = map(int, counts.groups())
    assert sent == int(found[1]) == completed + abandoned
    assert completed >= 3
    assert note in page.read_text()


def test_api_key_is_read_from_the_environment_and_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-canary")
    with fake_engine(tmp_path, *FAST) as engine:
        done = invoke(
            "run", "--url", engine.url, "--model", "ada", "--burst", "1", "--key-env", "A_KEY", "--output", "json"
        )
        (call,) = engine.calls()
    assert '"authorization": "Bearer sk-canary"' in json.dumps(call["headers"])
    assert "canary" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--url", "nowhere", "--model", "m", "--burst", "1"], "expected http://HOST:PORT"),
        (["run", "--url", "http://h", "--model", "m"], "either --rate"),
        (["run", "--url", "http://h", "--model", "m", "--rate", "1", "--burst", "1"], "either --rate"),
        (["run", "--url", "http://h", "--model", "m", "--rate", "0"], "--rate"),
        (["run", "--url", "http://h", "--model", "m", "--burst", "1", "--key-env", "NO_SUCH"], "NO_SUCH is not set"),
        (["coldstart", "--url", "http://h", "--model", "m", "--ops", "nowhere"], "expected http://HOST:PORT"),
        (["coldstart", "--url", "http://h"], "--model"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "cached"], "--from cached requires --ops"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "gone"], "--from gone requires --ops"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "asleep"], "--from asleep is not supported yet"),
        (["coldstart", "--url", "http://h", "--model", "m", "--from", "warm"], "'zero', 'gone', 'cached', 'asleep'"),
    ],
)
def test_invalid_load_command_options_exit_2_with_a_message_on_stderr(arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("command", ["run", "coldstart"])
def test_help_of_each_load_command_shows_an_example(command: str) -> None:
    assert f"Example:  pilotlight load {command} --url http://" in invoke(command, "--help").stdout


def test_prompt_of_a_load_request_has_the_requested_size() -> None:
    for size in (1, 64, 5000):
        body = json.loads(request_body("m", 1, size, stream=True))
        assert len(body["messages"][0]["content"]) == size
