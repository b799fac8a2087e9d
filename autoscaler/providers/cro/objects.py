"""Reads and writes ComposabilityRequests and ComposableResources (cro.hpsys.ibm.ie.com/v1alpha1). Pure.

The operator admits one request per model and node, so all clients that want devices there share it, each with a part of
its size. Pilotlight's part is the sum of its capacity orders, each recorded in an annotation; the rest belongs to other
clients (Dynamic Device Scaling, a person). Each resource of a request is one device; a label names its order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from autoscaler.contract import ModelName
from autoscaler.providers.kubernetes_access import Object

API = "cro.hpsys.ibm.ie.com/v1alpha1"
REQUESTS, RESOURCES = f"/apis/{API}/composabilityrequests", f"/apis/{API}/composableresources"
NOTE = "lease.pilotlight.dev/"
"""Prefix of a request's annotations. The suffix is the name of an order, the value its LeaseNote."""
LEASE, MADE = "pilotlight.dev/lease", "pilotlight.dev/made"
"""Labels: of a resource, its order; of a request, that Pilotlight created it."""
MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label of a resource: its request."""
LAST_USED, VICTIM = "cohdi.io/last-used-time", "cohdi.io/delete-device"
"""Annotations of a resource that Dynamic Device Scaling and the operator read. A recent LAST_USED means that the device
is not idle. A resource with VICTIM is removed first when its request shrinks.
"""
ONLINE = "Online"
GOING = frozenset({"Detaching", "Deleting"})
_UNSAFE = re.compile(r"[^a-z0-9-]+")
_NONE_FREE = re.compile(
    r"\b(no|not|none|lack)\b.{0,40}\b(free|available|enough|left|remain\w*)\b"
    r"|\b(insufficient|shortage|exhausted)\b|\bout of (capacity|devices|gpus|resources|stock)\b",
    re.IGNORECASE,
)
"""Matches an error that reports that no device is free.
The operator has no code for it and quotes the fabric manager ("FM returned code: '...', error message: '...'"). Those
messages are not documented, so likely wordings are matched.
"""


class LeaseNote(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One order of Pilotlight on a request."""

    provider: str
    owner: ModelName
    epoch: int
    devices: int
    asked_unix_s: float
    before: int = 0
    """Number of devices that its node had before Pilotlight attached any."""
    leaving: bool = False
    """It was released: its devices are being detached."""
    installation: str = ""
    """The installation; empty if an earlier version wrote the note."""


def is_from_provider(note: LeaseNote, provider: str, installation: str) -> bool:
    """Whether an order is of this provider of this installation."""
    return note.provider == provider and note.installation in {"", installation}


class Resource(NamedTuple):
    """One device that is being attached to a node, is attached, or is being detached."""

    name: str
    version: str
    request: str
    model: str
    node: str
    state: str
    device_id: str
    """Its UUID; empty: the fabric has assigned none yet. Once assigned, the device will be attached."""
    error: str
    created: str
    lease: str
    victim: bool
    last_used: str
    going: bool


class Request(NamedTuple):
    """One ComposabilityRequest: the devices of one model on one node, for all clients."""

    name: str
    version: str
    model: str
    node: str
    size: int
    error: str
    notes: Mapping[str, LeaseNote]
    """By order."""
    made: bool
    """Pilotlight created it."""
    going: bool

    @property
    def live(self) -> list[str]:
        """Pilotlight's orders that were not released, oldest first."""
        kept = [name for name, note in self.notes.items() if not note.leaving]
        return sorted(kept, key=lambda name: (self.notes[name].asked_unix_s, name))

    @property
    def ours(self) -> int:
        """Number of devices of Pilotlight's live orders."""
        return sum(self.notes[name].devices for name in self.live)


def read_request(found: Object) -> Request | None:
    """Read a request; None if it is not for GPUs on one node."""
    metadata, spec = found["metadata"], found["spec"]["resource"]
    if spec["type"] != "gpu" or spec.get("allocation_policy", "samenode") != "samenode":
        return None
    notes = metadata.get("annotations") or {}
    status = found.get("status") or {}
    nodes = {one.get("node_name", "") for one in (status.get("resources") or {}).values()} - {""}
    return Request(
        name=metadata["name"], version=metadata["resourceVersion"], model=spec["model"],
        node=spec.get("target_node") or (nodes.pop() if len(nodes) == 1 else ""), size=spec["size"],
        error=status.get("error") or "", made=MADE in (metadata.get("labels") or {}),
        notes={key.removeprefix(NOTE): note for key, text in notes.items() if (note := _note(key, text)) is not None},
        going="deletionTimestamp" in metadata,
    )  # fmt: skip


def _note(key: str, text: str) -> LeaseNote | None:
    if not key.startswith(NOTE):
        return None
    try:
        return msgspec.json.decode(text, type=LeaseNote)
    except (msgspec.DecodeError, RecursionError):
        return None  # not written by Pilotlight


def read_resource(found: Object) -> Resource:
    """Read a resource."""
    metadata, spec, status = found["metadata"], found["spec"], found.get("status") or {}
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return Resource(
        name=metadata["name"], version=metadata.get("resourceVersion", ""), request=labels.get(MANAGED_BY, ""),
        model=spec["model"], node=spec["target_node"],
        state=status.get("state", ""), device_id=status.get("device_id") or "", error=status.get("error") or "",
        created=metadata.get("creationTimestamp", ""), lease=labels.get(LEASE, ""),
        victim=notes.get(VICTIM) == "true", last_used=notes.get(LAST_USED, ""),
        going="deletionTimestamp" in metadata or status.get("state") in GOING,
    )  # fmt: skip


def assign_resources(request: Request, resources: Iterable[Resource]) -> dict[str, tuple[Resource, ...]]:
    """Map the orders of a request to their resources.
    The label of a live order is trusted. Unlabelled resources count for other clients first, then for our orders.
    """
    mine = [one for one in resources if one.request == request.name]
    mine.sort(key=lambda one: (one.created, one.name))
    found: dict[str, list[Resource]] = {name: [] for name in request.notes}
    live = request.live
    alive = [one for one in mine if not one.going]
    surplus = len(alive) - request.size
    free: list[Resource] = []
    for one in mine:
        leaving = one.lease in found and one.lease not in live
        if one.going:
            if leaving:
                found[one.lease].append(one)
        elif leaving and one.victim and surplus > 0:
            found[one.lease].append(one)
            surplus -= 1
        elif one.lease in live and len(found[one.lease]) < request.notes[one.lease].devices:
            found[one.lease].append(one)
        else:
            free.append(one)
    del free[: max(0, request.size - request.ours)]
    for name in live:
        lacks = request.notes[name].devices - len(found[name])
        found[name] += free[:lacks]
        del free[:lacks]
    return {name: tuple(some) for name, some in found.items()}


def list_undeliverable_leases(request: Request, shares: Mapping[str, Sequence[Resource]]) -> frozenset[str]:
    """Pilotlight's orders that will not be delivered, since another client reduced the request below their sum."""
    left, lost = request.size, set[str]()
    for name in sorted(request.live, key=lambda name: request.notes[name].devices - len(shares[name])):
        devices = request.notes[name].devices
        if devices > left:
            lost.add(name)
        else:
            left -= devices
    return frozenset(lost)


def list_stuck_resources(resources: Iterable[Resource], model: str) -> tuple[Resource, ...]:
    """Resources that wait for a device of the model and report an error."""
    waits = (one for one in resources if one.model == model and not one.device_id and one.error and not one.going)
    return tuple(one for one in waits if one.state != ONLINE)


def find_starved_resource(waits: Iterable[Resource]) -> Resource | None:
    """A stuck resource whose error says that the fabric has no free device; None if there is none.
    Other errors (a node without a driver, an unknown machine) do not affect other nodes.
    """
    return next((one for one in waits if one.node not in one.error and _NONE_FREE.search(one.error)), None)


# --- watches ----------------------------------------------------------------------------------------------------------


def watched_request_state(found: Object, provider: str, installation: str = "") -> object:
    """The parts of a request whose change concerns the provider; None if the provider has no order on it.
    Includes the names of its resources, since resources without our label are not watched.
    """
    request, status = read_request(found), found.get("status") or {}
    if request is None or not any(is_from_provider(note, provider, installation) for note in request.notes.values()):
        return None
    return request._replace(version=""), status.get("state", ""), sorted(status.get("resources") or {})


def watched_resource_state(found: Object, model: str) -> object:
    """The parts of a resource whose change matters; None if it is of another model or has no order's label.
    Excludes the time of last use, which Pilotlight writes.
    """
    resource = read_resource(found)
    ours = resource.model == model and resource.lease
    return resource._replace(version="", last_used="") if ours else None


# --- manifests --------------------------------------------------------------------------------------------------------


def request_name(model: str, node: str) -> str:
    """Name of the request that Pilotlight creates for a model on a node."""
    digest = hashlib.sha256(f"{model}/{node}".encode()).hexdigest()[:10]
    return "-".join(part for part in ("pilotlight", _UNSAFE.sub("-", node.lower())[:40].strip("-"), digest) if part)


def build_composability_request(model: str, node: str, size: int, notes: Mapping[str, LeaseNote]) -> Object:
    """Build a request with only Pilotlight's orders."""
    resource = {"type": "gpu", "model": model, "size": size, "target_node": node, "allocation_policy": "samenode"}
    metadata = {"name": request_name(model, node), "labels": {MADE: "true"}, "annotations": _note_annotations(notes)}
    return {"apiVersion": API, "kind": "ComposabilityRequest", "metadata": metadata, "spec": {"resource": resource}}


def build_resize_patch(version: str, size: int, notes: Mapping[str, LeaseNote | None]) -> Object:
    """Build the patch that sets the size and these annotations (None: removed), if the request has this version."""
    metadata = {"resourceVersion": version, "annotations": _note_annotations(notes)}
    return {"metadata": metadata, "spec": {"resource": {"size": size}}}


def _note_annotations(notes: Mapping[str, LeaseNote | None]) -> dict[str, str | None]:
    return {NOTE + name: None if one is None else msgspec.json.encode(one).decode() for name, one in notes.items()}


def size_without_lease(request: Request, lease: str) -> int:
    """Size of a request after the release of that order; never more than its current size."""
    others = max(0, request.size - request.ours)
    return min(request.size, others + sum(request.notes[name].devices for name in request.live if name != lease))
