"""Binding conditions (KEP-5007) of allocated DRA devices that are not attached yet, and their effect on slices.

A ResourceSlice device lists its binding conditions; the scheduler copies them into the claim that is allocated the
device. The controller that attaches the device (for example of a fabric) sets these conditions in the claim's status.
The scheduler binds the pod when all binding conditions are true. It deallocates the device when a failure condition is
true, or after ten minutes. Malformed objects raise no error, and conditions that are not set count as waiting. This
module only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from autoscaler.slicing.dra import dra_device_name_of_id
from autoscaler.slicing.dra_resource_slices import ATTACHED_FIRST
from autoscaler.slicing.slicer_protocol import Object
from autoscaler.state.world import Slice

SAID_MAX = 200
"""Maximum number of characters of a condition's message in a reason."""

State = Literal["waiting", "ready", "failed"]


class Binding(NamedTuple):
    """An allocated device that must be attached before the pod of its claim is bound."""

    entry: str
    """DRIVER/POOL/DEVICE."""
    claim: str
    """NAMESPACE/NAME."""
    state: State
    says: str
    """The deciding condition (not true yet, or a failure) with its reason and message."""


def read_bindings(claim: Object) -> tuple[Binding, ...]:
    """Return the devices of a claim that have binding conditions; empty if there are none."""
    status = _map(claim.get("status"))
    allocated = _list(_map(_map(status.get("allocation")).get("devices")).get("results"))
    known = {
        _entry(device): {str(one.get("type", "")): one for one in map(_map, _list(device.get("conditions")))}
        for device in map(_map, _list(status.get("devices")))
    }
    metadata = _map(claim.get("metadata"))
    name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    return tuple(
        Binding(_entry(one), name, *_state(one, known.get(_entry(one), {})))
        for one in map(_map, allocated)
        if _list(one.get("bindingConditions"))
    )


def apply_bindings(slices: tuple[Slice, ...], found: Iterable[Binding]) -> tuple[Slice, ...]:
    """Return the slices; those closed until their device is attached get the attachment state as the reason."""
    words = {one.entry: _words(one) for one in found}
    if not words:
        return slices
    pairs = (
        (one, words.get(dra_device_name_of_id(one.id)) if one.closed.startswith(ATTACHED_FIRST) else None)
        for one in slices
    )
    return tuple(one if says is None else replace(one, closed=says) for one, says in pairs)


def _words(one: Binding) -> str:
    match one.state:
        case "waiting":
            return f"it is being attached for claim {one.claim}, which waits for {one.says}"
        case "failed":
            return f"it could not be attached for claim {one.claim}: {one.says}"
    return f"it is attached and allocated to claim {one.claim}"


def _state(result: Object, conditions: Mapping[str, Object]) -> tuple[State, str]:
    """Evaluate the conditions as the scheduler does: failures first."""
    for name in _list(result.get("bindingFailureConditions")):
        if _is_true(conditions.get(str(name))):
            return "failed", _format_condition(str(name), conditions[str(name)])
    for name in _list(result.get("bindingConditions")):
        if not _is_true(conditions.get(str(name))):
            return "waiting", _format_condition(str(name), conditions.get(str(name), {}))
    return "ready", ""


def _is_true(condition: Object | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _format_condition(name: str, condition: Object) -> str:
    """`FabricDeviceFailed (NoCable: ...)`."""
    more = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    return f"{name} ({more[:SAID_MAX]})" if more else name


def _entry(one: Object) -> str:
    return "/".join(str(one.get(key, "")) for key in ("driver", "pool", "device"))


def _map(said: Any) -> Object:
    return said if isinstance(said, dict) else {}


def _list(said: Any) -> list[Any]:
    return said if isinstance(said, list) else []
