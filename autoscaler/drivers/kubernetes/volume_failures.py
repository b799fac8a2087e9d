"""Reads from Events why a pod waits for volumes: a missing Secret or ConfigMap, a failed mount. I/O.

A pod's status does not report a failed mount. Events are listed only for pods that have a node and are not prepared, at
growing intervals. A newer Event with a reason in `GOES_ON` shows that the volume was mounted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen as AdoptedPod
from autoscaler.drivers.kubernetes.objects.pod_state import IMAGE_S_MAX, PodSeen
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.unreadable_objects import Name
from autoscaler.kubernetes.watch import VERSION_DIGITS_MAX, Watched
from autoscaler.text import one_line, redact_addresses

LOOK_S, LOOK_S_MAX = 5.0, 10.0
"""First interval between two lists of one pod's Events, and the longest; it doubles each time."""
GOES_ON: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
"""Reasons of Events that follow once all volumes are mounted."""
FAILURES: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
MESSAGE_MAX: Final = 300

_log = logging.getLogger("pilotlight.autoscaler.pods")


Pod = PodSeen | AdoptedPod
P = TypeVar("P", PodSeen, AdoptedPod)


class _Look(NamedTuple):
    next_s: float
    pause_s: float


def find_volume_failure(events: Sequence[Object]) -> str:
    """Return reason and message of a pod's newest Event if that reports a volume failure, else an empty text."""
    known = [event for event in events if event.get("reason") in FAILURES | GOES_ON]
    newest = max(known, key=_when, default=None)
    if newest is None or newest["reason"] not in FAILURES:
        return ""
    return f"{newest['reason']}: {one_line(redact_addresses(str(newest.get('message', ''))), MESSAGE_MAX)}"


def _when(event: Object) -> tuple[str, int]:
    """Return a sort key: the time of an Event in whole seconds, then its resourceVersion."""
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    version = str(event.get("metadata", {}).get("resourceVersion", ""))
    return str(at)[:19], int(version) if version.isdecimal() and len(version) <= VERSION_DIGITS_MAX else 0


class PodEvents(Generic[P]):
    """Volume failures of the pods in `watched`, of one namespace. `changed` receives pods whose failure changed."""

    def __init__(
        self, api: Api, namespace: str, watched: Watched[P], changed: Callable[[P], None], clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/events"
        self._watched: Watched[P] = watched
        self._changed: Callable[[P], None] = changed
        self._clock = clock
        self._looks: dict[str, _Look] = {}
        self._found: dict[str, str] = {}
        """Pod uid -> why the pod waits."""
        self._unreadable: dict[str, frozenset[Name]] = {}
        """Pod uid -> its Events that cannot be decoded."""

    def with_failure(self, pod: P) -> P:
        """Return the pod. If its own status reports no failure, add the one from its Events, with a time limit."""
        found = self._found.get(pod.uid, "")
        return pod._replace(waits=found, patience_s=IMAGE_S_MAX) if found and _waits(pod) else pod

    async def run(self) -> None:
        """Poll until cancelled. Without the permission to list Events, volume failures are unknown."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """List the Events of all pods that are due. A failure for one pod does not affect the others."""
        there = {pod.uid: pod for pod in self._watched.items.values() if _waits(pod)}
        now_s = self._clock()
        self._looks = {uid: self._looks.get(uid, _Look(now_s, LOOK_S)) for uid in there}
        self._found = {uid: said for uid, said in self._found.items() if uid in there}
        self._unreadable = {uid: names for uid, names in self._unreadable.items() if uid in there}
        for uid, (next_s, pause_s) in list(self._looks.items()):
            if next_s > now_s:
                continue
            self._looks[uid] = _Look(now_s + pause_s, min(2 * pause_s, LOOK_S_MAX))
            try:
                said = find_volume_failure(await self._list(uid))
            except (ApiError, UnreachableError) as error:
                _log.debug("event=pod_events_read_failed error=%s", error)
                continue
            if said != self._found.get(uid, ""):
                self._found[uid] = said
                self._changed(there[uid])

        self._api.unreadable.keep(self, frozenset[Name]().union(*self._unreadable.values()))

    async def _list(self, uid: str) -> list[Object]:
        """Return the Events of a pod that can be decoded, and record the others."""
        pages = [page async for page in self._api.pages(self._path, {"fieldSelector": f"involvedObject.uid={uid}"})]
        unreadable = [one for page in pages for one in page.unreadable]
        for one in unreadable:
            self._api.unreadable.add(self, one, self._path)
        self._unreadable[uid] = frozenset((one.namespace, one.name) for one in unreadable)
        return [event for page in pages for event in page.items]


def _waits(pod: Pod) -> bool:
    """Return whether the pod waits on its node and its status gives no reason."""
    return bool(pod.bound and pod.waits) and pod.patience_s is None and not (pod.prepared or pod.leaving or pod.ended)
