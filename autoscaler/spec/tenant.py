"""The Tenant document: the party that is authenticated, limited and charged (interfaces, section 2).

Owns the typed definition of what is in force now: keys, permission, weight and priority. Guarantees, rates and budgets
are refused by `autoscaler.documents.load` until they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from autoscaler.contract import TenantName
from autoscaler.spec.decode import Part
from autoscaler.spec.model import Priority


class Key(Part, frozen=True):
    """One API key by its hash (SHA-256 of the key's bytes, lower-case hex). Times are RFC 3339."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] = field(name="sha256")
    name: str = ""
    created_at: str | None = None
    expires_at: str | None = None
    role: Literal["tenant", "viewer", "operator", "finance"] = "tenant"


class TenantSpec(Part, frozen=True):
    """The spec of a Tenant."""

    keys: tuple[Key, ...] = ()
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    models: tuple[str, ...] | None = None
    priority_max: Priority = 0


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A Tenant as the autoscaler uses it."""

    name: TenantName
    spec: TenantSpec = TenantSpec()


def unix_seconds(time: str) -> float:
    """An RFC 3339 time as seconds since 1970. Raises ValueError on anything else, also a time without its zone."""
    moment = datetime.fromisoformat(time)
    if moment.tzinfo is None or len(time) < len("2027-01-31T12:00:00Z"):
        raise ValueError("expected a time such as 2027-01-31T12:00:00Z")
    return moment.timestamp()


def weight_of(tenants: Mapping[TenantName, Tenant], name: TenantName) -> float:
    """The weight of a Tenant; 1 for one that the documents do not have."""
    tenant = tenants.get(name)
    return tenant.spec.weight if tenant is not None else 1.0
