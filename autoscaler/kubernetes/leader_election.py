"""Leader election: reads and writes the Lease and notifies this process of gained and lost leadership. I/O.

`autoscaler.kubernetes.leader_election_state_machine` decides what is written and whether we lead. When leadership is
lost, `follow` is called first, and it stops all work in progress before the Lease can be acquired again. Every request
ends within a fifth of the Lease's duration. The watch on the holder only shortens the wait after a release; decisions
use the Lease as read. Wall-clock times are written for people and never read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Protocol

from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.leader_election_state_machine import RENEW, ElectionCandidate, LeaseRecord, Write
from autoscaler.kubernetes.watch import Watched
from autoscaler.spec.installation_ownership import Ownership, installation_id

JITTER = 0.9
"""Each wait is multiplied by a random factor between this and 1, so that candidates do not write simultaneously."""
RELEASE_S_MAX = 2.0
"""Maximum wait of a terminating process; without a release the next leader waits until the Lease expires."""

log = logging.getLogger("pilotlight.autoscaler.lease")


class Process(Protocol):
    """The process that takes part in the election."""

    def lease_seconds(self) -> int:
        """The duration of the Lease, from Settings."""

    def heard(self) -> Collection[int]:
        """The epochs that gateways and agents have reported."""

    def lead(self, epoch: int) -> None:
        """Start to lead in `epoch`."""

    async def follow(self) -> None:
        """Stop leading; return when no order is in progress."""


class Elector:
    """A candidate for the Lease `name`. `api` must not limit writes by `writes_s`; `identity` must be unique."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._name = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._clock = clock
        self._candidate = ElectionCandidate(identity)
        self._owner = Ownership(installation_id(namespace, name))
        self._found: Object = {}
        """The Lease as last read or written, so that a write keeps foreign labels."""
        self._reported_epoch: int | None = None
        self._begun = False
        """Whether `lead` has returned; False: it raised, and is called again."""
        self._wake = asyncio.Event()
        self._trouble = ""

    def writes_s(self) -> float:
        """For how many more seconds this process may write. Its other API clients send no writes after that."""
        return self._candidate.writes_s(self._clock())

    def in_touch(self) -> bool:
        """Whether the API server answered the last request, at most a fifth of the Lease's duration ago."""
        return self._api.answers

    async def run(self, process: Process) -> None:
        """Run the election until cancelled; call `release` afterwards."""
        holder = Watched(
            self._api, self._path,
            lambda found: str((found.get("spec") or {}).get("holderIdentity") or ""),  # all that the watch needs
            lambda _: self._wake.set(), fieldSelector=f"metadata.name={self._name}",
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(holder.run())
            tasks.create_task(self._campaign(process))

    async def release(self) -> None:
        """Release the Lease so that another process can lead at once. Call it only when no order is in progress."""
        write = self._candidate.release(self._clock())
        if write is None:
            return
        try:
            async with asyncio.timeout(RELEASE_S_MAX):
                await self._write(write)
        except (ApiError, UnreachableError, TimeoutError) as error:
            log.warning("event=lease_release_failed error=%s", error or "timed out")

    async def _campaign(self, process: Process) -> None:
        while True:
            self._wake.clear()
            self._candidate.duration_s = process.lease_seconds()
            try:
                async with asyncio.timeout(self._candidate.duration_s * RENEW) as limit:
                    await self._round(process, limit)
            except (ApiError, UnreachableError, TimeoutError) as error:
                self._candidate.failed()
                self._log_trouble(str(error) or "timed out")
            else:
                self._log_trouble("")
            await self._notify(process)
            now_s = self._clock()
            wait_s = max(0.0, self._candidate.due_s(now_s) - now_s)
            try:
                async with asyncio.timeout(wait_s * random.uniform(JITTER, 1)):  # noqa: S311  jitter needs no cryptographic randomness
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _round(self, process: Process, limit: asyncio.Timeout) -> None:
        """Read and write the Lease once, if due."""
        one = self._candidate
        await self._notify(process, limit)
        if one.must_look(self._clock()):
            one.saw(await self._read(), self._clock())
            await self._notify(process, limit)
        write = one.write(self._clock(), process.heard())
        await self._notify(process, limit)
        if write is not None:
            started_s = self._clock()
            record = await self._write(write)
            one.wrote(write, record, started_s, self._clock())

    async def _notify(self, process: Process, limit: asyncio.Timeout | None = None) -> None:
        """Notify the process of a gained or lost leadership. The time limit is suspended during `follow`."""
        if self._reported_epoch is not None and self._candidate.epoch(self._clock()) != self._reported_epoch:
            log.warning("event=leadership_lost epoch=%d", self._reported_epoch)
            if limit is not None:
                limit.reschedule(None)
            await process.follow()
            self._reported_epoch = None
            if limit is not None:
                limit.reschedule(asyncio.get_running_loop().time() + self._candidate.duration_s * RENEW)
        epoch = self._candidate.epoch(self._clock())
        if epoch is not None and (self._reported_epoch is None or not self._begun):
            log.warning("event=leadership_acquired epoch=%d", epoch)
            self._reported_epoch, self._begun = epoch, False
            process.lead(epoch)
            self._begun = True

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _read(self) -> LeaseRecord | None:
        try:
            found = await self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            self._found = {}
            return None
        return self._record(found)

    async def _write(self, write: Write) -> LeaseRecord:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Object = self._found.get("spec", {})
        spec = {
            **old, "holderIdentity": write.holder, "leaseDurationSeconds": write.duration_s, "renewTime": now,
            "leaseTransitions": write.epoch,
            "acquireTime": now if write.acquires else old.get("acquireTime", now),
        }  # fmt: skip
        if write.version is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            return self._record(await self._api.create(self._path, self._owner.label({**body, "spec": spec})))
        metadata = {**self._found["metadata"], "resourceVersion": write.version}
        body = self._owner.label({**self._found, "metadata": metadata, "spec": spec})
        return self._record(await self._api.replace(f"{self._path}/{self._name}", body))

    def _record(self, found: Object) -> LeaseRecord:
        self._found = found
        spec = found.get("spec") or {}
        return LeaseRecord(
            version=found["metadata"]["resourceVersion"],
            holder=spec.get("holderIdentity") or "",
            epoch=spec.get("leaseTransitions") or 0,
            duration_s=spec.get("leaseDurationSeconds") or self._candidate.duration_s,
            renewed=spec.get("renewTime") or "",
        )

    def _log_trouble(self, trouble: str) -> None:
        """Log each new error once, and its end."""
        if trouble != self._trouble:
            log.warning("event=lease_trouble error=%s", trouble or "none")
            self._trouble = trouble
