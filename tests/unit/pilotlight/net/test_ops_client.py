"""The client of the operations port, and commands pointed at a foreign server: one line, status 2, in bounded time."""

from __future__ import annotations

import json
import socket
import time
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from autoscaler.queries.response_types import Row, Sentences
from pilotlight.cli.main import cli
from pilotlight.net import ops_client
from tests.support.fakes.foreign_server import FOREIGN, HEAD, serving, sized

pytestmark = pytest.mark.standard

COMMANDS = [
    ("status",),
    ("status", "m"),
    ("status", "--output", "json"),
    ("explain", "model", "m"),
    ("explain", "fit", "m"),
    ("explain", "last"),
    ("wake", "m"),
    ("stop", "m"),
    ("cordon", "g"),
    ("uncordon", "g"),
    ("drain", "g", "--no-wait"),
    ("plan", "--live", "--demand", "demand.yaml"),
]
AT_ONCE = {"list": {"status --output json"}}
"""A list is also the valid response of an empty installation."""


@pytest.fixture(autouse=True)
def _demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demand.yaml").write_text("m: 1")


@pytest.mark.parametrize("name", FOREIGN)
def test_response_of_another_server_exits_2_with_a_one_line_error(name: str) -> None:
    with serving(lambda link: link.sendall(FOREIGN[name])) as url:
        for words in COMMANDS:
            done = CliRunner().invoke(cli, [*words, "--ops", url], prog_name="pilotlight")
            if " ".join(words) in AT_ONCE.get(name, ()):
                assert done.exit_code == 0
                continue
            if name == "list" and words[0] in {"cordon", "uncordon", "drain"}:
                assert (done.exit_code, "no device or node g" in done.stderr) == (1, True)
                continue
            assert done.exit_code == 2, (words, done.output, done.exception)
            assert done.stderr.startswith("pilotlight: --ops: "), words
            assert done.stderr.count("\n") == 1, words


def test_error_of_the_operations_port_is_printed_with_exit_status_1() -> None:
    body = sized(b'{"error":"no such model; existing: \\u001b]0;a"}', b"404 Not Found")
    with serving(lambda link: link.sendall(body)) as url:
        done = CliRunner().invoke(cli, ["wake", "m", "--ops", url], prog_name="pilotlight")
    assert (done.exit_code, done.stderr) == (1, "pilotlight: no such model; existing: \\u001b]0;a\n")


def test_explanation_is_escaped_in_text_output_and_unchanged_in_json() -> None:
    text = "\x1b]0;red\x07\x9b\u202e \x7f\nsecond"
    body = sized(json.dumps({"sentences": [text, "x" * 100_000]}).encode())
    with serving(lambda link: link.sendall(body)) as url:
        done = CliRunner().invoke(cli, ["explain", "last", "--ops", url])
        first, second = done.stdout.splitlines()
        assert first == "\\u001b]0;red\\u0007\\u009b\\u202e \\u007f second"
        assert second.endswith("(100000 characters)")
        assert len(second) < 10_000
        done = CliRunner().invoke(cli, ["explain", "last", "--ops", url, "--output", "json"])
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["sentences"] == [text, "x" * 100_000]


def test_status_rows_with_markup_or_control_sequences_are_escaped() -> None:
    row = {"model": "[/x]\x1b]0;owned\x07", "state": "[red]zero", "replicas": {"\x9b": 1}}
    bodies = [sized(json.dumps([row]).encode()), sized(b'{"sentences":[]}'), sized(b"{}")]
    with serving(lambda link: link.sendall(bodies.pop(0))) as url:
        done = CliRunner().invoke(cli, ["status", "--ops", url])
    assert done.exit_code == 0, done.exception
    assert "[/x]\\u001b]0;owned\\u0007" in done.stdout
    assert "[red]zero" in done.stdout
    assert "1 \\u009b" in done.stdout


def drip(link: socket.socket, first: bytes) -> None:
    """Send `first`, then one byte now and then until the client disconnects."""
    link.sendall(first)
    while True:
        link.sendall(b" ")
        time.sleep(0.02)


@pytest.mark.parametrize(
    "first", [b"", HEAD, HEAD + b"x:", HEAD + b"\r\n[", HEAD + b"content-length: 9999999\r\n\r\n["]
)
def test_response_that_never_completes_times_out(first: bytes) -> None:
    with serving(partial(drip, first=first)) as url:
        began_s = time.monotonic()
        with pytest.raises(click.ClickException, match=r"no complete response within 0\.3 s"):
            ops_client.fetch(url, "/api/v1/status", tuple[Row, ...], timeout_s=0.3)
        assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("ops", ["http://", "http://[::1", "127.0.0.1:99999", "127.0.0.1:x", "::::"])
def test_invalid_ops_address_is_a_usage_error(ops: str) -> None:
    done = CliRunner().invoke(cli, ["status", "--ops", ops], prog_name="pilotlight")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("pilotlight: --ops ")
    assert "expected http://HOST:PORT" in done.stderr


def test_request_to_a_silent_operations_port_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(click.ClickException, match="start `pilotlight serve`, or correct --ops"):
            ops_client.fetch(f"127.0.0.1:{silent.getsockname()[1]}", "/", Sentences, timeout_s=0.2)


def test_operations_port_response_above_the_size_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_client, "BYTES_MAX", 1 << 20)

    def endless(link: socket.socket) -> None:
        link.sendall(HEAD + b"\r\n")
        while True:
            link.sendall(b" " * 65_536)

    with serving(endless) as url, pytest.raises(ops_client.NotOursError, match="more than 1 MiB"):
        ops_client.fetch(url, "/api/v1/status", tuple[Row, ...], timeout_s=60)
