"""Resolves name conflicts in an installation: a Model name or alias belongs to the oldest Model that claims it. Pure.

Models in files are the oldest, then Models are ordered by creation time, namespace and name. A younger Model with the
same name is renamed to `namespace/name`; a conflicting alias is removed; `taken` describes the conflict. Names of
adapters (`name:adapter`) follow the name of their Model. Invariant: no Model loses a name to a younger one. When the
owner is deleted, the next oldest Model gets the name. The same rules apply to Tenants and the hashes of their keys.

Also owns the syntax of names that clients send as `model`: they are safe in logs, URLs and metric labels. The syntax is
here and not in `autoscaler.documents.document_rules`, so that modules that only read names do not depend on engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId, TenantName
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.spec.decode import Path, WrongKeyError
from autoscaler.spec.model import Model
from autoscaler.spec.tenant import Key, Tenant


class Origin(NamedTuple):
    """The source of a Model that is not in a file."""

    source: str
    namespace: str
    name: str
    """The name in that source."""


class Settled(NamedTuple):
    """All Models with their resolved names."""

    models: tuple[Model, ...] = ()
    names: Mapping[Origin, ModelName] = {}
    """The resolved name of each Model. A Model that lost all its names is missing."""
    taken: Mapping[Origin, str] = {}
    """A sentence about the names of a Model that belong to others."""
    faults: Mapping[Origin, str] = {}
    """The exception that a Model raised, in one line; its earlier version is used."""


NOTHING: Final = Settled()


def resolve_model_conflicts(
    files: Sequence[Model], others: Mapping[Origin, Model], before: Settled = NOTHING
) -> Settled:
    """Resolve the names of Models. Models in `files` have no conflicts among themselves.

    A Model that keeps all its names is returned as the same object. A Model that raises an exception keeps its names
    and its document from `before`; a new one gets only its own name.
    """
    owners = {name: f"Model {model.name} in the configuration files" for model in files for name in _all(model)}
    models, names, taken = list(files), dict[Origin, ModelName](), dict[Origin, str]()
    faults, earlier = dict[Origin, str](), _index(before)
    for origin, model in sorted(others.items(), key=_age):
        claimed = len(owners)
        done = attempt(partial(_settled, origin, model, owners))
        if isinstance(done, Failure):
            while len(owners) > claimed:
                owners.popitem()
            faults[origin] = describe_error(done.error)
            done = _keep(origin, model, earlier().get(origin), owners), []
        settled, lost = done
        if lost:
            taken[origin] = "; ".join(lost)
        if settled is not None:
            models.append(settled)
            names[origin] = settled.name
    return Settled(tuple(models), names, taken, faults)


def resolve_tenant_conflicts(
    files: Sequence[Tenant], others: Sequence[Tenant]
) -> tuple[tuple[Tenant, ...], dict[TenantName, str]]:
    """Return the Tenants of files and the others, oldest first, each with a sentence on keys and names that it lost."""
    tenants = {tenant.name: tenant for tenant in files}
    owners = {key.sha256: tenant.name for tenant in files for key in tenant.spec.keys}
    taken: dict[TenantName, str] = {}
    for tenant in others:
        if tenant.name in tenants:
            taken[tenant.name] = f"Tenant {tenant.name} in the configuration files has precedence"
            continue
        lost = [key for key in tenant.spec.keys if owners.setdefault(key.sha256, tenant.name) != tenant.name]
        if lost:
            taken[tenant.name] = "; ".join(
                f"API key {_shown(key)} already belongs to Tenant {owners[key.sha256]}" for key in lost
            )
            kept = tuple(key for key in tenant.spec.keys if key not in lost)
            tenant = replace(tenant, spec=replace(tenant.spec, keys=kept))  # noqa: PLW2901  without the conflicting keys
        tenants[tenant.name] = tenant
    return tuple(tenants.values()), taken


def _settled(origin: Origin, model: Model, owners: dict[str, str]) -> tuple[Model | None, list[str]]:
    """Return the Model with its resolved names, or None if it lost all, and sentences about the lost names."""
    me, lost = f"Model {origin.namespace}/{origin.name}", list[str]()
    named = model
    if owner := _claim(model, model.name, me, owners):
        called = f"{model.namespace}/{model.name}"
        lost.append(f"name `{model.name}` belongs to {owner}; this Model is renamed to `{called}`")
        if owner := _claim(model, called, me, owners):
            return None, [f"other Models have the names `{model.name}` and `{called}`; {owner} is named `{called}`"]
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


def _index(before: Settled) -> Callable[[], Mapping[Origin, Model]]:
    """Return a function that returns the Models of `before` by origin, and computes them at its first call only."""

    @cache
    def models() -> Mapping[Origin, Model]:
        named = {model.name: model for model in before.models}
        return {origin: named[name] for origin, name in before.names.items()}

    return models


def _keep(origin: Origin, model: Model, kept: Model | None, owners: dict[str, str]) -> Model | None:
    """Return `kept`, the earlier version of a Model, or the Model with only its name. None: the name belongs to
    another. `kept` does not count if it belongs to a deleted object of the same name.
    """
    if kept is None or (kept.uid, kept.created_unix_s) != (model.uid, model.created_unix_s):
        kept = replace(model, spec=replace(model.spec, aliases=(), adapters=()))
    if not owners.keys().isdisjoint((*_all(kept),)):
        kept = replace(kept, spec=replace(kept.spec, aliases=(), adapters=()))
    if kept.name in owners:
        return None
    owners.update(dict.fromkeys(_all(kept), f"Model {origin.namespace}/{origin.name}"))
    return kept


def _claim(model: Model, name: str, me: str, owners: dict[str, str]) -> str:
    """Claim a name and the adapter names below it. If one is taken, claim nothing and return the owner."""
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
    """Identify a key by its name or the first digits of its hash."""
    return f"`{key.name}`" if key.name else f"{key.sha256[:8]}..."


NAME_CHARS_MAX = 253
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")


ALIAS = re.compile(r"[A-Za-z0-9(\[]([A-Za-z0-9._:/()\[\] -]*[A-Za-z0-9)\]])?")
ALIAS_WANTED = (
    f"expected 1 to {NAME_CHARS_MAX} letters, digits, spaces, brackets ()[] or ._:/- that begin and end with a letter, "
    "a digit or a bracket"
)


def check_alias(alias: str, at: Path) -> None:
    """Check an alias, which may have spaces and brackets, unlike a name. Raises WrongKeyError."""
    if len(alias) > NAME_CHARS_MAX or not ALIAS.fullmatch(alias):
        raise WrongKeyError(at, ALIAS_WANTED)


def check_name(name: str, at: Path) -> None:
    """Check a name that clients can send as `model`. Raises WrongKeyError."""
    if len(name) > NAME_CHARS_MAX or not NAME.fullmatch(name):
        wanted = f"1 to {NAME_CHARS_MAX} letters, digits or ._:/- that begin and end with a letter or digit"
        raise WrongKeyError(at, f"expected {wanted}")


UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
ID_NAME_CHARS_MAX = 100
"""Maximum characters of a model's name in the ids of its replicas: an id is a file name and a label."""


def format_replica_id(model: ModelName, spec_hash: str, intent: str) -> ReplicaId:
    """Return the id of a replica that is started for the decision `intent`."""
    return ReplicaId(f"{UNSAFE.sub('-', model)[:ID_NAME_CHARS_MAX]}-{spec_hash}-{intent}")


def simplify_name(text: str) -> str:
    """Return a valid name of a Model that is similar to a text: `my model (v2)` becomes `my-model-v2`. Empty if the
    text contains no letters or digits.
    """
    plain = re.sub(r"[^A-Za-z0-9._:/-]+", "-", text)
    return plain.strip("._:/-")[:NAME_CHARS_MAX].rstrip("._:/-")
