"""Model objects whose decoding raises an unexpected exception, and what is in force instead of their document. Pure.

Their Models are quarantined (`autoscaler.fold.model_quarantine`). The last valid document stays in force. If the object
never had one, a stand-in has its name, so that its requests are rejected as those of a quarantined Model. Only the
object's metadata, its Tenants and its installation are read from the object itself.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import ModelName, TenantName
from autoscaler.exception_handling import describe_error
from autoscaler.kubernetes.optional_kinds import created_unix_s
from autoscaler.kubernetes.safe_decoding import Object
from autoscaler.spec.model import Model, ModelSpec


class Undecoded(NamedTuple):
    """An object whose decoding raised an exception. It is decoded again when the quarantine of its Model ends."""

    found: Object
    reason: str
    """The exception, in one line."""
    stand_in: Model
    """The Model that is in force if the object never had a valid document."""


def describe_undecoded(found: Object, error: Exception) -> Undecoded:
    """Describe an object whose decoding raised `error`. Its metadata must be valid."""
    metadata = found["metadata"]
    spec = ModelSpec(engine="command", paused=True, tenants=_read_tenants(found), installation=read_installation(found))
    stand_in = Model(
        name=ModelName(metadata["name"]), spec=spec, namespace=metadata["namespace"], uid=metadata["uid"],
        created_unix_s=created_unix_s(metadata),
    )  # fmt: skip
    return Undecoded(found, describe_error(error), stand_in)


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


def _read_spec(found: Object) -> Object:
    spec = found.get("spec")
    return spec if isinstance(spec, dict) else {}
