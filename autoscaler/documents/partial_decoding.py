"""The spec of the stand-in of a Model whose document raises an unexpected exception when it is decoded. Pure.

It has the document's engine, names, Tenants, queue limits, policy and installation, as far as they are valid: what a
gateway needs to reject a request, or to pass it to a ready replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec.structs import replace

from autoscaler.contract import TenantName
from autoscaler.documents.document_rules import (
    ADAPTER,
    ADAPTERS_MAX,
    check_own_names,
    check_size_of_names,
    check_tenant_names,
)
from autoscaler.spec.decode import WrongKeyError, decode_value
from autoscaler.spec.document_names import check_alias
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Adapter, EngineName, ModelSpec, Queue
from autoscaler.spec.policy import ModelPolicy, check_policy

NO_SPEC = ModelSpec(engine="command")
"""The spec of a stand-in about whose engine and names nothing is known."""

Document = Mapping[str, Any]
"""A Model document whose metadata is valid."""


def read_installation(document: Document) -> str | None:
    """Read `spec.installation` without decoding the spec. None: it has none."""
    named = _read_spec(document).get("installation")
    return named if isinstance(named, str) else None


def _read_tenants(document: Document) -> tuple[TenantName, ...] | None:
    """Read `spec.tenants` without decoding the spec. Without a valid list no Tenant may use the Model."""
    named = _read_spec(document).get("tenants")
    if named is None:
        return None
    names = named if isinstance(named, list) else ()
    tenants = tuple(TenantName(name) for name in names if isinstance(name, str))
    return tenants if _are_within_limits(ModelSpec(engine=NO_SPEC.engine, tenants=tenants)) else ()


def _are_within_limits(names: ModelSpec) -> bool:
    """Whether aliases and Tenants are within the limits of documents, and can be encoded."""
    try:
        check_tenant_names(names)
        check_size_of_names(names)
    except (WrongKeyError, UnicodeEncodeError):  # the latter: an unpaired surrogate
        return False
    return True


def read_known_keys(document: Document) -> ModelSpec:
    """Read the keys that a gateway needs to reject a request, or to pass it to a ready replica."""
    spec, name = _read_spec(document), document["metadata"]["name"]
    said = spec.get("engine")
    engine = said if isinstance(said, str) and said in ENGINES else NO_SPEC.engine
    policy = _read_policy(spec)
    known = ModelSpec(
        engine=cast("EngineName", engine),
        tenants=() if policy is None else _read_tenants(document),
        policy=policy or ModelPolicy(),
        queue=_read_queue(spec),
        installation=read_installation(document),
    )
    for more in (
        replace(known, aliases=_read_aliases(spec), adapters=_read_adapters(spec, engine)),
        replace(known, aliases=_read_aliases(spec)),
    ):
        if not _are_within_limits(more):
            continue
        try:
            check_own_names(name, more)
        except WrongKeyError:
            continue
        return more
    return known


def _read_queue(spec: Document) -> Queue:
    """Read `spec.queue`; the default limits if it is not valid."""
    try:
        return decode_value(spec.get("queue", {}), Queue)
    except WrongKeyError:
        return Queue()


def _read_policy(spec: Document) -> ModelPolicy | None:
    """Read `spec.policy`. None: it is not valid, so that no Tenant may use the Model."""
    try:
        policy = decode_value(spec.get("policy", {}), ModelPolicy)
        check_policy(policy, ("spec", "policy"))
    except WrongKeyError:
        return None
    return policy


def _read_aliases(spec: Document) -> tuple[str, ...]:
    """Read `spec.aliases`; none if one of them is not a valid name."""
    said = spec.get("aliases")
    aliases = tuple(one for one in said if isinstance(one, str)) if isinstance(said, list) else ()
    try:
        for alias in aliases:
            check_alias(alias, ("spec", "aliases"))
    except WrongKeyError:
        return ()
    return aliases


def _read_adapters(spec: Document, engine: str) -> tuple[Adapter, ...]:
    """Read the names of `spec.adapters`, without their artifacts; none if one of them is not valid."""
    said = spec.get("adapters")
    if not isinstance(said, list) or len(said) > ADAPTERS_MAX or ENGINES[engine].adapters is None:
        return ()
    names = [one.get("name") if isinstance(one, dict) else None for one in said]
    valid = [name for name in names if isinstance(name, str) and ADAPTER.fullmatch(name)]
    return tuple(Adapter(name=name, artifact="") for name in valid) if len({*valid}) == len(names) else ()


def _read_spec(document: Document) -> Document:
    spec = document.get("spec")
    return spec if isinstance(spec, dict) else {}
