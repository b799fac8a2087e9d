"""Who has which name, in the whole installation: a Model name or alias belongs to the oldest Model that has it. Pure.

Owns the order of age (documents of files first, then by creation, then by namespace and name) and what becomes of a
younger Model: it is called `namespace/name`, an alias that is taken is left out of it, and `taken` says whose it is.
Names of adapters (`name:adapter`) go with the name that they begin with. Promises: nobody who has a name loses it to a
younger one; when its holder goes, the next one has it. The same for Tenants and the hashes of their keys.

What a name may be that clients send as `model`: fit for logs, URLs and metric labels. Pure.

Owns that rule alone, so that whoever reads names need not know of engines, as `autoscaler.documents.validation` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName, TenantName
from autoscaler.spec.decode import Path, WrongKeyError
from autoscaler.spec.model import Model
from autoscaler.spec.tenant import Key, Tenant


class Origin(NamedTuple):
    """Where a Model is written down, if not in a file."""

    source: str
    namespace: str
    name: str
    """As it stands there."""


class Settled(NamedTuple):
    """All Models under the names that they have."""

    models: tuple[Model, ...] = ()
    names: Mapping[Origin, ModelName] = {}
    """What each is called; one that nothing is left of is not there."""
    taken: Mapping[Origin, str] = {}
    """What others have of its names, in a sentence."""


def resolve_model_conflicts(files: Sequence[Model], others: Mapping[Origin, Model]) -> Settled:
    """The Models of files, which differ in all their names, and the others. A Model that keeps its names is the same
    object as before.
    """
    owners = {name: f"Model {model.name} of the files" for model in files for name in _all(model)}
    models, names, taken = list(files), dict[Origin, ModelName](), dict[Origin, str]()
    for origin, model in sorted(others.items(), key=_age):
        settled, lost = _settled(origin, model, owners)
        if lost:
            taken[origin] = "; ".join(lost)
        if settled is not None:
            models.append(settled)
            names[origin] = settled.name
    return Settled(tuple(models), names, taken)


def resolve_tenant_conflicts(
    files: Sequence[Tenant], others: Sequence[Tenant]
) -> tuple[tuple[Tenant, ...], dict[TenantName, str]]:
    """The Tenants of files and the others, oldest first; and what older ones have of each, in a sentence."""
    tenants = {tenant.name: tenant for tenant in files}
    owners = {key.sha256: tenant.name for tenant in files for key in tenant.spec.keys}
    taken: dict[TenantName, str] = {}
    for tenant in others:
        if tenant.name in tenants:
            taken[tenant.name] = f"a Tenant {tenant.name} is in the files, and that one counts"
            continue
        lost = [key for key in tenant.spec.keys if owners.setdefault(key.sha256, tenant.name) != tenant.name]
        if lost:
            taken[tenant.name] = "; ".join(f"key {_shown(key)} is one of Tenant {owners[key.sha256]}" for key in lost)
            kept = tuple(key for key in tenant.spec.keys if key not in lost)
            tenant = replace(tenant, spec=replace(tenant.spec, keys=kept))  # noqa: PLW2901  what is left of it
        tenants[tenant.name] = tenant
    return tuple(tenants.values()), taken


def _settled(origin: Origin, model: Model, owners: dict[str, str]) -> tuple[Model | None, list[str]]:
    """What it is called, None for nothing; and what is lost."""
    me, lost = f"Model {origin.namespace}/{origin.name}", list[str]()
    named = model
    if owner := _claim(model, model.name, me, owners):
        called = f"{model.namespace}/{model.name}"
        lost.append(f"`{model.name}` belongs to {owner}, so this one is called `{called}`")
        if owner := _claim(model, called, me, owners):
            return None, [f"`{model.name}` and `{called}` belong to others: {owner} has the latter"]
        named = replace(model, name=ModelName(called), served_name=model.name)
    aliases = []
    for alias in model.spec.aliases:
        if owner := _claim(model, alias, me, owners):
            lost.append(f"alias `{alias}` belongs to {owner}")
        else:
            aliases.append(alias)
    if len(aliases) < len(model.spec.aliases):
        named = replace(named, spec=replace(model.spec, aliases=tuple(aliases)))
    return named, lost


def _claim(model: Model, name: str, me: str, owners: dict[str, str]) -> str:
    """Takes a name with those of its adapters; or says who has one of them, and takes none."""
    wanted = [name, *(f"{name}:{adapter.name}" for adapter in model.spec.adapters)]
    owner = next((owners[one] for one in wanted if one in owners), "")
    if not owner:
        owners.update(dict.fromkeys(wanted, me))
    return owner


def _all(model: Model) -> Iterator[str]:
    yield from model.names()
    yield from model.adapter_names()


def _age(item: tuple[Origin, Model]) -> tuple[int, str, str, str]:
    origin, model = item
    return model.created_unix_s, origin.namespace, origin.name, origin.source


def _shown(key: Key) -> str:
    """By its name or the first digits of its hash."""
    return f"`{key.name}`" if key.name else f"{key.sha256[:8]}..."


NAME_CHARS_MAX = 253
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")


def check_name(name: str, at: Path) -> None:
    """A name that clients may send as `model`. Raises WrongKeyError."""
    if len(name) > NAME_CHARS_MAX or not NAME.fullmatch(name):
        wanted = f"1 to {NAME_CHARS_MAX} letters, digits or ._:/- that begin and end with a letter or digit"
        raise WrongKeyError(at, f"expected {wanted}")
