"""Watches the gateways' pods and reports which gateways exist; a gateway's ID is its pod's name. I/O.

A gateway counts as gone when its pod object is deleted or its containers are proven to have ended. Silence does not
suffice: a silent gateway may still have requests, and its slot allocations count (interfaces, section 6, Known
gateways). A gateway whose pod is ready is known, whether or not it reports.

A silent gateway that is known only from its reports is looked up. If its name matches the gateways' Deployment and the
API server has no such pod, it is gone: its pod ended before the watch began. Gateways with other names may run outside
the cluster, so they are not looked up.
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
"""Interval at which silent gateways are looked up."""
_OF_A_DEPLOYMENT = re.compile(r"[a-z0-9]{1,10}-[a-z0-9]{5}")
"""The suffix after a Deployment's name in the names of its pods."""

GatewayEvents = tuple[GatewaySeen | GatewayGone, ...]


class GatewayPod(NamedTuple):
    """The retained fields of a gateway's pod."""

    name: str
    uid: str
    ready: bool
    ended: bool
    family: str = ""
    """Common name prefix of the Deployment's pods; empty: the pod does not belong to a Deployment."""


def read_gateway_pod(pod: Object) -> GatewayPod:
    """Read the retained fields from the pod object."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    template = (metadata.get("labels") or {}).get(TEMPLATE_HASH, "")
    family = metadata.get("generateName", "").removesuffix(f"{template}-") if template else ""
    return GatewayPod(metadata["name"], metadata["uid"], ready, status.get("phase") in ENDED, family)


def derive_gateway_events(change: Change[GatewayPod]) -> GatewayEvents:
    """The events of a gateway that follow from a change of its pod. A new pod of the same name replaces the old one."""
    old, new = change.old, change.new
    gone = old is not None and not old.ended and (new is None or new.uid != old.uid)
    events: GatewayEvents = (GatewayGone(gateway=GatewayId(old.name)),) if old is not None and gone else ()
    if new is None:
        return events
    if new.ended:
        return (*events, GatewayGone(gateway=GatewayId(new.name)))
    if new.ready and (old is None or not old.ready or gone):
        return (*events, GatewaySeen(gateway=GatewayId(new.name), watched=True))
    return events


class GatewayPods:
    """Reports to `observe` the gateways of a namespace that match `selector`.
    `silent` returns the gateways whose last report has expired and that are not known to be gone.
    """

    def __init__(
        self, api: Api, namespace: str, observe: Callable[[GatewayEvents], None], selector: str = SELECTOR,
        silent: Callable[[], Iterable[GatewayId]] = tuple,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._observe = observe
        self._silent = silent
        self._families = set[str]()
        self._pods = Watched(api, self._path, read_gateway_pod, self._changed, labelSelector=selector)

    async def run(self) -> None:
        """Watch the pods until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            tasks.create_task(self._poll_silent_gateways())

    def _changed(self, changes: list[Change[GatewayPod]]) -> None:
        self._families.update(change.new.family for change in changes if change.new is not None and change.new.family)
        events = tuple(one for change in changes for one in derive_gateway_events(change))
        if events:
            self._observe(events)

    async def _poll_silent_gateways(self) -> None:
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
        """Whether the gateway's pod exists. Queries the API server, which is more current than the watch.
        Also True if the API server does not respond, or if the pod cannot be decoded.
        """
        try:
            pages = [page async for page in self._api.pages(self._path, {"fieldSelector": f"metadata.name={gateway}"})]
        except (ApiError, UnreachableError):
            return True
        return any(page.items or page.unreadable for page in pages)
