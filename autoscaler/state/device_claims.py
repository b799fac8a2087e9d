"""Devices of a fabric that a claim of anybody was given before they are attached. Pure.

Owns these types, what our ResourceSlices call what could be attached, and the reading of claims (resource.k8s.io/v1)
that the scheduler gave some of it: their pod waits, not bound yet, for what is written into the claim (KEP-5007). What
of it is ordered is `autoscaler.provisioning.provisioner`', what is published and written
`autoscaler.provisioning.device_claims`'. Never raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autoscaler.contract import ModelName
from autoscaler.state.operator_orders import StateRecord

DRIVER = "fabric.pilotlight.dev"
RESCHEDULE, FAILED, READY = "FabricDeviceReschedule", "FabricDeviceFailed", "FabricDeviceReady"
"""Conditions of a claim's device, as CoHDI's fabrics name them."""
OVER = (RESCHEDULE, FAILED)
"""Upon any of these the scheduler takes the device back from the claim."""
_OWNER = "claim@"
"""No Model's name has that."""
OWNER_CHARACTERS_MAX = 200
"""Of an owner that a fabric keeps beside what it has."""


class PendingDeviceClaim(StateRecord, frozen=True):
    """What one claim waits for: Devices of one product, to be attached to one node."""

    namespace: str
    name: str
    uid: str
    provider: str
    node: str
    kind: str
    """Of a product, as names of devices have it (`kind_of`)."""
    devices: tuple[str, ...]
    """As its pool names them."""
    since: str = ""
    """When the scheduler gave them, as the API writes it: who waits longest goes first."""

    @property
    def owner(self) -> ModelName:
        """Whose its Lease is: a claim's, as long as it is called so."""
        return ModelName(f"{_OWNER}{self.namespace}/{self.name}"[:OWNER_CHARACTERS_MAX])


class AwaitedSeen(StateRecord, frozen=True):
    """An observation: all that claims wait for."""

    awaited: tuple[PendingDeviceClaim, ...]


def is_claim_owner(owner: ModelName) -> bool:
    """Whether a Lease was ordered for a claim, and not for a Model."""
    return owner.startswith(_OWNER)


def pool_of(provider: str, node: str) -> str:
    """What a provider could attach to a node."""
    return f"{provider}/{node}"


def kind_of(product: str) -> str:
    """Short, and no other product's."""
    return hashlib.sha256(product.encode()).hexdigest()[:8]


def device_of(product: str, number: int) -> str:
    """A device of a pool: the claim that is given it says by that name what is to be attached."""
    return f"gpu-{kind_of(product)}-{number}"


def read_pending_device_claims(claim: Mapping[str, Any]) -> tuple[PendingDeviceClaim, ...]:
    """Of any claim that is a pod's; what is over by its conditions is waited for no more."""
    status, metadata = _map(claim.get("status")), _map(claim.get("metadata"))
    if not _list(status.get("reservedFor")) or "deletionTimestamp" in metadata:
        return ()
    given = [one for one in map(_map, _list(_devices(status).get("results"))) if one.get("driver") == DRIVER]
    over = {(one.get("pool"), one.get("device")) for one in map(_map, _list(status.get("devices"))) if _is_over(one)}
    if any((one.get("pool"), one.get("device")) in over for one in given):
        return ()  # the scheduler takes all of it back
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
    """Who waits longest first."""
    return tuple(sorted(found, key=lambda one: (one.since, one.uid, one.provider, one.kind)))


def build_device_statuses(claim: Mapping[str, Any], told: Mapping[str, tuple[str, str, str]], at: str) -> list[Any]:
    """The `status.devices` of a claim with one more condition of ours each; what others wrote stays. `told`: by device
    the condition's type, reason and message.
    """
    status = _map(claim.get("status"))
    before = [*map(_map, _list(status.get("devices")))]
    ours = {str(one.get("device")): one for one in before if one.get("driver") == DRIVER}
    others = [one for one in before if one.get("driver") != DRIVER]
    return [*others, *_ours(status, ours, told, at)]


def _ours(
    status: Mapping[str, Any],
    before: Mapping[str, Mapping[str, Any]],
    told: Mapping[str, tuple[str, str, str]],
    at: str,
) -> Iterator[Any]:
    for one in map(_map, _list(_devices(status).get("results"))):
        device = str(one.get("device", ""))
        if one.get("driver") != DRIVER or device not in told:
            continue
        type_, reason, message = told[device]
        kept = [each for each in _list(_map(before.get(device)).get("conditions")) if _map(each).get("type") != type_]
        made = {"type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}
        yield {**{key: one[key] for key in ("driver", "pool", "device")}, "conditions": [*kept, made]}


def _is_over(device: Mapping[str, Any]) -> bool:
    told = map(_map, _list(device.get("conditions")))
    return device.get("driver") == DRIVER and any(
        one.get("type") in OVER and one.get("status") == "True" for one in told
    )


def _devices(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return _map(_map(status.get("allocation")).get("devices"))


def _map(said: Any) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {}


def _list(said: Any) -> list[Any]:
    return said if isinstance(said, list) else []
