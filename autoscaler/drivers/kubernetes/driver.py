"""The Kubernetes driver: Replicas as pods of one namespace (architecture, section 5). I/O; it decides nothing.

Watches nodes and its pods, and asks each engine itself whether it is ready (a kubelet would ask once a second); what it
writes is `orders`'. Promises: a start that was made before is found by its name; who is called ready is the very pod
that the watch has at that address; a pod that waits for room or an image says so, and only an image that cannot be had
is a start that failed; CLEAN only when the pod's object is gone, which a kubelet allows once its processes are, and
then some time for what GPUs keep (`assume_after_s`), until the node's agent can say more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.base import Launcher, Observe
from autoscaler.drivers.kubernetes import nodes, pods
from autoscaler.drivers.kubernetes.api import Api, ApiError, UnreachableError
from autoscaler.drivers.kubernetes.orders import Orders
from autoscaler.drivers.kubernetes.pods import PodSeen
from autoscaler.drivers.kubernetes.watching import Change, Key, Watched
from autoscaler.model import Model
from autoscaler.podspec import Pod
from autoscaler.world import Replica, ReplicaSeen, Seen, SlicesSeen, Synced

ASSUME_AFTER_S = 30.0
"""A GPU may keep memory of a process that is gone (architecture, section 5: *assumed*)."""
ADOPT_SECONDS_MAX = 10.0
"""Synced waits so long for what is half gone."""
REFUSED_S = 60.0
"""What a start was refused for is in the way of the next ones of the same spec for so long: no storm of tries."""
REFRESH_RETRY_S = 0.2
ASSUMED = "assumed"


class KubernetesDriver:
    """Runs Replicas in a namespace. `api` is open while it runs; `image` gives the one of a Model's engine, `defaults`
    what the Settings lay over every pod. Without `inventory` nodes are not looked at: there are no Slices then.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        launch: Launcher,
        image: Callable[[Model], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        assume_after_s: float = ASSUME_AFTER_S,
        defaults: Callable[[], Pod] = Pod,
        inventory: bool = True,
    ) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        self._launch = launch
        self._image = image
        self._clock = clock
        self._assume_after_s = assume_after_s
        self._defaults = defaults
        self._inventory = inventory
        self._pace = probes.Pace(clock)
        self._nodes = Watched(api, "/api/v1/nodes", nodes.read, self._nodes_changed)
        self._pods = Watched(api, path, pods.read, self._pods_changed, labelSelector=pods.SELECTOR)
        self._orders = Orders(api, path, self._pods, self)
        self._observe: Observe = _not_running
        self._tasks = asyncio.TaskGroup()
        self._ordered = set[asyncio.Task[None]]()
        """Orders under way."""
        self._asking: dict[ReplicaId, asyncio.Task[None]] = {}
        self._hoping: dict[ReplicaId, asyncio.TimerHandle] = {}
        """Of those that cannot start as things are: when that has lasted too long."""
        self._told: dict[ReplicaId, ReplicaSeen] = {}
        """What was last said of each pod that is there."""
        self._stopping = set[ReplicaId]()
        self._clean: dict[ReplicaId, asyncio.Event] = {}
        """Of those that were half gone when they were adopted."""
        self._refused: dict[ModelName, tuple[str, float, str]] = {}
        """Model -> (spec hash, until when, why): what no start of it can do anything about."""
        self._listens = False
        """What was there at first is known: changes count."""

    async def run(self, observe: Observe) -> None:
        """Adopts, then observes until cancelled. One run per driver."""
        self._observe = observe
        async with self._tasks as tasks:
            if self._inventory:
                tasks.create_task(self._nodes.run())
                await self._nodes.synced.wait()
            self._tell_slices()
            tasks.create_task(self._pods.run())
            await self._pods.synced.wait()
            await self._adopt()
            self._take_over()
            observe((Synced(),))

    def lead(self) -> None:
        """We lead from now on: tells all there is again, to its end (Synced), and takes over what leaders
        before have left half done. A driver that has not adopted yet does so at the end of that.
        """
        if self._listens:
            self._order(self._lead())

    async def _lead(self) -> None:
        """What the leader before did last may not have been heard of: it would be done a second time."""
        while True:
            try:
                await self._pods.refresh()
            except (ApiError, UnreachableError):
                await asyncio.sleep(REFRESH_RETRY_S)
            else:
                break
        self._tell_slices()
        for pod in list(self._pods.items.values()):
            self._judge(None, pod)  # what we were about to delete is not ready any more
        for told in list(self._told.values()):
            self._observe((told,))
        self._take_over()
        self._observe((Synced(),))

    async def follow(self) -> None:
        """We lead no more: returns when nothing that was ordered is under way."""
        under_way = list(self._ordered)
        for order in under_way:
            order.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._stopping.clear()

    def obstacle(self, model: Model) -> str:
        """What makes its launch impossible, or made it a moment ago."""
        spec_hash, until_s, reason = self._refused.get(model.name, ("", 0.0, ""))
        if spec_hash == model.spec_hash() and self._clock() < until_s:
            return reason
        try:
            self._launch(model, pods.HOST, pods.PORT)
        except Exception as error:  # noqa: BLE001 - launch is foreign: whatever it raises is a failed start
            return str(error)
        return ""

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, model: Model) -> None:
        """Creates its pod; one that exists is only observed again."""
        found = self._orders.known(pods.name_of(replica.id))
        if found is not None and pods.same(found, replica):
            self._see(found, Seen.STARTING, again=True)
            return
        try:
            launch = self._launch(model, pods.HOST, pods.PORT)
            wanted = pods.manifest(replica, model, launch, self._image(model), self._defaults())
        except Exception as error:  # noqa: BLE001 - launch is foreign: whatever it raises is a failed start
            self._fail(replica, str(error))
            return
        self._order(self._orders.create(replica, wanted))

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Deletes its pod, with so much time. A later order can only shorten that. What is not known is clean."""
        self._stopping.add(replica.id)
        self._order(self._orders.delete(replica, grace_s))

    def start_waits(self, replica: Replica, reason: str) -> None:
        """The API server did not make its pod yet."""
        self._observe((_seen_of(replica, Seen.STARTING, waits=reason),))

    def start_refused(self, replica: Replica, reason: str) -> None:
        """The API server will not make such a pod: admission, rights, a namespace that goes."""
        self._refuse(replica.model, replica.spec_hash, reason)
        self._fail(replica, reason)

    def is_gone(self, replica: Replica) -> None:
        """There is no pod of it."""
        self._stopping.discard(replica.id)
        self._observe((_seen_of(replica, Seen.CLEAN, proof=ASSUMED),))

    def _order(self, order: Coroutine[object, object, None]) -> None:
        task = self._tasks.create_task(order)
        self._ordered.add(task)
        task.add_done_callback(self._ordered.discard)

    def _fail(self, replica: Replica, reason: str) -> None:
        self._observe((_seen_of(replica, Seen.EXITED, reason=reason), _seen_of(replica, Seen.CLEAN, proof=ASSUMED)))

    def _refuse(self, model: ModelName, spec_hash: str, reason: str) -> None:
        self._refused[model] = (spec_hash, self._clock() + REFUSED_S, reason)

    def _take_over(self) -> None:
        """Marks of leaders before are void: what they were about to delete is the plan's again."""
        for pod in self._pods.items.values():
            if pod.ended and not pod.leaving:
                self._order(self._orders.remove(pod))
            elif pod.drain and not pod.leaving and pod.replica not in self._stopping:
                self._order(self._orders.unmark(pod))

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _nodes_changed(self, _: list[Change[nodes.NodeSeen]]) -> None:
        if self._listens:
            self._tell_slices()
            for pod in list(self._pods.items.values()):
                self._judge(pod, pod)

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
            if is_ready and not pod.leaving:
                self._see(pod, Seen.READY)  # at once: how long it has run is not how long it took to start
            self._judge(None, self._pods.items.get(_key(pod)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_SECONDS_MAX):
                for clean in half_gone.values():
                    await clean.wait()

    def _judge(self, old: PodSeen | None, new: PodSeen | None) -> None:
        """What a change of a pod, or of its node, means."""
        if old is not None and (new is None or new.uid != old.uid):
            self._is_gone(old)
        if new is None:
            return
        if new.patience_s is None:
            self._give_hope(new.replica)
        if new.ended or (new.leaving and self._is_lost(new.node)):
            self._has_ended(new, new.ended or f"its node {new.node} is lost")
        elif new.leaving:
            self._leaves(new)
        elif new.waits:
            self._see(new, Seen.STARTING)
            if new.patience_s is not None and new.replica not in self._hoping:
                loop = asyncio.get_running_loop()
                self._hoping[new.replica] = loop.call_later(new.patience_s, self._lose_hope, _key(new), new.uid)
        elif new.started_unix_s is not None and new.ip:
            self._look_for_namesake(new)
            self._see(new, Seen.STARTING)
            if new.replica not in self._asking:
                self._asking[new.replica] = self._tasks.create_task(self._ask(new))

    def _has_ended(self, pod: PodSeen, reason: str) -> None:
        self._see(pod, Seen.EXITED, reason=reason)
        self._stop_asking(pod.replica)
        if pod.ended and not pod.leaving:
            self._order(self._orders.remove(pod))

    def _leaves(self, pod: PodSeen) -> None:
        """It is being deleted, and its end will be seen. If that was not ordered by us, it gets no more Calls."""
        self._stop_asking(pod.replica)
        told = self._told.get(pod.replica)
        if pod.replica in self._stopping or (told is not None and told.seen is Seen.STARTING and not pod.drain):
            return
        if pod.drain:  # by a leader before us, who saw that no Call was on it
            self._see(pod, Seen.EXITED, reason="it was being stopped")
        else:
            self._see(pod, Seen.UNREADY, reason=f"its pod is being deleted: {pod.disrupted or 'somebody asked for it'}")

    def _is_lost(self, node: str) -> bool:
        found = self._nodes.items.get(Key("", node))
        return self._inventory and bool(node) and (found is None or found.lost)

    def _lose_hope(self, key: Key, uid: str) -> None:
        """Its image, or a Secret, could not be had for too long: the start has failed, and so would the next."""
        pod = self._pods.items.get(key)
        if pod is None or pod.uid != uid or pod.patience_s is None:
            return
        self._refuse(pod.model, pod.spec_hash, pod.waits)
        self._see(pod, Seen.EXITED, reason=pod.waits)
        self._order(self._orders.remove(pod))

    def _give_hope(self, replica: ReplicaId) -> None:
        hoping = self._hoping.pop(replica, None)
        if hoping is not None:
            hoping.cancel()

    def _is_gone(self, pod: PodSeen) -> None:
        self._stop_asking(pod.replica)
        self._give_hope(pod.replica)
        self._see(pod, Seen.EXITED, reason=pod.ended or "stopped")
        self._tasks.create_task(self._assume(pod))

    async def _assume(self, pod: PodSeen) -> None:
        await asyncio.sleep(self._assume_after_s)
        self._see(pod, Seen.CLEAN, proof=ASSUMED)
        self._told.pop(pod.replica, None)
        self._stopping.discard(pod.replica)
        self._clean.pop(pod.replica, asyncio.Event()).set()

    # --- readiness ----------------------------------------------------------------------------------------------------

    async def _ask(self, pod: PodSeen) -> None:
        """Probes an engine for as long as its pod runs."""
        born_s, failed = self._clock(), 0
        while True:
            await self._pace.turn()
            began_s = self._clock()
            answered = await self._probe(pod)
            seen = self._told[pod.replica].seen if pod.replica in self._told else Seen.STARTING
            failed = 0 if answered else failed + 1
            pause_s = probes.READY_EVERY_S
            if answered and seen is not Seen.READY:
                if self._is_there(pod):
                    self._see(pod, Seen.READY)
            elif not answered and seen is Seen.STARTING:
                pause_s = probes.every_s(self._clock() - born_s, listens=answered is not None)
            elif failed >= probes.FAILURES_MAX and seen is Seen.READY:
                self._see(pod, Seen.UNREADY, reason=f"{probes.FAILURES_MAX} probes in a row failed")
            await asyncio.sleep(max(0.0, began_s + pause_s - self._clock()))

    def _is_there(self, pod: PodSeen) -> bool:
        """Whether what answered is this very pod, as far as the watch knows: addresses are given out again."""
        now = self._pods.items.get(_key(pod))
        there = now is not None and (now.uid, now.ip) == (pod.uid, pod.ip) and not now.leaving
        return there and not self._older(pod)

    def _look_for_namesake(self, pod: PodSeen) -> None:
        """Two pods at one address: the older is gone, and we were not told so."""
        for other in self._at(pod.ip):
            if other.uid != pod.uid and (other.started_unix_s or 0.0) <= (pod.started_unix_s or 0.0):
                self._stop_asking(other.replica)
                self._see(other, Seen.UNREADY, reason=f"its address was given to {pod.name}")
                self._pods.suspect()

    def _older(self, pod: PodSeen) -> bool:
        """Whether a younger pod of ours is at its address."""
        return any((one.started_unix_s or 0.0) > (pod.started_unix_s or 0.0) for one in self._at(pod.ip))

    def _at(self, ip: str) -> list[PodSeen]:
        """Our pods that run at an address, as far as the watch knows: at most one, if all is well."""
        return [pod for pod in self._pods.items.values() if pod.ip == ip and pod.started_unix_s and not pod.ended]

    async def _answers(self, pod: PodSeen) -> bool:
        runs = pod.started_unix_s is not None and pod.ip and not pod.ended
        return bool(runs and await self._probe(pod) and self._is_there(pod))

    @staticmethod
    async def _probe(pod: PodSeen) -> bool | None:
        tls_name = None if pod.tls_name is None else pod.tls_name or pod.ip
        return await probes.probe(pod.ip, pods.PORT, pod.readiness_path, tls_name=tls_name)

    def _stop_asking(self, replica: ReplicaId) -> None:
        asking = self._asking.pop(replica, None)
        if asking is not None:
            asking.cancel()

    def _see(self, pod: PodSeen, seen: Seen, *, reason: str = "", proof: str = "", again: bool = False) -> None:
        """Tells it, if it is news. An end is the end: nothing but CLEAN comes after it."""
        told, waits = self._told.get(pod.replica), pod.waits if seen is Seen.STARTING else ""
        if again and told is not None:
            self._observe((told,))
        if told is not None and not _is_news(told, seen, waits):
            return
        started_s = None if pod.started_unix_s is None else self._clock() - (time.time() - pod.started_unix_s)
        self._told[pod.replica] = ReplicaSeen(
            id=pod.replica, model=pod.model, spec_hash=pod.spec_hash, intent=pod.intent, slices=pod.slices,
            memory_bytes=pod.memory_bytes, compute_percent=pod.compute_percent, slots=pod.slots, seen=seen,
            address=f"{pod.ip}:{pods.PORT}" if pod.ip else "", started_s=started_s, reason=reason, waits=waits,
            proof=proof,
        )  # fmt: skip
        self._observe((self._told[pod.replica],))


def _is_news(told: ReplicaSeen, seen: Seen, waits: str) -> bool:
    if told.seen is Seen.EXITED:
        return seen is Seen.CLEAN
    if told.seen in (Seen.READY, Seen.UNREADY) and seen is Seen.STARTING:
        return False
    return (told.seen, told.waits) != (seen, waits)


def _seen_of(replica: Replica, seen: Seen, *, reason: str = "", waits: str = "", proof: str = "") -> ReplicaSeen:
    """Of a Replica that has no pod."""
    return ReplicaSeen(
        id=replica.id, model=replica.model, spec_hash=replica.spec_hash, intent=replica.intent, slices=replica.slices,
        memory_bytes=replica.memory_bytes, compute_percent=replica.compute_percent, slots=replica.slots, seen=seen,
        reason=reason, waits=waits, proof=proof,
    )  # fmt: skip


def _key(pod: PodSeen) -> Key:
    return Key(pod.namespace, pod.name)


def _not_running(_: object) -> None:
    raise RuntimeError("the driver is not running")
