"""Writes what adopted workloads show of their adoption into their status, while this process leads. I/O.

Owns the order and the pace: one write at a time, PER_S a second of all workloads together, so that no start waits for
what is merely told. Promises: of workloads at rest nothing is asked; a refusal is said once and harms nobody. It is
written by server-side apply of that one condition, which is ours from then on; all others are the controller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from autoscaler.drivers.kubernetes.adoption.objects import ReleasedWorkload, ShownCondition, WorkloadKey, WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.status import Sign
from autoscaler.drivers.kubernetes.adoption.workload_controller import PLURALS, TRANSIENT
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.resources.conditions import ConditionValue
from autoscaler.text import format_rfc3339

PER_S = 10.0
"""Writes of all workloads in a second."""
RETRY_S = 10.0
"""While the API server is in trouble."""

_log = logging.getLogger(__name__)


class Showing:
    """Of one driver. What it is told while another leads it keeps for when it leads."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._signs: dict[WorkloadKey, Sign] = {}
        """Of each workload that shows something, or is to."""
        self._leads = False
        self._news = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._trouble = ""
        self._said = set[int]()
        """Refusals that were logged, by their status."""

    def see(self, seen: WorkloadSeen | ReleasedWorkload, wanted: ConditionValue | None) -> None:
        """A workload, and what it shall show."""
        sign = self._signs.get(seen.key)
        if sign is None or sign.uid != seen.uid:
            sign = self._signs[seen.key] = Sign(seen.uid)
        sign.see(seen.shown, seen.version, wanted)
        if sign.empty:
            self.forget(seen.key)
        elif sign.due_s() is not None:
            self._news.set()

    def forget(self, key: WorkloadKey) -> None:
        """There is no such workload, or it has nothing to do with us."""
        self._signs.pop(key, None)

    def lead(self) -> None:
        """See SharedDriver."""
        self._leads = True
        for sign in self._signs.values():
            sign.lead()
        self._news.set()

    async def follow(self) -> None:
        """See SharedDriver."""
        self._leads = False
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    async def run(self) -> None:
        """Until cancelled."""
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
        """(whose turn is next, when)."""
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
        except FencedError:  # until we lead anew
            self._leads = False
        except UnreachableError as error:
            self._troubled(str(error))
        except ApiError as error:
            if error.status >= TRANSIENT:
                self._troubled(str(error))
            else:
                self._refused(key, sign, error)
        else:
            self._trouble = ""
            sign.wrote(shown, int(done["metadata"]["resourceVersion"]), self._clock())

    def _refused(self, key: WorkloadKey, sign: Sign, error: ApiError) -> None:
        """A role of before, or a workload that is gone: it is served all the same."""
        self._trouble = ""
        sign.refused()
        if error.status not in self._said:
            self._said.add(error.status)
            _log.warning("condition not written, also of others like it workload=%s error=%s", key, error)

    def _troubled(self, trouble: str) -> None:
        """Said once, until it is over or another."""
        if trouble != self._trouble:
            _log.warning("conditions of adopted workloads wait error=%s", trouble)
        self._trouble = trouble


def _written(key: WorkloadKey, shown: ShownCondition) -> dict[str, str]:
    """As the API server has it."""
    said = shown.said
    written = {
        "type": said.type, "status": said.status, "reason": said.reason, "message": said.message,
        "lastTransitionTime": shown.since,
    }  # fmt: skip
    return written | ({"lastUpdateTime": shown.since} if key.kind == "Deployment" else {})
