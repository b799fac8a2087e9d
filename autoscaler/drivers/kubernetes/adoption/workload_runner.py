"""Connects one adopted workload to the API server: watches and probes its pods, writes its scale and pod marks. I/O.

`Runner` does the I/O around a `Workload`, which makes the decisions. Writes are level-triggered and sequential: a
change during a write is part of the next one, and failed requests are retried. Engines are probed directly, so that no
request waits for a kubelet's next probe; where only the kubelet can probe, its result is used. `AdoptionCandidate` is
the driver's record of a workload that is served, or would be with valid annotations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.drivers import probes
from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.adoption.annotations import Hand, read_port
from autoscaler.drivers.kubernetes.adoption.objects import (
    COST,
    GOES_FIRST,
    INTENT,
    REPLICA,
    AdoptedPodSeen,
    WorkloadSeen,
    read_pod,
)
from autoscaler.drivers.kubernetes.adoption.tracked_pod import PodMark
from autoscaler.drivers.kubernetes.adoption.workload import Workload
from autoscaler.drivers.kubernetes.pod_writer import Pauses
from autoscaler.drivers.kubernetes.volume_failures import PodEvents
from autoscaler.drivers.resilient_tasks import PAUSE_S_MAX, fault_reporter
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.model import Model
from autoscaler.state.world import Replica

CHANGED_S, CHANGED_S_MAX = 0.01, 0.5
"""First and longest pause after a conflict, doubled each time. If others changed the scale, the watch soon reports
it.
"""
CONFLICTS_MAX = 20
"""Conflicts in a row after which the starts that wait for a pod fail."""
MARK_FAILURES_MAX = 20
"""Transient failures in a row to mark a pod after which the scale is written without the mark: about 80 s. A webhook
that permanently rejects changes of pods must not block all scaling.
"""
PLURALS = {"Deployment": "deployments", "StatefulSet": "statefulsets"}

_log = logging.getLogger("pilotlight.autoscaler.adoption")


class Means(NamedTuple):
    """Resources shared by all workloads of a driver."""

    api: Api
    observe: Observe
    clock: Callable[[], float]
    pace: probes.Pace


class Runner:
    """Runs one `Workload`."""

    def __init__(self, core: Workload, means: Means) -> None:
        self.core = core
        self.begun = asyncio.Event()
        """Set once its pods have been observed."""
        self._means = means
        key = core.seen.key
        self._scale_path = f"/apis/apps/v1/namespaces/{key.namespace}/{PLURALS[key.kind]}/{key.name}/scale"
        self._pods_path = f"/api/v1/namespaces/{key.namespace}/pods"
        self._pods = Watched(
            means.api, self._pods_path, self._read, self._pods_changed, labelSelector=core.seen.selector
        )
        self._events = PodEvents(means.api, key.namespace, self._pods, self._judge_again, means.clock)
        self._uids: dict[str, AdoptedPodSeen] = {}
        self._tasks = asyncio.TaskGroup()
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._ready: set[str] = set()
        """Probed pods that were last reported as ready."""
        self._dirty = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._refusals = self._mark_failures = 0
        self._pauses = Pauses()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Run until cancelled. It may run again after an exception."""
        self._tasks = asyncio.TaskGroup()
        self._probing.clear()
        self._ready.clear()
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._pods.run())
                await self._pods.synced.wait()
                await asyncio.gather(*(self._probe_once(pod) for pod in tuple(self._uids.values())))
                if not self.begun.is_set():
                    self.core.begin(self._now_s())
                for uid in tuple(self._uids):
                    self._start_or_stop_probing(uid)
                self.settle()
                self.begun.set()
                tasks.create_task(self._events.run())
                await self._write_levels()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def start(self, replica: Replica) -> None:
        """Start a replica, as in `Driver`."""
        self.core.start(replica, self._now_s())
        self.settle()

    def stop(self, replica: Replica) -> None:
        """Stop a replica, as in `Driver`."""
        self.core.stop(replica, self._now_s())
        self.settle()

    def lead(self) -> None:
        """Become the leader, as in `SharedDriver`."""
        self.core.lead(self._now_s())
        self.settle()

    async def follow(self) -> None:
        """Stop leading, as in `SharedDriver`."""
        self.core.follow()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    def settle(self) -> None:
        """Report new observations and trigger a write; called after every change of the core."""
        if observations := self.core.take():
            self._means.observe(observations)
        self._dirty.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_s := self.core.due_s()) is not None and self.begun.is_set():
            wait_s = max(0.0, due_s - self._now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        done = attempt(self._reevaluate)
        if isinstance(done, Failure):
            fault_reporter(self.core.model.name, self._means.observe)(describe_error(done.error))
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S_MAX, self._on_timer)

    def _reevaluate(self) -> None:
        self.core.look(self._now_s())
        self.settle()

    def _now_s(self) -> float:
        return self._means.clock()

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _read(self, found: Object) -> AdoptedPodSeen | None:
        """Parse a pod. `read_port` cannot fail, since the workload only gets valid annotations."""
        seen = self.core.seen
        return read_pod(found, seen.key, seen.container, read_port(seen), seen.init_containers)

    def _pods_changed(self, changes: list[Change[AdoptedPodSeen]]) -> None:
        for _, old, new in changes:
            if old is not None and (new is None or new.uid != old.uid):
                self._uids.pop(old.uid, None)
                self.core.see_pod(old.uid, None, self._now_s())
            if new is not None:
                self._uids[new.uid] = new
                self._see(new)
                if new.kubelet_decides:
                    self.core.answered(new.uid, new.ready and not new.leaving, self._now_s())
                elif new.held and new.uid in self._ready:  # report it as not ready now, before the next probe
                    self._report_ready(new.uid, False)
            for uid in {one.uid for one in (old, new) if one is not None}:
                self._start_or_stop_probing(uid)
        self.settle()

    def _see(self, pod: AdoptedPodSeen) -> None:
        self.core.see_pod(pod.uid, self._events.with_failure(pod), self._now_s())

    def _judge_again(self, pod: AdoptedPodSeen) -> None:
        """Process changed Events of a pod."""
        if pod.uid in self._uids:
            self._see(self._uids[pod.uid])
            self.settle()

    def _start_or_stop_probing(self, uid: str) -> None:
        """Probe a pod for as long as its engine runs."""
        pod, task = self._uids.get(uid), self._probing.get(uid)
        runs = pod is not None and pod.started_unix_s is not None and bool(pod.ip) and not pod.leaving and not pod.ended
        if runs and pod is not None and not pod.kubelet_decides:
            if task is None:
                self._probing[uid] = self._tasks.create_task(self._probe_pod(uid))
        elif task is not None:
            task.cancel()
            del self._probing[uid]
            self._ready.discard(uid)

    async def _probe_pod(self, uid: str) -> None:
        born_s, failed, ever = self._now_s(), 0, False
        while True:
            await self._means.pace.turn()
            pod, began_s = self._uids[uid], self._now_s()
            answered = await _probe(pod)
            failed, ever = (0, True) if answered else (failed + 1, ever)
            pod, ready = self._uids[uid], uid in self._ready
            is_ready = (bool(answered) and not pod.held) or (not ever and pod.ready)
            pause_s = probes.READY_EVERY_S
            if is_ready is not ready and (is_ready or pod.held or failed >= probes.FAILURES_MAX):
                self._report_ready(uid, is_ready)
                self.settle()
            elif not ready and not ever:
                pause_s = self._means.pace.every_s(self._now_s() - born_s, listens=answered is not None)
            await asyncio.sleep(max(0.0, began_s + pause_s - self._now_s()))

    def _report_ready(self, uid: str, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(uid)
        self.core.answered(uid, ready, self._now_s())

    async def _probe_once(self, pod: AdoptedPodSeen) -> None:
        """Probe once, so that an engine that already runs is reported as ready at once."""
        probed = not (pod.kubelet_decides or pod.held)
        runs = pod.started_unix_s is not None and pod.ip and probed and not pod.leaving
        if runs and await _probe(pod):
            self._report_ready(pod.uid, True)

    # --- writes -------------------------------------------------------------------------------------------------------

    async def _write_levels(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._writing = self._tasks.create_task(self._write_or_report())
            await asyncio.wait((self._writing,))

    async def _write_or_report(self) -> None:
        """Write once; a failure is retried or reported."""
        try:
            await self._write()
        except UnreachableError as error:
            _log.warning("event=scale_failed workload=%r error=%s", str(self.core.seen.key), error)
            await self._again()
        except ApiError as error:
            self._refusals += 1
            if error.is_transient:
                if self._refusals == 1:
                    _log.warning("event=scale_failed workload=%r error=%s", str(self.core.seen.key), error)
                await self._again()
            elif error.status == 409 and self._refusals < CONFLICTS_MAX:
                await self._read_scale()
                await asyncio.sleep(min(CHANGED_S * 2.0**self._refusals, CHANGED_S_MAX))
                self._dirty.set()
            else:
                self._refused(error)
        except FencedError:  # losing the leadership is not a failed start
            _log.info("event=scale_skipped workload=%r reason='not the leader'", str(self.core.seen.key))
            self.core.follow()
        else:
            self._refusals, self._mark_failures, self._pauses = 0, 0, Pauses()

    async def _again(self) -> None:
        """Retry after a growing pause."""
        await self._pauses.rest()
        self._dirty.set()

    async def _read_scale(self) -> None:
        """Read the version on which the next write relies: the watch may lag behind."""
        with contextlib.suppress(ApiError, UnreachableError):
            found = await self._means.api.get(self._scale_path)
            of = found["metadata"]
            self.core.see_scale(of["uid"], found["spec"].get("replicas", 0), int(of["resourceVersion"]))

    def _refused(self, error: ApiError) -> None:
        self._refusals = 0
        self._pauses = Pauses()
        reason = f"{self.core.seen.key} cannot be scaled: {error}"
        self.core.refused(reason, self._now_s(), lasts=error.status != 409)
        if observations := self.core.take():
            self._means.observe(observations)

    async def _write(self) -> None:
        """Write the marks of stopping pods, then the scale, then the other marks."""
        for mark in self.core.marks(going=True):
            await self._mark(mark)
        level = self.core.level()
        if level is None:
            self.core.nothing_to_write(self._now_s())
        else:
            key = self.core.seen.key
            scale = {
                "apiVersion": "autoscaling/v1", "kind": "Scale",
                "metadata": {"name": key.name, "resourceVersion": str(self.core.version)},
                "spec": {"replicas": level},
            }  # fmt: skip
            done = await self._means.api.apply(self._scale_path, scale, WRITER)
            self.core.wrote(level, int(done["metadata"]["resourceVersion"]), self._now_s())
            _log.info("event=scaled workload=%r replicas=%d", str(key), level)
        if observations := self.core.take():
            self._means.observe(observations)
        if self.core.level() is not None:
            self._dirty.set()
        for mark in self.core.marks(going=False):
            await self._mark(mark)

    async def _mark(self, mark: PodMark) -> None:
        """Mark a pod. A transient failure is raised, so that the pod is marked before the scale is lowered. After any
        other failure, the next leader may rename the pod's replica, or another pod may be deleted first.
        """
        notes = {REPLICA: mark.replica, INTENT: mark.intent, COST: GOES_FIRST if mark.goes_first else None}
        self.core.marked(mark)  # before the write, because annotations observed during it are newer
        try:
            patch = {"metadata": {"uid": mark.uid, "annotations": notes}}
            await self._means.api.patch(f"{self._pods_path}/{mark.pod}", patch)
        except UnreachableError:
            self.core.unmarked(mark)
            raise
        except (ApiError, FencedError) as error:
            if isinstance(error, ApiError) and error.is_transient:
                self.core.unmarked(mark)
                self._mark_failures += 1
                if self._mark_failures < MARK_FAILURES_MAX:
                    raise
            _log.info("event=pod_annotation_failed pod=%s error=%s", mark.pod, error)


async def _probe(pod: AdoptedPodSeen) -> bool | None:
    """Return whether the engine returns 200, or listens if it has no path; None: nothing listens."""
    if pod.path is not None:
        return await probes.probe_engine(pod.ip, pod.probe_port, pod.path)
    try:
        async with asyncio.timeout(probes.PROBE_SECONDS_MAX):
            _, writer = await asyncio.open_connection(pod.ip, pod.probe_port)
            writer.close()
    except (OSError, TimeoutError):
        return None
    return True


class AdoptionCandidate:
    """A workload found by the watch, with the driver's state about it."""

    def __init__(self, seen: WorkloadSeen) -> None:
        self.seen = seen
        self.hand: Hand | None = None
        self.hand_s = 0.0
        """Time of `hand` by our own monotonic clock."""
        self.model: Model | None = None
        self.good: WorkloadSeen | None = None
        """Its current state, with the last valid annotations."""
        self.called: ModelName | None = None
        """Its name in the installation, which differs if an older model has its name."""
        self.taken = ""
        """Which of its names others use, in a sentence."""
        self.elsewhere: str | None = ""
        """Why another installation serves it, in a sentence; empty: this one does; None: not known yet."""
        self.problem = ""
        self.faulty = False
        """An exception was reported for the workload, not for a model."""
        self.fault = ""
        """The exception that its current version raised; empty: none."""
        self.unread: WorkloadSeen | None = None
        """The version that raised an exception before it was stored in `seen`."""
        self.last_event = self.logged = ""
        self.released = False
        """The workload or its annotation was deleted; only ending replicas are left."""
        self.runner: Runner | None = None
        self.running: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
