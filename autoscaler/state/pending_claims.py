"""Attachable fabric devices that were allocated to ResourceClaims before they are attached. Pure.

Owns these types, the names of attachable devices in our ResourceSlices, and the parser for claims (resource.k8s.io/v1)
to which the scheduler allocated such devices. The pod of such a claim is not bound until a condition is written to the
claim (KEP-5007). `autoscaler.provisioning.provisioner` decides what to order,
`autoscaler.provisioning.fabric_device_claims` what to publish and write. Never raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autoscaler.contract import ModelName
from autoscaler.state import StateRecord

DRIVER = "fabric.pilotlight.dev"
RESCHEDULE, FAILED, READY = "FabricDeviceReschedule", "FabricDeviceFailed", "FabricDeviceReady"
"""Conditions of a claim's device, with the names that CoHDI's fabrics use."""
OVER = (RESCHEDULE, FAILED)
"""Conditions that make the scheduler deallocate the device from the claim."""
_OWNER = "claim@"
"""A prefix that is not allowed in the name of a Model."""
OWNER_CHARACTERS_MAX = 200
"""The maximum length of an owner that a fabric stores with a device."""


class PendingDeviceClaim(StateRecord, frozen=True):
    """Devices of one product that one claim waits for, to be attached to one node."""

    namespace: str
    name: str
    uid: str
    provider: str
    node: str
    kind: str
    """A hash of the product, as part of device names (`kind_of`)."""
    devices: tuple[str, ...]
    """The names of the devices in their pool."""
    since: str = ""
    """When the scheduler allocated them, in the format of the API. The claim that waits longest is served first."""

    @property
    def owner(self) -> ModelName:
        """The owner of the capacity order: the claim, by its name."""
        return ModelName(f"{_OWNER}{self.namespace}/{self.name}"[:OWNER_CHARACTERS_MAX])


class AwaitedSeen(StateRecord, frozen=True):
    """An observation: all devices that claims wait for."""

    awaited: tuple[PendingDeviceClaim, ...]


def is_claim_owner(owner: ModelName) -> bool:
    """Return whether capacity was ordered for a claim and not for a Model."""
    return owner.startswith(_OWNER)


def pool_of(provider: str, node: str) -> str:
    """Return the pool of devices that a provider can attach to a node."""
    return f"{provider}/{node}"


def kind_of(product: str) -> str:
    """Return a short hash that identifies a product."""
    return hashlib.sha256(product.encode()).hexdigest()[:8]


def device_of(product: str, number: int) -> str:
    """Return the name of a device of a pool. The name in a claim determines what to attach."""
    return f"gpu-{kind_of(product)}-{number}"


def read_pending_device_claims(claim: Mapping[str, Any]) -> tuple[PendingDeviceClaim, ...]:
    """Return the devices that a claim of a pod waits for, except devices whose conditions are final."""
    status, metadata = _map(claim.get("status")), _map(claim.get("metadata"))
    if not _list(status.get("reservedFor")) or "deletionTimestamp" in metadata:
        return ()
    given = [one for one in map(_map, _list(_devices(status).get("results"))) if one.get("driver") == DRIVER]
    over = {(one.get("pool"), one.get("device")) for one in map(_map, _list(status.get("devices"))) if _is_over(one)}
    if any((one.get("pool"), one.get("device")) in over for one in given):
        return ()  # the scheduler deallocates all of them
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in given:
        provider, _, node = str(one.get("pool", "")).partition("/")
        kind = str(one.get("device", "")).removeprefix("gpu-").rpartition("-")[0]
        found.setdefault((provider, node, kind), []).append(str(one.get("device", "")))
    names = {key: str(metadata.get(key, "")) for key in ("namespace", "name", "uid")}
    names["since"] = str(_map(status.get("allocation")).get("allocationTimestamp", ""))
    return tuple(
        PendingDeviceClaim(provider=provider, node=node, kind=kind, devices=tuple(sorted(devices)), **names)
        for (provider, node, kind), devices in sorted(found.items())
    )


def sort_by_wait(found: Iterable[PendingDeviceClaim]) -> tuple[PendingDeviceClaim, ...]:
    """Sort claims by waiting time, longest first."""
    return tuple(sorted(found, key=lambda one: (one.since, one.uid, one.provider, one.kind)))


def build_device_statuses(
    claim: Mapping[str, Any], conditions: Mapping[str, tuple[str, str, str]], at: str
) -> list[Any]:
    """Build `status.devices` of a claim with one more condition for each device of ours. Entries of others are kept.
    `conditions`: device -> type, reason and message of the condition.
    """
    status = _map(claim.get("status"))
    before = [*map(_map, _list(status.get("devices")))]
    ours = {str(one.get("device")): one for one in before if one.get("driver") == DRIVER}
    others = [one for one in before if one.get("driver") != DRIVER]
    return [*others, *_ours(status, ours, conditions, at)]


def _ours(
    status: Mapping[str, Any],
    before: Mapping[str, Mapping[str, Any]],
    conditions: Mapping[str, tuple[str, str, str]],
    at: str,
) -> Iterator[Any]:
    for one in map(_map, _list(_devices(status).get("results"))):
        device = str(one.get("device", ""))
        if one.get("driver") != DRIVER or device not in conditions:
            continue
        type_, reason, message = conditions[device]
        kept = [each for each in _list(_map(before.get(device)).get("conditions")) if _map(each).get("type") != type_]
        made = {"type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}
        yield {**{key: one[key] for key in ("driver", "pool", "device")}, "conditions": [*kept, made]}


def _is_over(device: Mapping[str, Any]) -> bool:
    conditions = map(_map, _list(device.get("conditions")))
    return device.get("driver") == DRIVER and any(
        one.get("type") in OVER and one.get("status") == "True" for one in conditions
    )


def _devices(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return _map(_map(status.get("allocation")).get("devices"))


def _map(said: Any) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {}


def _list(said: Any) -> list[Any]:
    return said if isinstance(said, list) else []
