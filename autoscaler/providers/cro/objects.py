"""ComposabilityRequests and ComposableResources (cro.hpsys.ibm.ie.com/v1alpha1) as objects, and which of them is whose.
Pure.

Owns what we write there and what it means. The operator admits one request for a model and a node, so all who want
Devices there share it, each with a part of its size: ours are our Leases, noted on it one by one; the rest is others'
(Dynamic Device Scaling's, a person's). Each resource of a request is one Device; a label says for which Lease it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from autoscaler.contract import ModelName
from autoscaler.providers.kube import Object

API = "cro.hpsys.ibm.ie.com/v1alpha1"
REQUESTS, RESOURCES = f"/apis/{API}/composabilityrequests", f"/apis/{API}/composableresources"
NOTE = "lease.pilotlight.dev/"
"""Annotation of a request, with the name of a Lease behind it: what of its size is that Lease's (Note)."""
LEASE, MADE = "pilotlight.dev/lease", "pilotlight.dev/made"
"""Labels: of a resource, its Lease; of a request, that it is there only for us."""
MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label of a resource: its request."""
LAST_USED, VICTIM = "cohdi.io/last-used-time", "cohdi.io/delete-device"
"""Annotations of a resource, as Dynamic Device Scaling and the operator read them: while the first is fresh nobody
takes it for idle; one with the second goes first when its request gets smaller."""
ONLINE = "Online"
GOING = frozenset({"Detaching", "Deleting"})
_UNSAFE = re.compile(r"[^a-z0-9-]+")
_NONE_FREE = re.compile(
    r"\b(no|not|none|lack)\b.{0,40}\b(free|available|enough|left|remain\w*)\b"
    r"|\b(insufficient|shortage|exhausted)\b|\bout of (capacity|devices|gpus|resources|stock)\b",
    re.IGNORECASE,
)
"""That there is none free. The operator has no word for it and passes on what the fabric's control says ("FM returned
code: '...', error message: '...'"), of which no list is published: so it is known by the words that one would take.
"""


class LeaseNote(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One Lease of ours on a request."""

    provider: str
    owner: ModelName
    epoch: int
    devices: int
    asked_unix_s: float
    before: int = 0
    """So many Devices its node had before any of ours came."""
    leaving: bool = False
    """It was given back: its Devices are going."""
    installation: str = ""
    """Whose it is; empty: it was noted by a version that did not say so."""


def is_from_provider(note: LeaseNote, provider: str, installation: str) -> bool:
    """Whether a Lease is one of this provider of this installation."""
    return note.provider == provider and note.installation in {"", installation}


class Resource(NamedTuple):
    """One Device on its way to a node, there, or on its way back."""

    name: str
    version: str
    request: str
    model: str
    node: str
    state: str
    device_id: str
    """Its UUID; empty: the fabric has given none yet. With one it comes, whatever anybody wants."""
    error: str
    created: str
    lease: str
    victim: bool
    last_used: str
    going: bool


class Request(NamedTuple):
    """What is wanted of one model on one node, by all together."""

    name: str
    version: str
    model: str
    node: str
    size: int
    error: str
    notes: Mapping[str, LeaseNote]
    """By Lease."""
    made: bool
    """It is there only for us."""
    going: bool

    @property
    def live(self) -> list[str]:
        """Our Leases that were not given back, in the order in which they were ordered."""
        kept = [name for name, note in self.notes.items() if not note.leaving]
        return sorted(kept, key=lambda name: (self.notes[name].asked_unix_s, name))

    @property
    def ours(self) -> int:
        """Devices of those."""
        return sum(self.notes[name].devices for name in self.live)


def read_request(found: Object) -> Request | None:
    """None: it is for something else than GPUs on one node."""
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
        return None  # what somebody else wrote there is no Lease of ours


def read_resource(found: Object) -> Resource:
    """As it is now."""
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
    """By Lease of a request the resources that are its. What is not labelled is the others' first, as far as their
    part of the size goes, for that was there first; a label of a Lease that lives is believed.
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
    """Our Leases of which nothing comes any more: somebody made the request smaller than what we have of it."""
    left, lost = request.size, set[str]()
    for name in sorted(request.live, key=lambda name: request.notes[name].devices - len(shares[name])):
        devices = request.notes[name].devices
        if devices > left:
            lost.add(name)
        else:
            left -= devices
    return frozenset(lost)


def list_stuck_resources(resources: Iterable[Resource], model: str) -> tuple[Resource, ...]:
    """Those that wait for a Device of that model, and of which the operator says that something is wrong."""
    waits = (one for one in resources if one.model == model and not one.device_id and one.error and not one.going)
    return tuple(one for one in waits if one.state != ONLINE)


def find_starved_resource(waits: Iterable[Resource]) -> Resource | None:
    """Of those in vain one that is told that the fabric has none; None: there is no such. What else is wrong (its node
    has no driver, nobody knows its machine) is no word about other nodes.
    """
    return next((one for one in waits if one.node not in one.error and _NONE_FREE.search(one.error)), None)


# --- what changes -----------------------------------------------------------------------------------------------------


def watched_request_state(found: Object, provider: str, installation: str = "") -> object:
    """What of a request may be news for who has Leases on it; None: that provider has none there. The moment at which
    its resources are made is: until they have our label nothing is heard of them.
    """
    request, status = read_request(found), found.get("status") or {}
    if request is None or not any(is_from_provider(note, provider, installation) for note in request.notes.values()):
        return None
    return request._replace(version=""), status.get("state", ""), sorted(status.get("resources") or {})


def watched_resource_state(found: Object, model: str) -> object:
    """What of a resource may be news; None: it is of another model, or nobody has said whose Lease's it is. When it was
    last used is none, for that we say.
    """
    resource = read_resource(found)
    ours = resource.model == model and resource.lease
    return resource._replace(version="", last_used="") if ours else None


# --- what is written --------------------------------------------------------------------------------------------------


def request_name(model: str, node: str) -> str:
    """Of the request that we make for a model on a node."""
    digest = hashlib.sha256(f"{model}/{node}".encode()).hexdigest()[:10]
    return "-".join(part for part in ("pilotlight", _UNSAFE.sub("-", node.lower())[:40].strip("-"), digest) if part)


def build_composability_request(model: str, node: str, size: int, notes: Mapping[str, LeaseNote]) -> Object:
    """One that is there only for us."""
    resource = {"type": "gpu", "model": model, "size": size, "target_node": node, "allocation_policy": "samenode"}
    metadata = {"name": request_name(model, node), "labels": {MADE: "true"}, "annotations": _told(notes)}
    return {"apiVersion": API, "kind": "ComposabilityRequest", "metadata": metadata, "spec": {"resource": resource}}


def build_resize_patch(version: str, size: int, notes: Mapping[str, LeaseNote | None]) -> Object:
    """The patch that makes a request of this version so large, with these notes (None: it is taken away)."""
    metadata = {"resourceVersion": version, "annotations": _told(notes)}
    return {"metadata": metadata, "spec": {"resource": {"size": size}}}


def _told(notes: Mapping[str, LeaseNote | None]) -> dict[str, str | None]:
    return {NOTE + name: None if one is None else msgspec.json.encode(one).decode() for name, one in notes.items()}


def size_without_lease(request: Request, lease: str) -> int:
    """The size that is left of a request when that Lease is given back: never more than it has."""
    others = max(0, request.size - request.ours)
    return min(request.size, others + sum(request.notes[name].devices for name in request.live if name != lease))
