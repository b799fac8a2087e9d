"""The Tenant document: the party that is authenticated, limited and charged (interfaces, section 2).

Owns the typed definition of the supported keys: API keys, permission, weight and priority. `autoscaler.documents.parse`
rejects guarantees, rates and budgets, which are not supported yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from autoscaler.contract import TenantName, Weight
from autoscaler.spec.decode import Part
from autoscaler.spec.model import Priority
from autoscaler.spec.policy import RequestPolicy


class Key(Part, frozen=True):
    """An API key, stored as its hash."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] = field(name="sha256")
    """The SHA-256 of the key's bytes, in lower-case hex."""
    name: str = ""
    """A name for people."""
    created_at: str | None = None
    """When the key was created (RFC 3339), for information only."""
    expires_at: str | None = None
    """When the key expires (RFC 3339). None: never."""
    role: Literal["tenant", "viewer", "operator", "finance"] = "tenant"
    """The role. `tenant` and `operator` keys can use Models; the others cannot."""


class TenantSpec(Part, frozen=True):
    """The spec of a Tenant."""

    keys: tuple[Key, ...] = ()
    """The API keys."""
    weight: Weight = 1.0
    """The share of slots when several Tenants compete for them."""
    models: tuple[str, ...] | None = None
    """Globs over the names of Models that the Tenant may use. None: every Model that does not list Tenants."""
    priority_max: Priority = 0
    """The highest priority that a request can set with `X-Priority`."""
    policy: RequestPolicy = RequestPolicy()
    """Changes to the members of request bodies, and external checks, in addition to those of the Model."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A Tenant as the autoscaler uses it."""

    name: TenantName
    spec: TenantSpec = TenantSpec()


def weight_of(tenants: Mapping[TenantName, Tenant], name: TenantName) -> float:
    """Return the weight of a Tenant; 1 if the documents do not contain it."""
    tenant = tenants.get(name)
    return tenant.spec.weight if tenant is not None else 1.0
