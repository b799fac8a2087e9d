"""Represents capacity orders as ProvisioningRequests (autoscaling.x-k8s.io/v1) and reads their conditions. Pure.

The reasons of conditions are those of Cluster Autoscaler and the clouds.
The object contains the whole order, for a new leader. BookingExpired with the reason CONSUMED is not a failure: all
pods of the request exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from autoscaler.contract import ModelName
from autoscaler.providers.kubernetes_access import SAID_MAX, Object
from autoscaler.providers.order_annotations import (
    DEVICES,
    EPOCH,
    LEASE,
    NODE,
    OFFER,
    OWNER,
    PROVIDER,
    WRITER,
    provider_label_value,
    read_offer,
)
from autoscaler.spec.pod import CONSUMES, GPU, MANAGED_BY
from autoscaler.spec.quantity import whole_number
from autoscaler.state.capacity import AcquireOrder, Listed, Marks, Offer
from autoscaler.state.world import NodeId
from autoscaler.text import redact_addresses, unix_seconds

API: Final = "autoscaling.x-k8s.io/v1"
CHECK: Final = "check-capacity.autoscaling.x-k8s.io"
"""Books room on existing nodes; adds none."""
ATOMIC: Final = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
GKE: Final = "queued-provisioning.gke.io"
"""Dynamic Workload Scheduler: adds nodes at an unknown time, and removes them after maxRunDurationSeconds."""
VALID_S: Final = 3600
"""Cluster Autoscaler retries for this many seconds; Pilotlight gives up sooner (`DUE_S` in `capacity.lead_times`)."""
CONSUMED: Final = "CapacityBookingConsumed"
Phase = Literal["coming", "here", "leaving", "failed"]
_QUOTA = re.compile(r"quota", re.IGNORECASE)
_REQUEST_LABEL = re.compile(r"provisioning-request")


class RequestCondition(NamedTuple):
    """One condition of a request."""

    holds: bool
    reason: str
    message: str
    since_unix_s: float

    def says(self) -> str:
        """Reason and message. Redacts addresses before truncating: a truncated one would not be recognized."""
        return redact_addresses(": ".join(filter(None, (self.reason, self.message))))[:SAID_MAX]


class CandidateNode(NamedTuple):
    """A node that may belong to a request."""

    name: NodeId
    labels: Mapping[str, str]
    created_unix_s: float
    gpus: int
    """Number of allocatable GPUs."""


class Booking(NamedTuple):
    """One ProvisioningRequest of Pilotlight."""

    name: str
    provider: str
    class_name: str
    offer: Offer
    devices: int
    owner: ModelName
    epoch: int
    created_unix_s: float
    version: str
    leaving: bool
    node: str
    """Its recorded node; empty: none yet."""
    conditions: Mapping[str, RequestCondition]
    details: Mapping[str, str]
    spoilt: bool = False
    """Its annotations are invalid."""

    def holds(self, kind: str) -> bool:
        """Whether a condition is true."""
        return kind in self.conditions and self.conditions[kind].holds


# --- manifests --------------------------------------------------------------------------------------------------------


def build_pod_template(order: AcquireOrder, pod: Object) -> Object:
    """Build the PodTemplate: a replica's pod with all devices of the order, on nodes with the offer's labels."""
    spec = {**pod["spec"], "nodeSelector": {**pod["spec"].get("nodeSelector", {}), **order.offer.labels}}
    first, *others = spec["containers"]
    resources = first.get("resources", {})
    limits = {**resources.get("limits", {}), GPU: str(order.devices * order.offer.parts)}
    requests = {name: amount for name, amount in resources.get("requests", {}).items() if name != GPU}
    spec["containers"] = [{**first, "resources": {**resources, "requests": requests, "limits": limits}}, *others]
    return {
        "apiVersion": "v1", "kind": "PodTemplate", "metadata": _metadata(order),
        "template": {"metadata": pod.get("metadata", {}), "spec": spec},
    }  # fmt: skip


def build_provisioning_request(order: AcquireOrder, class_name: str, max_run_s: float | None) -> Object:
    """Build the ProvisioningRequest for one pod of its template, and so for one node."""
    name = order.id.name
    return {
        "apiVersion": API, "kind": "ProvisioningRequest", "metadata": _metadata(order),
        "spec": {
            "provisioningClassName": class_name, "parameters": _parameters(class_name, max_run_s),
            "podSets": [{"count": 1, "podTemplateRef": {"name": name}}],
        },
    }  # fmt: skip


def _parameters(class_name: str, max_run_s: float | None) -> dict[str, str]:
    if class_name == CHECK:
        return {"noRetry": "true"}
    if class_name == ATOMIC:
        return {"ValidUntilSeconds": str(VALID_S)}
    return {} if max_run_s is None else {"maxRunDurationSeconds": str(int(max_run_s))}


def _metadata(order: AcquireOrder) -> Object:
    notes = {
        PROVIDER: order.id.provider, OFFER: msgspec.json.encode(order.offer).decode(), DEVICES: str(order.devices),
        OWNER: order.owner, EPOCH: str(order.epoch),
    }  # fmt: skip
    labels = {MANAGED_BY: WRITER, LEASE: provider_label_value(order.id.provider)}
    return {"name": order.id.name, "labels": labels, "annotations": notes}


# --- parsing ----------------------------------------------------------------------------------------------------------


def read_booking(found: Object) -> Booking:
    """Read an object with Pilotlight's label: a request, or its PodTemplate, which has no conditions."""
    metadata, status = found["metadata"], found.get("status") or {}
    notes: dict[str, str] = metadata.get("annotations") or {}
    offer = read_offer(notes)
    devices, epoch = whole_number(notes.get(DEVICES)), whole_number(notes.get(EPOCH))
    spoilt = offer is None or devices is None or epoch is None
    provider = notes.get(PROVIDER, "")
    return Booking(
        metadata["name"], provider, found.get("spec", {}).get("provisioningClassName", ""),
        offer or Offer(provider=provider, name="", product="", memory_bytes=0), devices or 1,
        ModelName(notes.get(OWNER, "")), epoch or 0, unix_seconds(metadata["creationTimestamp"]),
        str(metadata.get("resourceVersion", "")), "deletionTimestamp" in metadata, notes.get(NODE, ""),
        {one["type"]: _condition(one) for one in status.get("conditions") or ()},
        status.get("provisioningClassDetails") or {}, spoilt,
    )  # fmt: skip


def read_node(found: Object) -> CandidateNode:
    """Read a Node."""
    metadata = found["metadata"]
    has: dict[str, str] = (found.get("status") or {}).get("allocatable") or {}
    return CandidateNode(
        NodeId(metadata["name"]), metadata.get("labels") or {}, unix_seconds(metadata["creationTimestamp"]),
        whole_number(str(has.get(GPU, "0"))) or 0,
    )  # fmt: skip


def _condition(said: Object) -> RequestCondition:
    moment = said.get("lastTransitionTime")
    since_s = unix_seconds(moment) if moment else 0.0
    return RequestCondition(said.get("status") == "True", said.get("reason", ""), said.get("message", ""), since_s)


# --- nodes of requests ------------------------------------------------------------------------------------------------


def assign_nodes(
    bookings: Iterable[Booking], nodes: Mapping[str, CandidateNode], bound: Mapping[str, str]
) -> dict[str, str]:
    """Map bookings to their nodes, by name, as far as they are known.
    In this order: the recorded node, that of its pod (`bound`), one labelled for it, the oldest free one created later.
    """
    all_of = sorted((one for one in bookings if not one.leaving), key=lambda one: (_granted(one), one.name))
    found = {one.name: one.node or bound.get(one.name, "") or _named(one, nodes) for one in all_of}
    taken = {node for node in found.values() if node}
    for one in all_of:
        if found[one.name] or not one.holds("Provisioned") or one.class_name == CHECK or _details(one):
            continue
        fits = (
            node for node in sorted(nodes.values(), key=lambda node: (node.created_unix_s, node.name))
            if node.name not in taken and node.created_unix_s >= one.created_unix_s
            and one.offer.labels.items() <= node.labels.items()
        )  # fmt: skip
        node = next(fits, None)
        if node is not None:
            found[one.name] = node.name
            taken.add(node.name)
    return {name: node for name, node in found.items() if node}


def _granted(one: Booking) -> float:
    said = one.conditions.get("Provisioned")
    return one.created_unix_s if said is None or not said.holds else said.since_unix_s


def _details(one: Booking) -> frozenset[str]:
    """Values that label its nodes (`ResizeRequestName`)."""
    return frozenset(value for name, value in one.details.items() if name.startswith("ResizeRequest"))


def _named(one: Booking, nodes: Mapping[str, CandidateNode]) -> str:
    said = _details(one)
    for name, node in sorted(nodes.items()):
        if said and any(value in said for label, value in node.labels.items() if _REQUEST_LABEL.search(label)):
            return name
    return ""


# --- state ------------------------------------------------------------------------------------------------------------


def booking_to_lease(one: Booking, node: CandidateNode | None, named: str, ends_s: float | None) -> Listed:
    """Convert a booking to an order. `named`: its node, if known; `node`: that node, if it exists."""
    if one.leaving:
        return _lease(one, "leaving")
    if one.spoilt:
        why = "the annotations of its ProvisioningRequest are invalid"
        return _lease(one, "failed", says=why, node=named)
    if named and node is None:
        return _lease(one, "failed", says=f"its node {named} was deleted", node=named)
    if node is not None:
        asked = one.devices * one.offer.parts
        if one.class_name != CHECK and 0 < node.gpus < asked:
            why = f"its node {named} has {node.gpus} of {asked} devices"  # others are not registered, or unhealthy
            return _lease(one, "failed", says=why, node=named, ends_s=ends_s)
        return _lease(one, "here", committed=True, node=named, ends_s=ends_s, says=_warned(one))
    why = _why_failed(one)
    if why:
        return _lease(one, "failed", says=why)
    granted = one.class_name != CHECK and one.holds("Provisioned")
    return _lease(one, "coming", committed=granted, says=_awaits(one), dry=is_quota_exhausted(one))


def template_to_lease(one: Booking) -> Listed:
    """Convert a PodTemplate without a request to a failed order."""
    return _lease(one, "failed", says="its ProvisioningRequest was not created or was deleted")


def node_label_selector(one: Booking) -> str:
    """Label selector of the nodes that may belong to the booking."""
    return ",".join(f"{name}={value}" for name, value in sorted(one.offer.labels.items()))


def ends_unix_s(one: Booking) -> float | None:
    """When the granted capacity is revoked; None: never, or unknown."""
    revoked, granted = one.conditions.get("CapacityRevoked"), one.conditions.get("Provisioned")
    if revoked is not None and revoked.holds:
        return revoked.since_unix_s
    if one.offer.lasts_s is None or granted is None or not granted.holds:
        return None
    return granted.since_unix_s + one.offer.lasts_s


def _why_failed(one: Booking) -> str:
    for kind, why in (
        ("Failed", "its request failed"), ("CapacityRevoked", "its capacity was revoked"),
        ("BookingExpired", "its booking expired unused"),
    ):  # fmt: skip
        said = one.conditions.get(kind)
        if said is not None and said.holds and said.reason != CONSUMED:
            return format_reason(why, said)
    refused = one.conditions.get("Accepted")
    return format_reason("its request was not accepted", refused) if refused is not None and not refused.holds else ""


def is_quota_exhausted(one: Booking) -> bool:
    """Whether it waits for an exhausted quota, as another request would."""
    said = one.conditions.get("Provisioned")
    return said is not None and not said.holds and _is_quota(said) and not one.leaving


def _is_quota(said: RequestCondition) -> bool:
    return bool(_QUOTA.search(said.reason) or _QUOTA.search(said.message))


def _awaits(one: Booking) -> str:
    granted, accepted = one.conditions.get("Provisioned"), one.conditions.get("Accepted")
    if granted is None:
        return "it waits in the queue" if accepted is not None else "its request is not accepted yet"
    if granted.holds:
        return "its booking is used" if one.holds("BookingExpired") else "it is granted; its node has not joined yet"
    return format_reason("it is not provisioned yet", granted)


def _warned(one: Booking) -> str:
    said = one.conditions.get("CapacityRevoked")
    return format_reason("its capacity is being revoked", said) if said is not None and said.holds else ""


def format_reason(why: str, said: RequestCondition) -> str:
    """Combine our reason with the cloud's. If a quota is exhausted, the cloud quota is reported instead of ours."""
    return f"{'the quota of the cloud is used up' if _is_quota(said) else why} ({said.says() or 'no reason was given'})"


def _lease(
    one: Booking, phase: Phase, *, committed: bool = False, node: str = "", ends_s: float | None = None,
    says: str = "", dry: bool = False,
) -> Listed:  # fmt: skip
    notes = dict(zip(CONSUMES, (one.name, one.class_name), strict=True)) if one.holds("Provisioned") else {}
    marks = Marks(annotations=notes)
    return Listed(
        name=one.name, offer=one.offer, devices=one.devices, phase=phase, committed=committed, node=node,
        owner=one.owner, epoch=one.epoch, ends_s=ends_s, marks=marks, says=says, dry=dry,
    )  # fmt: skip
