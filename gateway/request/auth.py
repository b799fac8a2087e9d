"""Who may call what: an API key gives a Tenant, a name gives a Model that this Tenant may call (interfaces, section 3).

Owns the directory of Tenants, keys and names as the catalogue says them. Promises the same answer and the same work for
a missing, an unknown and an expired key, and the same answer for a Model that does not exist and one that is forbidden,
so that neither can be found out by asking. Keeps hashes of keys, never a key. Pure; the time is passed in.
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
"""Permissions remembered; above that they are forgotten and worked out again. Only Models that exist take a place."""
SALTS_MAX = 10_000
"""Salts of Tenants remembered; others are worked out anew."""
CALLING_ROLES = frozenset({"tenant", "operator"})
"""Roles whose keys may call a Model; viewer and finance only read on the operations port."""

_NOBODY = (0.0, TenantEntry(name=TenantName("")))


class Directory:
    """Tenants, keys and Models by the names that clients use."""

    def __init__(self) -> None:
        self.settings = FrontSettings()
        self.known = False
        """The catalogue has been told. Before, nobody can say what exists or who may call."""
        self._version = (0, 0)
        self._tenants: dict[TenantName, TenantEntry] = {}
        self._models: dict[ModelName, ModelEntry] = {}
        self._keys: dict[str, tuple[float, TenantEntry]] = {}
        """Hash of a key that may call -> when it expires, and whose it is."""
        self._names: dict[str, ModelEntry] = {}
        self._resolved: dict[tuple[TenantName, str], ModelEntry] = {}
        """What was permitted before."""
        self._default = TenantEntry(name=DEFAULT_TENANT)

    def apply(self, delta: CatalogueDelta) -> None:
        """Takes a change of the catalogue, or ignores it when it is older than what is known."""
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
        """Whose Call it is, by the hash of the key that was sent. Raises CallError 401.

        Without `keys_needed` everybody is Tenant `default`.
        """
        if not self.settings.keys_needed:
            return self._default
        expires_unix_s, tenant = self._keys.get(key_sha256 or "", _NOBODY)
        if expires_unix_s <= now_unix_s:
            raise invalid_api_key()
        return tenant

    def resolve(self, tenant: TenantEntry, name: str) -> ModelEntry:
        """The Model that the Tenant means by a name or alias. Raises CallError 404, also when it may not call it.

        Of `model:adapter` it is the Model's entry with the adapter's `served_name` and `lora`; all else is the Model's.
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
        """The Models that the Tenant may call and that are listed, by name."""
        return [
            model
            for name, model in sorted(self._models.items())
            if not model.unlisted and self._names.get(name) is model and is_permitted(tenant, model)
        ]

    def _index(self) -> None:
        """Derives keys and names. Documents give a name to one Model; should two have it, it is the older one's."""
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
    """What keeps a Tenant's prefix cache apart from others' in an engine, which need not learn the name.

    It is no secret: no client can send one.
    """
    return sha256(f"pilotlight/cache-salt/{tenant}".encode()).hexdigest()[:32]


def is_permitted(tenant: TenantEntry, model: ModelEntry) -> bool:
    """Whether the Tenant may call the Model: neither document may rule it out.

    A Model that lists Tenants is for those only. A Tenant that lists globs may call what matches one; one that lists
    none may call the Models that list no Tenants, and those that list it.
    """
    if model.tenants is not None and tenant.name not in model.tenants:
        return False
    return tenant.models is None or any(fnmatchcase(model.name, glob) for glob in tenant.models)
