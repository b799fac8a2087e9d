"""Determines which installation serves the Models of each namespace, by Leases with the name CLAIM. I/O.

`autoscaler.spec.installation_ownership` decides when to acquire or renew a Lease. The holder is the installation, so
each of its processes renews the Lease, leader or not. A known holder stays valid while the API server rejects requests
or does not respond. If the server rejects the Lease for GRACE_S (missing permission, webhook, quota), the Models of
that namespace are served without a Lease, which is logged. While the server is unable to read or write the Lease,
another installation may hold it. After GRACE_S the holder of that namespace counts as unknown, so that its Models do
not delay those of others (`autoscaler.kubernetes.resources.document_merge`). The same applies to a Lease that cannot be
decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from autoscaler.kubernetes.api import UNREADABLE, Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.spec.installation_ownership import ANYBODYS, CLAIM, CLAIM_S, Claim, Ownership

LOOK_S, RETRY_S, CONFLICT_S = 60.0, 1.0, 0.05
"""Pause between two reads of a Lease; after an error; and after a write conflict with another process."""
GRACE_S = 10.0
"""How long the API server may reject a Lease before Models are served without it: permissions may be granted late. Also
how long the Models of all namespaces wait at the start for a Lease that cannot be read or written.
"""
AT_ONCE_MAX = 16
"""Maximum concurrent requests: many namespaces are claimed at the first start."""
NOT_FOUND, CONFLICT = 404, 409
NO_RIGHT = frozenset({401, 403})
UNKNOWN = (
    "replicas of its Models keep running, and none are started or stopped, until the Lease can be read and written"
)
WITHOUT = "other installations may serve its Models, too; grant get, create and update on Leases"

_log = logging.getLogger("pilotlight.autoscaler.resources")


class ModelClaims:
    """The claims of the installation `me`.
    `known` is called at each change with a mapping of namespaces to the installations that serve their Models. None:
    the Lease cannot be decoded, read or written, so the installation is unknown. A missing namespace: the result is
    still pending.
    """

    def __init__(
        self, api: Api, me: str, known: Callable[[dict[str, str | None]], None],
        clock: Callable[[], float] = time.monotonic, owner: Ownership = ANYBODYS,
    ) -> None:  # fmt: skip
        self._api, self.me, self._known, self._clock, self._owner = api, me, known, clock, owner
        self._wanted: frozenset[str] = frozenset()
        self._claims: dict[str, Claim] = {}
        self._holders: dict[str, str | None] = {}
        self._due_s: dict[str, float] = {}
        self._since_s: dict[str, float] = {}
        """Namespace -> since when its installation is requested."""
        self._in_progress: set[str] = set()
        self._limit = asyncio.Semaphore(AT_ONCE_MAX)
        self._reported: dict[str, str | None] | None = None
        self._news = asyncio.Event()
        self._fails_s: dict[str, float] = {}
        """Namespace -> time of the first of the current rejections."""
        self._without: set[str] = set()
        """Namespaces whose Models are served without a Lease."""

    def ask(self, namespaces: Collection[str]) -> None:
        """Set the namespaces that have Models."""
        wanted = frozenset(namespaces)
        if wanted != self._wanted:
            self._wanted = wanted
            self._news.set()

    async def run(self) -> None:
        """Claim and renew until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                wait_s = self.look(tasks)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                        await self._news.wait()

    def look(self, tasks: asyncio.TaskGroup) -> float:
        """Start reading and writing the Leases that are due, each in its own task. Returns the seconds until the next
        call; a task that ends makes another call due.
        """
        for kept in (self._claims, self._holders, self._due_s, self._fails_s, self._since_s):
            for gone in kept.keys() - self._wanted:
                del kept[gone]
        self._without &= self._wanted
        self._api.unreadable.keep(self, {(one, CLAIM) for one in self._wanted})
        now_s = self._clock()
        self._since_s = dict.fromkeys(self._wanted, now_s) | self._since_s
        for namespace in sorted(self._wanted - self._in_progress):
            if self._due_s.get(namespace, now_s) <= now_s:
                self._in_progress.add(namespace)
                tasks.create_task(self._settle(namespace))
        self._give_up(now_s)
        self._report()
        due_s = [self._due_s.get(one, now_s) for one in self._wanted - self._in_progress]
        due_s += [self._given_up_s(one) for one in self._pending()]
        return max(0.0, min(due_s, default=math.inf) - now_s)

    def _pending(self) -> frozenset[str]:
        return self._wanted - self._holders.keys()

    def _given_up_s(self, namespace: str) -> float:
        """Return the time from which the installation of a namespace counts as unknown.
        It is later after a rejection, so that `_refused` decides first.
        """
        rejected_s = self._fails_s.get(namespace)
        return self._since_s[namespace] + GRACE_S if rejected_s is None else rejected_s + GRACE_S + 2 * RETRY_S

    def _give_up(self, now_s: float) -> None:
        for namespace in sorted(self._pending()):
            if now_s >= self._given_up_s(namespace):
                self._holders[namespace] = None
                _log.warning("event=model_lease_unavailable lease=%s namespace=%s effect=%r", CLAIM, namespace, UNKNOWN)

    def _report(self) -> None:
        if self._reported != self._holders:
            holders = dict(self._holders)
            self._known(holders)
            self._reported = holders

    async def _settle(self, namespace: str) -> None:
        try:
            async with self._limit:
                await self._hold(namespace)
        except (ApiError, UnreachableError) as error:
            if isinstance(error, ApiError) and not error.is_transient:
                self._refused(namespace, error)
            else:
                _log.debug("event=model_lease_request_failed namespace=%s error=%s", namespace, error)
                self._due_s[namespace] = self._clock() + RETRY_S
        else:
            self._fails_s.pop(namespace, None)
            self._without.discard(namespace)
            self._due_s[namespace] = self._clock() + LOOK_S
        finally:
            self._in_progress.discard(namespace)
            self._news.set()
        self._report()

    def _refused(self, namespace: str, error: ApiError) -> None:
        now_s = self._clock()
        is_over = now_s - self._fails_s.setdefault(namespace, now_s) >= GRACE_S
        if is_over and self._holders.get(namespace) is None:
            self._holders[namespace] = self.me
        if is_over and namespace not in self._without:
            self._without.add(namespace)
            _log.warning(
                "event=model_lease_refused lease=%s namespace=%s effect=%r error=%s", CLAIM, namespace, WITHOUT, error
            )
        again_s = CONFLICT_S if error.status in {NOT_FOUND, CONFLICT} else RETRY_S
        self._due_s[namespace] = now_s + (LOOK_S if is_over else again_s)

    async def _hold(self, namespace: str) -> None:
        """Read the Lease, and acquire or renew it if that is due. Raises ApiError, UnreachableError."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        found: Object | None
        try:
            found = await self._api.get(f"{path}/{CLAIM}")
        except ApiError as error:
            if error.status in NO_RIGHT:
                raise
            if error.status == UNREADABLE:
                self._holders.setdefault(namespace, None)
                lease = Unreadable("Lease", namespace, CLAIM, "", error.message, "coordination.k8s.io/v1")
                self._api.unreadable.add(self, lease, path)
                return
            if error.status != NOT_FOUND:
                raise UnreachableError(str(error)) from error
            found = None
        self._api.unreadable.remove(self, namespace, CLAIM)
        claim, first = self._seen(namespace, found), self._holders.get(namespace) is None
        if claim.holder:
            self._holders[namespace] = claim.holder
        if claim.next(self.me, self._clock()) in {"take", "renew"} or (first and claim.holder == self.me):
            claim = self._seen(namespace, await self._write(path, found))
            self._holders[namespace] = claim.holder

    def _seen(self, namespace: str, found: Object | None) -> Claim:
        spec: Object = (found or {}).get("spec") or {}
        holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
        before = self._claims.get(namespace)
        same = before is not None and (before.holder, before.renewed) == (holder, renewed)
        since_s = before.since_s if before is not None and same else self._clock()
        duration_s = float(spec.get("leaseDurationSeconds") or CLAIM_S)
        self._claims[namespace] = Claim(holder, renewed, duration_s, since_s)
        return self._claims[namespace]

    async def _write(self, path: str, found: Object | None) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Object = (found or {}).get("spec") or {}
        acquired = old.get("acquireTime", now) if old.get("holderIdentity") == self.me else now
        spec = {
            **old, "holderIdentity": self.me, "leaseDurationSeconds": CLAIM_S, "renewTime": now, "acquireTime": acquired
        }  # fmt: skip
        if found is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": CLAIM}, "spec": spec}
            return await self._api.create(path, self._owner.label(body))
        return await self._api.replace(f"{path}/{CLAIM}", self._owner.label({**found, "spec": spec}))
