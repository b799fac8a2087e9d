"""Creates, marks and deletes replicas' pods through the API server, with retries and exactly once. I/O.

A missing response, a busy server and an exhausted quota do not fail a start: the order is retried with growing pauses
and reports the reason. A permanent rejection fails the start. Invariants:

- A repeated create for a decision finds the existing pod.
- A pod is deleted by its uid and by the version with our own mark, so that a former leader cannot delete a pod that its
  successor took over. While we may write, a removed mark is set again.
- A write that is no longer allowed (`FencedError`) is left to the current leader and does not fail a start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from typing import Protocol

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.blocked_starts import is_temporary
from autoscaler.drivers.kubernetes.inventory.resource_claims import Claims
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.kubernetes.weight_volumes import NodeVolumes
from autoscaler.exception_handling import describe_error
from autoscaler.kubernetes.api import MERGE, Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.kubeconfig import MALFORMED
from autoscaler.kubernetes.watch import ObjectKey, Watched
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.state.lifecycle import STOP_GRACE_S
from autoscaler.state.world import Replica

RETRY_S, RETRY_GROWTH, RETRY_S_MAX = 0.2, 1.5, 10.0
"""Pauses between retries of an order (full quota, failing server): the first, the growth factor, and the longest."""
CONFLICTS_MAX = 20
"""Maximum attempts to mark and delete a pod that others change in between; its kubelet writes, too."""
NO_ANSWER = "the API server does not answer"

_log = logging.getLogger("pilotlight.autoscaler.pods")


class StartListener(Protocol):
    """Receives the results of orders."""

    def start_made(self, replica: Replica) -> None:
        """The API server has created the pod."""

    def start_waits(self, replica: Replica, reason: str) -> None:
        """The start is being retried for this reason."""

    def start_refused(self, replica: Replica, reason: str) -> None:
        """The start failed: the pod was rejected."""

    def is_gone(self, replica: Replica) -> None:
        """The replica to stop has no pod."""

    def order_failed(self, replica: ReplicaId, reason: str) -> None:
        """An exception occurred; the order is retried."""


class Orders:
    """Orders for one namespace. `watched` has our pods in it. Each order is a coroutine, to be run as a task."""

    def __init__(
        self, api: Api, path: str, watched: Watched[PodSeen], listener: StartListener, owner: Ownership = ANYBODYS
    ) -> None:
        self._api = api
        self._path = path
        self._owner = owner
        self._claims = Claims(api, path.split("/")[4], owner)
        self._volumes = NodeVolumes(api)
        self._watched = watched
        self._listener = listener
        self._making: dict[ReplicaId, asyncio.Event] = {}
        """Creates in progress; the event is set once the pod is no longer wanted."""
        self._made: dict[ReplicaId, asyncio.Event] = {}
        """Creates in progress; the event is set once the request has ended, with any result."""
        self._naming: dict[ReplicaId, frozenset[str]] = {}
        """Creates in progress: the names of their claims."""

    def known(self, name: str) -> PodSeen | None:
        """Return the pod as the watch has it."""
        return self._watched.items.get(ObjectKey(self._path.split("/")[4], name))

    # --- creation -----------------------------------------------------------------------------------------------------

    async def create(
        self, replica: Replica, wanted: Object, claims: Sequence[Object] = (), volumes: Sequence[Object] = ()
    ) -> None:
        """Create the pod and the objects that it references, or find them.
        These are its own ResourceClaims, those shared with other pods on its GPU, and the volume of its node's weights
        with its claim. The volume and its claim are never deleted here.
        """
        if replica.id in self._making:
            return
        unwanted = self._making[replica.id] = asyncio.Event()
        over = self._made[replica.id] = asyncio.Event()
        self._naming[replica.id] = frozenset(one["metadata"]["name"] for one in claims)
        try:
            if not await self._create(replica, wanted, (claims, volumes), unwanted) and claims:
                await self._surely(replica.id, lambda: self._claims.drop(claims))
        except FencedError:
            _log.info("event=start_skipped replica=%s reason='not the leader'", replica.id)
        finally:
            del self._making[replica.id], self._made[replica.id], self._naming[replica.id]
            over.set()

    async def _create(
        self,
        replica: Replica,
        wanted: Object,
        named: tuple[Sequence[Object], Sequence[Object]],
        unwanted: asyncio.Event,
    ) -> bool:
        """Return whether a pod exists."""
        pauses, (claims, volumes) = Pauses(), named
        while not unwanted.is_set():
            try:
                await self._volumes.make(volumes)
                await self._claims.make(claims)
                await self._claims.give(claims, await self._create_once(replica, wanted))
                await self._make_way(replica.runtime.marks.instead)
            except UnreachableError:
                reason = NO_ANSWER
            except ApiError as error:
                reason = error.message or error.reason
                if not _passes(error):
                    self._listener.start_refused(replica, f"the API server rejected its pod: {reason}")
                    return False
            else:
                self._listener.start_made(replica)
                return True
            if unwanted.is_set():
                return False
            self._listener.start_waits(replica, reason)
            await pauses.rest(unwanted)
        return False

    async def _make_way(self, keeper: str) -> None:
        """Delete the placeholder pod. It is called after the create, so that no other pod gets its place."""
        if not keeper:
            return
        try:
            await self._api.delete(f"{self._path}/{keeper}", grace_s=0)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _create_once(self, replica: Replica, wanted: Object) -> Object:
        try:
            made = await self._api.create(self._path, wanted)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            made = await self._api.get(f"{self._path}/{wanted['metadata']['name']}")
            found = pod_state.read_replica_pod(made)
            if found is None or not pod_state.is_pod_of_replica(found, replica) or not self._owner.owns(made):
                raise ApiError(409, error.reason, "a pod of its name exists and is not ours") from error
        self._watched.expect(str(made["metadata"]["resourceVersion"]))
        return made

    async def tidy(self) -> None:
        """Remove claims that previous leaders left without a pod."""

        def there(claim: str) -> list[PodSeen]:
            return [pod for pod in self._watched.items.values() if claim in pod.claims]

        try:
            await self._claims.tidy(there, lambda claim: any(claim in one for one in self._naming.values()))
        except (ApiError, UnreachableError, FencedError) as error:
            _log.warning("event=claim_cleanup_failed error=%s", error)

    async def label(self) -> None:
        """Label pods and ResourceClaims made by a version without such labels. An object whose labels may not be
        changed (an admission policy) is skipped and logged. Raises `ApiError`, `UnreachableError`, `FencedError`.
        """
        if not self._owner.unlabelled:
            return
        for path in (self._path, self._claims.path):
            try:
                pages = self._api.pages(path, {"labelSelector": self._owner.unlabelled})
                found = [one["metadata"] async for page in pages for one in page.items]
            except ApiError as error:
                if path == self._path or error.status not in (403, 404):
                    raise
                return  # without the resource, or the permission for it, none was created
            for of in found:
                same = {"uid": of["uid"], "resourceVersion": of["resourceVersion"]}
                try:
                    await self._api.patch(f"{path}/{of['name']}", {"metadata": {**same, "labels": self._owner.labels}})
                except ApiError as error:
                    if _passes(error):
                        raise
                    if error.status != 404:
                        _log.warning("event=label_refused object=%s/%s error=%s", path, of["name"], error)

    # --- deletion -----------------------------------------------------------------------------------------------------

    async def delete(self, replica: Replica, grace_s: float) -> None:
        """Mark the replica's pod and delete it with this grace period."""
        if replica.id in self._making:
            self._making[replica.id].set()
            await self._made[replica.id].wait()
        epoch = str(replica.drain.epoch) if replica.drain is not None else "0"
        await self._surely(replica.id, lambda: self._delete(replica, epoch, math.ceil(grace_s)))

    async def remove(self, pod: PodSeen) -> None:
        """Delete a pod whose engine does not run, with the pod's own grace period.

        Unless its containers have ended, only the version that was just read is deleted, because the pod may change.
        The delete is not forced, even if the node is lost: a container may have started, and only its kubelet can end
        it and report that. For a pod without a node or whose containers have ended, the API server waits for no
        kubelet.
        """
        await self._surely(pod.replica, lambda: self._remove(pod))

    async def hasten(self, pod: PodSeen, grace_s: float) -> None:
        """Shorten the grace period of a pod that is being deleted."""
        await self._surely(pod.replica, lambda: self._delete_very(pod, None, math.ceil(grace_s)))

    def take_over(self, stopping: Container[ReplicaId]) -> Iterator[Coroutine[object, object, None]]:
        """Yield the orders of a new leader: clean up claims, delete ended pods, and void the marks of previous leaders.
        Marked pods that are being deleted get `STOP_GRACE_S`; the planner decides again about the others. `stopping`:
        the replicas that we stop.
        """
        yield self.tidy()
        for pod in self._watched.items.values():
            if pod.ended and not pod.leaving:
                yield self.remove(pod)
            elif pod.drain and pod.replica not in stopping:
                yield self.hasten(pod, STOP_GRACE_S) if pod.leaving else self.unmark(pod)

    async def unmark(self, pod: PodSeen) -> None:
        """Remove a previous leader's mark from a pod that is not deleted, so that it can no longer delete the pod."""
        body = {"metadata": {"uid": pod.uid, "annotations": {pods.DRAIN: None}}}
        await self._surely(pod.replica, lambda: self._mark(pod, body))

    async def _delete(self, replica: Replica, epoch: str, grace_s: int) -> None:
        name = pods.format_pod_name(replica.id)
        pod = self.known(name)
        if pod is None:
            found = await self._look(name)
            pod = None if found is None or not self._owner.owns(found) else pod_state.read_replica_pod(found)
            if pod is None or pod.intent != replica.intent:  # another pod of the same name
                self._listener.is_gone(replica)
                return
        if pod.leaving or pod.ended:
            await self._delete_very(pod, None, grace_s)
            return
        mark = {"metadata": {"uid": pod.uid, "annotations": {pods.DRAIN: epoch}}}
        for _ in range(CONFLICTS_MAX):  # marked again each time, because a former leader may have removed the mark
            marked = await self._mark(pod, mark)
            if marked is None or await self._delete_very(pod, str(marked["metadata"]["resourceVersion"]), grace_s):
                return
        raise UnreachableError(f"DELETE {name}: it changed in each of {CONFLICTS_MAX} attempts")

    async def _remove(self, pod: PodSeen) -> None:
        if pod.ended:
            await self._delete_very(pod, None, None)
            return
        for _ in range(CONFLICTS_MAX):
            found = await self._look(pod.name)
            if found is None or found["metadata"]["uid"] != pod.uid:
                self._watched.suspect()
                return
            if await self._delete_very(pod, str(found["metadata"]["resourceVersion"]), None):
                return
        raise UnreachableError(f"DELETE {pod.name}: it changed in each of {CONFLICTS_MAX} attempts")

    async def _mark(self, pod: PodSeen, body: Object) -> Object | None:
        """Return the pod with the mark; None if it is gone."""
        try:
            return await self._api.patch(f"{self._path}/{pod.name}", body, MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 409:  # another pod of that name, or constant writes by others
                found = await self._look(pod.name)
                if found is not None and found["metadata"]["uid"] == pod.uid:
                    raise
            self._watched.suspect()
            return None

    async def _delete_very(self, pod: PodSeen, version: str | None, grace_s: int | None) -> bool:
        """Delete exactly this pod, by its UID and `version` (None: any); return False if it has another version.
        `grace_s` None: the pod's own grace period.
        """
        path = f"{self._path}/{pod.name}"
        if pod.lingers and grace_s is not None:
            grace_s = min(grace_s, pods.LINGERED_S)
        try:
            left = await self._api.delete(path, uid=pod.uid, version=version, grace_s=grace_s)
        except ApiError as error:
            if error.status == 404:
                self._watched.suspect()
                return True
            if error.status != 409:
                raise
            if version is None:  # another pod of that name, which the watch has not reported
                self._watched.suspect()
            return False
        self._watched.expect(str(left.get("metadata", {}).get("resourceVersion", "")))
        return True

    async def _look(self, name: str) -> Object | None:
        try:
            return await self._api.get(f"{self._path}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _surely(self, replica: ReplicaId, ask: Callable[[], Awaitable[object]]) -> None:
        """Retry `ask`, which is idempotent, until it succeeds or is fenced.
        A pod that is not deleted would hold its devices forever.
        """
        pauses, said = Pauses(), False
        while True:
            try:
                await ask()
            except FencedError:
                _log.info("event=pod_write_skipped replica=%s reason='not the leader'", replica)
            except (UnreachableError, ApiError) as error:
                if not said and not isinstance(error, UnreachableError) and not _passes(error):
                    _log.error("event=pod_write_failed replica=%s error=%s", replica, error)
                    said = True
                await pauses.rest()
                continue
            except MALFORMED as error:  # an unreadable response
                if not said:
                    self._listener.order_failed(replica, describe_error(error))
                    said = True
                await pauses.rest()
                continue
            return


class Pauses:
    """Growing pauses, randomized so that no two orders keep the same rhythm."""

    def __init__(self) -> None:
        self._next_s = RETRY_S

    async def rest(self, sooner: asyncio.Event | None = None) -> None:
        """Pause, at most until the event is set."""
        pause_s = self._next_s * random.uniform(0.5, 1)  # noqa: S311  jitter needs no cryptographic randomness
        self._next_s = min(RETRY_GROWTH * self._next_s, RETRY_S_MAX)
        try:
            async with asyncio.timeout(pause_s):
                await (sooner or asyncio.Event()).wait()
        except TimeoutError:
            return


def _passes(error: ApiError) -> bool:
    """Return whether the same request may succeed later."""
    contended = error.status == 409 and error.reason == "Conflict"  # on a ResourceQuota that others use, too
    return error.is_transient or contended or (error.status == 403 and is_temporary(error.message))
