"""Composes one autoscaler process on one machine: documents, state, local driver, loop, contract and operations port.

Owns the order of its start and stop. At SIGTERM every engine is stopped and proven gone, unless `keep_engines`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import web

from autoscaler.documents import Documents
from autoscaler.drivers.devices import Devices
from autoscaler.drivers.histories import HistoryFile
from autoscaler.drivers.local import LocalDriver
from autoscaler.drivers.processes import become_subreaper
from autoscaler.drivers.records import StateDirectory, replace_file
from autoscaler.log import Log
from autoscaler.loop import Loop, Step
from autoscaler.metrics import Metrics
from autoscaler.ops import OperationsServer
from autoscaler.serve import ContractServer
from autoscaler.states import ReplicaState
from autoscaler.world import DocumentsSeen, HistorySeen, World
from pilotlight import process
from pilotlight.gathering import launcher, read_documents
from pilotlight.listen import Address
from pilotlight.supervisor import say

SAVE_S = 60.0
"""Histories are written this often, and at the end."""
SHUTDOWN_S = 0.5
"""How long open connections of the operations port and the contract may take to end."""
ENGINE_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for an engine at the end: no Call is on it any more."""


class AutoscalerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one autoscaler process is told."""

    state: Path
    documents: Path
    contract_socket: Path
    ops: Address
    ops_fd: int | None = None
    """A listening socket to take over instead of opening `ops`."""
    gateway_sockets: tuple[Path, ...] = ()
    parent: int | None = None
    keep_engines: bool = False


def run(options: AutoscalerOptions) -> None:
    """Runs until SIGTERM."""
    process.unblock_signals()
    if options.parent is not None:
        process.die_with_parent(options.parent)
    documents = read_documents(options.documents)
    process.run(serve(options, documents))


async def serve(options: AutoscalerOptions, documents: Documents) -> None:
    """The life of the process."""
    clock = asyncio.get_running_loop().time
    stop = process.stop_event()
    state = StateDirectory.attach(options.state)
    become_subreaper()
    histories = HistoryFile(state, clock, time.time)
    driver = LocalDriver(state, launcher(), Devices(documents.settings.devices), clock)
    loop = Loop(World(epoch=next_epoch(state), leading_since_s=clock()), driver, clock)
    log = Log()
    metrics = Metrics(lambda: loop.world)
    loop.listeners += [lambda step: log.extend(step.transitions), metrics.on_step, Narrator().on_step]
    loop.observe([DocumentsSeen(models=documents.models, tenants=documents.tenants, settings=documents.settings)])
    remembered, broken = histories.load()
    if broken:
        say(broken)
    loop.observe([HistorySeen(model=model, history=history) for model, history in remembered.items()])
    contract = ContractServer(loop)
    operations = OperationsServer(loop, log, metrics.text, lambda: options.gateway_sockets)
    runners = [web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S) for app in (contract.application(), operations.application())]
    for runner in runners:
        await runner.setup()
    options.contract_socket.unlink(missing_ok=True)
    await web.UnixSite(runners[0], str(options.contract_socket)).start()
    await web.SockSite(runners[1], process.socket_of(options.ops_fd, options.ops)).start()
    process.settle()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run()), tasks.create_task(save_often(histories, loop))]
        await stop.wait()
        if not options.keep_engines:
            await loop.wind_down(ENGINE_GRACE_S)
        for task in running:
            task.cancel()
    histories.save(loop.world.histories, at_once=True)
    for runner in runners:
        await runner.cleanup()


def next_epoch(state: StateDirectory) -> int:
    """One more than any leader of this state directory had."""
    path = state.path / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    replace_file(path, f"{epoch}\n".encode())
    return epoch


async def save_often(histories: HistoryFile, loop: Loop) -> None:
    """Keeps what was learnt of starts on disk."""
    while True:
        await asyncio.sleep(SAVE_S)
        histories.save(loop.world.histories)


class Narrator:
    """Says every transition in one line for the person at the terminal."""

    def __init__(self) -> None:
        self._width = 0

    def on_step(self, step: Step) -> None:
        """Prints what this step changed; the state that follows a start or stop at once is left out."""
        for move in step.transitions:
            if move.after in {ReplicaState.PENDING, ReplicaState.SCRUBBING}:
                continue
            self._width = max(self._width, len(move.model))
            now = time.strftime("%H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
            line = f"{now}  {move.model:{self._width}}  {move.after.value:9}  {move.reason}"
            sys.stdout.write(line.rstrip() + "\n")
        sys.stdout.flush()
