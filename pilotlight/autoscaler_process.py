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
from autoscaler.drivers.local import LocalDriver
from autoscaler.drivers.records import StateDirectory
from autoscaler.log import Log

from autoscaler.loop import Loop, Step
from autoscaler.metrics import Metrics
from autoscaler.ops import OperationsServer
from autoscaler.serve import ContractServer
from autoscaler.states import ReplicaState
from autoscaler.world import DocumentsSeen, HistorySeen, World
from pilotlight import process
from pilotlight.gathering import Documents, launcher, read_documents
from pilotlight.listen import Address

SAVE_S = 60.0
"""Histories are written at most this often, and at the end."""


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
    driver = LocalDriver(state, launcher(), documents.settings.devices)
    loop = Loop(World(epoch=state.next_epoch(), leading_since_s=clock()), driver, clock)
    log = Log()
    metrics = Metrics(lambda: loop.world)
    loop.listeners += [lambda step: log.extend(step.transitions), metrics.on_step, Narrator().on_step]
    loop.observe([DocumentsSeen(models=documents.models, tenants=documents.tenants, settings=documents.settings)])
    loop.observe([HistorySeen(model=m, history=h) for m, h in state.load_histories(clock()).items()])
    contract = ContractServer(loop)
    operations = OperationsServer(loop, log, metrics.text, lambda: options.gateway_sockets)
    runners = [web.AppRunner(app, access_log=None) for app in (contract.application(), operations.application())]
    for runner in runners:
        await runner.setup()
    options.contract_socket.unlink(missing_ok=True)
    await web.UnixSite(runners[0], str(options.contract_socket)).start()
    await web.SockSite(runners[1], process.socket_of(options.ops_fd, options.ops)).start()
    process.settle()
    async with asyncio.TaskGroup() as tasks:
        deciding = tasks.create_task(loop.run())
        saving = tasks.create_task(save_often(state, loop))
        await stop.wait()
        deciding.cancel()
        saving.cancel()
    if not options.keep_engines:
        await driver.stop_all()
    state.save_histories(loop.world.histories, clock())
    for runner in runners:
        await runner.cleanup()


async def save_often(state: StateDirectory, loop: Loop) -> None:
    """Keeps what was learnt of starts on disk."""
    while True:
        await asyncio.sleep(SAVE_S)
        state.save_histories(loop.world.histories, asyncio.get_running_loop().time())


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
