"""Probes the readiness of engines in pods directly, each for as long as its pod runs. I/O.

A kubelet would probe only once a second. Addresses are reused, so a replica is reported ready only if the watch has its
pod at that address. Of two pods at one address the older is reported unready, and the watch is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.kubernetes.watch import ObjectKey, Watched
from autoscaler.state.events import Seen


class PodStateCallback(Protocol):
    """Receives the observed state of a pod."""

    def __call__(self, pod: PodSeen, seen: Seen, *, reason: str = "") -> None:
        """Report the state if it has changed."""


class ReadinessProber:
    """Probes the pods of one driver. `last_seen` returns the last observation of a replica; `faults` returns the
    function that reports exceptions of a model.
    """

    def __init__(  # noqa: PLR0917  pods, tasks, then callbacks, rate and clock
        self,
        pods: Watched[PodSeen],
        tasks: asyncio.TaskGroup,
        last_seen: Callable[[ReplicaId], Seen],
        see: PodStateCallback,
        pace: probes.Pace,
        clock: Callable[[], float],
        faults: Callable[[ModelName], Callable[[str], None]],
    ) -> None:
        self._pods = pods
        self._tasks = tasks
        self._last_seen = last_seen
        self._see = see
        self._pace = pace
        self._clock = clock
        self._faults = faults
        self._probing: dict[ReplicaId, asyncio.Task[None]] = {}

    def begin(self, pod: PodSeen) -> None:
        """Start probing a pod that runs, unless it is probed already."""
        if pod.replica not in self._probing:
            probing = retry_until_success(partial(self._probe_until_stopped, pod), self._faults(pod.model))
            self._probing[pod.replica] = self._tasks.create_task(probing)

    async def _probe_until_stopped(self, pod: PodSeen) -> None:
        """Probe an engine for as long as its pod runs."""
        born_s, failed = self._clock(), 0
        while True:
            await self._pace.turn()
            began_s = self._clock()
            answered = await self._probe(pod)
            seen = self._last_seen(pod.replica)
            failed = 0 if answered else failed + 1
            pause_s = probes.READY_EVERY_S
            if answered and seen is not Seen.READY:
                if self._is_there(pod):
                    self._see(pod, Seen.READY)
            elif not answered and seen is Seen.STARTING:
                pause_s = self._pace.every_s(self._clock() - born_s, listens=answered is not None)
            elif failed >= probes.FAILURES_MAX and seen is Seen.READY:
                self._see(pod, Seen.UNREADY, reason=f"{probes.FAILURES_MAX} probes in a row failed")
            await asyncio.sleep(max(0.0, began_s + pause_s - self._clock()))

    def _is_there(self, pod: PodSeen) -> bool:
        """Return whether, according to the watch, this pod has the address; addresses are reused."""
        now = self._pods.items.get(ObjectKey(pod.namespace, pod.name))
        there = now is not None and (now.uid, now.ip) == (pod.uid, pod.ip) and not now.leaving
        return there and all((one.started_unix_s or 0.0) <= (pod.started_unix_s or 0.0) for one in self._at(pod.ip))

    def look_for_namesake(self, pod: PodSeen) -> None:
        """Report older pods at the address of this one as unready: the watch missed that they are gone."""
        for other in self._at(pod.ip):
            if other.uid != pod.uid and (other.started_unix_s or 0.0) <= (pod.started_unix_s or 0.0):
                self.stop(other.replica)
                self._see(other, Seen.UNREADY, reason=f"the IP address of its pod now belongs to pod {pod.name}")
                self._pods.suspect()

    def _at(self, ip: str) -> list[PodSeen]:
        """Return our pods that run at an address according to the watch; normally at most one."""
        return [pod for pod in self._pods.items.values() if pod.ip == ip and pod.started_unix_s and not pod.ended]

    async def answers(self, pod: PodSeen) -> bool:
        """Return whether the engine is ready now."""
        runs = pod.started_unix_s is not None and pod.ip and not pod.ended
        return bool(runs and await self._probe(pod) and self._is_there(pod))

    @staticmethod
    async def _probe(pod: PodSeen) -> bool | None:
        tls_name = None if pod.tls_name is None else pod.tls_name or pod.ip
        return await probes.probe_engine(pod.ip, pod.port, pod.readiness_path, tls_name=tls_name)

    def stop(self, replica: ReplicaId) -> None:
        """Stop probing a pod that has stopped or gets no more requests."""
        task = self._probing.pop(replica, None)
        if task is not None:
            task.cancel()
