"""Read-only commands and load tests against a real `serve`: by alias, for a failed Model, and through a pipe."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoscaler.documents.parse import parse_documents
from loadtest.result import Ending
from tests.support.builders.artifacts import model_files
from tests.support.harness.serve.serve import API, Serving, fake, model, serving
from tests.support.waiting import WITHIN_S, until


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user types it.

    A command waits 5 s for the operations port. If the autoscaler was paused for longer, the command is run again.
    """
    command = [sys.executable, "-m", "pilotlight", *words]
    end_s = time.monotonic() + WITHIN_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if "no response from --ops" not in done.stderr or time.monotonic() >= end_s:
            return done


@pytest.mark.standard
async def test_commands_given_an_alias_report_on_the_model_of_that_alias(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", aliases=["al-ada"], idleSeconds=0.1)
    async with serving(tmp_path, ada) as one:
        to = ("--url", one.url, "--model", "al-ada")
        measured = run("load", "coldstart", *to, "--rounds", "2", "--ops", one.ops)
        assert measured.returncode == 0, measured.stderr
        assert measured.stdout.splitlines()[-1].startswith("verdict holds: 2 requests, 2 completed")
        assert run("load", "coldstart", *to, "--rounds", "1").returncode == 0
        assert run("load", "run", *to, "--burst", "2").returncode == 0
        assert "Last: ada-" in run("explain", "model", "al-ada", "--ops", one.ops).stdout
        (row,) = json.loads(run("status", "al-ada", "--output", "json", "--ops", one.ops).stdout)
        assert row["model"] == "ada"
        unknown = run("status", "eve", "--ops", one.ops)
        assert (unknown.returncode, unknown.stderr) == (1, "pilotlight: no such model; existing: ada\n")


@pytest.mark.standard
def test_import_prints_a_llama_swap_configuration_as_documents(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {ada: {cmd: 'llama-server --port ${PORT} --parallel 2 -m /models/ada.gguf', ttl: 300}}")
    done = run("import", "llama-swap", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    (ada,) = parse_documents([("printed", done.stdout)]).models
    assert (ada.name, ada.spec.artifact, ada.spec.slots, ada.spec.idle_seconds) == (
        "ada", "file:///models/ada.gguf", 2, 300,
    )  # fmt: skip


async def test_coldstart_measurement_of_a_failed_model_ends_with_an_error(tmp_path: Path) -> None:
    bad = fake(tmp_path, "bad", "--fail", "dies-on-start", start={"retries": 0})
    async with serving(tmp_path, bad) as one:
        first = await one.call("bad")
        assert (first.ending, first.code) == (Ending.FAILED, "model_start_failed")
        await until("it is reported", lambda: one.reported_state("bad") == "failed")
        done = run("load", "coldstart", "--url", one.url, "--model", "bad")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "the model failed to start" in done.stderr
        by_ops = run("load", "coldstart", "--url", one.url, "--model", "bad", "--ops", one.ops)
        assert by_ops.returncode == 1
        assert "ended after 1 of 20 rounds: the model failed to start" in by_ops.stdout
        assert one.starts("bad") == 1


def watch(one: Serving, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Run `status --watch` with its output in a file."""
    with (folder / "watched.txt").open("wb") as output:
        command = [sys.executable, "-m", "pilotlight", "status", "--watch", "--ops", one.ops, *words]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored in background jobs
        try:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        finally:
            signal.signal(signal.SIGINT, before)


async def test_status_watch_writes_the_change_from_zero_to_ready_to_a_file(tmp_path: Path) -> None:
    # The Model must not become idle before the test has stopped the command, also if the test was paused.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", idleSeconds=600)
    async with serving(tmp_path, ada) as one:
        process = watch(one, tmp_path, "--output", "json")
        try:
            written = tmp_path / "watched.txt"
            await until("the first state is printed", lambda: written.read_text().endswith("\n"))
            await one.call("ada")
            await until("its change is printed", lambda: '"state": "ready"' in written.read_text())
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        states = [json.loads(line)["models"][0]["state"] for line in written.read_text().splitlines()]
    assert (states[0], states[-1]) == ("zero", "ready")


@pytest.mark.standard
async def test_explain_fit_shows_estimated_and_later_measured_memory(tmp_path: Path) -> None:
    """Without declared devices in Settings, the host's memory is the device."""
    model_files.attending(tmp_path / "ada.gguf", layers=6, window=256)
    weights = {"artifact": f"file://{tmp_path}/ada.gguf", "args": ["--threads=1"], "contextTokens": 1024}
    ada = model("ada", engine="llama.cpp", aliases=["al-ada"], gpu={}, **weights)
    paged = model("paged", engine="vllm", artifact=f"file://{tmp_path}/ada.gguf", gpu={})
    async with serving(tmp_path, ada, paged, {"apiVersion": API, "kind": "Settings"}) as one:
        explained = run("explain", "fit", "al-ada", "--ops", one.ops)
        assert explained.returncode == 0, explained.stderr
        assert "  cache 38Mi: 1 layer keeps all of 4 x 1024 tokens, 5 the last 256.\n" in explained.stdout
        assert explained.stdout.splitlines()[-1].startswith("host: ")
        share = run("explain", "fit", "paged", "--ops", one.ops).stdout
        assert share.startswith(
            "paged is assumed to need all memory of each of its devices. Its GGUF header (gemma3) gives this estimate:"
        )
        assert "\nvllm always reserves 90% of its devices" in share
        assert (await one.call("ada")).ending is Ending.COMPLETED

        def fit() -> dict[str, int]:  # the numbers in its output
            found = json.loads(run("explain", "fit", "ada", "--output", "json", "--ops", one.ops).stdout)
            return {key: value for key, value in found.items() if isinstance(value, int)}

        await until("its use is measured", lambda: fit()["used_bytes"] > 0, within_s=90)
        assert fit()["used_bytes"] < fit()["memory_bytes"]
        unknown = run("explain", "fit", "eve", "--ops", one.ops)
        assert (unknown.returncode, unknown.stderr) == (1, "pilotlight: no such model; existing: ada, paged\n")
