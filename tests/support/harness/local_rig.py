"""An environment for real replicas, for tests of the local driver: a state directory and fake engines, with cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.drivers.local.nvml import Nvml
from autoscaler.drivers.local.replica_processes import read_process, read_process_mark
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import DeclaredDevice
from autoscaler.state.world import Replica, ReplicaResources, SliceId
from tests.contracts.driver import Manner
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.waiting import until

TINY_ENGINE = """
import socket, sys
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    c.close()
"""
"""An engine that only becomes ready; it starts in half the time of the fake engine."""

INSTANCE = f"i{os.getpid()}"
"""For tests that mark processes by hand: other processes of the same run do so at the same time."""
R1 = f"{INSTANCE}/r1"
GPU0 = DeclaredDevice(name="gpu0", memory_bytes=Bytes(1 << 30), model="H100")
KNOBS = {
    Manner.GOOD: (),
    Manner.NEVER_READY: ("--fail", "never-ready"),
    Manner.DIES_ON_START: ("--fail", "dies-on-start:3"),
    Manner.IGNORES_SIGTERM: ("--fail", "ignores-sigterm"),
}


class ArgvLaunch(NamedTuple):
    """A launch as engines return it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    readiness_path: str = "/health"


def launch(model: Model, host: str, port: int, given: Given = AS_ASKED) -> ArgvLaunch:
    """Starts the Model's command with {host} and {port} filled in, regardless of its memory."""
    del given
    argv = tuple(word.replace("{host}", host).replace("{port}", str(port)) for word in model.spec.command)
    return ArgvLaunch(argv, {name: value for name, value in model.spec.env.items() if isinstance(value, str)})


def python(source: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs Python source."""
    return (sys.executable, "-S", "-E", "-c", source, *arguments)


def replica(name: str, argv: tuple[str, ...], slices: tuple[str, ...] = ("gpu0",)) -> tuple[Replica, Model]:
    """A Replica named `name` of a Model of the same name, run by a command."""
    model = Model(name=ModelName(name), spec=ModelSpec(engine="command", command=argv))
    return Replica(
        id=ReplicaId(name),
        model=model.name,
        spec_hash=model.spec_hash(),
        intent=f"intent-{name}",
        slots=4,
        resources=ReplicaResources(slices=tuple(map(SliceId, slices)), memory_bytes=1 << 20),
    ), model


class LocalRig:
    """A rig of the contract suite with real processes."""

    began_within_s = 0.5

    def __init__(
        self,
        path: Path,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        nvml: Nvml | None = None,
    ) -> None:
        self.state = StateDirectory.open(path / "state")
        self._loop_factory = loop_factory
        self._nvml = nvml

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(scenario)

    def driver(self) -> LocalDriver:
        devices = Devices((GPU0,)) if self._nvml is None else Devices((), lambda: self._nvml)
        return LocalDriver(self.state, launch, devices)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        if manner is Manner.CANNOT_START:
            return replica(name, ("/nowhere/engine", "{port}"))
        return replica(name, tuple(command("--port", "{port}", *KNOBS[manner])))

    def processes(self, name: ReplicaId) -> list[int]:
        """Running processes that carry the replica's mark."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if read_process_mark(pid) == self.state.mark_prefix + name and not _gone(pid)]

    def main(self, name: ReplicaId) -> int:
        """The pid of its main process: the one that carries its mark and leads its session."""
        deadline_s = time.monotonic() + 60
        while not (leaders := [pid for pid in self.processes(name) if os.getsid(pid) == pid]):
            assert time.monotonic() < deadline_s, f"{name} has no process"
        return leaders[0]

    def kill(self, replica: ReplicaId) -> None:
        os.kill(self.main(replica), signal.SIGKILL)

    def exists(self, replica: ReplicaId) -> bool:
        return bool(self.processes(replica))

    async def until_over(self, replica: ReplicaId) -> None:
        await until("it is over", lambda: not self.exists(replica))

    def starts(self, replica: ReplicaId) -> int:
        """Counted in the engine's own log: the fake engine logs one line when it listens."""
        return max(1, self.state.log(replica).read_text().count("listening on"))

    def close(self) -> None:
        """Ends everything that is left of this rig's Replicas."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (read_process_mark(int(entry.name)) or "").startswith(self.state.mark_prefix):
                os.kill(int(entry.name), signal.SIGKILL)
        self.state.close()


def _gone(pid: int) -> bool:
    one = read_process(pid)
    return one is None or one.gone
