"""Proof that nothing of a pod is left: measured, assumed, or assumed much later after a force delete."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes import proof_of_clean
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.kubernetes.proof_of_clean import (
    ASSUMED,
    EXITED,
    FORCED_S,
    MEASURED,
    UNPREPARED,
    Clearing,
    is_force_deleted,
)
from autoscaler.state.world import SliceId

RUNS = PodSeen(
    namespace="n", name="r", uid="u", replica=ReplicaId("r"), model=ModelName("a"), spec_hash="h", intent="i",
    slices=(SliceId("n1/gpu0"),), memory_bytes=1, compute_percent=0, slots=1, readiness_path="/", tls_name=None,
    node="n1", ip="10.0.0.1", port=8000, prepared=True, started_unix_s=1.0, ended="", waits="", patience_s=None,
    leaving=True, drain="", disrupted="",
)  # fmt: skip


def node(boot: str, ready: str = "True") -> NodeSeen:
    conditions = [{"type": "Ready", "status": ready}]
    return nodes.read_node({
        "metadata": {"name": "n1"}, "spec": {},
        "status": {"allocatable": {"nvidia.com/gpu": "2"}, "nodeInfo": {"bootID": boot}, "conditions": conditions},
    })  # fmt: skip


class Stage:
    """A clock, a node and a measurement that the test sets, and a pending proof."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proof_of_clean, "LOOK_S", 0.001)
        self.now_s = 100.0
        self.node: NodeSeen | None = node("b1")
        self.measured = False
        self.asked: list[tuple[str, float]] = []
        self._one = Clearing(lambda: self.now_s, lambda _: self.node, self._measured, 30.0)

    def _measured(self, replica: ReplicaId, since_s: float) -> bool:
        self.asked.append((replica, since_s))
        return self.measured

    async def clear(self, pod: PodSeen = RUNS, *, by_force: bool = False) -> asyncio.Task[str]:
        """The pod is deleted now."""
        proof = asyncio.create_task(self._one.prove(pod, by_force=by_force))
        await asyncio.sleep(0)
        return proof

    async def looks(self, count: int = 3) -> None:
        """Wait until it was measured `count` more times."""
        until = len(self.asked) + count
        async with asyncio.timeout(60):
            while len(self.asked) < until:
                await asyncio.sleep(0.001)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


async def test_pod_is_clean_as_soon_as_its_device_memory_is_measured_free(stage: Stage) -> None:
    proof = await stage.clear()
    await stage.looks()
    assert not proof.done()
    stage.measured = True
    assert await proof == MEASURED
    assert set(stage.asked) == {("r", 100.0)}, "only what was measured since its pod went"


async def test_unmeasured_pod_is_assumed_clean_after_30_seconds(stage: Stage) -> None:
    proof = await stage.clear()
    stage.now_s += 29.9
    await stage.looks()
    assert not proof.done()
    stage.now_s += 0.1
    assert await proof == ASSUMED


async def test_force_deleted_pod_is_clean_once_its_memory_is_measured_free(stage: Stage) -> None:
    proof = await stage.clear(by_force=True)
    stage.now_s += 100.0
    await stage.looks()
    assert not proof.done()
    stage.measured = True
    assert await proof == MEASURED


async def test_force_deleted_pod_is_assumed_clean_after_grace_period_and_margin(stage: Stage) -> None:
    proof = await stage.clear(RUNS._replace(grace_s=600.0), by_force=True)
    stage.now_s += 600.0 + FORCED_S - 0.1
    await stage.looks()
    assert not proof.done()
    stage.now_s += 0.1
    assert await proof == ASSUMED


async def test_force_delete_timer_excludes_time_with_unknown_node_status(stage: Stage) -> None:
    proof = await stage.clear(by_force=True)
    stage.node = node("b1", "Unknown")
    stage.now_s += 100_000.0
    await stage.looks()
    stage.node = node("b1")
    await stage.looks()
    stage.now_s += RUNS.grace_s + FORCED_S - 0.1
    await stage.looks()
    assert not proof.done()
    stage.now_s += 0.1
    assert await proof == ASSUMED


@pytest.mark.parametrize("now", [None, node("b2")])
async def test_pod_on_removed_or_rebooted_node_is_assumed_clean(stage: Stage, now: NodeSeen | None) -> None:
    proof = await stage.clear(by_force=True)
    stage.now_s += 60.0
    await stage.looks()
    assert not proof.done()
    stage.node = now
    assert await proof == ASSUMED


@pytest.mark.parametrize(("ended", "proof"), [("ended with status 0", EXITED), ("", ASSUMED)])
async def test_pod_without_devices_is_clean_at_once_without_measurement(stage: Stage, ended: str, proof: str) -> None:
    found = await stage.clear(RUNS._replace(slices=(), ended=ended))
    assert (await found, stage.asked, stage.now_s) == (proof, [], 100.0)


def test_pod_object_removed_before_engine_exit_counts_as_force_deleted() -> None:
    assert is_force_deleted(RUNS)
    assert not is_force_deleted(RUNS._replace(ended="ended with status 0")), "its kubelet has reported its end"
    assert not is_force_deleted(RUNS._replace(started_unix_s=None)), "nothing ran"
    assert not is_force_deleted(RUNS._replace(slices=())), "it held nothing"


async def test_pod_with_only_unshared_resource_claims_is_clean_at_once(stage: Stage) -> None:
    own = await stage.clear(RUNS._replace(claims=("r",)))
    assert await own == UNPREPARED
    for claims in (("mps-gpu-0-1",), ("r", "mps-gpu-0-1")):
        proof = await stage.clear(RUNS._replace(claims=claims))
        await stage.looks()
        assert not proof.done()
        stage.now_s += 30.0
        assert await proof == ASSUMED
