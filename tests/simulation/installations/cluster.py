"""A cluster in virtual time: a town whose autoscalers elect a leader by a Lease and act on an API server, and one node.

Everything that decides or writes is the real code: loop, Kubernetes driver, watches, elector. Simulated are the API
server (`tests.simulation.environment.api_server`), the kubelet and the probes of engines. This module wires them and
injects faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta, tzinfo
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

from autoscaler.contract import GatewayId, ReplicaId, Report
from autoscaler.controller.loop import LoopStep
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.kubernetes import leader_election
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.queries.agent_reports import is_device_memory_free
from autoscaler.slicing.nvidia_device_plugin import MEMORY_MIB
from autoscaler.spec.model import Model
from autoscaler.spec.pod import GPU
from autoscaler.state.events import FollowingSeen, LeadingSeen
from autoscaler.state.world import Replica, ReplicaResources, Slice
from tests.simulation.case_harness import GIB, Stage
from tests.simulation.checks import continuous_invariants, final_invariants
from tests.simulation.checks.gateway_reports import ReceivedReports
from tests.simulation.environment import process
from tests.simulation.environment.api_server import NODES, PODS, Server, SimApi
from tests.simulation.environment.machine import QUICK, Machine, Manners, one_device
from tests.simulation.environment.process import Process
from tests.simulation.environment.virtual_loop import run
from tests.simulation.installations.gateway import SimLink
from tests.simulation.installations.installation import Autoscaler, Town
from tests.support.fakes.driver import STOPPED, FakeEngine
from tests.support.harness.local_rig import launch
from tests.support.harness.scenarios import hide_parameters

NODE = "node"
BIND_S = 0.005
"""Delay of scheduler and kubelet: from a pod to the process of its engine."""
P = ParamSpec("P")
T = TypeVar("T")
Scenario = Callable[Concatenate[Stage, "Cluster", P], Coroutine[object, object, None]]


class Skewed(datetime):
    """The wall clock of the current process, with its skew."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Skewed:
        requested = process.current()
        true = datetime.fromtimestamp(Server.unix_s(), tz) + timedelta(
            seconds=requested.skew_s if requested is not None else 0.0
        )
        return cls.fromisoformat(true.isoformat())


class Elected(Autoscaler):
    """One autoscaler process of a cluster, composed as in `pilotlight.processes.cluster`.
    Create it inside its `process`.
    """

    def __init__(self, town: Cluster, name: str, own: Process) -> None:
        clock = asyncio.get_running_loop().time
        self.name = name
        self.process = own
        self._town = town
        self._listed = asyncio.Event()
        self.reports = ReceivedReports(clock())
        self.elector = Elector(SimApi(town.server, name), "town", "pilotlight", name, clock)
        api = SimApi(town.server, name, self.elector.writes_s)
        driver = KubernetesDriver(
            api, "town", launch, lambda _: "image", clock, assume_after_s=0.05,
            measured=lambda replica, since_s: is_device_memory_free(self.loop.world, replica, since_s, clock()),
        )  # fmt: skip
        super().__init__(town, 0, driver, self.elector.writes_s, self.elector.in_touch)
        self.loop.listeners.append(self._on_step)

    def _on_step(self, step: LoopStep) -> None:
        if step.after.leadership.synced:
            self._listed.set()

    async def more(self) -> None:
        await self._listed.wait()
        await self.elector.run(self)

    # --- drivers.kubernetes.lease.Process -----------------------------------------------------------------------------

    def lease_seconds(self) -> int:
        return self.loop.world.settings.lease_seconds

    def heard(self) -> frozenset[int]:
        gateways = self.loop.world.gateways.values()
        return frozenset(one.report.epoch for one in gateways if one.report is not None)

    def lead(self, epoch: int) -> None:
        self.loop.observe((LeadingSeen(epoch=epoch),))
        self.driver.lead()
        self._town.leads(self, epoch)

    async def follow(self) -> None:
        await self.driver.follow()
        self.loop.observe((FollowingSeen(),))


class ClusterLink(SimLink):
    """A gateway's connection to the autoscaler of that name."""

    def __init__(self, town: Cluster, gateway: GatewayId, name: str) -> None:
        super().__init__(town, gateway)
        self._cluster = town
        self.name = name

    def there(self) -> Elected | None:
        return self._cluster.processes.get(self.name)

    def serves(self, control: Autoscaler, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert isinstance(control, Elected)
        return control.process.run(lambda: self._cluster.task(work))

    def arrives(self, control: Autoscaler, take: Callable[[], None]) -> None:
        assert isinstance(control, Elected)
        if control.process.runs:
            take()
        else:
            self._cluster.task(_once_awake(control.process, take))


async def _once_awake(of: Process, take: Callable[[], None]) -> None:
    await of.awake()
    take()


class Kubelet(Machine):
    """The engines of the node's pods."""

    def __init__(self, rng: random.Random, slices: tuple[Slice, ...], manners: Manners, server: Server) -> None:
        super().__init__(rng, slices, manners)
        self._server = server
        self.models: tuple[Model, ...] = ()
        server.on_pod = self._hears

    def _hears(self, pod: Object, event: str) -> None:
        loop = asyncio.get_running_loop()
        if event == "ADDED":
            loop.call_later(BIND_S, self._starts, pod["metadata"]["name"], pod["metadata"]["uid"])
            return
        found = pod_state.read_replica_pod(pod)
        assert found is not None
        engine = self.engines.get(found.replica)
        if engine is None or not engine.alive:
            self._server.put(PODS, pod, "DELETED")
        else:
            self.stop(engine.replica, pod["metadata"]["deletionGracePeriodSeconds"])

    def _starts(self, name: str, uid: str) -> None:
        pod = self._server.objects[PODS].get(name)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return
        found = pod_state.read_replica_pod(pod)
        assert found is not None
        pod["spec"]["nodeName"] = NODE
        replica = Replica(
            id=found.replica,
            model=found.model,
            spec_hash=found.spec_hash,
            intent=found.intent,
            slots=found.slots,
            resources=ReplicaResources(slices=found.slices, memory_bytes=found.memory_bytes),
        )
        self.start(replica, next(one for one in self.models if one.name == found.model))

    def delete_by_force(self, replica: ReplicaId, runs_on_s: float = 0.0) -> None:
        """Delete the pod at once; its process, of which no status is reported any more, ends `runs_on_s` later."""
        self._server.put(PODS, self._server.objects[PODS][pods.format_pod_name(replica)], "DELETED")
        if runs_on_s:
            self._loop.call_later(runs_on_s, self.kill, replica)
        else:
            self.kill(replica)

    def evict(self, replica: ReplicaId) -> None:
        """Evict the pod by node pressure: its process ends; the pod is kept, without an address."""
        pod = self._server.objects[PODS][pods.format_pod_name(replica)]
        pod["status"] = {"phase": "Failed", "reason": "Evicted"}
        self._server.put(PODS, pod, "MODIFIED")
        self.kill(replica)

    def changed(self, engine: FakeEngine, what: str) -> None:
        pod = self._server.objects[PODS].get(pods.format_pod_name(engine.replica.id), {})
        if not pod or pod.get("status", {}).get("phase") == "Failed":
            super().changed(engine, what)
            return
        if what == "start":
            found = pod_state.read_replica_pod(pod)
            assert found is not None
            engine.address = f"10.244.{len(self.started) // 250}.{len(self.started) % 250 + 2}:{found.port}"
        super().changed(engine, what)
        if what == "start":
            pod["status"] = {"podIP": engine.address.partition(":")[0], **_state({"running": {"startedAt": _now()}})}
        elif not engine.alive:
            over = {"exitCode": 0 if engine.reason == STOPPED else 137}
            pod["status"] = {**pod["status"], **_state({"terminated": over})}
        if what == "clean" and "deletionTimestamp" in pod["metadata"]:
            self._server.put(PODS, pod, "DELETED")
        elif what != "ready":
            self._server.put(PODS, pod, "MODIFIED")

    async def probe(self, host: str, port: int, path: str, *, tls_name: str | None = None) -> bool | None:
        """Replacement for `probes.probe_engine`."""
        del path, tls_name
        await asyncio.sleep(0.0005)
        found = [one for one in self.engines.values() if one.address == f"{host}:{port}" and one.alive]
        return found[0].ready if found else None


def _state(state: Object) -> Object:
    return {"phase": "Running", "containerStatuses": [{"name": pods.ENGINE, "state": state}]}


def _now() -> str:
    return datetime.fromtimestamp(Server.unix_s(), UTC).isoformat()


class Cluster(Town):
    """The installation; its autoscalers are named `a`, `b`, ..."""

    def __init__(
        self, seed: int, models: tuple[Model, ...], *, names: str, gateways: int, gpus: int, manners: Manners,
        skews_s: tuple[float, ...],
    ) -> None:  # fmt: skip
        self.server = Server()
        self.names = names
        self.processes: dict[str, Elected] = {}
        self._skews_s = dict(zip(names, skews_s, strict=False))
        self._killed: list[Elected] = []
        self.epochs: list[tuple[str, int]] = []
        """Each leader with its epoch."""
        labels = {MEMORY_MIB: str(16 * GIB >> 20)}
        self.server.put(NODES, {
            "metadata": {"name": NODE, "labels": labels}, "spec": {},
            "status": {"allocatable": {GPU: str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]},
        }, "ADDED")  # fmt: skip
        slices = tuple(one_device(16 * GIB, f"{NODE}/gpu{number}") for number in range(gpus))
        super().__init__(seed, models=models, slices=slices, gateways=gateways, manners=manners)

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        self.server.objects[PODS] = {}
        made = Kubelet(self.rng, slices, manners, self.server)
        made.models = self.models
        return made

    def links(self, gateway: GatewayId) -> list[SimLink]:
        return [ClusterLink(self, gateway, name) for name in self.names]

    def start_autoscaler(self) -> None:
        """Start all of them."""
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start or restart one process."""
        own = Process(self._skews_s.get(name, 0.0))
        self.processes[name] = own.run(lambda: Elected(self, name, own))

    def tell(self, control: Autoscaler, report: Report) -> None:
        assert isinstance(control, Elected)
        control.reports.take(report, self.now())

    def leads(self, one: Elected, epoch: int) -> None:
        """A process was elected; it knows the reports that it received before."""
        self.autoscaler, self.reports = one, one.reports
        self.reports.since_s = self.now()
        self.epochs.append((one.name, epoch))
        one.process.on_stop = lambda: self._stopped(one)

    def _stopped(self, one: Elected) -> None:
        """A process that is stopped believes nothing."""
        if self.autoscaler is one:
            self.autoscaler = None

    @property
    def leader(self) -> Elected:
        """The process that was elected last."""
        return self.processes[self.epochs[-1][0]]

    def kill(self, name: str) -> None:
        """SIGKILL: its connections break; requests that it has sent are carried out."""
        one = self.processes.pop(name)
        one.process.stop()
        self._killed.append(one)
        for gateway in self.gateways:
            for link in gateway.links:
                if isinstance(link, ClusterLink) and link.name == name:
                    link.cut()

    async def close(self) -> None:
        self.server.leave()
        for gateway in self.gateways:
            gateway.task.cancel()
        for one in (*self._killed, *self.processes.values()):
            await one.process.buried()
        await asyncio.gather(*(gateway.task for gateway in self.gateways), return_exceptions=True)


def play(
    act: Callable[[Stage, Cluster], Coroutine[Any, Any, T]], *models: Model, seed: int = 1, names: str = "ab",
    gateways: int = 2, gpus: int = 1, manners: Manners = QUICK, skews_s: tuple[float, ...] = (),
) -> T:  # fmt: skip
    """Run one scenario in virtual time once there is a leader; then check every invariant that holds always."""

    async def whole() -> T:
        process.install()
        town = Cluster(
            seed, models, names=names, gateways=gateways, gpus=gpus, manners=manners, skews_s=skews_s
        )  # fmt: skip
        patch.setattr(probes, "probe_engine", town.machine.probe)  # type: ignore[attr-defined]  # a Kubelet
        watcher = continuous_invariants.Watcher(town, strict=False)
        stage = Stage(town, watcher)
        try:
            await stage.until(lambda: bool(town.epochs))
            await asyncio.sleep(1.0)
            result = await act(stage, town)
            watcher.stop()
            broken = [*final_invariants.everybody_was_answered(town), *watcher.broken]
            assert not broken, broken
            assert not town.crashes
        finally:
            await town.close()
        return result

    random.seed(seed)  # for the product's own jitter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader_election, "datetime", Skewed)
        return run(whole())


def simulated(*models: Model, **options: Any) -> Callable[[Scenario[P]], Callable[P, None]]:
    """Make a test that runs the scenario with `play`. pytest passes all parameters except the stage and the cluster."""

    def decorate(scenario: Scenario[P]) -> Callable[P, None]:
        @wraps(scenario)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            play(lambda stage, town: scenario(stage, town, *args, **kwargs), *models, **options)

        return hide_parameters(test, scenario, 2)

    return decorate
