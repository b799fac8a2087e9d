"""Why a pod waits for its volumes, as its Events say: a missing Secret or ConfigMap, a failed mount. I/O.

A pod's status does not name a failed mount. Events are listed only for pods that have a node and are not prepared, at
growing intervals. One that says that the pod went on (GOES_ON) is newer than one about a volume that was mounted after
all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen as AdoptedPod
from autoscaler.drivers.kubernetes.objects.pod import IMAGE_S_MAX, PodSeen
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.watch import Watched
from autoscaler.text import one_line, redact_addresses

LOOK_S, LOOK_S_MAX = 5.0, 40.0
"""After a pod was bound, and between two looks at one pod: at first, and at most."""
GOES_ON: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
"""Reasons of Events that come when all volumes are mounted."""
FAILURES: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
MESSAGE_MAX: Final = 300

_log = logging.getLogger(__name__)


Pod = PodSeen | AdoptedPod
P = TypeVar("P", PodSeen, AdoptedPod)


class _Look(NamedTuple):
    next_s: float
    pause_s: float


def find_volume_failure(events: Sequence[Object]) -> str:
    """What the newest Event of a pod says, if it is about a volume: reason and message; empty: it is not."""
    known = [event for event in events if event.get("reason") in FAILURES | GOES_ON]
    newest = max(known, key=_when, default=None)
    if newest is None or newest["reason"] not in FAILURES:
        return ""
    return f"{newest['reason']}: {one_line(redact_addresses(str(newest.get('message', ''))), MESSAGE_MAX)}"


def _when(event: Object) -> tuple[str, int]:
    """Times of Events have whole seconds; of two in one second the one that was written later is newer."""
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    version = str(event.get("metadata", {}).get("resourceVersion", ""))
    return str(at)[:19], int(version) if version.isdecimal() else 0


class PodEvents(Generic[P]):
    """Of the pods that `watched` has, all in one namespace. `changed` gets a pod of which something else is known."""

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
        """By the pod's uid: why it waits."""

    def with_failure(self, pod: P) -> P:
        """The pod with the failure that its Events report, if its own status reports none, and the time that it has."""
        found = self._found.get(pod.uid, "")
        return pod._replace(waits=found, patience_s=IMAGE_S_MAX) if found and _waits(pod) else pod

    async def run(self) -> None:
        """Until cancelled. Without the right to list Events nothing is known of volumes."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (ApiError, UnreachableError) as error:
                _log.debug("events of pods are not read error=%s", error)

    async def look(self) -> None:
        """One look at all pods that are due. Raises ApiError, UnreachableError."""
        there = {pod.uid: pod for pod in self._watched.items.values() if _waits(pod)}
        now_s = self._clock()
        self._looks = {uid: self._looks.get(uid, _Look(now_s, LOOK_S)) for uid in there}
        self._found = {uid: said for uid, said in self._found.items() if uid in there}
        for uid, (next_s, pause_s) in list(self._looks.items()):
            if next_s > now_s:
                continue
            self._looks[uid] = _Look(now_s + pause_s, min(2 * pause_s, LOOK_S_MAX))
            listed = await self._api.get(self._path, fieldSelector=f"involvedObject.uid={uid}")
            said = find_volume_failure(listed.get("items") or ())
            if said != self._found.get(uid, ""):
                self._found[uid] = said
                self._changed(there[uid])


def _waits(pod: Pod) -> bool:
    """Whether it waits on its node for no reason that its status says."""
    return bool(pod.bound and pod.waits) and pod.patience_s is None and not (pod.prepared or pod.leaving or pod.ended)
