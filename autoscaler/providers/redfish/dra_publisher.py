"""Publishes a fabric's attachable devices as ResourceSlices (resource.k8s.io/v1) and reports on claims. I/O.

The content comes from `autoscaler.provisioning.fabric_device_claims`. A pool is one ResourceSlice whose name is derived
from the pool's, so that every leader finds it. A label names the installation, which changes only its own slices.
Slices select their node by name and not by `nodeName`, since a starting kubelet deletes all slices with its `nodeName`.
Slices are updated before claims, so that a claim is not allocated the same device again. Failures: see Reconciler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from autoscaler.providers.kubernetes_access import CONFLICT, NOT_FOUND, AnswerError, ApiServer, Object
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.reconciler import Reconciler
from autoscaler.providers.release_checks import CLAIMS, SLICES
from autoscaler.provisioning.fabric_device_claims import ClaimStatus, DevicePool, Published
from autoscaler.spec.installation_ownership import installation_id
from autoscaler.spec.pod import MANAGED_BY, OURS
from autoscaler.state.pending_claims import DRIVER, build_device_statuses
from autoscaler.text import format_rfc3339

API: Final = "resource.k8s.io/v1"
LOOK_S: Final = 5.0
"""Seconds between updates without a notification, since attachable devices also change with time."""
SWEEP_S: Final = 60.0
"""Seconds between reads of the published slices, since other clients may have changed them."""
HOME: Final = OURS + "home"
_LABEL: Final = "pilotlight-fabric"
UNBOUND: Final = (
    "the API server does not store binding conditions: enable its feature gates DRADeviceBindingConditions and "
    "DRAResourceClaimDeviceStatus, or set `publish: false`"
)


class UnboundError(RefusedError):
    """The API server ignores binding conditions, so pods would be bound before their devices exist."""


class DraPublisher(Reconciler):
    """Publishes the pools and claim statuses of `due`; see the module docstring.

    `place`: Pilotlight's namespace and the name of the leader-election Lease. `due` returns None if they are unknown or
    this process must not publish.
    """

    def __init__(
        self, server: ApiServer, place: tuple[str, str], due: Callable[[], Published | None], clock: Callable[[], float]
    ) -> None:
        super().__init__(self._once, "the attachable devices of fabrics are not published")
        self._server, self._due, self._clock = server, due, clock
        self._home, self._before = installation_id(*place), place[0]
        """Label values of this installation's slices: the current one, and that of earlier versions (the namespace)."""
        self._shown: tuple[DevicePool, ...] | None = None
        """The published pools; None: unknown."""
        self._swept_s = 0.0

    async def _once(self) -> float:
        due, shown = self._due(), self._shown
        self._shown = None
        if due is None:
            return LOOK_S
        if due.pools != shown or (due.pools and self._clock() >= self._swept_s + SWEEP_S):
            await self._publish(due.pools)
            self._swept_s = self._clock()
        for one in due.statuses:
            await self._write_claim_status(one)
        self._shown = due.pools
        return LOOK_S

    # --- ResourceSlices -----------------------------------------------------------------------------------------------

    async def _publish(self, pools: tuple[DevicePool, ...]) -> None:
        existing = await self._server.items(SLICES, labelSelector=f"{MANAGED_BY}={_LABEL}")
        there = {one["metadata"]["name"]: one for one in existing if _home(one) in {self._home, self._before}}
        wanted = {resource_slice_name(pool.name): pool for pool in pools}
        for name, found in sorted(there.items()):
            if name not in wanted:
                await self._server.delete(f"{SLICES}/{name}", version=found["metadata"]["resourceVersion"])
        for name, pool in sorted(wanted.items()):
            await self._put(name, pool, there.get(name))

    async def _put(self, name: str, pool: DevicePool, found: Object | None) -> None:
        """Create or update a slice. A new one is incomplete at first, so nothing is allocated before `_check`."""
        if found is None:
            metadata = {"name": name, "labels": {MANAGED_BY: _LABEL, HOME: self._home}}
            made = {
                "apiVersion": API,
                "kind": "ResourceSlice",
                "metadata": metadata,
                "spec": build_resource_slice_spec(pool, 1, slices=2),
            }
            found = await self._server.create(SLICES, made)
            await self._check(found, build_resource_slice_spec(pool, 1, slices=2))
        generation = int(found["spec"]["pool"]["generation"])
        if _home(found) != self._home or not _is(found, build_resource_slice_spec(pool, generation)):
            metadata = {"resourceVersion": found["metadata"]["resourceVersion"], "labels": {HOME: self._home}}
            spec = build_resource_slice_spec(pool, generation + 1)
            found = await self._server.patch(f"{SLICES}/{name}", {"metadata": metadata, "spec": spec})
            await self._check(found, spec)

    async def _check(self, found: Object, wanted: Object) -> None:
        """Delete a slice that the server stored without binding conditions, and raise UnboundError."""
        if not _is(found, wanted):
            await self._server.delete(f"{SLICES}/{found['metadata']['name']}")
            raise UnboundError(UNBOUND)

    # --- claims -------------------------------------------------------------------------------------------------------

    async def _write_claim_status(self, status: ClaimStatus) -> None:
        """Write the status of a claim, unless it has been deleted or recreated."""
        path = f"{CLAIMS.removesuffix('resourceclaims')}namespaces/{status.namespace}/resourceclaims/{status.name}"
        claim = await self._server.find(path)
        if claim is None or claim["metadata"]["uid"] != status.uid:
            return
        at = format_rfc3339(self._server.unix_s())
        devices = build_device_statuses(claim, status.devices, at)
        if devices == ((claim.get("status") or {}).get("devices") or []):
            return
        version = {"resourceVersion": claim["metadata"]["resourceVersion"]}
        try:
            await self._server.patch(f"{path}/status", {"metadata": version, "status": {"devices": devices}})
        except AnswerError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            self.look()  # it has changed: retry


def resource_slice_name(pool: str) -> str:
    """Name of a pool's ResourceSlice."""
    return f"{_LABEL}-{hashlib.sha256(pool.encode()).hexdigest()[:16]}"


def build_resource_slice_spec(pool: DevicePool, generation: int, slices: int = 1) -> Object:
    """Spec of a pool's only ResourceSlice. With more `slices` the pool is incomplete, and nothing is allocated."""
    return {
        "driver": DRIVER, "pool": {"name": pool.name, "generation": generation, "resourceSliceCount": slices},
        "nodeSelector": _node(pool.node), "devices": [*pool.devices],
    }  # fmt: skip


def _home(found: Object) -> str:
    return str(found["metadata"]["labels"].get(HOME, ""))


def _is(found: Object, wanted: Object) -> bool:
    return {key: found["spec"].get(key) for key in wanted} == wanted


def _node(name: str) -> Mapping[str, Any]:
    chosen = {"key": "metadata.name", "operator": "In", "values": [name]}
    return {"nodeSelectorTerms": [{"matchFields": [chosen]}]}
