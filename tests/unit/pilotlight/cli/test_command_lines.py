"""Generated command lines: no traceback, no raw control characters, a documented exit status, a bounded run time."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from pilotlight.net import ops_client
from tests.support.fakes.foreign_server import FOREIGN, serving, sized
from tests.support.harness import command_lines
from tests.support.harness.command_lines import OWNED, Case, Ended, OverdueError

SHORT, LONG = 120, 2000
SEED = 4711
UNFRAMED = b"HTTP/1.1 500 E\r\nContent-Type: application/json\r\n\r\n"
HOSTILE = {
    **{name: FOREIGN[name] for name in ("html", "deep", "redirect", "wrong type", "list", "no HTTP")},
    "sentences": sized(json.dumps({"sentences": [OWNED * 100], "problem": OWNED, "error": OWNED}).encode()),
    "error": sized(json.dumps({"error": OWNED}).encode(), b"500 Internal Server Error"),
    "unframed": UNFRAMED + b'{"error":{"code":"\xff"}}',
    "unframed deep": UNFRAMED + b'{"a":' * 3000,
    "unframed control": UNFRAMED + json.dumps({"error": {"code": "\u009b31m\u202e"}}).encode(),
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the files that cases name, without this machine's configuration and without daemons."""
    command_lines.lay_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in [one for one in os.environ if one.startswith(("PILOTLIGHT_", "XDG_", "KUBE", "HF_", "AWS_"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(ops_client, "TIMEOUT_S", 1.0)
    monkeypatch.setattr("artifacts.http.retry.TRIES_MAX", 1)
    command_lines.stop_daemons(monkeypatch)
    yield
    assert sys.stdout.writable()


def send(link: socket.socket, body: bytes) -> None:
    link.sendall(body)


def broken(seed: int, count: int) -> list[str]:
    """Descriptions of the cases that break an invariant, with the command line."""
    found = []
    with ExitStack() as stack:
        urls = tuple(stack.enter_context(serving(partial(send, body=body))) for body in HOSTILE.values())
        for number, case in enumerate(command_lines.cases(seed, count, urls)):
            try:
                wrong = command_lines.faults(case, command_lines.run(case.words))
            except OverdueError:
                wrong = ["it does not end"]
            except Exception as error:  # noqa: BLE001 - an exception of any class is a finding
                wrong = [f"{type(error).__name__}: {error}"]
            if wrong:
                found.append(f"case {number} of seed {seed}: {case.words!r}: {', '.join(wrong)}")
    return found


@pytest.mark.standard
def test_random_command_lines_print_at_most_one_error_line() -> None:
    assert broken(SEED, SHORT) == []


@pytest.mark.deep
def test_two_thousand_random_commands_print_at_most_one_error_line() -> None:
    assert broken(SEED + 1, LONG) == []


def test_output_check_rejects_each_kind_of_bad_command_output() -> None:
    case, good = Case(("status", "m")), Ended(2, b"", b"pilotlight: --ops: no\n")
    assert command_lines.faults(case, good) == []
    for bad in (
        good._replace(status=3),
        good._replace(err=b"Traceback (most recent call last):\n"),
        good._replace(err=b"pilotlight: internal error: KeyError\n"),
        good._replace(out=b"\x1b[2J"),
        good._replace(out=b"\xff"),
        good._replace(out="\x9b\u202e".encode()),
        good._replace(err=b"two\nlines\n"),
    ):
        assert command_lines.faults(case, bad) != []


@pytest.mark.standard
def test_command_over_its_time_limit_raises_an_error() -> None:
    with pytest.raises(OverdueError), command_lines.limited(("x",), 0.05):
        time.sleep(60)


def test_equal_seeds_generate_the_same_command_lines() -> None:
    first = list(command_lines.cases(1, 200))
    assert first == list(command_lines.cases(1, 200))
    assert first != list(command_lines.cases(2, 200))
    assert {words for words, _ in command_lines.commands()} <= {case.words[:end] for case in first for end in (1, 2, 3)}
