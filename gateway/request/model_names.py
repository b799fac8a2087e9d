"""Names of models, aliases and adapters: from the name in a request to a model that the tenant may call. Pure.

A model that does not exist and a forbidden one give the same response, so that neither can be found out by probing.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import msgspec

from autoscaler.contract import ModelEntry, ModelName, TenantEntry, TenantName
from gateway.errors import model_not_found
from gateway.exception_handling import reraise_memory_error

RESOLVED_MAX = 10_000
"""Permission cache size; above it the cache is cleared. Only existing models take an entry."""


class ModelNames:
    """The models of the catalogue by the names that clients use."""

    def __init__(self) -> None:
        self._models: dict[ModelName, ModelEntry] = {}
        self._entries: dict[ModelName, dict[str, ModelEntry]] = {}
        """Model -> its entry under each of its names."""
        self._names: dict[str, ModelEntry] = {}
        """Name -> the entry of the oldest Model with it."""
        self._younger: dict[str, dict[ModelName, ModelEntry]] = {}
        """Name of several Models -> the entries of the others."""
        self._resolved: dict[tuple[TenantName, str], ModelEntry] = {}
        """Cache of permitted models."""

    def clear(self) -> None:
        """Remove all models."""
        self._models.clear()
        self._entries.clear()
        self._names.clear()
        self._younger.clear()
        self._resolved.clear()

    def update(self, models: Iterable[ModelEntry], gone: Iterable[ModelName]) -> dict[ModelName, Exception]:
        """Replace these models and remove others. If several models have the same name or alias, it belongs to the
        oldest of them. Return the models whose names raised an exception; they have only their own name.
        """
        faults: dict[ModelName, Exception] = {}
        self._resolved.clear()
        for name in gone:
            self._remove(name)
        for model in models:
            self._remove(model.name)
            try:
                entries = self._list_names(model)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[model.name] = error
                entries = {str(model.name): model}
            self._models[model.name] = model
            self._entries[model.name] = entries
            for called, entry in entries.items():
                self._add(called, entry)
        return faults

    def _list_names(self, model: ModelEntry) -> dict[str, ModelEntry]:
        """Return the entry of a model under each of its names."""
        entries: dict[str, ModelEntry] = {}
        names = (model.name, *model.aliases)
        for name in names:
            served = model.served_name if name == model.name or not model.serves_aliases else name
            entry = model if served == model.served_name else msgspec.structs.replace(model, served_name=served)
            entries.setdefault(name, entry)
        for adapter in model.adapters:
            entry = msgspec.structs.replace(model, served_name=adapter.served_name, lora=adapter.lora)
            for name in names:
                entries.setdefault(f"{name}:{adapter.name}", entry)
        return entries

    def _add(self, name: str, entry: ModelEntry) -> None:
        oldest = self._names.get(name)
        if oldest is None:
            self._names[name] = entry
            return
        younger = self._younger.setdefault(name, {})
        if _age(entry) < _age(oldest):
            self._names[name], entry = entry, oldest
        younger[entry.name] = entry

    def _remove(self, model: ModelName) -> None:
        self._models.pop(model, None)
        for name in self._entries.pop(model, {}):
            younger = self._younger.get(name)
            if younger is None:
                del self._names[name]
                continue
            if self._names[name].name == model:
                oldest = min(younger.values(), key=_age)
                self._names[name] = oldest
                del younger[oldest.name]
            else:
                del younger[model]
            if not younger:
                del self._younger[name]

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

    def resolve_tagged(self, tenant: TenantEntry, name: str) -> ModelEntry:
        """Do the same for Ollama's clients, which append `:latest` to a name without a tag."""
        if name not in self._names:
            name = name.removesuffix(":latest")
        return self.resolve(tenant, name)

    def with_tag(self, name: str) -> str:
        """Return a name as Ollama lists it, with a tag: clients append `:latest` and search the list for the result."""
        tagged = f"{name}:latest"
        return name if ":" in name or tagged in self._names else tagged

    def own_aliases(self, model: ModelEntry) -> list[str]:
        """Return the aliases of a model, without those that belong to an older one."""
        return [alias for alias in model.aliases if alias in self._names and self._names[alias].name == model.name]

    def visible(self, tenant: TenantEntry) -> list[ModelEntry]:
        """Return the listed models that the tenant may call, by name."""
        return [
            model
            for _, model in sorted(self._models.items())
            if not model.unlisted and self._names.get(model.name) is model and is_permitted(tenant, model)
        ]


def _age(model: ModelEntry) -> tuple[float, ModelName]:
    return model.created_unix_s, model.name


def is_permitted(tenant: TenantEntry, model: ModelEntry) -> bool:
    """Return whether the Tenant and the Model both permit that the tenant calls the model.

    A model that lists tenants is only for those. A tenant that lists globs may call models that match one. A tenant
    that lists none may call models that list no tenants, and those that list it.
    """
    if model.tenants is not None and tenant.name not in model.tenants:
        return False
    return tenant.models is None or any(fnmatchcase(model.name, glob) for glob in tenant.models)
