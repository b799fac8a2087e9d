"""The Kubernetes driver: runs replicas as pods of one namespace. I/O; makes no decisions.

Watches nodes, its pods and other users of devices. Probes the readiness of each engine directly, because a kubelet
would probe only once a second. `pod_writer` writes to the API server. Invariants:

- A repeated start finds the existing pod by its name.
- A replica is reported ready only if the watch has its pod at the probed address.
- A pod that waits for capacity or an image reports the reason. The start fails only if the wait cannot end.
- CLEAN is reported only when the pod's object is gone, which a kubelet allows once its processes have ended, and
  `proof_of_clean` has proven that its devices are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from autoscaler.agent_contract import Laid
from autoscaler.capacity.attachable_nodes import Groups
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.driver import Launcher, NodeSupply, Observe
from autoscaler.drivers.kubernetes import proof_of_clean
from autoscaler.drivers.kubernetes.blocked_starts import VOLUMES, Policies, RefusedStarts, WeightsWaits
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen, StartTiming
from autoscaler.drivers.kubernetes.objects.replica_observations import (
    build_observation,
    build_podless_observation,
    is_about_pod,
    is_news,
    with_finalizers,
)
from autoscaler.drivers.kubernetes.pod_writer import Orders
from autoscaler.drivers.kubernetes.proof_of_clean import Clearing
from autoscaler.drivers.kubernetes.readiness import ReadinessProber
from autoscaler.drivers.kubernetes.start_objects import PodBuilder
from autoscaler.drivers.kubernetes.volume_failures import PodEvents
from autoscaler.drivers.resilient_tasks import NO_MODEL, fault_reporter, retry_until_success, start_contained_task
from autoscaler.exception_handling import Failure, attempt, describe_error, reraise_memory_error
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.state.events import ReplicaSeen, Seen, Synced
from autoscaler.state.world import Replica, SliceId

ADOPT_SECONDS_MAX = 10.0
"""How long `Synced` waits for pods that are terminating."""
REFRESH_RETRY_S = 0.2
ALLOWED_S = 1.0
"""Maximum delay until the API server's admission applies a changed quota or LimitRange."""
REFRESH_EVERY_S = 5.0
"""Interval of full reads of the pods while one is being deleted or does not respond."""


_log = logging.getLogger("pilotlight.autoscaler.pods")


class KubernetesDriver:
    """Runs replicas in a namespace. `api` must be open while it runs; `image` returns the image for a model's engine.
    Without `inventory` nodes are not watched, and another source reports the slices (`DeclaredDevices`).
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        launch: Launcher,
        image: Callable[[Model], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        assume_after_s: float = proof_of_clean.ASSUME_AFTER_S,
        measured: proof_of_clean.Measured = proof_of_clean.nothing_measured,
        settings: Callable[[], Settings] = Settings,
        inventory: bool = True,
        groups: Callable[[], Groups] = dict,
        pace: probes.Pace | None = None,
        supply: NodeSupply = VOLUMES,
        owner: Ownership = ANYBODYS,
    ) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        self._namespace, self._clock, self._owner = namespace, clock, owner
        self._unix_s = api.unix_s
        self._clearing = Clearing(clock, self._node, measured, assume_after_s, self._reserved)
        self._inventory = None if not inventory else Inventory(
            api, namespace, settings, is_ours=self._is_ours, owner=owner, held=self._held,
            changed=self._devices_changed, hosts_changed=self._hosts_changed, groups=groups,
        )  # fmt: skip
        self._pods = Watched(api, path, pod_state.read_replica_pod, self._pods_changed, labelSelector=owner.engines)
        self._make = PodBuilder(namespace, launch, image, settings, self._inventory, supply, owner)
        self._orders = Orders(api, path, self._pods, self, owner)
        self._weights_waits = WeightsWaits(supply, self)
        self._observe: Observe = _not_running
        self._tasks = asyncio.TaskGroup()
        self._ordered = set[asyncio.Task[None]]()
        """Orders in progress."""
        self._prober = ReadinessProber(
            self._pods, self._tasks, self._last_seen, self._see, pace or probes.Pace(clock), clock,
            lambda model: fault_reporter(model, self._observe),
        )  # fmt: skip
        self._events = PodEvents(api, namespace, self._pods, self._judge_again, clock)
        self._start_timeouts: dict[ReplicaId, tuple[tuple[float, str], asyncio.TimerHandle]] = {}
        """Replicas whose wait has a time limit: the limit in seconds and what they wait for, and its timer."""
        self._begun: dict[ReplicaId, StartTiming] = {}
        self._reported: dict[ReplicaId, ReplicaSeen] = {}
        """The last observation of each existing pod."""
        self._stopping = set[ReplicaId]()
        self._cleared = set[ReplicaId]()
        """Replicas whose pods are gone but not yet proven clean."""
        self._over = set[str]()
        """Uids of ended pods whose objects still exist: they no longer hold anything."""
        self._clean: dict[ReplicaId, asyncio.Event] = {}
        """Replicas that were terminating when they were adopted."""
        self._refused = RefusedStarts()
        self._policies = Policies(api, namespace, self._allow)
        self._hosts_fault = ""
        self._listens = False
        """The initial state is known, so changes are processed."""

    async def run(self, observe: Observe) -> None:
        """Adopt, then observe until cancelled. One run per driver."""
        self._observe = observe
        async with self._tasks as tasks:
            if self._inventory is not None:
                await self._inventory.begin(tasks)
            tasks.create_task(self._pods.run())
            await self._pods.synced.wait()
            await retry_until_success(self._adopt, fault_reporter(NO_MODEL, observe, "adoption of pods"))
            observe((Synced(),))
            tasks.create_task(
                retry_until_success(self._refresh_periodically, fault_reporter(NO_MODEL, observe, "refresh of pods"))
            )
            tasks.create_task(
                retry_until_success(self._events.run, fault_reporter(NO_MODEL, observe, "events of pods"))
            )
            tasks.create_task(
                retry_until_success(self._policies.run, fault_reporter(NO_MODEL, observe, "quotas and limits"))
            )

    def lead(self) -> None:
        """Become the leader: report everything again, ending with `Synced`, and finish the orders of previous leaders.
        During adoption this call has no effect, because adoption ends with the same steps.
        """
        if self._listens:
            self._order(
                NO_MODEL, retry_until_success(self._lead, fault_reporter(NO_MODEL, self._observe, "change of leader"))
            )

    async def _lead(self) -> None:
        """Take over. Refresh first: the watch may lag behind the last leader's writes, which would be repeated."""
        trouble = ""
        while True:
            try:
                await self._orders.label()
                if self._inventory is not None:
                    await self._inventory.refresh()
                await self._pods.refresh()
            except (ApiError, UnreachableError, FencedError) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("event=takeover_delayed error=%s", trouble)
                await asyncio.sleep(REFRESH_RETRY_S)
            else:
                break
        self._report_slices()
        for pod in list(self._pods.items.values()):
            self._contain(pod.model, partial(self._judge, None, pod))  # a pod about to be deleted is not ready
        for reported in list(self._reported.values()):
            self._observe((reported,))
        self._order(NO_MODEL, *self._orders.take_over(self._stopping))
        self._observe((Synced(),))

    async def follow(self) -> None:
        """Stop leading. Returns when no order is in progress any more."""
        under_way = list(self._ordered)
        for order in under_way:
            order.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._weights_waits.forget()
        self._stopping.clear()

    def obstacle(self, model: Model) -> str:
        """Return why a start of the model would fail, or why the API server rejected one recently."""
        return self._refused.reason(model, self._clock()) or self._make.obstacle(model)

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, model: Model) -> None:
        """Create the replica's pod; an existing one is only observed again."""
        found = self._orders.known(pods.format_pod_name(replica.id))
        if found is not None and pod_state.is_pod_of_replica(found, replica):
            self._see(found, Seen.STARTING, again=True)
            return
        self._order(replica.model, *self._weights_waits.begin(replica, model))

    def weights_came(self, replica: Replica, model: Model, laid: Laid | None) -> None:
        """Create the pod. `laid`: its weights on the node; None: they are in a volume."""
        if laid is not None and laid.folders:
            self._begun.setdefault(replica.id, StartTiming()).pull(self._clock())
        try:
            made = self._make(replica, model, laid)
        except Exception as error:  # noqa: BLE001 - launch is foreign code: any exception is a failed start
            reraise_memory_error(error)
            self.weights_failed(replica, str(error))
            return
        self._order(replica.model, self._orders.create(replica, *made))

    def weights_failed(self, replica: Replica, reason: str) -> None:
        """Report a failed start: no pod exists, and none will be created."""
        self._begun.pop(replica.id, None)
        failed = build_podless_observation(replica, Seen.EXITED, reason=reason)
        self._observe((failed, build_podless_observation(replica, Seen.CLEAN, proof=proof_of_clean.ASSUMED)))

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Delete its pod with this grace period; a later call can only shorten it. A replica without a pod is CLEAN."""
        self._stopping.add(replica.id)
        self._weights_waits.stop(replica.id)
        self._order(replica.model, self._orders.delete(replica, grace_s))

    def start_made(self, replica: Replica) -> None:
        """Record that the API server has created the pod."""
        self._begun.setdefault(replica.id, StartTiming()).ask(self._clock())

    def start_waits(self, replica: Replica, reason: str) -> None:
        """Report that the API server has not created the pod yet."""
        self._observe((build_podless_observation(replica, Seen.STARTING, waits=reason),))

    def start_refused(self, replica: Replica, reason: str) -> None:
        """Fail the start: the API server rejects the pod (admission, permissions, a terminating namespace)."""
        self._refused.note(replica.model, replica.spec_hash, reason, self._clock())
        self.weights_failed(replica, reason)

    def _allow(self) -> None:
        """Forget rejected starts after a change of a quota or LimitRange, and again once admission applies it."""
        self._refused.forget()
        asyncio.get_running_loop().call_later(ALLOWED_S, self._refused.forget)

    def is_gone(self, replica: Replica) -> None:
        """Report a replica without a pod as clean."""
        if replica.id in self._cleared:
            return  # its pod is gone, and the proof of CLEAN is pending
        self._stopping.discard(replica.id)
        self._begun.pop(replica.id, None)
        self._observe((build_podless_observation(replica, Seen.CLEAN, proof=proof_of_clean.ASSUMED),))

    def order_failed(self, replica: ReplicaId, reason: str) -> None:
        """Report an exception; the order is retried."""
        last = self._reported.get(replica)
        fault_reporter(NO_MODEL if last is None else last.model, self._observe)(reason)

    def _order(self, model: ModelName, *orders: Coroutine[object, object, None]) -> None:
        """Run orders as tasks. Exceptions are reported as faults of `model`."""
        for order in orders:
            task = start_contained_task(self._tasks, order, fault_reporter(model, self._observe))
            self._ordered.add(task)
            task.add_done_callback(self._ordered.discard)

    # --- observations -------------------------------------------------------------------------------------------------

    def _devices_changed(self, is_node: bool) -> None:
        self.look_again()
        if self._listens:
            for pod in list(self._pods.items.values()):
                self._contain(pod.model, partial(self._locate, pod))
                if is_node:
                    self._contain(pod.model, partial(self._judge, pod, pod))

    def _is_ours(self, pod: Object) -> bool:
        """Return whether the watch of our pods has this pod. A pod that could not be labelled is not in it, so that its
        devices count as used by others.
        """
        here = bool(pod["metadata"]["namespace"] == self._namespace)
        return here and self._owner.has_label(pod) and pod_state.read_replica_pod(pod) is not None

    def _held(self) -> Iterator[SliceId]:
        there = (reported for reported in self._reported.values() if reported.seen is not Seen.CLEAN)
        return (id for reported in there for id in reported.actual or reported.slices)

    def look_again(self) -> None:
        """Report the slices again after a change of Settings or of devices used by others."""
        if self._listens:
            self._report_slices()

    def _hosts_changed(self) -> None:
        """`look_again` for a timer: an exception is reported once, and the next change retries."""
        done = attempt(self.look_again)
        reason = describe_error(done.error) if isinstance(done, Failure) else ""
        if reason != self._hosts_fault:
            self._hosts_fault = reason
            fault_reporter(NO_MODEL, self._observe, "hosts")(reason)

    def _report_slices(self) -> None:
        if self._inventory is not None:
            self._observe(self._inventory.look())

    def _pods_changed(self, changes: list[Change[PodSeen]]) -> None:
        for _, old, new in changes:
            pod = new or old
            if pod is not None:
                self._contain(pod.model, partial(self._pod_changed, old, new))

    def _contain(self, model: ModelName, work: Callable[[], None]) -> None:
        """Run `work`; its exception is a fault of the model."""
        done = attempt(work)
        if isinstance(done, Failure):
            fault_reporter(model, self._observe)(describe_error(done.error))

    def _pod_changed(self, old: PodSeen | None, new: PodSeen | None) -> None:
        if new is not None and new.uid not in self._over:
            self._begins(old, new)
        if self._listens:
            self._judge(old, new)
            self._locate(new)

    def _begins(self, old: PodSeen | None, new: PodSeen) -> None:
        if old is not None and old.uid != new.uid:
            self._begun.pop(new.replica, None)
        begun = self._begun.setdefault(new.replica, StartTiming())
        if self._listens and old is None:
            begun.ask(self._clock())
        begun.see(self._clock(), bound=bool(new.node), prepared=new.prepared, runs=new.started_unix_s is not None)

    async def _adopt(self) -> None:
        """Adopt all existing pods. Engines that respond are reported as ready at once."""
        self._report_slices()
        found, self._listens = list(self._pods.items.values()), True
        half_gone = {pod.replica: asyncio.Event() for pod in found
                     if (pod.ended or pod.leaving) and not (pod.is_over and pod.finalizers)}  # fmt: skip
        self._clean |= half_gone
        ready = await asyncio.gather(*(self._prober.answers(pod) for pod in found), return_exceptions=True)
        for pod, is_ready in zip(found, ready, strict=True):
            if isinstance(is_ready, Exception):
                reraise_memory_error(is_ready)
                fault_reporter(pod.model, self._observe)(describe_error(is_ready))
            elif is_ready is True and not pod.leaving:
                # Reported as ready first: otherwise its age would count as the duration of its start.
                self._contain(pod.model, partial(self._see, pod, Seen.READY))
            self._contain(pod.model, partial(self._judge, None, self._pods.items.get(_key(pod))))
        self._order(NO_MODEL, *self._orders.take_over(self._stopping))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_SECONDS_MAX):
                for clean in half_gone.values():
                    await clean.wait()

    def _judge(self, old: PodSeen | None, new: PodSeen | None) -> None:
        """Process a change of a pod or of its node."""
        if old is not None and (new is None or new.uid != old.uid):
            if old.uid in self._over:
                self._over.discard(old.uid)
            else:
                self._is_gone(old)
        if new is None or new.uid in self._over:
            return
        new = self._events.with_failure(new)
        if new.leaving and new.is_over and new.finalizers:
            self._is_kept(new)
            return
        limit = None if new.patience_s is None else (new.patience_s, new.waits_for)
        if limit is None or limit != self._start_timeouts.get(new.replica, (limit,))[0]:
            self._cancel_start_timeout(new.replica)
        if new.ended or (new.leaving and self._is_lost(new.node)):
            self._has_ended(new, new.ended or f"its node {new.node} is lost")
        elif new.leaving:
            self._leaves(new)
        elif new.waits:
            self._see(new, Seen.STARTING)
            if limit is not None and new.replica not in self._start_timeouts:
                loop = asyncio.get_running_loop()
                lose = partial(self._on_start_timeout, _key(new), new.uid)
                timer = loop.call_later(limit[0], self._contain, new.model, lose)
                self._start_timeouts[new.replica] = limit, timer
        elif new.started_unix_s is not None and new.ip:
            self._prober.look_for_namesake(new)
            self._see(new, Seen.STARTING)
            self._prober.begin(new)

    def _judge_again(self, pod: PodSeen) -> None:
        """Evaluate a pod again after its Events changed."""
        now = self._pods.items.get(_key(pod))
        if now is not None and now.uid == pod.uid:
            self._contain(now.model, partial(self._judge, now, now))

    def _has_ended(self, pod: PodSeen, reason: str) -> None:
        self._see(pod, Seen.EXITED, reason=reason)
        self._prober.stop(pod.replica)
        if pod.ended and not pod.leaving:
            self._order(pod.model, self._orders.remove(pod))

    def _leaves(self, pod: PodSeen) -> None:
        """Handle a pod that is being deleted. If we did not order that, report it, so that it gets no more requests."""
        self._prober.stop(pod.replica)
        reported = self._reported.get(pod.replica)
        if pod.replica in self._stopping or (reported is not None and reported.seen is Seen.STARTING and not pod.drain):
            return
        if pod.drain:  # a previous leader deleted it, so its drain is over
            self._see(pod, Seen.LEAVING, reason="a previous leader was stopping it")
        else:
            self._see(pod, Seen.TAKEN, reason=f"its pod is being deleted: {pod.disrupted or 'by another client'}")

    def _is_lost(self, node: str) -> bool:
        found = self._node(node)
        return self._inventory is not None and bool(node) and (found is None or found.lost)

    def _on_start_timeout(self, key: ObjectKey, uid: str) -> None:
        """Fail a start whose image or Secret was missing for too long. The next start would fail, too."""
        pod = self._pods.items.get(key)
        pod = None if pod is None else self._events.with_failure(pod)
        if pod is None or pod.uid != uid or pod.patience_s is None:
            return
        self._refused.note(pod.model, pod.spec_hash, pod.waits, self._clock())
        self._see(pod, Seen.EXITED, reason=pod.waits)
        self._order(pod.model, self._orders.remove(pod))

    def _cancel_start_timeout(self, replica: ReplicaId) -> None:
        timeout = self._start_timeouts.pop(replica, None)
        if timeout is not None:
            timeout[1].cancel()

    def _is_gone(self, pod: PodSeen) -> None:
        self._prober.stop(pod.replica)
        self._cancel_start_timeout(pod.replica)
        ordered = pod.replica in self._stopping or (pod.leaving and pod.drain)
        ours = self._pods.gap and ordered  # a leader ordered its end, and the watch missed it
        by_force = proof_of_clean.is_force_deleted(pod) and not ours
        self._see(pod, Seen.EXITED, reason=pod.ended or (proof_of_clean.FORCED if by_force else "stopped"))
        self._cleared.add(pod.replica)
        report = fault_reporter(pod.model, self._observe)
        self._tasks.create_task(retry_until_success(partial(self._clear, pod, by_force=by_force), report))

    def _is_kept(self, pod: PodSeen) -> None:
        """Handle an ended pod whose object a foreign finalizer keeps. Like the scheduler, count its devices as free."""
        self._over.add(pod.uid)
        self._prober.stop(pod.replica)
        self._cancel_start_timeout(pod.replica)
        self._see(pod, Seen.EXITED, reason=pod.ended or "stopped")
        self._cleared.add(pod.replica)
        report = fault_reporter(pod.model, self._observe)
        self._tasks.create_task(
            retry_until_success(partial(self._clear, pod, by_force=False, kept_by=pod.finalizers), report)
        )

    def _reserved(self, pod: PodSeen) -> bool:
        return self._inventory is not None and self._inventory.reserved(pod)

    def _locate(self, pod: PodSeen | None) -> None:
        """Once known, report the slices that the pod actually has, if they differ from those chosen."""
        reported = self._reported.get(pod.replica) if pod is not None else None
        if (
            pod is None
            or reported is None
            or reported.actual
            or self._inventory is None
            or not is_about_pod(reported, pod)
        ):
            return
        if actual := self._inventory.actual(pod):
            self._reported[pod.replica] = replace(reported, actual=actual)
            self._report_slices()
            self._observe((self._reported[pod.replica],))

    def _node(self, name: str) -> NodeSeen | None:
        return None if self._inventory is None else self._inventory.node(name)

    async def _clear(self, pod: PodSeen, *, by_force: bool, kept_by: Sequence[str] = ()) -> None:
        proof = with_finalizers(await self._clearing.prove(pod, by_force=by_force), kept_by)
        self._cleared.discard(pod.replica)
        self._see(pod, Seen.CLEAN, proof=proof)
        self._report_slices_if_unknown(self._reported.pop(pod.replica, None))
        self._begun.pop(pod.replica, None)
        self._stopping.discard(pod.replica)
        self._clean.pop(pod.replica, asyncio.Event()).set()

    async def _refresh_periodically(self) -> None:
        """Read all pods periodically, because a replica would never end if the watch missed the end of its pod."""
        while True:
            await asyncio.sleep(REFRESH_EVERY_S)
            unready = any(reported.seen is Seen.UNREADY for reported in self._reported.values())
            if unready or any(pod.leaving and pod.uid not in self._over for pod in self._pods.items.values()):
                with contextlib.suppress(ApiError, UnreachableError):  # retried soon
                    await self._pods.refresh()

    def _last_seen(self, replica: ReplicaId) -> Seen:
        return self._reported[replica].seen if replica in self._reported else Seen.STARTING

    def _see(self, pod: PodSeen, seen: Seen, *, reason: str = "", proof: str = "", again: bool = False) -> None:
        """Report a state if it has changed. After EXITED only CLEAN follows."""
        reported, waits = self._reported.get(pod.replica), pod.waits if seen is Seen.STARTING else ""
        if again and reported is not None:
            self._observe((reported,))
        if reported is not None and not is_news(reported, seen, waits):
            return
        from_unix_s = self._clock() - self._unix_s()
        begun = self._begun.get(pod.replica, StartTiming())
        now = build_observation(pod, begun, from_unix_s, seen, reported, reason=reason, waits=waits, proof=proof)
        self._reported[pod.replica] = now
        self._observe((now,))
        self._report_slices_if_unknown(now)

    def _report_slices_if_unknown(self, reported: ReplicaSeen | None) -> None:
        """Report the slices if the replica holds one that no longer exists, because that closes or opens others."""
        if (
            reported is not None
            and self._inventory is not None
            and not self._inventory.knows(reported.actual or reported.slices)
        ):
            self._report_slices()


def _key(pod: PodSeen) -> ObjectKey:
    return ObjectKey(pod.namespace, pod.name)


def _not_running(_: object) -> None:
    raise RuntimeError("the driver is not running")
