"""The Kubernetes driver: Replicas as pods of one namespace (architecture, section 5). I/O; it decides nothing.

Watches nodes and its pods, and asks each engine itself whether it is ready (a kubelet would ask once a second).
Promises: a start that was made before is found by its name; a pod is deleted by its uid, never a namesake; CLEAN only
when the pod's object is gone, which a kubelet allows once its processes are, and then some time for what GPUs keep
(`assume_after_s`), until the node's agent can say more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable

from autoscaler.contract import ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.base import Launcher, Observe
from autoscaler.drivers.kubernetes import nodes, pods
from autoscaler.drivers.kubernetes.api import Api, ApiError, UnreachableError
from autoscaler.drivers.kubernetes.pods import PodSeen
from autoscaler.drivers.kubernetes.watching import Change, Key, Watched
from autoscaler.model import Model
from autoscaler.world import Replica, ReplicaSeen, Seen, SlicesSeen, Synced

ASSUME_AFTER_S = 30.0
"""A GPU may keep memory of a process that is gone (architecture, section 5: *assumed*)."""
RETRY_S, RETRIES = 0.5, 20
"""Of a request whose answer did not come: it is idempotent."""
ADOPT_SECONDS_MAX = 10.0
"""Synced waits so long for what is half gone."""
ASSUMED = "assumed"

_log = logging.getLogger(__name__)


class KubernetesDriver:
    """Runs Replicas in a namespace. `api` is open while it runs; `image` gives the one of a Model's engine."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        launch: Launcher,
        image: Callable[[Model], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        assume_after_s: float = ASSUME_AFTER_S,
    ) -> None:
        self._api = api
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._launch = launch
        self._image = image
        self._clock = clock
        self._assume_after_s = assume_after_s
        self._pace = probes.Pace(clock)
        self._nodes = Watched(api, "/api/v1/nodes", nodes.read, self._nodes_changed)
        self._pods = Watched(
            api, self._pods_path, pods.read, self._pods_changed, labelSelector=f"{pods.OURS}={pods.OWNER}"
        )
        self._observe: Observe = _not_running
        self._tasks = asyncio.TaskGroup()
        self._asking: dict[ReplicaId, asyncio.Task[None]] = {}
        self._seen: dict[ReplicaId, Seen] = {}
        """What was last said of each pod that is there."""
        self._clean: dict[ReplicaId, asyncio.Event] = {}
        """Of those that were half gone when they were adopted."""
        self._listens = False
        """What was there at first is known: changes count."""

    async def run(self, observe: Observe) -> None:
        """Adopts, then observes until cancelled. One run per driver."""
        self._observe = observe
        async with self._tasks as tasks:
            tasks.create_task(self._nodes.run())
            await self._nodes.synced.wait()
            self._tell_slices()
            tasks.create_task(self._pods.run())
            await self._pods.synced.wait()
            await self._adopt()
            observe((Synced(),))

    def obstacle(self, model: Model) -> str:
        """What makes its launch impossible."""
        try:
            self._launch(model, pods.HOST, pods.PORT)
        except Exception as error:  # noqa: BLE001 - launch is foreign: whatever it raises is a failed start
            return str(error)
        return ""

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, model: Model) -> None:
        """Creates its pod; one that exists is only observed again."""
        found = self._pods.items.get(_key(self._pods_path, replica.id))
        if found is not None and pods.same(found, replica):
            self._see(found, self._seen.get(replica.id, Seen.STARTING), again=True)
            return
        self._tasks.create_task(self._create(replica, model))

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Deletes its pod, with so much time. A later order can only shorten that. What is not known is clean."""
        self._tasks.create_task(self._delete(replica, grace_s))

    async def _create(self, replica: Replica, model: Model) -> None:
        try:
            launch = self._launch(model, pods.HOST, pods.PORT)
            wanted = pods.manifest(replica, model, launch, self._image(model))
            await self._surely(lambda: self._create_once(replica, wanted))
        except Exception as error:  # noqa: BLE001 - the launch is foreign, the server refuses for reasons of its own
            self._fail(replica, str(error))

    async def _create_once(self, replica: Replica, wanted: dict[str, object]) -> None:
        try:
            await self._api.create(self._pods_path, wanted)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            found = pods.read(await self._api.get(f"{self._pods_path}/{replica.id}"))
            if found is None or not pods.same(found, replica):
                raise

    async def _delete(self, replica: Replica, grace_s: float) -> None:
        known = self._pods.items.get(_key(self._pods_path, replica.id))
        path = f"{self._pods_path}/{replica.id}"
        try:
            await self._surely(
                lambda: self._api.delete(path, uid=known.uid if known else None, grace_s=math.ceil(grace_s))
            )
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or a namesake, which is not it
                _log.error("pod cannot be deleted replica=%s error=%s", replica.id, error)
                return
            if known is None:
                self._observe((_seen_of(replica, Seen.CLEAN, proof=ASSUMED),))

    async def _surely(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Again while no answer comes: the request is idempotent."""
        for left in range(RETRIES - 1, -1, -1):
            try:
                await ask()
            except UnreachableError:
                if not left:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _fail(self, replica: Replica, reason: str) -> None:
        self._observe((_seen_of(replica, Seen.EXITED, reason=reason), _seen_of(replica, Seen.CLEAN, proof=ASSUMED)))

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _nodes_changed(self, _: list[Change[nodes.NodeSeen]]) -> None:
        if self._listens:
            self._tell_slices()

    def _tell_slices(self) -> None:
        self._observe((SlicesSeen(slices=nodes.slices(list(self._nodes.items.values()))),))

    def _pods_changed(self, changes: list[Change[PodSeen]]) -> None:
        if self._listens:
            for _, old, new in changes:
                self._judge(old, new)

    async def _adopt(self) -> None:
        """All pods that are there: engines that answer are ready at once."""
        found, self._listens = list(self._pods.items.values()), True
        half_gone = {pod.replica: asyncio.Event() for pod in found if pod.ended or pod.leaving}
        self._clean |= half_gone
        ready = await asyncio.gather(*(self._answers(pod) for pod in found))
        for pod, is_ready in zip(found, ready, strict=True):
            if is_ready:
                self._see(pod, Seen.STARTING)
                self._see(pod, Seen.READY)
            self._judge(None, pod)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_SECONDS_MAX):
                for clean in half_gone.values():
                    await clean.wait()

    def _judge(self, old: PodSeen | None, new: PodSeen | None) -> None:
        """What a change of a pod means."""
        if new is None:
            if old is not None:
                self._is_gone(old)
        elif new.ended:
            self._see(new, Seen.EXITED, reason=new.ended)
            self._stop_asking(new.replica)
            if not new.leaving:
                self._tasks.create_task(self._remove(new))
        elif new.started_unix_s is not None and new.ip and new.replica not in self._asking:
            self._see(new, Seen.STARTING)
            self._asking[new.replica] = self._tasks.create_task(self._ask(new))

    async def _remove(self, pod: PodSeen) -> None:
        """Its engine has ended: the object has told all it can."""
        try:
            await self._surely(lambda: self._api.delete(f"{self._pods_path}/{pod.name}", uid=pod.uid, grace_s=0))
        except ApiError as error:
            if error.status not in (404, 409):
                _log.error("pod cannot be deleted replica=%s error=%s", pod.replica, error)

    def _is_gone(self, pod: PodSeen) -> None:
        self._stop_asking(pod.replica)
        if self._seen.get(pod.replica) is not Seen.EXITED:
            self._see(pod, Seen.EXITED, reason=pod.ended or "stopped")
        self._tasks.create_task(self._assume(pod))

    async def _assume(self, pod: PodSeen) -> None:
        await asyncio.sleep(self._assume_after_s)
        self._see(pod, Seen.CLEAN, proof=ASSUMED)
        self._seen.pop(pod.replica, None)
        self._clean.pop(pod.replica, asyncio.Event()).set()

    # --- readiness ----------------------------------------------------------------------------------------------------

    async def _ask(self, pod: PodSeen) -> None:
        """Probes an engine for as long as its pod runs."""
        born_s, failed = self._clock(), 0
        while True:
            await self._pace.turn()
            began_s = self._clock()
            answered = await probes.probe(pod.ip, pods.PORT, pod.readiness_path)
            seen = self._seen.get(pod.replica, Seen.STARTING)
            failed = 0 if answered else failed + 1
            pause_s = probes.READY_EVERY_S
            if answered and seen is not Seen.READY:
                self._see(pod, Seen.READY)
            elif not answered and seen is Seen.STARTING:
                pause_s = probes.every_s(self._clock() - born_s, listens=answered is not None)
            elif failed >= probes.FAILURES_MAX and seen is Seen.READY:
                self._see(pod, Seen.UNREADY, reason=f"{probes.FAILURES_MAX} probes in a row failed")
            await asyncio.sleep(max(0.0, began_s + pause_s - self._clock()))

    async def _answers(self, pod: PodSeen) -> bool:
        runs = pod.started_unix_s is not None and pod.ip and not pod.ended
        return bool(runs and await probes.probe(pod.ip, pods.PORT, pod.readiness_path))

    def _stop_asking(self, replica: ReplicaId) -> None:
        asking = self._asking.pop(replica, None)
        if asking is not None:
            asking.cancel()

    def _see(self, pod: PodSeen, seen: Seen, *, reason: str = "", proof: str = "", again: bool = False) -> None:
        if self._seen.get(pod.replica) is seen and not again:
            return
        self._seen[pod.replica] = seen
        started_s = None if pod.started_unix_s is None else self._clock() - (time.time() - pod.started_unix_s)
        self._observe((
            ReplicaSeen(
                id=pod.replica, model=pod.model, spec_hash=pod.spec_hash, intent=pod.intent, slices=pod.slices,
                memory_bytes=pod.memory_bytes, compute_percent=pod.compute_percent, slots=pod.slots, seen=seen,
                address=f"{pod.ip}:{pods.PORT}" if pod.ip else "", started_s=started_s, reason=reason, proof=proof,
            ),
        ))  # fmt: skip


def _seen_of(replica: Replica, seen: Seen, *, reason: str = "", proof: str = "") -> ReplicaSeen:
    """Of a Replica that has no pod."""
    return ReplicaSeen(
        id=replica.id, model=replica.model, spec_hash=replica.spec_hash, intent=replica.intent, slices=replica.slices,
        memory_bytes=replica.memory_bytes, compute_percent=replica.compute_percent, slots=replica.slots, seen=seen,
        reason=reason, proof=proof,
    )  # fmt: skip


def _key(path: str, name: str) -> Key:
    return Key(path.split("/")[4], name)


def _not_running(_: object) -> None:
    raise RuntimeError("the driver is not running")
