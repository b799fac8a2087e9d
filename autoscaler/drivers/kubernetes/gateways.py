"""Which gateways there are, as their pods say: a gateway's id is its pod's name. I/O; it decides nothing.

Owns one watch. Promises: a gateway is said to be gone when its pod's object is, or when its containers are proven to
have ended, and never for mere silence: one that nobody hears may have Calls, and its holds count (interfaces, section
6, Known gateways). One whose pod runs and is ready is known, heard or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autoscaler.contract import GatewayId
from autoscaler.drivers.kubernetes.api import Api, Object
from autoscaler.drivers.kubernetes.watching import Change, Watched
from autoscaler.world import GatewayGone, GatewaySeen

SELECTOR = "app.kubernetes.io/component=gateway"
ENDED = frozenset(("Succeeded", "Failed"))

Told = tuple[GatewaySeen | GatewayGone, ...]


class GatewayPod(NamedTuple):
    """What is kept of a gateway's pod."""

    name: str
    uid: str
    ready: bool
    ended: bool


def read(pod: Object) -> GatewayPod:
    """Of its object."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    return GatewayPod(metadata["name"], metadata["uid"], ready, status.get("phase") in ENDED)


def told(change: Change[GatewayPod]) -> Told:
    """What a change of a pod says of its gateway. A namesake under the same name is another: the first is gone."""
    old, new = change.old, change.new
    gone = old is not None and not old.ended and (new is None or new.uid != old.uid)
    said: Told = (GatewayGone(gateway=GatewayId(old.name)),) if old is not None and gone else ()
    if new is None:
        return said
    if new.ended:
        return (*said, GatewayGone(gateway=GatewayId(new.name)))
    if new.ready and (old is None or not old.ready or gone):
        return (*said, GatewaySeen(gateway=GatewayId(new.name)))
    return said


class GatewayPods:
    """The gateways of a namespace, those that `selector` selects, told to `observe`."""

    def __init__(self, api: Api, namespace: str, observe: Callable[[Told], None], selector: str = SELECTOR) -> None:
        self._observe = observe
        self._pods = Watched(api, f"/api/v1/namespaces/{namespace}/pods", read, self._changed, labelSelector=selector)

    async def run(self) -> None:
        """Until cancelled."""
        await self._pods.run()

    def _changed(self, changes: list[Change[GatewayPod]]) -> None:
        said = tuple(one for change in changes for one in told(change))
        if said:
            self._observe(said)
