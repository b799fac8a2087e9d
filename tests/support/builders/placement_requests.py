"""Placement requests from flat keyword arguments, which are distributed to the groups of the request."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from autoscaler.contract import ModelName
from autoscaler.placement.model.tenant_isolation import TenantSet
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest, Spread
from autoscaler.spec.pod import Toleration
from autoscaler.state.resources import Growth, Isolation, Link
from autoscaler.state.world import NodeId

GROUPS = ("kind", "urgency", "choice", "supplies")


class RequestFields(TypedDict, total=False):
    """The fields of a request and of its groups."""

    devices: int
    memory_bytes: int
    compute_percent: int
    isolation: Isolation
    products: tuple[str, ...]
    cpu_milli: int
    host_bytes: int
    spare_bytes: int
    link: Link
    priority: int
    unserved_since_s: float
    force: EvictionLevel
    begins_s: float
    selector: tuple[tuple[str, str], ...]
    tolerations: tuple[Toleration, ...]
    avoids: tuple[NodeId, ...]
    artifact: str
    image: str
    ordinal: int
    trust: TenantSet
    spread: Spread | None
    growth: Growth
    reason: str


def placement_request(model: str, ordinal: int = 0, /, **fields: Unpack[RequestFields]) -> PlacementRequest:
    """A request for one replica of the model."""
    return change_request(PlacementRequest(ModelName(model), ordinal), **fields)


def change_request(want: PlacementRequest, **fields: Unpack[RequestFields]) -> PlacementRequest:
    """The request with other fields; its weights are as large as the memory that it asks for."""
    given: dict[str, Any] = dict(fields)
    for name in GROUPS:
        group = getattr(want, name)
        given[name] = group._replace(**{field: given.pop(field) for field in group._fields if field in given})
    made = want._replace(**given)
    return made._replace(supplies=made.supplies._replace(weights_bytes=made.kind.total_bytes))
