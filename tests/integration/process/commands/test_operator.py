"""Operator orders on a real `serve`: wake, stop, cordon and drain, through the CLI."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.result import Ending
from tests.support.harness.serve.serve import API, Document, Serving, fake, serving, settings, shot
from tests.support.waiting import until

GPUS = [{"name": name, "model": "tiny", "memory": "100Mi"} for name in ("gpu0", "gpu1")]


async def pilotlight(one: Serving, *words: str, status: int = 0, **environ: str) -> str:
    """Return a command's output from both streams; its exit status must be `status`."""
    command = [sys.executable, "-m", "pilotlight", *words, "--ops", one.ops]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == status, done.stdout + done.stderr
    return (done.stdout + done.stderr).strip()


def on(one: Serving) -> dict[str, str]:
    """Return a mapping from each Model to its device."""
    rows = one.get("/api/v1/devices")
    assert isinstance(rows, list)
    return {held["model"]: row["device"] for row in rows for held in row["replicas"]}


@pytest.mark.standard
async def test_wake_and_stop_commands_start_and_drain_a_model(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "5", "--tokens", "40", idleSeconds=600)
    async with serving(tmp_path, ada) as one:
        assert (await pilotlight(one, "wake", "ada")).startswith("ada starts as soon as there is room")
        await one.ready("ada")
        assert "woken by an operator" in one.output()
        runs = one.begin(shot("ada", tokens=40, timeout_s=60))
        await until("it runs", lambda: one.demand("ada")["running"] == 1 or runs.done())  # done: after a long pause
        answer = json.loads(await pilotlight(one, "stop", "ada", "--output", "json"))
        assert (answer["verb"], len(answer["replicas"])) == ("stop", 1)
        assert "starts it again" in answer["says"]
        (result,) = await runs
        assert result.ending is Ending.COMPLETED, "what ran was finished"
        await one.zero("ada")
        assert "event=operator who='local' verb=stop model=ada" in one.output()
        assert (await one.call("ada", tokens=1)).ending is Ending.COMPLETED, "a Call wakes it again"
        assert "no such model; existing: ada" in await pilotlight(one, "wake", "nobody", status=1)


@pytest.mark.standard
async def test_cordon_survives_a_restart_and_drain_moves_the_replica(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", idleSeconds=600)
    async with serving(tmp_path, ada, {**settings(), "devices": GPUS}) as one:
        await pilotlight(one, "cordon", "gpu0")
        await one.stop()
        await one.start()
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert on(one) == {"ada": "gpu1"}, "gpu0 is still cordoned"
        assert await pilotlight(one, "uncordon", "gpu0") == "device gpu0 is no longer cordoned"
        first = await pilotlight(one, "drain", "gpu1")
        assert first.endswith("gpu1 is empty")
        assert on(one) == {"ada": "gpu0"}, "it moved"
        assert one.states("ada").count("ready") >= 2
        reported = await pilotlight(one, "drain", "local", "--no-wait", "--output", "json")
        assert json.loads(reported)["kind"] == "node"
        await one.zero("ada")
        waits = one.begin(shot("ada"))
        await until("it waits", lambda: one.demand("ada")["waiting"] == 1)
        assert "is cordoned by an operator" in await pilotlight(one, "explain", "model", "ada")
        assert "is cordoned by an operator" in await pilotlight(one, "status")
        for name in ("local", "gpu1"):
            await pilotlight(one, "uncordon", name)
        (result,) = await waits
        assert result.ending is Ending.COMPLETED
        assert "devices gpu0, gpu1; nodes local" in await pilotlight(one, "cordon", "gpu7", status=1)


@pytest.mark.standard
async def test_live_plan_shows_starts_and_stops_without_executing_them(tmp_path: Path) -> None:
    """Two Models fit on the device only one at a time. The one that runs is idle: it would be stopped for the other."""
    ada, bob = (
        fake(tmp_path, name, "--tokens-per-s", "0", idleSeconds=600, gpu={"memory": "60Mi"}) for name in ("ada", "bob")
    )
    (tmp_path / "demand.yaml").write_text("bob: 2\n")
    words = ("plan", "--live", "--demand", f"{tmp_path}/demand.yaml")
    async with serving(tmp_path, ada, bob, {**settings(), "devices": GPUS[:1]}) as one:
        assert (await pilotlight(one, *words)).startswith("start bob on gpu0 (60Mi of each): wake bob")
        assert (await one.call("ada")).ending is Ending.COMPLETED
        stops: list[str] = []
        while not stops:
            result = json.loads(await pilotlight(one, *words, "--output", "json"))
            stops = [removed["model"] for removed in result["stops"]]
            assert [lack["model"] for lack in result["unmet"]] == ["bob"] * (not stops), "until its residency is over"
        assert (stops, [start["model"] for start in result["starts"]]) == (["ada"], ["bob"])
        assert on(one) == {"ada": "gpu0"}
        assert "model=bob" not in one.output()
        (tmp_path / "demand.yaml").write_text("eve: 2\n")
        assert "eve: no such model; existing: ada, bob" in await pilotlight(one, *words, status=1)
    assert "no response from --ops" in await pilotlight(one, *words, status=1)


async def test_operator_command_without_operator_key_fails_if_tenants_exist(tmp_path: Path) -> None:
    keys = [
        {"name": role, "sha256": hashlib.sha256(f"pl-{role}".encode()).hexdigest(), "role": role}
        for role in ("tenant", "operator")
    ]
    acme: Document = {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"}, "spec": {"keys": keys}}
    async with serving(tmp_path, fake(tmp_path, "ada"), acme) as one:
        assert "requires an API key with the role operator" in await pilotlight(one, "wake", "ada", status=1)
        output = await pilotlight(one, "wake", "ada", "--key-env", "OPS_KEY", status=1, OPS_KEY="pl-tenant")
        assert "this API key has the role tenant" in output
        (tmp_path / "demand.yaml").write_text("ada: 1\n")
        words = ("plan", "--live", "--demand", f"{tmp_path}/demand.yaml")
        assert "a what-if requires an API key with the role operator" in await pilotlight(one, *words, status=1)
        assert "start ada" in await pilotlight(one, *words, "--key-env", "OPS_KEY", OPS_KEY="pl-operator")
        await pilotlight(one, "wake", "ada", "--key-env", "OPS_KEY", OPS_KEY="pl-operator")
        await one.ready("ada")
        assert "event=operator who='acme/operator' verb=wake model=ada" in one.output()
        assert "pl-operator" not in one.output()


@pytest.mark.standard
async def test_node_of_a_running_agent_is_listed_by_the_autoscaler(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada")) as one:
        (socket,) = (one.state / "run").glob("autoscaler*.sock")
        command = [sys.executable, "-m", "pilotlight", "agent", "--node", "n7", "--autoscaler", f"unix:{socket}"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as agent:
            try:
                rows = await until("its node is known", lambda: [row for row in nodes(one) if row["name"] == "n7"], 90)
                assert rows[0]["fresh"] is True
            finally:
                agent.terminate()
        assert agent.returncode == 0


def nodes(one: Serving) -> list[dict[str, object]]:
    rows = one.get("/api/v1/nodes")
    assert isinstance(rows, list)
    return rows
