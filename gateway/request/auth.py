"""Authentication: from API key to tenant (interfaces, section 3).

Contains the directory of tenants, keys and models from the catalogue. A missing, an unknown and an expired key give the
same response and cost the same work, so that none can be found out by probing. Stores hashes of keys, never a key.
`model_names` resolves names. Pure; the time is passed in.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import sha256
from typing import Final

from autoscaler.contract import (
    DEFAULT_TENANT,
    CatalogueDelta,
    FrontSettings,
    ModelName,
    PolicyEntry,
    TenantEntry,
    TenantName,
)
from gateway.errors import ambiguous_api_keys, invalid_api_key
from gateway.policy.request_policy import Policies
from gateway.request.model_names import ModelNames

SALTS_MAX = 10_000
"""Cache size for tenants' salts."""
CALLING_ROLES: Final = frozenset({"tenant", "operator"})
"""Roles whose keys may call a model; viewer and finance only read on the operations port."""

_NOBODY: Final = (0.0, TenantEntry(name=TenantName("")))


class Directory:
    """Tenants, keys and models by the names that clients use."""

    def __init__(self) -> None:
        self.names = ModelNames()
        self.settings = FrontSettings()
        self.all_policies = Policies()
        self.policies: Policies | None = None
        """None if no Model and no Tenant has a request policy."""
        self.watched = frozenset[str]()
        """Members of request bodies that some policy may change."""
        self.known = False
        """The catalogue has arrived. Before, requests cannot be authenticated."""
        self._version = (0, 0)
        self._tenants: dict[TenantName, TenantEntry] = {}
        self._keys: dict[str, tuple[float, TenantEntry]] = {}
        """Hash of a key whose role may call models -> expiry and tenant of the key."""
        self._default = TenantEntry(name=DEFAULT_TENANT)

    def apply(self, delta: CatalogueDelta) -> dict[ModelName, Exception]:
        """Apply a change of the catalogue, unless it is older than the current state. Only what changed takes time.
        Return the models whose names raised an exception.
        """
        if (delta.epoch, delta.version) < self._version:
            return {}
        self._version = (delta.epoch, delta.version)
        self.known = self.known or delta.full
        if delta.full:
            self._tenants.clear()
            self.names.clear()
            self.all_policies.clear()
        for tenant in delta.tenants_gone:
            self._tenants.pop(tenant, None)
        self._tenants.update((entry.name, entry) for entry in delta.tenants)
        if delta.settings is not None:
            self.settings = delta.settings
        if delta.full or delta.tenants or delta.tenants_gone:
            self._index_tenants()
        if delta.full or delta.models or delta.models_gone or delta.tenants or delta.tenants_gone:
            self._update_policies(delta)
            return self.names.update(delta.models, delta.models_gone)
        return {}

    def authenticate(self, keys_sha256: tuple[str, ...], now_unix_s: float) -> TenantEntry:
        """Return the tenant of the valid one of these keys, given by their hashes. Raises CallError 401.

        Without `keys_needed` every request belongs to tenant `default`. Clients may send the key of another service in
        a second header; such a key is ignored. Two valid keys of different tenants are an error.
        """
        if not self.settings.keys_needed:
            return self._default
        found: TenantEntry | None = None
        for key in keys_sha256:
            expires_unix_s, tenant = self._keys.get(key, _NOBODY)
            if expires_unix_s <= now_unix_s:
                continue
            if found is not None and found.name != tenant.name:
                raise ambiguous_api_keys()
            found = tenant
        if found is None:
            raise invalid_api_key()
        return found

    def _update_policies(self, delta: CatalogueDelta) -> None:
        models = dict[ModelName, PolicyEntry | None].fromkeys(delta.models_gone)
        models.update((entry.name, entry.policy) for entry in delta.models)
        tenants = dict[TenantName, PolicyEntry | None].fromkeys(delta.tenants_gone)
        tenants.update((entry.name, entry.policy) for entry in delta.tenants)
        self.all_policies.update(models, tenants)
        self.policies = None if self.all_policies.empty else self.all_policies
        self.watched = self.all_policies.members

    def _index_tenants(self) -> None:
        """Derive the keys and the default tenant."""
        self._default = self._tenants.get(DEFAULT_TENANT, TenantEntry(name=DEFAULT_TENANT))
        self._keys = {
            key.sha256: (math.inf if key.expires_unix_s is None else key.expires_unix_s, tenant)
            for tenant in self._tenants.values()
            for key in tenant.keys
            if key.role in CALLING_ROLES
        }


@lru_cache(SALTS_MAX)
def cache_salt(tenant: TenantName) -> str:
    """Return the salt that isolates a tenant's prefix cache in an engine, without disclosing the tenant's name.

    It need not be secret, because clients cannot send a salt.
    """
    return sha256(f"pilotlight/cache-salt/{tenant}".encode()).hexdigest()[:32]
