"""Model objects whose decoding raises an unexpected exception, and what is in force instead of their document. Pure.

Their Models are quarantined (`autoscaler.fold.model_quarantine`). The last valid document stays in force. If the object
never had one, a stand-in has its names, so that its requests are rejected as those of a quarantined Model and reach
replicas that are ready already. It is never started: its Model is quarantined whenever a plan is made, since a retry
decodes the object before the plan.

A stand-in of our own kind has the object's engine, names, Tenants and installation, as far as they are valid. Those of
other kinds have only the name of the object, because their spec has other keys.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from msgspec.structs import replace

from autoscaler.contract import ModelName, TenantName
from autoscaler.documents.document_rules import ADAPTER, ADAPTERS_MAX, check_own_names
from autoscaler.exception_handling import describe_error
from autoscaler.kubernetes.optional_kinds import created_unix_s
from autoscaler.kubernetes.safe_decoding import Object
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Adapter, EngineName, Model, ModelSpec
from autoscaler.spec.name_conflicts import check_name

NO_SPEC = ModelSpec(engine="command")
"""The spec of a stand-in about whose engine and names nothing is known."""


class Undecoded(NamedTuple):
    """An object whose decoding raised an exception. It is decoded again when the quarantine of its Model ends."""

    found: Object
    reason: str
    """The exception, in one line."""
    stand_in: Model
    """The Model that is in force if the object never had a valid document."""


def describe_undecoded(found: Object, error: Exception) -> Undecoded:
    """Describe an object of our own kind whose decoding raised `error`. Its metadata must be valid."""
    metadata = found["metadata"]
    return Undecoded(found, describe_error(error), _stand_in(found, _read_known_keys(found), metadata["uid"]))


def describe_unconverted(found: Object, error: Exception) -> Undecoded:
    """Describe an object of another kind whose conversion raised `error`. Its metadata must be valid."""
    return Undecoded(found, describe_error(error), _stand_in(found, NO_SPEC))


def _stand_in(found: Object, spec: ModelSpec, uid: str = "") -> Model:
    metadata = found["metadata"]
    return Model(
        name=ModelName(metadata["name"]), spec=spec, namespace=metadata["namespace"], uid=uid,
        created_unix_s=created_unix_s(metadata),
    )  # fmt: skip


def read_installation(found: Object) -> str | None:
    """Read `spec.installation` without decoding the spec. None: it has none."""
    named = _read_spec(found).get("installation")
    return named if isinstance(named, str) else None


def _read_tenants(found: Object) -> tuple[TenantName, ...] | None:
    """Read `spec.tenants` without decoding the spec. Without a valid list no Tenant may use the Model."""
    named = _read_spec(found).get("tenants")
    if named is None:
        return None
    names = named if isinstance(named, list) else ()
    return tuple(TenantName(name) for name in names if isinstance(name, str))


def _read_known_keys(found: Object) -> ModelSpec:
    """Read the keys that a gateway needs to reject a request, or to pass it to a ready replica."""
    spec, name = _read_spec(found), found["metadata"]["name"]
    said = spec.get("engine")
    engine = said if isinstance(said, str) and said in ENGINES else NO_SPEC.engine
    known = ModelSpec(
        engine=cast("EngineName", engine), tenants=_read_tenants(found), installation=read_installation(found)
    )
    for more in (
        replace(known, aliases=_read_aliases(spec), adapters=_read_adapters(spec, engine)),
        replace(known, aliases=_read_aliases(spec)),
    ):
        try:
            check_own_names(name, more)
        except WrongKeyError:
            continue
        return more
    return known


def _read_aliases(spec: Object) -> tuple[str, ...]:
    """Read `spec.aliases`; none if one of them is not a valid name."""
    said = spec.get("aliases")
    aliases = tuple(one for one in said if isinstance(one, str)) if isinstance(said, list) else ()
    try:
        for alias in aliases:
            check_name(alias, ("spec", "aliases"))
    except WrongKeyError:
        return ()
    return aliases


def _read_adapters(spec: Object, engine: str) -> tuple[Adapter, ...]:
    """Read the names of `spec.adapters`, without their artifacts; none if one of them is not valid."""
    said = spec.get("adapters")
    if not isinstance(said, list) or len(said) > ADAPTERS_MAX or ENGINES[engine].adapters is None:
        return ()
    names = [one.get("name") if isinstance(one, dict) else None for one in said]
    valid = [name for name in names if isinstance(name, str) and ADAPTER.fullmatch(name)]
    return tuple(Adapter(name=name, artifact="") for name in valid) if len({*valid}) == len(names) else ()


def _read_spec(found: Object) -> Object:
    spec = found.get("spec")
    return spec if isinstance(spec, dict) else {}
