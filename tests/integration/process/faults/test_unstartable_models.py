"""A Model that cannot start, on real processes: it is reported at startup, and nothing is evicted for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest import tiny_gguf
from loadtest.result import Ending
from tests.support.harness.serve.serve import Document, Serving, fake, model, serving, settings
from tests.support.waiting import WITHIN_S, until

MEMORY = {"memory": "80Mi"}
"""Memory of each Model on the one device of 100Mi: two never fit together."""


def pilotlight(one: Serving, *words: str) -> str:
    """Return the output of a command that queries the operations port.

    A command waits 5 s for that port. If the autoscaler was paused for longer, the command is run again.
    """
    command = [sys.executable, "-m", "pilotlight", *words, "--ops", one.ops]
    end_s = time.monotonic() + WITHIN_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout
        assert "no response from --ops" in done.stderr, done.stderr
        assert time.monotonic() < end_s, done.stderr


def impossible(folder: Path, how: str) -> tuple[Document, str]:
    """Return a Model that cannot start, and the reason."""
    file = folder / "bad.gguf"
    if how == "no-program":
        why = "the program of spec.command was not found; install it, or correct spec.command"
        return model("bad", engine="command", command=["/nowhere/engine", "{port}"], gpu=MEMORY), why
    why = f"{file} does not exist; put the model there, or correct spec.artifact"
    if how == "no-gguf":
        file.write_bytes(b"<html>Please log in to download this model</html>")
        why = f"{file}: not a GGUF file; put a complete GGUF file there, or correct spec.artifact"
    return model("bad", engine="llama.cpp", artifact=f"file://{file}", gpu=MEMORY), why


@pytest.mark.parametrize("how", ["no-file", "no-gguf", "no-program"])
async def test_model_that_cannot_start_is_reported_and_evicts_no_replica(tmp_path: Path, how: str) -> None:
    good = fake(tmp_path, "good", "--tokens-per-s", "0", gpu=MEMORY, residencySeconds=0)
    bad, why = impossible(tmp_path, how)
    async with serving(tmp_path, bad, good) as one:
        line = f"pilotlight: Model bad cannot start: {why}; its requests get 503 model_start_failed"
        await until("it is logged at the start", lambda: line in one.output().splitlines())
        assert f"It cannot start: {why}. Its requests are" in pilotlight(one, "explain", "model", "bad"), (
            "before any Call"
        )
        assert f"cannot start: {why}" in pilotlight(one, "status", "bad")
        assert (await one.call("good")).ending is Ending.COMPLETED
        engines = one.engines()
        for _ in range(2):
            refused = await one.call("bad")
            assert (refused.status, refused.code, refused.clear) == (503, "model_start_failed", True)
            assert 0 < int(refused.headers["retry-after"]) <= 62, "the pause does not grow"
        assert (await one.call("good")).ending is Ending.COMPLETED
        assert (one.engines(), one.starts("bad")) == (engines, 0)
        assert "draining" not in one.states("good")
        assert f"it cannot start: {why}" in pilotlight(one, "explain", "last")
        assert one.states("bad") == ["refused"], "once a minute, however often it is called"
        assert one.output().count("cannot start: ") == 2, "once at the start, once for its Calls"


async def test_weights_file_deleted_before_a_request_causes_no_eviction(tmp_path: Path) -> None:
    """No earlier check can have detected it: the file is checked again before anything is evicted."""
    good = fake(tmp_path, "good", "--tokens-per-s", "0", gpu=MEMORY, residencySeconds=0)
    bad, why = impossible(tmp_path, "no-file")
    tiny_gguf.make_model(tmp_path / "bad.gguf", "I was there.")
    async with serving(tmp_path, bad, good) as one:
        assert (await one.call("good")).ending is Ending.COMPLETED
        (tmp_path / "bad.gguf").unlink()
        assert (await one.call("bad")).code == "model_start_failed"
        assert "draining" not in one.states("good")
        await until("it is logged", lambda: f"Model bad cannot start: {why}" in one.output())


async def test_model_is_served_after_its_missing_weights_file_appears(tmp_path: Path) -> None:
    """Its memory requirement is unknown before, since the file header states it. Another Model keeps running."""
    good = fake(tmp_path, "good", "--tokens-per-s", "0", gpu={"memory": "1Mi"})
    late = model("late", engine="llama.cpp", artifact=f"file://{tmp_path}/late.gguf", gpu={}, contextTokens=64)
    async with serving(tmp_path, late, good, settings("1Gi")) as one:
        assert (await one.call("good")).ending is Ending.COMPLETED
        await until("it is logged at the start", lambda: "Model late cannot start" in one.output())
        tiny_gguf.make_model(tmp_path / "late.gguf", "Better late than never.")
        await until("it is seen", lambda: "the problem is fixed for late" in one.output(), 60)
        answer = await one.call("late", stream=False)
        assert answer.text.strip() == "Better late than never."
        assert "draining" not in one.states("good")
        assert one.starts("late") == 1
        row = one.get("/api/v1/models/late")
        assert isinstance(row, dict)
        assert 0 < row["memory_bytes"] < 1 << 30


async def test_reload_with_a_missing_program_keeps_the_running_engine_serving(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", gpu=MEMORY)
    async with serving(tmp_path, ada) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        engines = one.engines()
        one.config.write_text(one.config.read_text().replace(sys.executable, "/nowhere/python"))
        assert one.process is not None
        one.process.send_signal(signal.SIGHUP)
        await until(
            "it is logged", lambda: "Model ada cannot start: the program of spec.command was not found" in one.output()
        )
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert one.engines() == engines
        assert "Another replica cannot start: the program" in pilotlight(one, "explain", "model", "ada")
