"""Engines that a container runtime starts: the driver contract with a fake runtime, and with real Docker and podman."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.local import driver
from autoscaler.drivers.local.container_runtime import LABEL
from autoscaler.spec.model import Model
from autoscaler.state.events import Seen
from autoscaler.state.world import Replica
from tests.contracts.driver import DriverContract, Manner, Rig
from tests.support.fakes.container_runtime import fake_runtime
from tests.support.fakes.engines.fake_engine_process import SCRIPT
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import KNOBS, LocalRig, replica
from tests.support.harness.scenarios import run_on_rig
from tests.support.real_services.container_runtimes import IMAGE, LIMITS, MOUNTS, OPTIONS, RUNTIMES, real_runtime
from tests.support.waiting import until

PYTHON = str(Path(sys.executable).resolve())


class ContainerRig(LocalRig):
    """A rig whose engines are containers. `client` finds them, and runs them with `compose`; `options` are those of
    `run`, with the image.
    """

    def __init__(
        self, path: Path, client: Sequence[str], options: Sequence[str], compose: Sequence[str] | None = None
    ) -> None:
        super().__init__(path)
        self.client, self.options = tuple(client), tuple(options)
        self.command = self.client if compose is None else tuple(compose)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        engine: tuple[str, ...] = ("/nowhere/engine",)
        if manner is not Manner.CANNOT_START:
            engine = (PYTHON, "-S", "-E", str(SCRIPT), "--host", "0.0.0.0", "--port", "{port}", *KNOBS[manner])
        return replica(name, (*self.command, "run", "--publish", "{port}:{port}", *self.options, *engine))

    def containers(self, replica: ReplicaId, *options: str) -> list[str]:
        """Ids of its containers; with `--all` also of those that have ended."""
        label = f"label={LABEL}={self.state.mark_prefix}{replica}"
        words = (*self.client, "ps", "--quiet", "--filter", label, *options)
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split()

    def kill(self, replica: ReplicaId) -> None:
        """Kill the container: the client ends with status 137."""
        subprocess.run((*self.client, "kill", *self.containers(replica)), check=True, timeout=60)

    def exists(self, replica: ReplicaId) -> bool:
        return bool(self.processes(replica) or self.containers(replica))


class ContainerContract(DriverContract):
    """The contract of drivers, and what differs between a client and its container."""

    @run_on_rig
    async def test_container_is_removed_after_its_runtime_client_is_killed(self, rig: Rig) -> None:
        assert isinstance(rig, ContainerRig)
        one, model = rig.replica("r1", Manner.GOOD)
        async with running(manager := rig.driver()) as observed:
            manager.start(one, model)
            await observed.until(one.id, Seen.READY)
            os.kill(rig.main(one.id), signal.SIGKILL)
            await observed.until(one.id, Seen.CLEAN)
            assert not rig.containers(one.id, "--all")

    @run_on_rig
    async def test_driver_start_removes_a_container_whose_runtime_client_has_ended(self, rig: Rig) -> None:
        assert isinstance(rig, ContainerRig)
        one, model = rig.replica("r1", Manner.GOOD)
        first = rig.driver()
        async with running(first) as observed:
            first.start(one, model)
            await observed.until(one.id, Seen.READY)
        client = rig.main(one.id)
        os.kill(client, signal.SIGKILL)
        await until("the client has ended", lambda: client not in rig.processes(one.id))
        async with running(rig.driver()) as observed:
            assert observed.words(one.id)[-1] == "clean"
        assert not rig.containers(one.id, "--all")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine, or this process, may be paused for seconds: that is no failed probe, and no incomplete adoption."""
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 60.0)
    monkeypatch.setattr(driver, "ADOPT_SECONDS_MAX", 60.0)


@pytest.fixture(scope="module", params=sorted(RUNTIMES))
def client(request: pytest.FixtureRequest) -> Iterator[Sequence[str]]:
    """The words of a real client."""
    with real_runtime(request.param) as client:
        yield client


@pytest.mark.standard
@pytest.mark.usefixtures("patient")
class TestFakeRuntime(ContainerContract):
    """The runtime is a fake whose daemon owns the port."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        with fake_runtime(tmp_path) as client:
            rig = ContainerRig(tmp_path, (str(client),), ("image",))
            yield rig
            rig.close()

    @run_on_rig
    async def test_replica_is_not_ready_if_a_foreign_container_listens_on_its_port(self, rig: Rig) -> None:
        assert isinstance(rig, ContainerRig)
        one, model = rig.replica("r1", Manner.GOOD)
        client, run, *options = model.spec.command
        one, model = replica("r1", (client, run, "--label", f"{LABEL}=other", *options))
        async with running(manager := rig.driver()) as observed:
            manager.start(one, model)
            seen = await observed.until(one.id, Seen.STARTING, times=2)
            assert "a foreign process listens" in seen.reason
            manager.stop(one, 5.0)
            await observed.until(one.id, Seen.CLEAN)


@pytest.mark.standard
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("command", ["docker compose --file a.yml", "docker-compose --file a.yml"])
def test_container_of_compose_becomes_ready_and_is_removed_after_its_stop(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        one, model = rig.replica("r1", Manner.GOOD)
        async with running(manager := rig.driver()) as observed:
            manager.start(one, model)
            await observed.until(one.id, Seen.READY)
            assert rig.containers(one.id)
            manager.stop(one, 5.0)
            await observed.until(one.id, Seen.CLEAN)
            assert not rig.containers(one.id, "--all")

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with fake_runtime(tmp_path):
        rig = ContainerRig(tmp_path, ("docker",), ("service",), command.split())
        rig.run(scenario())
        rig.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.xdist_group("container runtimes")  # one daemon for all tests
class TestRealRuntime(ContainerContract):
    """The same with Docker and podman."""

    @pytest.fixture
    def rig(self, tmp_path: Path, client: Sequence[str]) -> Iterator[Rig]:
        rig = ContainerRig(tmp_path, client, (*LIMITS, *OPTIONS[client[0]], *MOUNTS, IMAGE))
        yield rig
        rig.close()
