"""Which gateways there are, as their pods say: a gateway's id is its pod's name. I/O; it decides nothing.

Owns one watch. Promises: a gateway is said to be gone when its pod's object is, or when its containers are proven to
have ended, and never for mere silence: one that nobody hears may have Calls, and its holds count (interfaces, section
6, Known gateways). One whose pod runs and is ready is known, heard or not. One that is only known from its reports and
is silent is looked for: where its name is that of a pod of the gateways' Deployment, and the API server has none, it is
gone, too: its pod ended before we watched. Of any other name nothing can be said: it may run outside of the cluster.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from autoscaler.contract import GatewayId
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.constants import ENDED, TEMPLATE_HASH
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.state.events import GatewayGone, GatewaySeen

SELECTOR = "app.kubernetes.io/component=gateway"
LOOK_S = 5.0
"""Those that are silent are looked for so often."""
_OF_A_DEPLOYMENT = re.compile(r"[a-z0-9]{1,10}-[a-z0-9]{5}")
"""What follows a Deployment's name in those of its pods."""

Told = tuple[GatewaySeen | GatewayGone, ...]


class GatewayPod(NamedTuple):
    """What is kept of a gateway's pod."""

    name: str
    uid: str
    ready: bool
    ended: bool
    family: str = ""
    """What the names of all pods of its Deployment begin with; empty: it is of none."""


def read_gateway_pod(pod: Object) -> GatewayPod:
    """Of its object."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    template = (metadata.get("labels") or {}).get(TEMPLATE_HASH, "")
    family = metadata.get("generateName", "").removesuffix(f"{template}-") if template else ""
    return GatewayPod(metadata["name"], metadata["uid"], ready, status.get("phase") in ENDED, family)


def derive_gateway_events(change: Change[GatewayPod]) -> Told:
    """What a change of a pod says of its gateway. A namesake under the same name is another: the first is gone."""
    old, new = change.old, change.new
    gone = old is not None and not old.ended and (new is None or new.uid != old.uid)
    said: Told = (GatewayGone(gateway=GatewayId(old.name)),) if old is not None and gone else ()
    if new is None:
        return said
    if new.ended:
        return (*said, GatewayGone(gateway=GatewayId(new.name)))
    if new.ready and (old is None or not old.ready or gone):
        return (*said, GatewaySeen(gateway=GatewayId(new.name), watched=True))
    return said


class GatewayPods:
    """The gateways of a namespace, those that `selector` selects, told to `observe`.

    `silent` gives those that have not been heard of for as long as a report counts, and are not known to be gone.
    """

    def __init__(
        self, api: Api, namespace: str, observe: Callable[[Told], None], selector: str = SELECTOR,
        silent: Callable[[], Iterable[GatewayId]] = tuple,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._observe = observe
        self._silent = silent
        self._families = set[str]()
        self._pods = Watched(api, self._path, read_gateway_pod, self._changed, labelSelector=selector)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            tasks.create_task(self._look_often())

    def _changed(self, changes: list[Change[GatewayPod]]) -> None:
        self._families.update(change.new.family for change in changes if change.new is not None and change.new.family)
        said = tuple(one for change in changes for one in derive_gateway_events(change))
        if said:
            self._observe(said)

    async def _look_often(self) -> None:
        await self._pods.synced.wait()
        while True:
            await asyncio.sleep(LOOK_S)
            for gateway in tuple(self._silent()):
                if self._is_of_a_family(gateway) and not await self._exists(gateway):
                    self._observe((GatewayGone(gateway=gateway),))

    def _is_of_a_family(self, gateway: GatewayId) -> bool:
        return any(
            gateway.startswith(family) and _OF_A_DEPLOYMENT.fullmatch(gateway.removeprefix(family))
            for family in self._families
        )

    async def _exists(self, gateway: GatewayId) -> bool:
        """Asks the API server itself, whose answer is no older than the question; without one it may exist."""
        try:
            found = await self._api.get(self._path, fieldSelector=f"metadata.name={gateway}")
        except (ApiError, UnreachableError):
            return True
        return bool(found["items"])
