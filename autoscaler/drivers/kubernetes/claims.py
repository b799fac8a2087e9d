"""ResourceClaims and ResourceSlices (resource.k8s.io/v1): what is kept of anybody's, and our pods' own claims. I/O.

Owns the life of our claims: one is made before the pod that names it, is the pod's from when that is there, so that it
goes with it, and is deleted where there will be no pod. What a leader before us left between is tidied up. Promises: a
second make of the same decision finds the first; nothing that another made is taken for ours, or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoscaler.drivers.kubernetes import pods
from autoscaler.drivers.kubernetes.api import Api, ApiError, Object
from autoscaler.drivers.kubernetes.vocabulary import WRITER
from autoscaler.podspec import MANAGED_BY, OURS
from autoscaler.slicing.base import PodFields
from autoscaler.slicing.dra import API, NVIDIA, Got, decode
from autoscaler.world import Replica

PUBLISHED, CLAIMS = f"/apis/{API}/resourceslices", f"/apis/{API}/resourceclaims"
_INTENT = OURS + "intent"
_log = logging.getLogger(__name__)


class ClaimSeen(NamedTuple):
    """What is kept of a claim that has something."""

    got: tuple[Got, ...]
    ours: bool
    users: frozenset[str] = frozenset()
    """Uids of the pods that it is reserved for."""


def read(claim: Object, namespace: str) -> ClaimSeen | None:
    """None: it has nothing. `namespace`: ours."""
    got, metadata = decode(claim), claim["metadata"]
    labels = metadata.get("labels") or {}
    ours = labels.get(MANAGED_BY) == WRITER and _INTENT in labels and metadata.get("namespace") == namespace
    users = frozenset(one.get("uid", "") for one in claim.get("status", {}).get("reservedFor") or ())
    return ClaimSeen(got, ours, users) if got else None


def read_published(found: Object) -> Object | None:
    """A ResourceSlice as Slicers read it; None: of a driver that none knows."""
    spec = found["spec"]
    return {"spec": spec} if spec.get("driver") == NVIDIA else None


def by_node(published: Iterable[Object]) -> dict[str, list[Object]]:
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


def wanted(replica: Replica, asks: PodFields | None) -> tuple[Object, ...]:
    """The claims of a Replica's pod, as they are made."""
    labels = {MANAGED_BY: WRITER, OURS + "model": pods.label_of(replica.model), _INTENT: replica.intent}
    return tuple(
        {**one, "metadata": {"name": pods.name_of(one["metadata"]["name"]), "labels": labels}}
        for one in (asks.claims if asks is not None else ())
    )


class Claims:
    """Our pods', in one namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._path = f"/apis/{API}/namespaces/{namespace}/resourceclaims"

    async def make(self, claims: Sequence[Object]) -> None:
        """Makes them, or finds that they were made. Raises ApiError, UnreachableError (as all here)."""
        for one in claims:
            try:
                await self._api.create(self._path, one)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                found = await self._api.get(f"{self._path}/{one['metadata']['name']}")
                if _intent(found) != _intent(one):
                    why = "a ResourceClaim of its name exists that another made"
                    raise ApiError(409, error.reason, why) from error

    async def give(self, claims: Sequence[Object], pod: Object) -> None:
        """They are that pod's."""
        for one in claims:
            await self._give(one, pod["metadata"]["name"], pod["metadata"]["uid"])

    async def drop(self, claims: Sequence[Object]) -> None:
        """There will be no pod of theirs."""
        for one in claims:
            try:
                found = await self._api.get(f"{self._path}/{one['metadata']['name']}")
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                continue  # it was not made
            if _intent(found) == _intent(one):
                await self._drop(found)

    async def tidy(self, there: Callable[[str], str | None], making: Callable[[str], bool]) -> None:
        """Of claims that are no pod's yet: gives each to its pod, or deletes it. `there`: the uid of a pod, `making`:
        whether it is about to be there; both by its name, which its claim has, too. They are asked at the last moment,
        and what has changed since it was listed stays: a start may go on beside this.
        """
        try:
            found = (await self._api.get(self._path, labelSelector=pods.SELECTOR))["items"]
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return  # without the kind, or the right to it, none was made
        for one in found:
            name = one["metadata"]["name"]
            if one["metadata"].get("ownerReferences") or making(name):
                continue
            uid = there(name)
            if uid is not None:
                await self._give(one, name, uid)
            else:
                await self._drop(one, one["metadata"]["resourceVersion"])

    async def _give(self, claim: Object, pod: str, uid: str) -> None:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
        try:
            await self._api.patch(
                f"{self._path}/{claim['metadata']['name']}", {"metadata": {"ownerReferences": [owner]}}
            )
        except ApiError as error:
            if error.status != 404:
                raise
            _log.warning("the claim of a pod is gone pod=%s", pod)

    async def _drop(self, claim: Object, version: str | None = None) -> None:
        path = f"{self._path}/{claim['metadata']['name']}"
        try:
            await self._api.delete(path, uid=claim["metadata"]["uid"], version=version)
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _intent(claim: Object) -> str:
    return str((claim["metadata"].get("labels") or {}).get(_INTENT, ""))
