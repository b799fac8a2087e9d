"""Represents a capacity order as a NodeClaim of Karpenter: builds the manifest and reads its state. Pure.

A NodeClaim is used instead of a pending pod: Pilotlight chooses its name, so that every leader finds the order by name;
it identifies the node of the order; and deleting it releases the node. Labels, taints, hashes and expiry are those of
the pool's template, as in Karpenter's own NodeClaims. Until a replica runs on its node, the NodeClaim has the
annotation against disruption; otherwise Karpenter would consolidate the empty node before weights are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace

from autoscaler.providers.karpenter.nodepool import GROUP, NodePool, Variant, build_requirements
from autoscaler.providers.kubernetes_access import Object
from autoscaler.providers.order_annotations import PROVIDER, WRITER, build_lease_annotations, read_lease_annotations
from autoscaler.spec.pod import DO_NOT_DISRUPT, GPU, MANAGED_BY
from autoscaler.state.capacity import AcquireOrder, Listed
from autoscaler.text import unix_seconds

REGISTERED_S_MAX = 600.0
"""A registered node that reports no GPU for this many seconds has failed; Karpenter itself waits forever."""
UNREGISTERED = "ResourceNotRegistered"
_DURATION = re.compile(r"([0-9]{1,15})(h|m|s)")
DURATION_S_MAX = (1 << 63) / 1e9
"""Go's longest duration; Karpenter cannot read a longer one."""
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def nodeclaim_path(version: str, name: str = "") -> str:
    """API path of all NodeClaims, or of one."""
    return f"/apis/{GROUP}/{version}/nodeclaims" + (f"/{name}" if name else "")


def build_nodeclaim(order: AcquireOrder, pool: NodePool, variant: Variant, requests: Mapping[str, str]) -> Object:
    """Build the NodeClaim of an order.
    `requests`: the owner's resource requests without GPUs, so that the node has room for its pod.
    """
    reference: Object = pool.spec.get("nodeClassRef") or {}
    group = reference.get("group") or str(reference.get("apiVersion", "")).partition("/")[0]
    labels = {**pool.labels, **variant.labels}
    if group and reference.get("name"):
        labels[f"{group}/{str(reference.get('kind', '')).lower()}"] = reference["name"]
    spec = {key: said for key, said in pool.spec.items() if key not in {"requirements", "resources"}}
    spec["requirements"] = list(build_requirements(pool, variant.pinned))
    devices = {GPU: str(variant.shape.devices)} if variant.shape.counted else {}
    if devices or requests:
        spec["resources"] = {"requests": {**requests, **devices}}
    return {
        "apiVersion": f"{GROUP}/{pool.version}",
        "kind": "NodeClaim",
        "metadata": {
            "name": order.id.name,
            "labels": {**labels, MANAGED_BY: WRITER, PROVIDER: order.id.provider},
            "annotations": {
                **pool.annotations,
                **pool.hashes,
                DO_NOT_DISRUPT: "true",
                **build_lease_annotations(order),
            },
            "ownerReferences": [
                {"apiVersion": f"{GROUP}/{pool.version}", "kind": "NodePool", "name": pool.name, "uid": pool.uid}
            ],
        },
        "spec": spec,
    }


def read_lease(claim: Object, provider: str, unix_s: float, now_s: float, expire_after: str = "Never") -> Listed:
    """Read an order from its NodeClaim. `unix_s`: current time by the server's clock; `now_s`: by the `World`'s.
    `expire_after`: used for claims without their own (v1beta1).
    """
    metadata, status = claim["metadata"], claim.get("status") or {}
    conditions: dict[str, Object] = {one["type"]: one for one in status.get("conditions") or ()}
    one = read_lease_annotations(claim, provider)
    lasts_s = parse_duration_s(str(claim["spec"].get("expireAfter") or expire_after))
    ends_unix_s = None if lasts_s is None else unix_seconds(metadata["creationTimestamp"]) + lasts_s
    says, ends_s = _troubled(conditions), None if ends_unix_s is None else now_s + ends_unix_s - unix_s
    going = conditions.get("DisruptionReason", {})
    if going.get("status") == "True":
        says, ends_s = f"Karpenter is removing it: {going.get('reason') or 'no reason was given'}", now_s
    one = replace(
        one, node=str(status.get("nodeName") or ""), committed=_true(conditions, "Launched"), ends_s=ends_s, says=says
    )
    if "deletionTimestamp" in metadata:
        return replace(one, phase="leaving", says=says or "its NodeClaim is being deleted", ends_s=now_s)
    if _true(conditions, "Initialized") and one.node:
        return replace(one, phase="here", committed=True)
    return replace(one, phase="failed" if _gives_up(conditions, unix_s) else "coming")


def has_do_not_disrupt(claim: Object) -> bool:
    """Whether the claim has the annotation against disruption."""
    said: Mapping[str, str] = claim["metadata"].get("annotations") or {}
    return said.get(DO_NOT_DISRUPT) == "true"


def _true(conditions: Mapping[str, Object], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _gives_up(conditions: Mapping[str, Object], unix_s: float) -> bool:
    said, joined = conditions.get("Initialized", {}), conditions.get("Registered", {})
    if said.get("reason") != UNREGISTERED or joined.get("status") != "True":
        return False
    return unix_s >= unix_seconds(joined["lastTransitionTime"]) + REGISTERED_S_MAX


def _troubled(conditions: Mapping[str, Object]) -> str:
    """The reported reason why the order is not delivered yet; empty: none."""
    for kind in ("Launched", "Registered", "Initialized"):
        said = conditions.get(kind, {})
        if said.get("status") != "True" and said.get("message") and said.get("reason") != "AwaitingReconciliation":
            return f"{said.get('reason') or kind}: {said['message']}"
    return ""


def parse_duration_s(text: str) -> float | None:
    """`720h`, `1h30m` -> seconds; None for `Never` and invalid text."""
    parts = _DURATION.findall(text)
    if not parts or "".join(map("".join, parts)) != text:
        return None
    lasts_s = sum(int(many) * _SECONDS[unit] for many, unit in parts)
    return lasts_s if lasts_s < DURATION_S_MAX else None
