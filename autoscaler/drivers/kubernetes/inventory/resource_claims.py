"""ResourceClaims and ResourceSlices (resource.k8s.io/v1): the facts kept about all of them, and our own claims. I/O.

Manages our claims. Each is created before its pod. The pod then becomes its owner, so that Kubernetes deletes both
together. If the pod is not created, the claim is deleted. A claim shared by the pods on a GPU is created by the first
pod, owned by all, and deleted with the last. Claims that previous leaders left behind are cleaned up.

Invariants: a repeated create for a decision finds the existing claim. An object created by others is neither adopted
nor deleted. A start fails if its claim was deleted meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.kubernetes.api import STRATEGIC, Api, ApiError, Object
from autoscaler.kubernetes.constants import WRITER
from autoscaler.slicing.dra import API, NVIDIA, Got, read_allocations
from autoscaler.slicing.dra_binding_conditions import Binding, read_bindings
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.pod import MANAGED_BY, OURS
from autoscaler.state import pending_claims as awaited
from autoscaler.state.pending_claims import PendingDeviceClaim
from autoscaler.state.world import Replica

PUBLISHED, CLAIMS = f"/apis/{API}/resourceslices", f"/apis/{API}/resourceclaims"
_INTENT = OURS + "intent"
_COMMON = "common"
"""The intent of a shared claim, which belongs to no single decision."""
CONFLICT = "Conflict"
"""Reason of an error that a retry may resolve."""
CLAIM_DELETING = (
    "the shared ResourceClaim of its GPU is being deleted, because the pods that used it are gone; it is created again "
    "after that"
)
_log = logging.getLogger("pilotlight.autoscaler.inventory")


class ClaimSeen(NamedTuple):
    """The facts kept about a claim: one with an allocation, or a shared claim of ours."""

    got: tuple[Got, ...]
    ours: bool
    users: frozenset[str] = frozenset()
    """Uids of the pods that it is reserved for."""
    bindings: tuple[Binding, ...] = ()
    """Its devices that must be attached before its pod is bound."""
    awaited: tuple[PendingDeviceClaim, ...] = ()
    """Those of its devices that our fabric must attach."""


def read_claim(claim: Object, namespace: str, owner: Ownership = ANYBODYS) -> ClaimSeen | None:
    """Parse a claim; None if it has no allocation and is not a shared claim of ours. `namespace` and `owner`: ours."""
    got, metadata = read_allocations(claim), claim["metadata"]
    labels = metadata.get("labels") or {}
    ours = labels.get(MANAGED_BY) == WRITER and _INTENT in labels and metadata.get("namespace") == namespace
    ours = ours and owner.owns(claim)
    return (
        ClaimSeen(got, ours, _users(claim), read_bindings(claim), awaited.read_pending_device_claims(claim))
        if got or (ours and labels[_INTENT] == _COMMON)
        else None
    )


def read_resource_slice(found: Object) -> Object | None:
    """Parse a ResourceSlice for the Slicers; None if its driver is unknown."""
    spec = found["spec"]
    return {"spec": spec} if spec.get("driver") == NVIDIA else None


def group_slices_by_node(published: Iterable[Object]) -> dict[str, list[Object]]:
    """Return the ResourceSlices per node. One with only counters belongs to all nodes of its pool."""
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
    """Return the manifests of the claims of a replica's pod."""
    own = {MANAGED_BY: WRITER, OURS + "model": pods.format_model_label(replica.model), _INTENT: replica.intent}
    common = {MANAGED_BY: WRITER, _INTENT: _COMMON}
    if asks is None:
        return ()
    names = [one["metadata"]["name"] for one in asks.claims]
    metadatas = [
        {"name": pods.format_pod_name(name), "labels": common if name in asks.common else own} for name in names
    ]
    return tuple({**one, "metadata": metadata} for one, metadata in zip(asks.claims, metadatas, strict=True))


class Claims:
    """Claims of our pods in one namespace."""

    def __init__(self, api: Api, namespace: str, owner: Ownership = ANYBODYS) -> None:
        self._api = api
        self._owner = owner
        self.path = f"/apis/{API}/namespaces/{namespace}/resourceclaims"

    async def make(self, claims: Sequence[Object]) -> None:
        """Create the claims, or find them. Raises `ApiError`, `UnreachableError` (as do all methods here)."""
        for one in claims:
            try:
                await self._api.create(self.path, one)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                await self._same(one, error)

    async def give(self, claims: Sequence[Object], pod: Object) -> None:
        """Make the pod an owner. Raises `ApiError` if a shared claim is being deleted: the pod would wait forever."""
        for one in claims:
            if not await self._give(one, pod["metadata"]["name"], pod["metadata"]["uid"]) and _is_common(one):
                raise ApiError(409, CONFLICT, CLAIM_DELETING)

    async def drop(self, claims: Sequence[Object]) -> None:
        """Delete the claims of a pod that will not be created."""
        for one in claims:
            try:
                found = await self._api.get(f"{self.path}/{one['metadata']['name']}")
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                continue  # it was not created
            alien = _intent(found) != _intent(one) or not self._owner.owns(found)
            if alien or (_is_common(one) and _owners(found)):
                continue
            await self._drop(found, found["metadata"]["resourceVersion"] if _is_common(one) else None)

    async def tidy(self, there: Callable[[str], Sequence[PodSeen]], making: Callable[[str], bool]) -> None:
        """Make pods the owners of the claims that they name, and delete claims without pods. `there`: pods that name a
        claim; `making`: whether such a pod is being created. Starts may run concurrently: both are called just before
        each write, and a claim that changed since it was listed is skipped.
        """
        try:
            pages = self._api.pages(self.path, {"labelSelector": self._owner.engines})
            found = [one async for page in pages for one in page.items]
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return  # without the resource, or the permission for it, none was created
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
        """Raise `ApiError` unless the existing claim of that name is the wanted one. If the existing claim is gone or
        being deleted, the error has the reason `CONFLICT`, so that the start is retried.
        """
        try:
            found = await self._api.get(f"{self.path}/{wanted['metadata']['name']}")
        except ApiError as gone:
            if gone.status != 404:
                raise
            raise ApiError(409, CONFLICT, CLAIM_DELETING) from gone
        if _intent(found) != _intent(wanted) or not self._owner.owns(found):
            raise ApiError(409, error.reason, "a ResourceClaim of its name exists and is not ours") from error
        if _is_common(wanted) and _is_being_deleted(found):
            raise ApiError(409, CONFLICT, CLAIM_DELETING) from error

    async def _give(self, claim: Object, pod: str, uid: str) -> bool:
        """Add an owner to the claim; return whether that pod can use it."""
        body = {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}]}}
        try:
            given = await self._api.patch(f"{self.path}/{claim['metadata']['name']}", body, STRATEGIC)
        except ApiError as error:
            if error.status != 404:
                raise
            _log.warning("event=claim_missing pod=%s", pod)
            return False
        return not _is_being_deleted(given) or uid in _users(given)

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


def _is_being_deleted(claim: Object) -> bool:
    return "deletionTimestamp" in claim["metadata"]


def _owners(claim: Object) -> frozenset[str]:
    """Return the uids of the pods that own it."""
    return frozenset(one["uid"] for one in claim["metadata"].get("ownerReferences") or ())


def _users(claim: Object) -> frozenset[str]:
    """Return the uids of the pods that it is reserved for."""
    return frozenset(one.get("uid", "") for one in claim.get("status", {}).get("reservedFor") or ())
