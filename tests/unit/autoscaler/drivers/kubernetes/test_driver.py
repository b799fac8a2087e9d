"""An exception in the work for one pod is a fault of its Model and does not affect other pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes import driver
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.kubernetes.proof_of_clean import Clearing
from autoscaler.kubernetes.api import Api, Object
from autoscaler.spec.installation_ownership import ANYBODYS, INSTALLATION, Ownership
from autoscaler.state.events import FaultSeen, Seen
from tests.support.fakes.kubernetes.api_server import Server
from tests.support.harness.driver_events import Observed, running
from tests.support.harness.local_rig import launch, replica

OWNER = Ownership("a-1")
GOOD, BAD = ReplicaId("good"), ReplicaId("bad")
IPS = {BAD: "10.0.0.1", GOOD: "10.0.0.2"}


def pod(name: ReplicaId, version: int, *, runs: bool = True) -> Object:
    """A pod of a replica, with a running engine or before its start."""
    one, model = replica(name, ("engine", "{port}"), (f"n/{name}",))
    found = pod_manifest.build_pod_manifest(one, model, launch(model, "", 1), "image")
    found["metadata"] |= {"uid": name, "namespace": "n", "resourceVersion": str(version)}
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status = {"podIP": IPS[name], "containerStatuses": [{"name": "engine", "state": state}]}
    return {**found, "status": status if runs else {}}


@pytest.mark.parametrize(
    ("owner", "labels", "is_ours"),
    [
        (ANYBODYS, {}, True), (OWNER, OWNER.labels, True), (OWNER, {}, False), (OWNER, {INSTALLATION: "b-2"}, False),
    ],
    ids=["no-installation", "labelled", "label-refused", "of-another"],
)  # fmt: skip
def test_pod_without_the_label_of_our_installation_is_foreign(
    owner: Ownership, labels: dict[str, str], is_ours: bool
) -> None:
    """Devices of a pod that could not be labelled count as used by others; the watch selects by the label."""
    of = KubernetesDriver(cast("Api", Server()), "n", launch, lambda _: "image", owner=owner)
    found = pod(GOOD, 1)
    found["metadata"]["labels"] = {**found["metadata"]["labels"], **labels}
    assert of._is_ours(found) is is_ours
    assert of._inventory is not None
    found["spec"]["nodeName"] = "n1"
    found["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    other = of._inventory._read_other(found)
    assert (other is not None and other.has_devices) is not is_ours


@asynccontextmanager
async def following(monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> AsyncIterator[tuple[Observed, Any]]:
    """A driver that has adopted the pods of both replicas, and its watch of pods."""
    monkeypatch.setattr(driver, "ADOPT_SECONDS_MAX", 0.0)
    server = Server()
    server.truth = {name: pod(name, 1, runs=runs) for name in (BAD, GOOD)}
    one = KubernetesDriver(cast("Api", server), "n", launch, lambda _: "image", assume_after_s=0.0, inventory=False)
    async with running(one) as observed:
        yield observed, one._pods


def probe(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Every engine responds; `fails`: the first probe of one raises."""
    failing = [IPS[BAD]] * fails

    async def ask(ip: str, *_: object, **__: object) -> bool:
        if ip in failing:
            failing.remove(ip)
            raise LookupError("injected")
        return True

    monkeypatch.setattr(probes, "probe_engine", ask)


def faults(observed: Observed) -> list[str]:
    """The Models of all faults."""
    found = [one for one in observed.all if isinstance(one, FaultSeen) and one.reason]
    assert all("LookupError" in one.reason for one in found)
    return [one.model for one in found]


async def test_exception_for_a_changed_pod_is_a_fault_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = KubernetesDriver._begins

    def broken(self: KubernetesDriver, old: PodSeen | None, new: PodSeen) -> None:
        if new.replica == BAD:
            raise LookupError("injected")
        begins(self, old, new)

    monkeypatch.setattr(KubernetesDriver, "_begins", broken)
    probe(monkeypatch, fails=False)
    async with following(monkeypatch) as (observed, _):
        await observed.until(GOOD, Seen.READY)
        assert faults(observed) == ["bad"]


async def test_exception_while_adopting_a_pod_is_a_fault_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, fails=True)
    async with following(monkeypatch) as (observed, _):
        await observed.until(GOOD, Seen.READY)
        assert faults(observed) == ["bad"]
        await observed.until(BAD, Seen.READY)  # the next probe succeeds


async def test_exception_while_probing_a_pod_is_a_fault_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, fails=True)
    async with following(monkeypatch, runs=False) as (observed, watched):
        assert faults(observed) == []
        for name in (BAD, GOOD):
            watched._see("MODIFIED", pod(name, 2), None)
        await observed.until(GOOD, Seen.READY)
        assert faults(observed) == ["bad"]


async def test_exception_while_proving_a_pod_clean_is_a_fault_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = Clearing.prove

    async def broken(self: Clearing, removed: PodSeen, *, by_force: bool) -> str:
        if removed.replica == BAD:
            raise LookupError("injected")
        return await prove(self, removed, by_force=by_force)

    monkeypatch.setattr(Clearing, "prove", broken)
    probe(monkeypatch, fails=False)
    async with following(monkeypatch) as (observed, watched):
        for name in (BAD, GOOD):
            watched._see("DELETED", pod(name, 2), None)
        await observed.until(GOOD, Seen.CLEAN)
        assert faults(observed) == ["bad"]
        assert observed.words(BAD)[-1] == "exited"
