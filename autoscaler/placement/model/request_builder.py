"""Builds the placement request of a Model. Pure."""

from __future__ import annotations

from autoscaler.placement.model.tenant_isolation import NO_TENANT, TenantSet
from autoscaler.placement.model.types import (
    EvictionLevel,
    NodeConstraints,
    PlacementRequest,
    RequiredArtifacts,
    Spread,
    Urgency,
)
from autoscaler.queries.granted_memory import compute_growth, spare_bytes
from autoscaler.spec.artifact_name import normalize_artifact
from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod, selector_of
from autoscaler.state.node_labels_and_taints import merge_tolerations
from autoscaler.state.pod_requests import compute_host_request
from autoscaler.state.resources import Isolation, Link, RequestShape
from autoscaler.state.world import NodeId

ISOLATION = {"any": Isolation.NONE, "memory": Isolation.MEMORY, "hardware": Isolation.HARDWARE}


LINKS = {"any": Link.NODE, "pcieRoot": Link.PCIE_ROOT, "nvlink": Link.NVLINK}


def build_placement_request(  # noqa: PLR0917  all callers give them in this order
    model: Model,
    ordinal: int,
    unserved_since_s: float,
    force: EvictionLevel,
    reason: str,
    defaults: Pod | None = None,
    avoids: tuple[NodeId, ...] = (),
) -> PlacementRequest:
    """Build the request for one replica. `defaults`: pod defaults of the Settings; `avoids`: nodes to avoid now."""
    labels = selector_of(defaults, model.spec.pod)
    apart, near = model.spec.spread or "", model.spec.near or ""
    kind = build_request_shape(model, defaults)
    selector = tuple(sorted(labels.items())) if labels else ()
    return PlacementRequest(
        model=model.name,
        ordinal=ordinal,
        kind=kind,
        urgency=Urgency(model.spec.priority, unserved_since_s, force),
        choice=NodeConstraints(selector, merge_tolerations(defaults, model.spec.pod), avoids),
        supplies=RequiredArtifacts(normalize_artifact(model.spec.artifact or ""), model.spec.image, kind.total_bytes),
        trust=tenant_set_of(model),
        spread=Spread(apart, near) if apart or near else None,
        growth=compute_growth(model),
        reason=reason,
    )


def build_request_shape(model: Model, defaults: Pod | None = None) -> RequestShape:
    """Build what decides where a replica of `model` fits. `defaults`: pod defaults of the Settings."""
    gpu, asked = model.spec.gpu, compute_host_request(model, defaults)
    return RequestShape(
        devices=gpu.count,
        memory_bytes=model.memory_bytes,
        compute_percent=gpu.compute_percent or 0,
        isolation=ISOLATION[gpu.isolation],
        products=gpu.models,
        cpu_milli=asked.cpu_milli,
        host_bytes=asked.host_bytes,
        spare_bytes=spare_bytes(model),
        link=LINKS[gpu.link] if gpu.count > 1 else Link.NODE,
    )


def tenant_set_of(model: Model | None) -> TenantSet:
    """Return the tenants that a model is limited to. None: the model no longer exists."""
    if model is None:
        return NO_TENANT
    return () if model.spec.tenants is None else tuple(sorted(set(model.spec.tenants))) or NO_TENANT
