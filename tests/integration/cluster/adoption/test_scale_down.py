"""Pilotlight selects which pod of an adopted Deployment is removed: its ReplicaSet controller deletes the idle one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from autoscaler.drivers.kubernetes.adoption.objects import COST
from tests.integration.cluster.support.entry_points import held_engine
from tests.integration.cluster.support.installations.adoption import OURS, Adopting, workload

WAIT_S_MAX = 180.0


@pytest.mark.parametrize("busy", ["older", "younger"])
async def test_scale_down_from_two_pods_removes_the_idle_one(adopting: Adopting, tmp_path: Path, busy: str) -> None:
    """Each pod has a request, since the first was full. One client disconnects; then `replicas-max` becomes 1."""
    notes = {OURS + "models": "ada", OURS + "slots": "1", OURS + "replicas-max": "2", OURS + "idle-seconds": "600"}
    body, release = workload("ada", 1, notes), tmp_path / "release"
    words = held_engine.command(release, "--host", "$(POD_IP)", "--port", "8080", "--name", "ada")
    body["spec"]["template"]["spec"]["containers"][0]["command"] = words
    await adopting.api.create(f"{adopting.apps}/deployments", body)
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        calls = dict[str, asyncio.Task[tuple[int, str]]]()
        pods = dict[str, str]()
        for count, one in enumerate(("older", "younger"), 1):
            calls[one] = asyncio.create_task(adopting.call("ada"))
            await adopting.until_running("ada", count)
            (pods[one],) = {pod["metadata"]["name"] for pod in await adopting.until_pods(count)} - set(pods.values())
        (idle,) = calls.keys() - {busy}
        calls[idle].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calls[idle]
        await adopting.until_running("ada", 1)
        patch = {"metadata": {"annotations": {OURS + "replicas-max": "1"}}}
        await adopting.api.patch(f"{adopting.apps}/deployments/ada", patch)
        (stays,) = await adopting.until_pods(1)
        assert not calls[busy].done(), "it went on meanwhile"
        assert stays["metadata"]["name"] == pods[busy]
        assert COST not in stays["metadata"].get("annotations", {})
        release.touch()
        assert (await calls[busy])[0] == 200
        assert (await adopting.embed("ada"))[0] == 200
        (still,) = await adopting.pods()
        assert still["metadata"]["uid"] == stays["metadata"]["uid"]
