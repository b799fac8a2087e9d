"""Represents capacity orders as places in a queue of Kueue (kueue.x-k8s.io): placeholder pods and Workloads. Pure.

Defines Pilotlight's labels and annotations, and interprets conditions and admission checks. A place is a pod group of
one, so that its Workload has its name. The pod contains the whole order, for a new leader. An order that waits for
quota or an admission check is pending; it fails if Kueue can never admit its Workload, deactivates or preempts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from autoscaler.contract import ModelName
from autoscaler.providers.kubernetes_access import ENDED, SAID_MAX, Object
from autoscaler.providers.order_annotations import (
    DEVICES,
    EPOCH,
    LEASE,
    OFFER,
    OWNER,
    PROVIDER,
    WRITER,
    provider_label_value,
    read_offer,
)
from autoscaler.providers.provisioning_request.objects import Phase
from autoscaler.spec.pod import GPU, GROUP, GROUP_SIZE, MANAGED_BY, OURS, PLACE, QUEUE
from autoscaler.spec.quantity import whole_number
from autoscaler.state.capacity import NO_MARKS, AcquireOrder, Listed, Marks, Offer
from autoscaler.text import redact_addresses

API: Final = "kueue.x-k8s.io"
VERSIONS: Final = ("v1beta2", "v1beta1")
"""The first served version is used; both have the fields that are read. Kueue before 0.15 has only the second."""
GATE: Final = "kueue.x-k8s.io/admission"
"""Kueue's webhook adds this gate to pods. Placeholders are created with it, so none runs if Kueue is unavailable."""
NAME: Final = OURS + "lease"
"""Annotation of placeholders and of replicas' pods: the order's name."""
PERMANENT: Final = frozenset({"NoMatchingFlavor", "ExceedsMaxQuota", "Misconfigured"})
"""Reasons of QuotaReserved=False that do not change with time."""
SPOILT, OVER = "the annotations of its pod are invalid", "its placeholder pod has terminated"
COMMAND: Final = ("sleep", "infinity")


class QueuePlace(NamedTuple):
    """One order, as its pods describe it."""

    name: str
    provider: str
    offer: Offer
    devices: int
    owner: ModelName
    epoch: int
    kept: bool
    """The placeholder pod exists; otherwise a replica's pod has replaced it."""
    node: str
    leaving: bool
    notes: Mapping[str, str]
    """Pilotlight's annotations on it."""
    wrong: str = ""
    """Why the order has failed; empty: it has not."""


def build_placeholder_pod(order: AcquireOrder, queue: str, template: Object) -> Object:
    """Build the placeholder pod: a replica's pod with the same devices and the command `sleep`."""
    spec = {**template["spec"], "nodeSelector": {**template["spec"].get("nodeSelector", {}), **order.offer.labels}}
    first = spec["containers"][0]
    resources = first.get("resources", {})
    limits = {**resources.get("limits", {}), GPU: str(order.devices)}
    container = {
        **first, "command": list(COMMAND), "resources": {**resources, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": order.id.name, "annotations": {**_notes(order), GROUP_SIZE: "1"},
            "labels": {
                **template.get("metadata", {}).get("labels", {}), MANAGED_BY: WRITER, PLACE: order.id.name,
                **_labels(order.id.provider, queue), GROUP: order.id.name,
            },
        },
        "spec": {
            **spec, "containers": [container], "schedulingGates": [{"name": GATE}], "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
    }  # fmt: skip


def _labels(provider: str, queue: str) -> dict[str, str]:
    return {QUEUE: queue, LEASE: provider_label_value(provider)}


def _notes(order: AcquireOrder) -> dict[str, str]:
    return {
        NAME: order.id.name, PROVIDER: order.id.provider, OFFER: msgspec.json.encode(order.offer).decode(),
        DEVICES: str(order.devices), OWNER: order.owner, EPOCH: str(order.epoch),
    }  # fmt: skip


def read_place(found: Object) -> QueuePlace | None:
    """Read a pod with Pilotlight's label; None for a replica's pod that has ended or has invalid annotations."""
    metadata = found["metadata"]
    notes: dict[str, str] = metadata.get("annotations") or {}
    kept = PLACE in (metadata.get("labels") or {})
    offer, devices, epoch = read_offer(notes), whole_number(notes.get(DEVICES)), whole_number(notes.get(EPOCH))
    wrong = SPOILT if offer is None or devices is None or epoch is None else ""
    if found.get("status", {}).get("phase") in ENDED:
        wrong = OVER
    if wrong and not kept:
        return None
    ours = {name: notes[name] for name in (NAME, PROVIDER, OFFER, DEVICES, OWNER, EPOCH) if name in notes}
    provider = notes.get(PROVIDER, "")
    return QueuePlace(
        metadata["name"] if kept else notes.get(NAME, ""), provider,
        offer or Offer(provider=provider, name="", product="", memory_bytes=0), devices or 1,
        ModelName(notes.get(OWNER, "")), epoch or 0, kept, found["spec"].get("nodeName", ""),
        "deletionTimestamp" in metadata, ours, wrong,
    )  # fmt: skip


def queue_closed_reason(queue: Object | None) -> str:
    """Why a LocalQueue admits nothing now; empty: it admits Workloads."""
    if queue is None:
        return "its LocalQueue does not exist"
    stop = queue.get("spec", {}).get("stopPolicy", "None")
    if stop != "None":
        return f"its LocalQueue is stopped ({stop})"
    active = _condition(queue, "Active")
    if active is not None and active.get("status") == "False":
        return f"its LocalQueue is not active ({_says(active)})"
    return ""


def place_to_lease(one: QueuePlace, workload: Object | None, queue: str) -> Listed:
    """Convert a place to an order. `workload`: of the placeholder pod; None: Kueue has created none yet.

    Once the place is admitted, a replica's pod may replace a placeholder that has no node yet, because both together
    would exceed the quota.
    """
    if one.leaving and one.kept:
        return _lease(one, "leaving")
    marks = Marks(
        annotations={**one.notes}, labels=_labels(one.provider, queue), gates=(GATE,),
        instead=one.name if one.kept else "",
    )  # fmt: skip
    if not one.kept:
        return _lease(one, "here", node=one.node, marks=marks)
    lost = one.wrong or _lost(workload)
    if lost:
        return _lease(one, "failed", says=lost)
    if one.node:
        return _lease(one, "here", node=one.node, marks=marks)
    return _lease(one, "coming", marks=marks if _admitted(workload) else NO_MARKS, says=_awaits(workload))


def _lost(workload: Object | None) -> str:
    if workload is None:
        return ""
    evicted, quota = _condition(workload, "Evicted"), _condition(workload, "QuotaReserved")
    if workload.get("spec", {}).get("active") is False:
        return f"Kueue deactivated its Workload ({_says(evicted) or 'no reason was given'})"
    if evicted is not None and evicted["status"] == "True":
        return f"Kueue evicted its Workload ({_says(evicted)})"
    if quota is not None and quota["status"] == "False" and quota.get("reason") in PERMANENT:
        return f"Kueue can never admit its Workload ({_says(quota)})"
    return ""


def _admitted(workload: Object | None) -> bool:
    said = None if workload is None else _condition(workload, "Admitted")
    return said is not None and said["status"] == "True"


def _awaits(workload: Object | None) -> str:
    if workload is None:
        return "Kueue has not created its Workload yet"
    quota = _condition(workload, "QuotaReserved")
    if quota is None or quota["status"] != "True":
        return f"it waits for quota ({_says(quota) or 'no reason was given'})"
    if not _admitted(workload):
        checks = workload.get("status", {}).get("admissionChecks") or ()
        open_ = [f"{one['name']}: {one.get('message') or one['state']}" for one in checks if one["state"] != "Ready"]
        said = "; ".join(open_) or _says(_condition(workload, "Admitted"))
        return f"it has quota, and waits for admission checks ({redact_addresses(said)})"[:SAID_MAX]
    return "it is admitted and has no node yet"


def _condition(of: Object, kind: str) -> Object | None:
    said = of.get("status", {}).get("conditions") or ()
    return next((one for one in said if one["type"] == kind), None)


def _says(said: Object | None) -> str:
    """Text of a condition. Addresses are redacted first, since a truncated one would not be recognized."""
    if said is None:
        return ""
    return redact_addresses(": ".join(filter(None, (said.get("reason", ""), said.get("message", "")))))[:SAID_MAX]


def _lease(one: QueuePlace, phase: Phase, *, node: str = "", marks: Marks = NO_MARKS, says: str = "") -> Listed:
    return Listed(
        name=one.name, offer=one.offer, devices=one.devices, phase=phase, committed=phase == "here", node=node,
        owner=one.owner, epoch=one.epoch, marks=marks, says=says,
    )  # fmt: skip
