"""ResourceClaims and ResourceSlices (resource.k8s.io/v1): what is kept of anybody's, and our pods' own claims. I/O.

Owns the life of our claims: one is made before the pod that names it, is the pod's from when that is there, so that it
goes with it, and is deleted where there will be no pod. One that pods on a GPU have in common is made by the first, is
each one's from when that is there, and goes with the last: Kubernetes deletes what none of its owners is left of. What
a leader before us left between is tidied up. Promises: a second make of the same decision finds the first; nothing that
another made is taken for ours, or deleted; no start ends with a claim that went under it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoscaler.drivers.kubernetes.objects import pod as pods
from autoscaler.drivers.kubernetes.objects.pod import PodSeen
from autoscaler.kubernetes.api import STRATEGIC, Api, ApiError, Object
from autoscaler.kubernetes.constants import WRITER
from autoscaler.slicing.base import PodFields
from autoscaler.slicing.dra_binding_conditions import Binding, read_bindings
from autoscaler.slicing.dra_claims import API, NVIDIA, Got, read_allocations
from autoscaler.spec.ownership import ANYBODYS, Ownership
from autoscaler.spec.pod import MANAGED_BY, OURS
from autoscaler.state import device_claims as awaited
from autoscaler.state.device_claims import PendingDeviceClaim
from autoscaler.state.world import Replica

PUBLISHED, CLAIMS = f"/apis/{API}/resourceslices", f"/apis/{API}/resourceclaims"
_INTENT = OURS + "intent"
_COMMON = "common"
"""The intent of a claim that is of no one decision."""
CONFLICT = "Conflict"
"""The reason of what may be otherwise when it is tried again."""
GOES = "the ResourceClaim that all on its GPU have is going with those of before: it is made anew when that is gone"
_log = logging.getLogger(__name__)


class ClaimSeen(NamedTuple):
    """What is kept of a claim that has something."""

    got: tuple[Got, ...]
    ours: bool
    users: frozenset[str] = frozenset()
    """Uids of the pods that it is reserved for."""
    bindings: tuple[Binding, ...] = ()
    """What of it must be attached before its pod is bound."""
    awaited: tuple[PendingDeviceClaim, ...] = ()
    """What of that is to come from a fabric of ours."""


def read_claim(claim: Object, namespace: str, owner: Ownership = ANYBODYS) -> ClaimSeen | None:
    """None: it has nothing. `namespace` and `owner`: ours."""
    got, metadata = read_allocations(claim), claim["metadata"]
    labels = metadata.get("labels") or {}
    ours = labels.get(MANAGED_BY) == WRITER and _INTENT in labels and metadata.get("namespace") == namespace
    ours = ours and owner.owns(claim)
    return (
        ClaimSeen(got, ours, _users(claim), read_bindings(claim), awaited.read_pending_device_claims(claim))
        if got
        else None
    )


def read_resource_slice(found: Object) -> Object | None:
    """A ResourceSlice as Slicers read it; None: of a driver that none knows."""
    spec = found["spec"]
    return {"spec": spec} if spec.get("driver") == NVIDIA else None


def group_slices_by_node(published: Iterable[Object]) -> dict[str, list[Object]]:
    """The ResourceSlices of each node. One may be of several; what is for counting only is of its pool's."""
    published, names = list(published), dict[str, set[str]]()
    for one in published:
        names.setdefault(one["spec"]["pool"]["name"], set()).update(_nodes(one))
    found: dict[str, list[Object]] = {}
    for one in published:
        for name in sorted(names[one["spec"]["pool"]["name"]]):
            found.setdefault(name, []).append(one)
    return found


def _nodes(published: Object) -> set[str]:
    spec = published["spec"]
    named = {spec.get("nodeName", ""), *(one.get("nodeName", "") for one in spec.get("devices") or ())}
    return named - {""}


def build_claims(replica: Replica, asks: PodFields | None) -> tuple[Object, ...]:
    """The claims of a Replica's pod, as they are made."""
    own = {MANAGED_BY: WRITER, OURS + "model": pods.format_model_label(replica.model), _INTENT: replica.intent}
    common = {MANAGED_BY: WRITER, _INTENT: _COMMON}
    if asks is None:
        return ()
    names = [one["metadata"]["name"] for one in asks.claims]
    told = [{"name": pods.format_pod_name(name), "labels": common if name in asks.common else own} for name in names]
    return tuple({**one, "metadata": metadata} for one, metadata in zip(asks.claims, told, strict=True))


class Claims:
    """Our pods', in one namespace."""

    def __init__(self, api: Api, namespace: str, owner: Ownership = ANYBODYS) -> None:
        self._api = api
        self._owner = owner
        self.path = f"/apis/{API}/namespaces/{namespace}/resourceclaims"

    async def make(self, claims: Sequence[Object]) -> None:
        """Makes them, or finds that they were made. Raises ApiError, UnreachableError (as all here)."""
        for one in claims:
            try:
                await self._api.create(self.path, one)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                await self._same(one, error)

    async def give(self, claims: Sequence[Object], pod: Object) -> None:
        """They are that pod's. Raises also where it would wait for ever, for one that goes with those before it."""
        for one in claims:
            if not await self._give(one, pod["metadata"]["name"], pod["metadata"]["uid"]) and _is_common(one):
                raise ApiError(409, CONFLICT, GOES)

    async def drop(self, claims: Sequence[Object]) -> None:
        """There will be no pod of theirs."""
        for one in claims:
            try:
                found = await self._api.get(f"{self.path}/{one['metadata']['name']}")
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                continue  # it was not made
            alien = _intent(found) != _intent(one) or not self._owner.owns(found)
            if alien or (_is_common(one) and _owners(found)):
                continue
            await self._drop(found, found["metadata"]["resourceVersion"] if _is_common(one) else None)

    async def tidy(self, there: Callable[[str], Sequence[PodSeen]], making: Callable[[str], bool]) -> None:
        """Of claims that are not their pods' yet: gives each to these, or deletes it where there is none. `there`: the
        pods that name a claim, `making`: whether one is about to be there. They are asked at the last moment, and what
        has changed since it was listed stays: a start may go on beside this.
        """
        try:
            pages = self._api.pages(self.path, {"labelSelector": self._owner.engines})
            found = [one async for page in pages for one in page.items]
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return  # without the kind, or the right to it, none was made
        for one in found:
            name, owners = one["metadata"]["name"], _owners(one)
            if making(name) or (owners and not _is_common(one)):
                continue
            users = there(name)
            for pod in users:
                if pod.uid not in owners:
                    await self._give(one, pod.name, pod.uid)
            if not users and not owners:
                await self._drop(one, one["metadata"]["resourceVersion"])

    async def _same(self, wanted: Object, error: ApiError) -> None:
        """One of its name is there: raises unless it is this very one. What goes is to be made anew then."""
        try:
            found = await self._api.get(f"{self.path}/{wanted['metadata']['name']}")
        except ApiError as gone:
            if gone.status != 404:
                raise
            raise ApiError(409, CONFLICT, GOES) from gone
        if _intent(found) != _intent(wanted) or not self._owner.owns(found):
            raise ApiError(409, error.reason, "a ResourceClaim of its name exists that another made") from error
        if _is_common(wanted) and _goes(found):
            raise ApiError(409, CONFLICT, GOES) from error

    async def _give(self, claim: Object, pod: str, uid: str) -> bool:
        """An owner beside those that it has; whether that pod can have it."""
        body = {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}]}}
        try:
            given = await self._api.patch(f"{self.path}/{claim['metadata']['name']}", body, STRATEGIC)
        except ApiError as error:
            if error.status != 404:
                raise
            _log.warning("the claim of a pod is gone pod=%s", pod)
            return False
        return not _goes(given) or uid in _users(given)

    async def _drop(self, claim: Object, version: str | None = None) -> None:
        path = f"{self.path}/{claim['metadata']['name']}"
        try:
            await self._api.delete(path, uid=claim["metadata"]["uid"], version=version)
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _intent(claim: Object) -> str:
    return str((claim["metadata"].get("labels") or {}).get(_INTENT, ""))


def _is_common(claim: Object) -> bool:
    return _intent(claim) == _COMMON


def _goes(claim: Object) -> bool:
    return "deletionTimestamp" in claim["metadata"]


def _owners(claim: Object) -> frozenset[str]:
    """Uids of the pods whose it is."""
    return frozenset(one["uid"] for one in claim["metadata"].get("ownerReferences") or ())


def _users(claim: Object) -> frozenset[str]:
    """Uids of the pods that it is reserved for."""
    return frozenset(one.get("uid", "") for one in claim.get("status", {}).get("reservedFor") or ())
