"""Assembles one autoscaler process: documents, state, driver, loop, contract and operations port.

Defines startup and shutdown. On SIGTERM all local engines are stopped and verified gone, unless `keep_engines` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec
from aiohttp import web

from autoscaler.contract import GatewayId, ModelName
from autoscaler.controller.loop import Listener, Loop, LoopStep
from autoscaler.documents.document_quarantine import PART, DocumentFault, list_faults_over
from autoscaler.documents.document_types import Documents
from autoscaler.drivers.driver import Driver
from autoscaler.drivers.local.cordon_file import CordonFile
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.drivers.local.learned_files import HistoryFile, LessonFile
from autoscaler.drivers.local.nvml import open_nvml
from autoscaler.drivers.local.replica_processes import become_subreaper
from autoscaler.drivers.local.state_directory import StateDirectory, StateError
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.exception_handling import (
    FaultReport,
    attempt_for,
    describe_error,
    raise_fault,
    reraise_memory_error,
)
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import Needs
from autoscaler.queries.response_types import DocumentsView
from autoscaler.server.auth import Admits
from autoscaler.server.gateways import ContractServer
from autoscaler.server.metrics import Metrics
from autoscaler.server.ops import OperationsServer
from autoscaler.server.order_handlers import Commands
from autoscaler.signals.scraper import SignalScraper
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import FailStart, Unmet
from autoscaler.state.events import ClockSeen, DocumentsSeen, FaultSeen, GatewaySeen, HistorySeen
from autoscaler.state.world import Leadership, World
from pilotlight import __version__, process
from pilotlight.models import capacity_providers
from pilotlight.models.cpu_warning import CpuBound
from pilotlight.models.document_loading import (
    NONE_KNOWN,
    build_launcher,
    keep_artifact_location,
    keep_valid_versions,
    problem_file,
    read_documents,
)
from pilotlight.models.explain_fit_needs import load_memory_needs, read_reported_needs
from pilotlight.models.page_cache import Warming
from pilotlight.models.registry_access import SignersError
from pilotlight.models.weights_fetch import STORE, Supply
from pilotlight.net import contract_access as access
from pilotlight.net import http_server as health
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address, check_operations, socket_of
from pilotlight.processes import cluster
from pilotlight.processes.cluster import Cluster, ClusterOptions
from pilotlight.processes.console import Misfits, Narrator
from pilotlight.processes.learner_runner import LearnerRunner
from pilotlight.processes.model_start_check_loop import Preflight
from pilotlight.safe_output import write_stderr

SAVE_S = 60.0
"""Interval at which histories are written; they are also written at shutdown."""
CLOCK_EVERY_S = 60.0
"""Interval at which the loop is given the time of day."""
nvml = functools.cache(open_nvml)
"""Opened once, when the documents are read, which requires knowing whether there are GPUs; the driver uses it too."""
log = logging.getLogger("pilotlight.autoscaler.process")
Located = Callable[[Model], Model]
"""As in `document_loading.read_documents`."""
Tell = Callable[[DocumentsSeen, Sequence[FaultSeen]], None]
"""Receives the documents of files and the exceptions that their Models raised."""
NO_DOCUMENTS = Documents()
ENGINE_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for an engine at shutdown, when no request uses it any more."""


class AutoscalerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one autoscaler process."""

    state: Path
    documents: Path
    contract_socket: Path | None
    ops: Address
    contract_listen: Address | None = None
    """Where gateways of other machines report, authenticated as in `access`."""
    access: Access = Access()
    health: Address | None = None
    """Address of the health port (liveness, readiness, metrics)."""
    ops_fd: int | None = None
    """An inherited listening socket to use instead of opening `ops`."""
    gateway_sockets: tuple[Path, ...] = ()
    """Sockets of the local gateways, STATE/run/GATEWAY.sock. These are known from the start, before they report."""
    parent: int | None = None
    keep_engines: bool = False
    cluster: ClusterOptions | None = None
    """The cluster in which replicas run as pods; None: they run as processes of this machine."""


def run_autoscaler(options: AutoscalerOptions) -> None:
    """Run until SIGTERM."""
    check_contract(options)
    if options.parent is not None:
        process.die_with_parent(options.parent)
    try:
        process.run(serve_autoscaler(options))
    except StateError as error:
        raise click.UsageError(str(error)) from None


async def serve_autoscaler(options: AutoscalerOptions) -> None:
    """Run the process from startup to shutdown."""
    async with AsyncExitStack() as stack:
        await serve_until_stopped(options, stack)


async def serve_until_stopped(options: AutoscalerOptions, stack: AsyncExitStack) -> None:
    """Start, run and stop. `stack` holds resources that outlive the loop."""
    clock = time.monotonic  # uvloop's clock is cached, in whole milliseconds
    stop, again, files = process.stop_event(), process.reload_event(), Files()
    faults = list[FaultSeen]()
    documents = load_checked_documents(options, faults.append)  # after `again`, so that no later change is missed
    by_hand = options.parent is None  # otherwise `serve` holds the lock of the state directory
    state = StateDirectory.open(options.state) if by_hand else StateDirectory.attach(options.state)
    become_subreaper()
    histories = HistoryFile(state, clock, time.time)
    devices = Devices(() if options.cluster else documents.settings.devices, nvml)
    driver: Driver
    house: Cluster | None = None
    supply: Supply | None = None
    if options.cluster is None:
        documents, supply = open_supply(options, documents, faults)
        driver = LocalDriver(state, build_launcher(lambda: devices.measured), devices, clock, supply)
        loop = Loop(World(epoch=state.next_epoch(), leadership=Leadership(leading_since_s=clock())), driver, clock)
    else:
        house = await stack.enter_async_context(cluster.open_cluster(options.cluster, clock))
        driver, loop = house.driver, house.loop()
    located = keep_artifact_location if supply is None else supply.located
    log = Log()
    metrics = Metrics(lambda: loop.world, clock, dict if house is None else house.unreadable.counts, loop.fault)
    tell: Tell = (lambda seen, faults: loop.observe([seen, *faults])) if house is None else house.put_files
    reloads = Reloads(options, loop, tell, located, again=again, documents=documents, faults=faults)
    preflight = Preflight(loop, driver.obstacle, reloads)
    cpu_bound = CpuBound(lambda: devices.measured, find_installed_programs())
    loop.listeners += [metrics.on_step, Misfits(loop.fault).on_step, preflight.on_step, cpu_bound.on_step]
    loop.listeners += [build_step_logger(log, Narrator(fault=loop.fault), loop.fault)]
    tell(build_documents_seen(documents), faults)
    tutor = load_histories(histories, loop, LearnerRunner(loop, LessonFile(state), clock))
    loop.observe([GatewaySeen(gateway=GatewayId(path.stem), watched=True) for path in options.gateway_sockets])
    operations = OperationsServer(
        loop, log, metrics.text, lambda: options.gateway_sockets, __version__,
        commands=build_commands(state, loop, clock, house), off=() if house is None else house.off,
        needs=build_needs_reader(loop, located, in_cluster=house is not None), documents=reloads.view,
    )  # fmt: skip
    runners = await open_ports(
        options, ContractServer(loop), operations, files, None if house is None else house.admits
    )
    process.freeze_gc()
    async with asyncio.TaskGroup() as tasks:
        kept: dict[str, Callable[[], Awaitable[None]]] = {
            "certificates": files.follow,
            "preflight": preflight.run,
            "cpu": cpu_bound.run,
            "lessons": tutor.run,
            "signals": SignalScraper(lambda: loop.world, loop.observe, clock).run,
            "histories": functools.partial(save_periodically, histories, loop),
            "documents": functools.partial(reload_on_event, again, reloads),
            "time": functools.partial(observe_clock, loop, clock, time.time),
            **({} if supply is None else weights_tasks(supply, located, loop, reloads)),
        }
        works = [
            loop.run(),
            *(retry_until_success(work, functools.partial(loop.trouble, what)) for what, work in kept.items()),
        ]
        running = [tasks.create_task(work) for work in works]
        if house is not None:
            running.append(tasks.create_task(house.run()))
        await stop.wait()
        if not options.keep_engines and house is None:  # pods keep running
            await loop.wind_down(ENGINE_GRACE_S)
        for task in running:
            task.cancel()
    if house is not None:
        await house.release()
    save_histories(histories, loop, at_once=True)
    for runner in runners:
        await runner.cleanup()


async def observe_clock(loop: Loop, clock: Callable[[], float], unix: Callable[[], float]) -> None:
    """Report the time of day for `replicas.schedule`, periodically because a machine's clock may be set."""
    while True:
        loop.observe([ClockSeen(unix_offset_s=unix() - clock())])
        await asyncio.sleep(CLOCK_EVERY_S)


def build_needs_reader(loop: Loop, located: Located, *, in_cluster: bool) -> Callable[[Model], Needs]:
    """Return the reader of artifacts' memory needs for `explain fit`."""
    if in_cluster:
        return lambda model: read_reported_needs(model, loop.world.learned.looked)
    return lambda model: load_memory_needs(located(model), gpus=has_gpu_memory(loop.world.settings))


def open_supply(
    options: AutoscalerOptions, documents: Documents, faults: list[FaultSeen]
) -> tuple[Documents, Supply]:  # fmt: skip
    """Return the Supply that fetches weights to this machine, and the documents with memory needs of stored weights.
    `faults` is replaced by the faults of these documents.
    """
    try:
        supply = Supply(options.state / STORE, documents.settings.weights)
    except SignersError as error:
        raise click.UsageError(f"Settings: {error}") from None
    faults.clear()
    return load_checked_documents(options, faults.append, located=supply.located), supply


def weights_tasks(
    supply: Supply, located: Located, loop: Loop, reloads: Reloads
) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return by name the tasks that pull weights to this machine and read them ahead."""
    warming = Warming(located)
    loop.listeners += [supply.on_step, warming.on_step]
    return {"weights": functools.partial(supply.run, loop, reloads), "warming": warming.run}


def load_histories(histories: HistoryFile, loop: Loop, tutor: LearnerRunner) -> LearnerRunner:
    """Restore what previous processes learnt."""
    remembered, broken = histories.load()
    if broken:
        log.warning("event=history_unreadable error=%s", broken)
    loop.observe([HistorySeen(model=model, history=history) for model, history in remembered.items()])
    tutor.remember()
    return tutor


def build_commands(state: StateDirectory, loop: Loop, clock: Callable[[], float], house: Cluster | None) -> Commands:
    """Return the routes of operator orders, with stored cordons in force."""
    if house is not None and house.cordons is not None:
        return Commands(loop, house.cordons)
    kept = CordonFile(state, loop.observe, clock, time.time)
    if broken := kept.load():
        log.warning("event=cordons_unreadable error=%s", broken)
    return Commands(loop, kept)


async def open_ports(
    options: AutoscalerOptions, contract: ContractServer, operations: OperationsServer, files: Files,
    admits: Admits | None,
) -> list[health.Runner]:  # fmt: skip
    """Open the contract, the operations port and the health port; `cleanup` of each stops it."""
    runners = [health.Runner(app) for app in (contract.application(), health.add_host_check(operations.application()))]
    for runner in runners:
        await runner.setup()
    if options.contract_socket is not None:
        options.contract_socket.unlink(missing_ok=True)
        await web.UnixSite(runners[0], str(options.contract_socket)).start()
    await web.SockSite(runners[1], socket_of(options.ops_fd, options.ops)).start()
    if options.contract_listen is not None:
        runners.append(await access.open_port(contract, options.contract_listen, options.access, files, admits))
    runners.append(await health.open_port(options.health, operations.health()))
    return runners


def check_contract(options: AutoscalerOptions) -> None:
    """Raise click's usage error if no gateway could report, or if anyone could without authentication."""
    if options.contract_listen is not None:
        named = options.cluster is not None and bool(options.cluster.users)
        access.check_port(options.contract_listen, options.access, accounts=named)
        if options.cluster is not None and options.cluster.accounts:
            write_stderr(
                "--account is deprecated: it grants the roles of both gateways and agents; "
                "use --gateway-account and --agent-account"
            )
    elif options.contract_socket is None:
        raise click.UsageError("no address for gateways: set --contract-socket or --contract-listen")


def has_gpu_memory(settings: Settings) -> bool:
    """Return whether this machine's devices have memory separate from the host memory that an engine uses."""
    return not settings.devices and nvml() is not None


def load_checked_documents(
    options: AutoscalerOptions, fault: Callable[[FaultSeen], None], known: Mapping[ModelName, Model] = NONE_KNOWN,
    located: Located = keep_artifact_location,
) -> Documents:  # fmt: skip
    """Return the documents. Raises click's usage error if they are invalid or forbid exposing `--ops`. `fault`: as in
    `document_loading.read_documents`.

    The supervisor has already checked the address of an inherited listener.
    """

    def gpus(settings: Settings) -> bool:
        return options.cluster is not None or has_gpu_memory(settings)

    documents = read_documents(options.documents, known, gpus, located, fault)
    capacity_providers.check_provider_modes(
        documents.settings, "machine" if options.cluster is None else options.cluster.scope
    )
    if options.ops_fd is None:
        check_operations(options.ops, documents.settings.auth)
    return documents


def build_step_logger(log: Log, narrator: Narrator, fault: FaultReport = raise_fault) -> Listener:
    """Return the listener that records each step for `explain` and prints it on the terminal. `fault` receives Models
    that raised an exception.
    """

    def on_step(step: LoopStep) -> None:
        log.extend(step.transitions)
        narrator.on_step(step)
        nowhere = [unmet for unmet in step.plan.unmet if unmet.model not in step.after.by_model]
        impossible = [action for action in step.actions if isinstance(action, FailStart)]
        rejected: list[Unmet | FailStart] = [*nowhere, *impossible]
        for one in rejected:
            rows = attempt_for(one.model, "explain", fault, functools.partial(log.refuse, [one], step.acted_s))
            narrator.refused(rows or ())

    return on_step


def build_documents_seen(documents: Documents) -> DocumentsSeen:
    """Return all documents as the event that the loop observes."""
    return DocumentsSeen(models=documents.models, tenants=documents.tenants, settings=documents.settings)


async def reload_on_event(again: asyncio.Event, reloads: Callable[[], Awaitable[None]]) -> None:
    """Reload the documents at each reload event."""
    while True:
        await again.wait()
        again.clear()
        await reloads()


class Reloads:
    """Reloads the documents, and reports the last failure, its own or that of `serve`.

    `again` requests a reload. `documents`: the first ones read; `faults`: the exceptions that they raised. A Model
    whose document cannot be decoded keeps its last valid one. When the quarantine of a Model with a fault expires, the
    Model is quarantined again at once, so that nothing starts before the documents are read again. If its document is
    valid then, the quarantine ends.
    """

    def __init__(
        self, options: AutoscalerOptions, loop: Loop, tell: Tell, located: Located, *, again: asyncio.Event,
        documents: Documents = NO_DOCUMENTS, faults: Sequence[FaultSeen] = (),
    ) -> None:  # fmt: skip
        self._options, self._loop, self._tell, self._located = options, loop, tell, located
        self._again = again
        self._problem = ""
        self._valid: dict[ModelName, Model] = {}
        """The last valid version of each Model, if it had one."""
        self._faults: Mapping[ModelName, DocumentFault] = {}
        self._put(documents, faults)
        loop.retries.append(self._retry)

    def _retry(self, ended: frozenset[ModelName]) -> None:
        for name in sorted(ended & self._faults.keys()):
            self._loop.fault(name, PART, self._faults[name].reason)
            self._again.set()

    def _put(self, documents: Documents, faults: Sequence[FaultSeen]) -> Documents:
        """Record what was read. Return it with the last valid versions of Models that cannot be decoded."""
        undecoded = documents.undecoded
        kept = {name: self._valid[name] for name in undecoded if name in self._valid}
        self._valid = {model.name: model for model in documents.models if model.name not in undecoded} | kept
        versions: dict[ModelName, object] = {model.name: model.spec for model in documents.models}
        versions |= {name: found.value for name, found in undecoded.items()}
        self._faults = {one.model: DocumentFault(one.reason, versions[one.model]) for one in faults}
        return keep_valid_versions(documents, self._valid)

    async def __call__(self) -> None:
        """Reload; documents that cannot be read are logged, and the last valid ones stay in force."""
        faults, known = list[FaultSeen](), self._loop.world.models
        try:
            documents = await asyncio.to_thread(
                load_checked_documents, self._options, faults.append, known, self._located
            )
            before, documents = self._faults, self._put(documents, faults)
            self._loop.observe(list_faults_over(before, self._faults))
            self._tell(build_documents_seen(documents), faults)
        except Exception as error:  # noqa: BLE001  a faulty document must not end the process; the error is reported
            reraise_memory_error(error)
            message = error.message if isinstance(error, click.UsageError) else describe_error(error)
            self._problem = f"{message}; the last valid documents stay in force"
            log.warning("event=documents_reload_failed error=%s", self._problem)
        else:
            self._problem = ""

    def view(self) -> DocumentsView:
        """Return the last failure. `serve` checks documents before this process and stores its error in a file."""
        path = problem_file(self._options.documents)
        with contextlib.suppress(OSError):
            return DocumentsView(problem=path.read_text(errors="replace"))
        return DocumentsView(problem=self._problem)


async def save_periodically(histories: HistoryFile, loop: Loop) -> None:
    """Save the histories of starts periodically."""
    while True:
        await asyncio.sleep(SAVE_S)
        save_histories(histories, loop)


def save_histories(histories: HistoryFile, loop: Loop, *, at_once: bool = False) -> None:
    """Save the histories; a full disk loses them but does not stop the autoscaler. A Model whose history raises an
    exception is left out.
    """
    try:
        histories.save(loop.world.learned.histories, at_once=at_once, fault=loop.fault)
    except OSError as error:
        log.warning("event=history_save_failed hint='check the disk of the state directory' error=%s", error.strerror)
