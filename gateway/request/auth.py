"""Authentication and authorization: from API key to tenant, from name to a permitted model (interfaces, section 3).

Contains the directory of tenants, keys and names from the catalogue. A missing, an unknown and an expired key give the
same response and cost the same work. A model that does not exist and a forbidden one give the same response. So neither
can be found out by probing. Stores hashes of keys, never a key. Pure; the time is passed in.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256

import msgspec

from autoscaler.contract import (
    DEFAULT_TENANT,
    CatalogueDelta,
    FrontSettings,
    ModelEntry,
    ModelName,
    TenantEntry,
    TenantName,
)
from gateway.errors import invalid_api_key, model_not_found

RESOLVED_MAX = 10_000
"""Permission cache size; above it the cache is cleared. Only existing models take an entry."""
SALTS_MAX = 10_000
"""Cache size for tenants' salts."""
CALLING_ROLES = frozenset({"tenant", "operator"})
"""Roles whose keys may call a model; viewer and finance only read on the operations port."""

_NOBODY = (0.0, TenantEntry(name=TenantName("")))


class Directory:
    """Tenants, keys and models by the names that clients use."""

    def __init__(self) -> None:
        self.settings = FrontSettings()
        self.known = False
        """The catalogue has arrived. Before, requests cannot be authenticated."""
        self._version = (0, 0)
        self._tenants: dict[TenantName, TenantEntry] = {}
        self._models: dict[ModelName, ModelEntry] = {}
        self._keys: dict[str, tuple[float, TenantEntry]] = {}
        """Hash of a key with a calling role -> its expiry and tenant."""
        self._names: dict[str, ModelEntry] = {}
        self._resolved: dict[tuple[TenantName, str], ModelEntry] = {}
        """Cache of permitted models."""
        self._default = TenantEntry(name=DEFAULT_TENANT)

    def apply(self, delta: CatalogueDelta) -> None:
        """Apply a change of the catalogue, unless it is older than the current state."""
        if (delta.epoch, delta.version) < self._version:
            return
        self._version = (delta.epoch, delta.version)
        self.known = self.known or delta.full
        if delta.full:
            self._tenants.clear()
            self._models.clear()
        for tenant in delta.tenants_gone:
            self._tenants.pop(tenant, None)
        for model in delta.models_gone:
            self._models.pop(model, None)
        self._tenants.update((entry.name, entry) for entry in delta.tenants)
        self._models.update((entry.name, entry) for entry in delta.models)
        if delta.settings is not None:
            self.settings = delta.settings
        self._index()

    def authenticate(self, key_sha256: str | None, now_unix_s: float) -> TenantEntry:
        """Return the tenant of a key, given by its hash. Raises CallError 401.

        Without `keys_needed` every request belongs to tenant `default`.
        """
        if not self.settings.keys_needed:
            return self._default
        expires_unix_s, tenant = self._keys.get(key_sha256 or "", _NOBODY)
        if expires_unix_s <= now_unix_s:
            raise invalid_api_key()
        return tenant

    def resolve(self, tenant: TenantEntry, name: str) -> ModelEntry:
        """Return the model for a name or alias. Raises CallError 404, also if the tenant may not call it.

        For `model:adapter` it is the model's entry with the adapter's `served_name` and `lora`.
        """
        known = self._resolved.get((tenant.name, name))
        if known is not None:
            return known
        model = self._names.get(name)
        if model is None or not is_permitted(tenant, model):
            raise model_not_found()
        if len(self._resolved) >= RESOLVED_MAX:
            self._resolved.clear()
        self._resolved[tenant.name, name] = model
        return model

    def visible(self, tenant: TenantEntry) -> list[ModelEntry]:
        """Return the listed models that the tenant may call, by name."""
        return [
            model
            for name, model in sorted(self._models.items())
            if not model.unlisted and self._names.get(name) is model and is_permitted(tenant, model)
        ]

    def _index(self) -> None:
        """Derive keys and names. Documents give a name to one model; if two have it, the older model gets it."""
        self._resolved.clear()
        self._default = self._tenants.get(DEFAULT_TENANT, TenantEntry(name=DEFAULT_TENANT))
        self._keys = {
            key.sha256: (math.inf if key.expires_unix_s is None else key.expires_unix_s, tenant)
            for tenant in self._tenants.values()
            for key in tenant.keys
            if key.role in CALLING_ROLES
        }
        self._names = {}
        for model in sorted(self._models.values(), key=lambda model: (model.created_unix_s, model.name)):
            names = (model.name, *model.aliases)
            for name in names:
                served = model.served_name if name == model.name or not model.serves_aliases else name
                entry = model if served == model.served_name else msgspec.structs.replace(model, served_name=served)
                self._names.setdefault(name, entry)
            for adapter in model.adapters:
                entry = msgspec.structs.replace(model, served_name=adapter.served_name, lora=adapter.lora)
                for name in names:
                    self._names.setdefault(f"{name}:{adapter.name}", entry)


@lru_cache(SALTS_MAX)
def cache_salt(tenant: TenantName) -> str:
    """Return the salt that isolates a tenant's prefix cache in an engine, without disclosing the tenant's name.

    It is no secret: clients cannot send one.
    """
    return sha256(f"pilotlight/cache-salt/{tenant}".encode()).hexdigest()[:32]


def is_permitted(tenant: TenantEntry, model: ModelEntry) -> bool:
    """Return whether the tenant may call the model: neither document may forbid it.

    A model that lists tenants is only for those. A tenant that lists globs may call models that match one. A tenant
    that lists none may call models that list no tenants, and those that list it.
    """
    if model.tenants is not None and tenant.name not in model.tenants:
        return False
    return tenant.models is None or any(fnmatchcase(model.name, glob) for glob in tenant.models)
