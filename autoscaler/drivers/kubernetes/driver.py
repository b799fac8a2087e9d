"""The Kubernetes driver: Replicas as pods of one namespace (architecture, section 5). I/O; it decides nothing.

Watches nodes, its pods and who else has devices, and asks each engine itself whether it is ready (a kubelet would ask
once a second); what it writes is `orders`'. Promises: a start that was made before is found by its name; who is called
ready is the very pod that the watch has at that address; a pod that waits for room or an image says so, and only an
image that cannot be had is a start that failed; CLEAN only when the pod's object is gone, which a kubelet allows once
its processes are, and `clearing` knows that its devices keep nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.base import Launcher, Observe
from autoscaler.drivers.kubernetes import clearing, declared, nodes, pods
from autoscaler.drivers.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.drivers.kubernetes.asking import Asking
from autoscaler.drivers.kubernetes.beginning import Beginning
from autoscaler.drivers.kubernetes.clearing import Clearing
from autoscaler.drivers.kubernetes.orders import Orders
from autoscaler.drivers.kubernetes.pods import PodSeen
from autoscaler.drivers.kubernetes.told import is_news, seen_in, unbound
from autoscaler.drivers.kubernetes.vocabulary import NODES
from autoscaler.drivers.kubernetes.watching import Change, Key, Watched
from autoscaler.model import Model
from autoscaler.settings import Settings
from autoscaler.world import Replica, ReplicaSeen, Seen, SlicesSeen, Synced

ADOPT_SECONDS_MAX = 10.0
"""Synced waits so long for what is half gone."""
REFUSED_S = 60.0
"""What a start was refused for is in the way of the next ones of the same spec for so long: no storm of tries."""
REFRESH_RETRY_S = 0.2
DOUBT_EVERY_S = 5.0
"""How often it is asked whether those are still there that are being deleted, or do not answer any more."""


class KubernetesDriver:
    """Runs Replicas in a namespace. `api` is open while it runs; `image` gives the one of a Model's engine. Without
    `inventory` nodes are not looked at: Slices are told by another then (`quotas`).
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        launch: Launcher,
        image: Callable[[Model], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        assume_after_s: float = clearing.ASSUME_AFTER_S,
        measured: clearing.Measured = clearing.nothing_measured,
        settings: Callable[[], Settings] = Settings,
        inventory: bool = True,
        pace: probes.Pace | None = None,
    ) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        self._namespace = namespace
        self._launch = launch
        self._image = image
        self._clock = clock
        self._unix_s = api.unix_s
        self._clearing = Clearing(clock, self._node, measured, assume_after_s)
        self._settings = settings
        self._inventory = inventory
        self._nodes = Watched(api, NODES, nodes.read, self._nodes_changed)
        self._pods = Watched(api, path, pods.read, self._pods_changed, labelSelector=pods.SELECTOR)
        self._others = Watched(
            api, "/api/v1/pods", self._read_other, self._others_changed, optional=True, fieldSelector=nodes.HOLDING
        )
        self._orders = Orders(api, path, self._pods, self)
        self._observe: Observe = _not_running
        self._tasks = asyncio.TaskGroup()
        self._ordered = set[asyncio.Task[None]]()
        """Orders under way."""
        self._asking = Asking(self._pods, self._tasks, self._last_seen, self._see, pace or probes.Pace(clock), clock)
        self._hoping: dict[ReplicaId, asyncio.TimerHandle] = {}
        """Of those that cannot start as things are: when that has lasted too long."""
        self._begun: dict[ReplicaId, Beginning] = {}
        self._told: dict[ReplicaId, ReplicaSeen] = {}
        """What was last said of each pod that is there."""
        self._stopping = set[ReplicaId]()
        self._cleared = set[ReplicaId]()
        """Whose pods are gone, and which are not proven clean yet."""
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
                tasks.create_task(self._others.run())
                await self._nodes.synced.wait()
                await self._others.synced.wait()
            self._tell_slices()
            tasks.create_task(self._pods.run())
            await self._pods.synced.wait()
            await self._adopt()
            self._take_over()
            observe((Synced(),))
            tasks.create_task(self._doubt())

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
                if self._inventory:
                    await self._nodes.refresh()
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
            self._launch(model, pods.HOST, pods.PORTS[0])
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
            launch = self._launch(model, pods.HOST, pods.port_of(replica.id))
            settings = self._settings()
            where, ranked = (
                declared.selector_of(settings.nodes, replica.slices),
                settings.priority_class(model.spec.priority),
            )
            wanted = pods.manifest(replica, model, launch, self._image(model), settings.pod, where, ranked)
        except Exception as error:  # noqa: BLE001 - launch is foreign: whatever it raises is a failed start
            self._fail(replica, str(error))
            return
        self._order(self._orders.create(replica, wanted))

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Deletes its pod, with so much time. A later order can only shorten that. What is not known is clean."""
        self._stopping.add(replica.id)
        self._order(self._orders.delete(replica, grace_s))

    def start_made(self, replica: Replica) -> None:
        """The API server has its pod."""
        self._begun.setdefault(replica.id, Beginning()).ask(self._clock())

    def start_waits(self, replica: Replica, reason: str) -> None:
        """The API server did not make its pod yet."""
        self._observe((unbound(replica, Seen.STARTING, waits=reason),))

    def start_refused(self, replica: Replica, reason: str) -> None:
        """The API server will not make such a pod: admission, rights, a namespace that goes."""
        self._refuse(replica.model, replica.spec_hash, reason)
        self._fail(replica, reason)

    def is_gone(self, replica: Replica) -> None:
        """There is no pod of it."""
        if replica.id in self._cleared:
            return  # it was there: what it left is not proven to be gone yet
        self._stopping.discard(replica.id)
        self._observe((unbound(replica, Seen.CLEAN, proof=clearing.ASSUMED),))

    def _order(self, order: Coroutine[object, object, None]) -> None:
        task = self._tasks.create_task(order)
        self._ordered.add(task)
        task.add_done_callback(self._ordered.discard)

    def _fail(self, replica: Replica, reason: str) -> None:
        self._observe(
            (unbound(replica, Seen.EXITED, reason=reason), unbound(replica, Seen.CLEAN, proof=clearing.ASSUMED))
        )

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

    def _read_other(self, pod: Object) -> nodes.OtherPod | None:
        ours = pod["metadata"]["namespace"] == self._namespace and pods.read(pod) is not None
        return None if ours else nodes.read_other(pod)

    def _others_changed(self, _: list[Change[nodes.OtherPod]]) -> None:
        if self._listens:
            self._tell_slices()

    def look_again(self) -> None:
        """What the Settings say of nodes has changed."""
        if self._listens:
            self._tell_slices()

    def _tell_slices(self) -> None:
        if self._inventory:
            found = nodes.slices(list(self._nodes.items.values()), self._settings().nodes)
            others = nodes.others(self._nodes.items.values(), found, self._others.items.values())
            self._observe((SlicesSeen(slices=found, others=others),))

    def _pods_changed(self, changes: list[Change[PodSeen]]) -> None:
        for _, old, new in changes:
            if new is not None:
                self._begins(old, new)
            if self._listens:
                self._judge(old, new)

    def _begins(self, old: PodSeen | None, new: PodSeen) -> None:
        if old is not None and old.uid != new.uid:
            self._begun.pop(new.replica, None)
        begun = self._begun.setdefault(new.replica, Beginning())
        if self._listens and old is None:
            begun.ask(self._clock())
        begun.see(self._clock(), bound=bool(new.node), prepared=new.prepared, runs=new.started_unix_s is not None)

    async def _adopt(self) -> None:
        """All pods that are there: engines that answer are ready at once."""
        found, self._listens = list(self._pods.items.values()), True
        half_gone = {pod.replica: asyncio.Event() for pod in found if pod.ended or pod.leaving}
        self._clean |= half_gone
        ready = await asyncio.gather(*(self._asking.answers(pod) for pod in found))
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
            self._asking.look_for_namesake(new)
            self._see(new, Seen.STARTING)
            self._asking.begin(new)

    def _has_ended(self, pod: PodSeen, reason: str) -> None:
        self._see(pod, Seen.EXITED, reason=reason)
        self._asking.stop(pod.replica)
        if pod.ended and not pod.leaving:
            self._order(self._orders.remove(pod))

    def _leaves(self, pod: PodSeen) -> None:
        """It is being deleted, and its end will be seen. If that was not ordered by us, it gets no more Calls."""
        self._asking.stop(pod.replica)
        told = self._told.get(pod.replica)
        if pod.replica in self._stopping or (told is not None and told.seen is Seen.STARTING and not pod.drain):
            return
        if pod.drain:  # by a leader before us, who saw that no Call was on it
            self._see(pod, Seen.EXITED, reason="it was being stopped")
        else:
            self._see(pod, Seen.UNREADY, reason=f"its pod is being deleted: {pod.disrupted or 'somebody asked for it'}")

    def _is_lost(self, node: str) -> bool:
        found = self._node(node)
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
        self._asking.stop(pod.replica)
        self._give_hope(pod.replica)
        ours = self._pods.gap and pod.replica in self._stopping  # its end, which we ordered, was not heard of
        by_force = clearing.forced(pod) and not ours
        self._see(pod, Seen.EXITED, reason=pod.ended or (clearing.FORCED if by_force else "stopped"))
        self._cleared.add(pod.replica)
        self._tasks.create_task(self._clear(pod, by_force=by_force))

    def _node(self, name: str) -> nodes.NodeSeen | None:
        return self._nodes.items.get(Key("", name))

    async def _clear(self, pod: PodSeen, *, by_force: bool) -> None:
        proof = await self._clearing.prove(pod, by_force=by_force)
        self._cleared.discard(pod.replica)
        self._see(pod, Seen.CLEAN, proof=proof)
        self._told.pop(pod.replica, None)
        self._begun.pop(pod.replica, None)
        self._stopping.discard(pod.replica)
        self._clean.pop(pod.replica, asyncio.Event()).set()

    async def _doubt(self) -> None:
        """A watch that has lost the end of a pod would keep its Replica for ever."""
        while True:
            await asyncio.sleep(DOUBT_EVERY_S)
            unready = any(told.seen is Seen.UNREADY for told in self._told.values())
            if unready or any(pod.leaving for pod in self._pods.items.values()):
                with contextlib.suppress(ApiError, UnreachableError):  # asked again soon
                    await self._pods.refresh()

    def _last_seen(self, replica: ReplicaId) -> Seen:
        return self._told[replica].seen if replica in self._told else Seen.STARTING

    def _see(self, pod: PodSeen, seen: Seen, *, reason: str = "", proof: str = "", again: bool = False) -> None:
        """Tells it, if it is news. An end is the end: nothing but CLEAN comes after it."""
        told, waits = self._told.get(pod.replica), pod.waits if seen is Seen.STARTING else ""
        if again and told is not None:
            self._observe((told,))
        if told is not None and not is_news(told, seen, waits):
            return
        from_unix_s = self._clock() - self._unix_s()
        begun = self._begun.get(pod.replica, Beginning())
        self._told[pod.replica] = seen_in(pod, begun, from_unix_s, seen, reason=reason, waits=waits, proof=proof)
        self._observe((self._told[pod.replica],))


def _key(pod: PodSeen) -> Key:
    return Key(pod.namespace, pod.name)


def _not_running(_: object) -> None:
    raise RuntimeError("the driver is not running")
