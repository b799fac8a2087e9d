"""Writes the conditions of adopted workloads into their status while this process leads. I/O.

Writes one status at a time, at most `PER_S` per second over all workloads, so that no start waits for status updates.
Up-to-date workloads cause no requests. A rejected write is logged once and affects nothing else. The condition is
written by server-side apply, so that Pilotlight owns it; the controller owns all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from autoscaler.drivers.kubernetes.adoption.objects import ReleasedWorkload, ShownCondition, WorkloadKey, WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.status import Sign
from autoscaler.drivers.kubernetes.adoption.workload_runner import PLURALS
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.resources.model_conditions import ConditionValue
from autoscaler.text import format_rfc3339

PER_S = 10.0
"""Writes per second for all workloads."""
RETRY_S = 10.0
"""Pause while the API server is failing."""

_log = logging.getLogger("pilotlight.autoscaler.adoption")


class Showing:
    """The writer of one driver. While another process leads, it only records the desired conditions."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._signs: dict[WorkloadKey, Sign] = {}
        """Each workload that has, or should have, a condition."""
        self._leads = False
        self._news = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._trouble = ""
        self._said = set[int]()
        """HTTP status codes of refused writes that were already logged."""

    def see(self, seen: WorkloadSeen | ReleasedWorkload, wanted: ConditionValue | None) -> None:
        """Record a workload and its desired condition."""
        sign = self._signs.get(seen.key)
        if sign is None or sign.uid != seen.uid:
            sign = self._signs[seen.key] = Sign(seen.uid)
        sign.see(seen.shown, seen.version, wanted)
        if sign.empty:
            self.forget(seen.key)
        elif sign.due_s() is not None:
            self._news.set()

    def forget(self, key: WorkloadKey) -> None:
        """Forget a workload that was deleted or that this installation does not serve."""
        self._signs.pop(key, None)

    def lead(self) -> None:
        """Become the leader, as in `SharedDriver`."""
        self._leads = True
        for sign in self._signs.values():
            sign.lead()
        self._news.set()

    async def follow(self) -> None:
        """Stop leading, as in `SharedDriver`."""
        self._leads = False
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    async def run(self) -> None:
        """Write due conditions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                key, due_s = self._next()
                wait_s = None if due_s is None else due_s - self._clock()
                if key is None or wait_s is None or wait_s > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._news.wait()
                    continue
                self._writing = tasks.create_task(self._write(key, self._signs[key]))
                await asyncio.wait((self._writing,))
                await asyncio.sleep(RETRY_S if self._trouble else 1.0 / PER_S)

    def _next(self) -> tuple[WorkloadKey | None, float | None]:
        """Return (the workload due next, when)."""
        signs = self._signs if self._leads else {}
        due = [(due_s, key) for key, sign in signs.items() if (due_s := sign.due_s()) is not None]
        if not due:
            return None, None
        due_s, key = min(due)
        return key, due_s

    async def _write(self, key: WorkloadKey, sign: Sign) -> None:
        shown = sign.next(format_rfc3339(self._api.unix_s()))
        path = f"/apis/apps/v1/namespaces/{key.namespace}/{PLURALS[key.kind]}/{key.name}/status"
        body: Object = {
            "apiVersion": "apps/v1", "kind": key.kind, "metadata": {"name": key.name, "uid": sign.uid},
            "status": {} if shown is None else {"conditions": [_written(key, shown)]},
        }  # fmt: skip
        try:
            done = await self._api.apply(path, body, WRITER)
        except FencedError:  # until we lead again
            self._leads = False
        except UnreachableError as error:
            self._troubled(str(error))
        except ApiError as error:
            if error.is_transient:
                self._troubled(str(error))
            else:
                self._refused(key, sign, error)
        else:
            self._trouble = ""
            sign.wrote(shown, int(done["metadata"]["resourceVersion"]), self._clock())

    def _refused(self, key: WorkloadKey, sign: Sign, error: ApiError) -> None:
        """Handle a rejected write (missing permission, deleted workload). The workload is served regardless."""
        self._trouble = ""
        sign.refused()
        if error.status not in self._said:
            self._said.add(error.status)
            _log.warning("event=condition_write_refused workload=%r error=%s", str(key), error)

    def _troubled(self, trouble: str) -> None:
        """Log a failure once until it ends or changes."""
        if trouble != self._trouble:
            _log.warning("event=condition_write_failed error=%s", trouble)
        self._trouble = trouble


def _written(key: WorkloadKey, shown: ShownCondition) -> dict[str, str]:
    """Return the condition in the API server's form."""
    said = shown.said
    written = {
        "type": said.type, "status": said.status, "reason": said.reason, "message": said.message,
        "lastTransitionTime": shown.since,
    }  # fmt: skip
    return written | ({"lastUpdateTime": shown.since} if key.kind == "Deployment" else {})
