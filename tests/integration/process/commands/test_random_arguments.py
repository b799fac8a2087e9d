"""Runs one generated case of each command through the real entry point, with arguments as bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import command_lines
from tests.support.harness.command_lines import Case, Ended

DAEMONS = {("serve",), ("gateway",), ("autoscaler",), ("agent",), ("weights", "serve"), ("status",)}
"""These commands may run indefinitely: an unknown option makes them exit."""
KNOWN = [words for words, _ in command_lines.commands()]
STANDARD = [("serve",), ("explain", "model"), ("weights", "pack")]


def run(words: tuple[str, ...], folder: Path) -> Ended:
    command = [os.fsencode(word) for word in (sys.executable, "-m", "pilotlight", *words)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=pytest.mark.standard if words in STANDARD else pytest.mark.deep) for words in KNOWN],
    ids=" ".join,
)
def test_random_arguments_of_each_command_cause_no_traceback(tmp_path: Path, words: tuple[str, ...]) -> None:
    command_lines.lay_files(tmp_path)
    number = KNOWN.index(words)
    case = list(command_lines.cases(4711, number + 1))[number]
    line = (*case.words, "--nope\udcff") if words in DAEMONS else case.words
    assert command_lines.faults(Case(line), run(line, tmp_path)) == []


@pytest.mark.standard
@pytest.mark.parametrize(
    "line",
    [
        ("load", "run", "--rate", "inf"),
        *(("doctor", "--driver", "kubernetes", "--kubeconfig", file) for file in ("binary", "empty", "/dev/null")),
        ("weights", "pack", "fifo", "--to", "layout"),
        ("serve", "--state", "s" * 5000),
    ],
    ids=lambda line: " ".join(line)[:60],
)
def test_unusable_argument_prints_one_error_line(tmp_path: Path, line: tuple[str, ...]) -> None:
    command_lines.lay_files(tmp_path)
    ended = run(line, tmp_path)
    assert command_lines.faults(Case(line), ended) == []
    assert ended.status != 0
    errors = [one for one in (ended.out + ended.err).splitlines() if one.startswith((b"pilotlight: ", b"blocker "))]
    assert len(errors) == 1


@pytest.mark.standard
def test_control_characters_in_a_weights_file_are_not_printed(tmp_path: Path) -> None:
    command_lines.lay_files(tmp_path)
    line = ("serve", "control.gguf", "--print-config")
    ended = run(line, tmp_path)
    assert command_lines.faults(Case(line), ended) == []
    assert ended.status == 2
    assert b"general.architecture" in ended.err
    assert b"owned" not in ended.err
