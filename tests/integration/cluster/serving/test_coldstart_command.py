"""`pilotlight load coldstart --from gone --ops` against a cluster: it measures a pod's cold start by phases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.cluster.support.clients.coldstart_command import PARTS, coldstart
from tests.integration.cluster.support.installations.adoption import OURS, Adopting, workload
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.integration.cluster.support.kubelet.pod import PULL_SECONDS

PULL_S, SEEN_MS_MIN = 22, 1_000
"""Duration of the image pull, and of its phase: a busy machine may delay the observation of its beginning by 20 s."""


async def ops(house: House, path: str) -> Any:
    """Returns the JSON response of the operations port."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/{path}") as answer:
        return await answer.json()


async def test_cold_start_of_a_pod_is_reported_by_phase(house: House, node: Node) -> None:
    assert node.name
    slow = {"pod": {"annotations": {PULL_SECONDS: str(PULL_S)}}}
    house.write(model("ada", idleSeconds=0.5, residencySeconds=0, **slow))
    async with house.running(), asyncio.timeout(180):
        found = await coldstart(house, "gone")
        (one,) = found["rounds"]
        assert one["cold"]
        phases: dict[str, float] = one["phases_ms"]
        assert list(phases) == ["queue", "decide", "place", *PARTS, "image", "load", "ready", "upstream"]
        assert all(took_ms >= 0 for took_ms in phases.values())
        whole_ms = sum(phases[name] for name in ("decide", "place", "image", "load", "ready"))
        assert whole_ms == pytest.approx(phases["queue"], abs=2), "they are what the Call waited in the queue"
        assert phases["queue"] <= one["first_byte_ms"]
        assert sum(phases[name] for name in PARTS) == pytest.approx(phases["place"], abs=2)
        assert phases["image"] >= SEEN_MS_MIN, "its image was pulled for longer"
        shown = await ops(house, "models/ada")
        assert shown["last_start_seconds"] == pytest.approx(phases["load"] / 1000, abs=0.01)
        async with house.session.get(f"http://127.0.0.1:{house.ops}/metrics") as answer:
            metrics = await answer.text()
        for phase in ("decide", "place", *PARTS, "image", "load"):
            assert f'pilotlight_start_seconds_count{{model="ada",phase="{phase}"}} 1.0' in metrics


async def test_adopted_deployment_has_start_phases_until_autoscaler_restart(adopting: Adopting) -> None:
    sleeping = workload("ada", 0, {OURS + "models": "ada", OURS + "idle-seconds": "600"})
    sleeping["spec"]["template"]["metadata"]["annotations"] = {PULL_SECONDS: str(PULL_S)}
    await adopting.api.create(f"{adopting.apps}/deployments", sleeping)
    async with asyncio.timeout(180):
        async with adopting.running():
            found = await coldstart(adopting, "gone")
            (one,) = found["rounds"]
            assert one["phases_ms"].keys() >= {"decide", "place", *PARTS, "image", "load", "ready"}
            assert one["phases_ms"]["image"] >= SEEN_MS_MIN, "its image was pulled for longer"
        async with adopting.running():
            while (await ops(adopting, "models/ada"))["replicas"] != {"ready": 1}:
                await asyncio.sleep(0.05)
            shown = await ops(adopting, "models/ada")
            assert shown["last_start_phases"] == {}
            async with adopting.session.get(f"http://127.0.0.1:{adopting.ops}/metrics") as answer:
                assert "pilotlight_start_seconds_count" not in await answer.text()
