"""The local driver: runs replicas as processes of this machine. I/O; makes no decisions.

Each replica is a session of its own, marked in its environment and recorded before it exists. After any kind of crash a
new driver therefore adopts the running replicas, kills incomplete ones, and reports the others as gone. One task
manages each replica from its start to its proof of CLEAN; another probes its readiness.

Invariants: an exit is observed at once (pidfd), with its reason. CLEAN is reported only with a proof
(`proof_of_clean`). Engines continue to run when `run` is cancelled. `start` and `stop` block only for the spawn.
`wait_for_weights` waits until the weights are fetched or the start is stopped; it then cancels the fetch and releases
weights that were fetched anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from autoscaler.contract import ReplicaId
from autoscaler.drivers.driver import Launch, Launcher, Observe, Supply, WeightsHandle
from autoscaler.drivers.local import container_runtime, disk_space, engine_logs, replica_processes
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.engine_process import EngineProcess, build_record, build_unknown_record
from autoscaler.drivers.local.ports import HOST, Ports
from autoscaler.drivers.local.proof_of_clean import EXITED, kill_all, prove_clean
from autoscaler.drivers.local.readiness import Readiness
from autoscaler.drivers.local.replica_processes import ProcessWatch
from autoscaler.drivers.local.state_directory import ReplicaRecord, StateDirectory
from autoscaler.drivers.resilient_tasks import (
    NO_MODEL,
    fault_reporter,
    retry_on_shortage,
    retry_until_success,
    start_contained_task,
)
from autoscaler.exception_handling import Failure, attempt, describe_error, reraise_memory_error
from autoscaler.queries.granted_memory import compute_engine_limits
from autoscaler.spec.model import Model
from autoscaler.state.events import Seen, SlicesSeen, Synced
from autoscaler.state.world import Placing, Replica


def supply_no_weights(_model: Model, _report: Callable[[str], None]) -> None:
    """The `Supply` of a node that has all weights."""


async def wait_for_weights(fetch: Awaitable[WeightsHandle], stop: asyncio.Event) -> WeightsHandle | None:
    """Return the weights; None if `stop` was set first. Raises what `fetch` raises."""
    fetching, stopping = asyncio.ensure_future(fetch), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({fetching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            return fetching.result()
        await _discard_weights(fetching)
    except asyncio.CancelledError:
        await _discard_weights(fetching)
        raise
    finally:
        stopping.cancel()
    return None


async def _discard_weights(fetching: asyncio.Future[WeightsHandle]) -> None:
    fetching.cancel()
    await asyncio.wait({fetching})
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().close()


HOUSEKEEPING_EVERY_S = 1.0
LOOK_EVERY_S = 5.0
"""Interval at which orphans are reaped and devices checked: a lost GPU is unhealthy within two checks."""
IDENTIFY_AFTER_S = 0.005
"""Delay before the first read of a new process's /proc entries, which are locked for milliseconds after the spawn."""
FETCHING_WEIGHTS = "its weights are being fetched"
ADOPT_SECONDS_MAX = 10.0
"""How long `Synced` waits for incomplete replicas; those left then are observed as EXITED."""

_log = logging.getLogger("pilotlight.autoscaler.local_driver")


class LocalDriver:
    """Runs replicas on this machine. `clock` is the `World`'s monotonic clock."""

    def __init__(
        self, state: StateDirectory, launch: Launcher, devices: Devices, clock: Callable[[], float] = time.monotonic,
        supply: Supply = supply_no_weights,
    ) -> None:  # fmt: skip
        self._state = state
        self._launch = launch
        self._supply = supply
        self._devices = devices
        self._clock = clock
        self._boot = replica_processes.boot_id()
        self._ports = Ports()
        self._watch = ProcessWatch()
        self._reaper = replica_processes.Reaper(state.mark_prefix)
        self._readiness = Readiness(devices, self._reaper, clock, self._report_seen, self._remember)
        self._engines: dict[ReplicaId, EngineProcess] = {}
        """Every replica from its start until it is clean."""
        self._observe: Observe = _not_running
        self._tasks = asyncio.TaskGroup()

    async def run(self, observe: Observe) -> None:
        """Adopt, then observe until cancelled. One run per driver."""
        self._observe = observe
        try:
            async with self._tasks as tasks:
                await retry_until_success(self._open_devices, fault_reporter(NO_MODEL, observe, "devices"))
                await retry_until_success(self._adopt, fault_reporter(NO_MODEL, observe, "adoption of engines"))
                observe((Synced(),))
                tasks.create_task(
                    retry_until_success(self._run_housekeeping, fault_reporter(NO_MODEL, observe, "logs of engines"))
                )
                if self._devices.measured:
                    tasks.create_task(
                        retry_until_success(self._watch_devices, fault_reporter(NO_MODEL, observe, "devices"))
                    )
        finally:
            self._observe = _not_running
            for engine in self._engines.values():
                self._watch.forget(engine.record.id)
                if engine.child is not None:
                    # The engine continues to run without us: avoid the ResourceWarning of its `Popen`.
                    engine.child.returncode = 0

    def obstacle(self, model: Model) -> str:
        """Return why the launch of the model would fail, such as a missing program. The program is not named: the word
        may be the value of a reference.
        """
        try:
            launch = self._launch(model, HOST, 0)
            program = launch.argv[0]
            container_runtime.check_command(launch.argv)
        except Exception as error:  # noqa: BLE001 - as in `start`
            reraise_memory_error(error)
            return _describe_launch_error(error).removeprefix(f"Model {model.name}: ")
        if shutil.which(program, path=launch.env.get("PATH")) is not None:
            return ""
        where = "" if os.sep in program else " on the PATH"
        return f"the program of spec.command was not found{where}; install it, or correct spec.command"

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, model: Model) -> None:
        """Spawn the engine, once its weights are available; a known replica is only reported again."""
        known = self._engines.get(replica.id)
        if known is not None:
            self._report_seen(known, known.seen, reason=known.reason)
            return
        waiting = self._unstarted(replica)
        waiting.waits = FETCHING_WEIGHTS
        fetch = self._supply(model, partial(self._report_progress, waiting))
        if fetch is None:
            self._begin(replica, model)
            return
        self._engines[replica.id] = waiting
        report = fault_reporter(replica.model, self._observe)
        start_contained_task(self._tasks, self._start_with_weights(waiting, fetch, replica), report)
        self._report_seen(waiting, Seen.STARTING)

    async def _start_with_weights(
        self, waiting: EngineProcess, fetch: Awaitable[WeightsHandle], replica: Replica
    ) -> None:
        """Wait for the weights, unless the replica is stopped meanwhile, then spawn."""
        try:
            weights = await wait_for_weights(fetch, waiting.stopping)
        except Exception as error:  # noqa: BLE001 - supply is foreign code, as launch is
            reraise_memory_error(error)
            self._engines.pop(replica.id)
            self._failed(replica, f"its weights: {_describe_launch_error(error)}")
            return
        self._engines.pop(replica.id)
        if weights is None:
            self._failed(replica, "stopped")
            return
        self._begin(replica, weights.model, weights)

    def _report_progress(self, waiting: EngineProcess, progress: str) -> None:
        if self._engines.get(waiting.record.id) is waiting:
            waiting.waits = f"{FETCHING_WEIGHTS}: {progress}"
            self._report_seen(waiting, Seen.STARTING)

    def _begin(self, replica: Replica, model: Model, weights: WeightsHandle | None = None) -> None:
        """Spawn the engine as soon as the disk has space. `weights`: the weights fetched for it."""
        if disk_space.is_full(disk_space.measure_free_space(self._state.path)):
            self._begin_with_space(replica, model, weights)
            return
        record = build_record(replica)
        try:
            port = self._ports.choose(self._clock())
            launch = self._launch(
                model, HOST, port, compute_engine_limits(model, replica, self._devices.fraction(model, replica))
            )
            container_runtime.check_command(launch.argv)
            record = msgspec.structs.replace(
                record, port=port, readiness_path=launch.readiness_path, tls=model.spec.tls, boot=self._boot
            )
            run = container_runtime.read_container_run(launch.argv)
            if run is not None:
                client = container_runtime.with_destination(run.client, launch.env)
                record = msgspec.structs.replace(record, container_client=client)
                if container_runtime.publishes_to_network(run):
                    fix = "begin the published port with 127.0.0.1:, or other hosts reach the engine without a key"
                    _log.warning("event=engine_port_published model=%s fix=%r", model.name, fix)
            self._state.put(record)
            engine = self._spawn(record, launch, weights)
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a failed start of one model
            reraise_memory_error(error)
            self._forget(replica.id)
            if disk_space.is_out_of_space(error):
                self._begin_with_space(replica, model, weights)
                return
            if weights is not None:
                weights.close()
            self._failed(replica, _describe_launch_error(error))
            return
        self._take(engine)
        self._start_supervised(engine, self._supervise)
        self._report_seen(engine, Seen.STARTING)

    def _begin_with_space(self, replica: Replica, model: Model, weights: WeightsHandle | None) -> None:
        """Wait for space, unless the replica is stopped meanwhile. It does not count as a failed start."""
        waiting = self._unstarted(replica)
        waiting.waits = disk_space.REASON
        self._engines[replica.id] = waiting

        async def spawn_later() -> None:
            has_space = False
            try:
                has_space = await disk_space.wait_for_space(self._state.path, waiting.stopping)
            finally:
                self._engines.pop(replica.id)
                if weights is not None and not has_space:
                    weights.close()
            if has_space:
                self._begin(replica, model, weights)
            else:
                self._failed(replica, "stopped")

        start_contained_task(self._tasks, spawn_later(), fault_reporter(replica.model, self._observe))
        self._report_seen(waiting, Seen.STARTING)

    def _failed(self, replica: Replica, reason: str) -> None:
        """Report a failed start: no process exists, and none will be spawned."""
        failed = self._unstarted(replica)
        self._report_seen(failed, Seen.EXITED, reason=reason)
        self._report_seen(failed, Seen.CLEAN, proof=EXITED)

    def _unstarted(self, replica: Replica) -> EngineProcess:
        return EngineProcess(
            mark=self._mark(replica.id), record=build_record(replica), child=None, born_s=self._clock()
        )

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`; a later call can only shorten it. An unknown replica is CLEAN."""
        engine = self._engines.get(replica.id)
        if engine is None:
            # adoption adopted or killed every process with our mark, and no engine is forgotten before its proof
            self._report_seen(self._unstarted(replica), Seen.CLEAN, proof=EXITED)
        else:
            engine.end_within(grace_s)

    def _spawn(self, record: ReplicaRecord, launch: Launch, weights: WeightsHandle | None) -> EngineProcess:
        pulled = Placing() if weights is None else Placing(pulled_s=self._clock())
        env = {name: value for name, value in os.environ.items() if not name.startswith("PILOTLIGHT_")}
        mark = self._mark(record.id)
        devices = self._devices.environment(record.slices)
        added = {**launch.env, **devices, replica_processes.MARK: mark}
        run = container_runtime.read_container_run(launch.argv)
        argv = launch.argv if run is None else container_runtime.label_command(run, mark, launch.env, devices)
        output = engine_logs.open_for_engine(self._state.log(record.id))
        try:
            child = replica_processes.spawn_process(
                argv, {**env, **added}, output, () if weights is None else weights.lease_fds
            )
        except OSError as error:
            if error.filename == argv[0]:  # may be the value of a reference
                error.filename = "the program of the engine"
            raise
        finally:
            os.close(output)
        record = msgspec.structs.replace(record, pid=child.pid)
        return EngineProcess(
            mark=mark, record=record, child=child, born_s=self._clock(), weights=weights, placing=pulled
        )

    def _take(self, engine: EngineProcess) -> None:
        """Register the engine and watch for the exit of its main process."""
        record = engine.record
        self._engines[record.id] = engine
        if engine.child is not None:
            self._reaper.spare(record.pid)
        self._watch.watch(record.id, record.pid, engine.end)
        if engine.child is None and not replica_processes.is_process_alive(
            record.pid, record.start_ticks, self._mark(record.id)
        ):
            engine.end()  # it exited, and its pid was reused, before it was watched

    # --- one replica --------------------------------------------------------------------------------------------------

    def _start_supervised(
        self, engine: EngineProcess, work: Callable[[EngineProcess], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """Run `work` as a task. An exception is reported as a fault of the model, and `work` is retried."""
        report = fault_reporter(engine.record.model, self._observe)
        return self._tasks.create_task(retry_until_success(partial(work, engine), report))

    async def _supervise(self, engine: EngineProcess) -> None:
        """Manage a replica until its proof of CLEAN."""
        probing = self._start_supervised(engine, self._readiness.probe_until_stopped)
        try:
            if engine.child is not None:
                await self._identify(engine)
            await engine.stopping.wait()
        finally:
            probing.cancel()
        if not engine.ended.is_set():
            reason = await self._end(engine)
        else:
            reason = self._why_it_ended(engine)
            if disk_space.is_full(disk_space.measure_free_space(self._state.path)):  # does not count as a failed start
                reason = f"{disk_space.REASON} ({reason})"
                self._report_seen(engine, Seen.LEAVING, reason=reason)
        self._report_seen(engine, Seen.EXITED, reason=reason)
        await self._clear(engine)

    async def _identify(self, engine: EngineProcess) -> None:
        """Record the identity of its process. Until then, an adoption would use its mark."""
        await asyncio.sleep(IDENTIFY_AFTER_S)
        facts = await retry_on_shortage(partial(replica_processes.read_process, engine.record.pid))
        if facts is not None:  # our child, and not reaped
            engine.record = msgspec.structs.replace(engine.record, start_ticks=facts.start_ticks)
        self._remember(engine.record)

    async def _end(self, engine: EngineProcess) -> str:
        """Send SIGTERM to all its processes, wait for the grace period, and return the reason of the exit."""
        if engine.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.record.pid, signal.SIGTERM)
        else:
            found, _ = await replica_processes.find_processes(engine.claim, self._reaper)
            await retry_on_shortage(partial(replica_processes.send_signal, found, signal.SIGTERM))
        if await engine.wait_for_end():
            return "stopped"
        return "did not end within its grace period after SIGTERM and was killed"

    def _why_it_ended(self, engine: EngineProcess) -> str:
        """Describe the exit. The engine's last line of output is included only if the engine never got a request,
        because the line may contain a prompt otherwise. It is never included for an adopted engine.
        """
        ours = engine.child is not None
        how = replica_processes.describe_exit(engine.record.pid) if ours else ""
        if engine.record.container_client:
            how = container_runtime.describe_status(how)
        how = how or "ended (it was adopted, so its exit status is not known)"
        words = engine_logs.last_line(self._state.log(engine.record.id)) if ours and not engine.record.was_ready else ""
        return f"{how}: {words}" if words else how

    async def _clear(self, engine: EngineProcess) -> None:
        """Kill the remaining processes, wait for the proof of CLEAN, and forget the replica."""

        def alarm(what: str) -> None:
            _log.error("event=replica_cleanup_failed replica=%s reason=%s", engine.record.id, what)
            self._report_seen(engine, Seen.EXITED, reason=what)

        record = engine.record
        if record.container_client:
            await container_runtime.remove_containers(record.container_client, engine.mark, alarm)
        if outlived := await kill_all(engine.claim, self._reaper, self._clock, alarm):
            pids = ",".join(map(str, sorted(outlived)))
            _log.warning("event=engine_processes_outlived replica=%s pids=%s killed=true", record.id, pids)
        if record.container_client:  # the client may have started one after the first look
            await container_runtime.remove_containers(record.container_client, engine.mark, alarm)
        proof = await prove_clean(self._devices, record.slices, record.gpu_pids, self._clock, alarm)
        self._watch.forget(record.id)
        if engine.child is not None:
            engine.child.poll()
            self._reaper.forget(record.pid)
        self._forget(record.id)
        self._engines.pop(record.id, None)
        if engine.weights is not None:
            engine.weights.close()
        self._report_seen(engine, Seen.CLEAN, proof=proof)

    # --- adoption -----------------------------------------------------------------------------------------------------

    async def _open_devices(self) -> None:
        self._observe((SlicesSeen(slices=await self._devices.open()),))

    async def _adopt(self) -> None:
        """Report every replica that an earlier driver left behind, and clear incomplete ones.

        An exception about one replica quarantines its model. Other exceptions occur before anything is adopted.
        """
        self._state.drop_unfinished()
        records, broken = self._state.records()
        for line in broken:
            _log.error("event=record_unreadable error=%s", line)
        found = await replica_processes.find_marked_processes(self._state.mark_prefix, self._reaper)
        living, clearing = [], dict[asyncio.Task[None], EngineProcess]()
        for record in records:
            facts = found.pop(record.id, [])
            recalled = attempt(partial(self._recall, record, facts))
            if isinstance(recalled, Failure):
                fault_reporter(record.model, self._observe)(describe_error(recalled.error))
            engine = self._recall(build_unknown_record(record.id), []) if isinstance(recalled, Failure) else recalled
            if engine.ended.is_set():
                clearing[self._start_supervised(engine, self._clear)] = engine
            else:
                living.append(engine)
        for name in found:
            _log.warning("event=unrecorded_replica_killed replica=%s", name)
            engine = self._recall(build_unknown_record(ReplicaId(name)), [])
            clearing[self._start_supervised(engine, self._clear)] = engine
        await self._adopt_living(living)
        if clearing:
            _, unfinished = await asyncio.wait(clearing, timeout=ADOPT_SECONDS_MAX)
            for task in unfinished:
                engine = clearing[task]
                self._report_seen(engine, Seen.EXITED, reason="it ended earlier, and its cleanup is not complete")

    async def _adopt_living(self, engines: Sequence[EngineProcess]) -> None:
        answers = await asyncio.gather(*map(self._readiness.answers, engines), return_exceptions=True)
        for engine, ready in zip(engines, answers, strict=True):
            if isinstance(ready, Exception):
                reraise_memory_error(ready)
                fault_reporter(engine.record.model, self._observe)(describe_error(ready))
            elif ready:
                engine.record = msgspec.structs.replace(engine.record, was_ready=True)
            unready = Seen.UNREADY if engine.record.was_ready else Seen.STARTING
            self._report_seen(engine, Seen.READY if ready is True else unready)
            self._remember(engine.record)
            self._start_supervised(engine, self._supervise)

    def _recall(self, record: ReplicaRecord, found: Sequence[replica_processes.Facts]) -> EngineProcess:
        """Create an `EngineProcess` from a record; ended if its main process no longer runs."""
        if record.boot != self._boot:
            record = msgspec.structs.replace(record, pid=0, start_ticks=0)
        if record.start_ticks == 0:  # its driver ended before it recorded the identity
            record = msgspec.structs.replace(record, pid=0)
            leader = next((one for one in found if one.session == one.pid), None)
            if leader is not None:
                record = msgspec.structs.replace(
                    record, pid=leader.pid, start_ticks=leader.start_ticks, boot=self._boot
                )
        engine = EngineProcess(mark=self._mark(record.id), record=record, child=None, born_s=self._clock())
        if record.pid:
            engine.born_s = replica_processes.started_s(record.start_ticks)
            self._take(engine)
        else:
            self._engines[record.id] = engine
            engine.end()
        return engine

    # --- housekeeping -------------------------------------------------------------------------------------------------

    async def _run_housekeeping(self) -> None:
        """Limit the size of logs and reap orphans while there are replicas."""
        look_s = 0.0
        while True:
            await asyncio.sleep(HOUSEKEEPING_EVERY_S)
            if not self._engines:
                continue
            try:
                in_use = frozenset(map(self._state.log, self._engines))
                await asyncio.to_thread(engine_logs.prune_logs, self._state.path / "logs", in_use)
            except OSError as error:
                _log.error("event=log_pruning_failed error=%s", error)
            if self._clock() >= look_s:
                look_s = self._clock() + LOOK_EVERY_S
                async for _ in replica_processes.iterate_processes(self._reaper):
                    pass

    async def _watch_devices(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            slices = await self._devices.look()
            if slices is not None:
                self._observe((SlicesSeen(slices=slices),))

    def _mark(self, replica: ReplicaId) -> str:
        return self._state.mark_prefix + replica

    def _remember(self, record: ReplicaRecord) -> None:
        try:
            self._state.put(record)
        except OSError as error:  # not fatal: the mark of the process suffices for an adoption
            _log.error("event=record_write_failed replica=%s error=%s", record.id, error.strerror)

    def _forget(self, replica: ReplicaId) -> None:
        try:
            self._state.drop(replica)
        except OSError as error:
            _log.error("event=record_removal_failed replica=%s error=%s", replica, error.strerror)

    def _report_seen(
        self, engine: EngineProcess, seen: Seen, *, reason: str = "", proof: str = "", grew: bool = False
    ) -> None:
        engine.seen, engine.reason = seen, reason
        self._observe((engine.as_seen(proof=proof, grew=grew),))


def _describe_launch_error(error: Exception) -> str:
    """Return why a launch failed, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _not_running(_: object) -> None:
    raise RuntimeError("the driver is not running")
