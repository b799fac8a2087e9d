"""Reads the ResourceSlices (resource.k8s.io/v1) of a node: entries, and the counters that some of them share.

Covers the pools of one driver. An entry is a device that a claim may get: a GPU, or a part of one that does not exist
until it is claimed. Entries that exclude each other consume shared counters. Malformed objects raise no error, and an
entry that the scheduler would not allocate is closed, with the reason. Chooses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from autoscaler.slicing.slicer_protocol import Object
from autoscaler.spec.quantity import MEMORY_MIB_MAX, MIB, parse_size

Counters = Mapping[tuple[str, str], int]
"""(counter set, counter) -> how much."""
TYPES = {"gpu", "mig"}
"""Values of attribute `type`: others (`vfio`) are another path to the same hardware. An entry without it is a GPU."""
_LINK = "resource.kubernetes.io", "pcieRoot"
SURE = ("uuid", "resource.kubernetes.io/pciBusID", "pciAddr")
"""Attributes that identify an entry, in order of preference."""
_MEMORY_SLICE = re.compile(r"memory-?[sS]lice-?([0-9]{1,2})")
ATTACHED_FIRST = "it must be attached first"
_EFFECTS = {"NoSchedule", "NoExecute"}


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Base class; unknown fields are ignored."""


class _Attribute(_Struct, frozen=True):
    string: str = ""


class _Range(_Struct, frozen=True):
    min: str | int = 0
    max: str | int | None = None
    step: str | int | None = None


class _Policy(_Struct, frozen=True):
    valid_values: list[str | int] = []
    valid_range: _Range | None = None


class _Value(_Struct, frozen=True):
    value: str | int
    request_policy: _Policy | None = None


class _Consumed(_Struct, frozen=True):
    counter_set: str
    counters: dict[str, _Value]


class _Taint(_Struct, frozen=True):
    key: str
    effect: str
    value: str = ""


class _Device(_Struct, frozen=True):
    name: str
    attributes: dict[str, _Attribute] = {}
    capacity: dict[str, _Value] = {}
    consumes_counters: list[_Consumed] = []
    taints: list[_Taint] = []
    allow_multiple_allocations: bool = False
    binding_conditions: list[str] = []
    node_name: str = ""


class _Counters(_Struct, frozen=True):
    name: str
    counters: dict[str, _Value]


class _Pool(_Struct, frozen=True):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class _Spec(_Struct, frozen=True):
    driver: str
    pool: _Pool
    node_name: str = ""
    devices: list[_Device] | None = None
    shared_counters: list[_Counters] | None = None


class _Slice(_Struct, frozen=True):
    spec: _Spec


class Policy(NamedTuple):
    """The amounts of memory that an entry can allocate; any amount if nothing is set."""

    least: int = 0
    step: int = 1
    values: tuple[int, ...] = ()

    def given(self, asked: int) -> int:
        """Round up to the least allocatable amount; above the maximum return `asked` (the scheduler rejects it)."""
        if self.values:
            return min((one for one in self.values if one >= asked), default=asked)
        over = max(0, asked - self.least)
        return self.least + -(-over // self.step) * self.step


class DraDevice(NamedTuple):
    """A device that a claim may get."""

    name: str
    """DRIVER/POOL/DEVICE, unique in the cluster."""
    pool: str
    device: str
    mig: bool
    profile: str
    """MIG profile."""
    parent: str
    """The GPU that it is or is part of: its UUID if known."""
    start: int | None
    """First memory slice, if known."""
    product: str
    memory_bytes: int | None
    policy: Policy
    link: str
    """PCIe root, if known."""
    shared: bool
    consumes: Counters
    where: str
    """CEL expression that matches only this entry; for a part that does not exist yet, only its GPU and profile."""
    closed: str

    @property
    def placed(self) -> bool:
        """Whether `where` determines the position on the GPU."""
        return "memorySlice" in self.where


class Pools(NamedTuple):
    """The pools of one driver on one node."""

    entries: tuple[DraDevice, ...]
    counters: Mapping[str, Counters]
    """By pool."""

    def room(self, pool: str, taken: Iterable[DraDevice]) -> bool:
        """Return whether the pool's counters allow all of these entries at once."""
        left = dict(self.counters.get(pool, {}))
        for entry in taken:
            for counter, much in entry.consumes.items():
                left[counter] = left.get(counter, 0) - much
        return all(much >= 0 for much in left.values())


def read_pools(objects: Sequence[Object], node: str, driver: str) -> Pools:
    """Read the newest generation of each pool."""
    found: dict[str, list[_Spec]] = {}
    for one in objects:
        try:
            spec = msgspec.convert(one, _Slice).spec
        except msgspec.ValidationError:
            continue  # reported as an incomplete pool
        if spec.driver == driver:
            found.setdefault(spec.pool.name, []).append(spec)
    entries: list[DraDevice] = []
    counters: dict[str, Counters] = {}
    for name, listed in sorted(found.items()):
        newest = max(spec.pool.generation for spec in listed)
        specs = [spec for spec in listed if spec.pool.generation == newest]
        counters[name] = _counters(
            ((one.name, one.counters) for spec in specs for one in spec.shared_counters or ()), 0
        )
        closed = _not_whole(name, specs)
        entries += [
            _entry(driver, name, one, closed)
            for spec in specs
            for one in spec.devices or ()
            if (spec.node_name or one.node_name) == node and one.attributes.get("type", _GPU).string in TYPES
        ]
    return Pools(tuple(entries), counters)


_GPU = _Attribute("gpu")


def _not_whole(name: str, specs: Sequence[_Spec]) -> str:
    """Return why the scheduler allocates nothing from the pool; empty if it does."""
    many = max(spec.pool.resource_slice_count for spec in specs)
    if len(specs) != many:
        return f"its pool {name} has {len(specs)} of {many} ResourceSlices: its driver has not published all"
    devices = [one.name for spec in specs for one in spec.devices or ()]
    return f"its pool {name} names a device twice" if len(set(devices)) < len(devices) else ""


def _counters(sets: Iterable[tuple[str, Mapping[str, _Value]]], unknown: int) -> Counters:
    """Parse counters. `unknown`: value for a malformed amount."""
    return {
        (name, counter): 0 if one.value in (0, "0") else parse_size(one.value) or unknown
        for name, counters in sets
        for counter, one in counters.items()
    }


def _entry(driver: str, pool: str, device: _Device, closed: str) -> DraDevice:
    attributes = {_domain(key, driver): one.string for key, one in device.attributes.items()}
    capacity = {_domain(key, driver): one for key, one in device.capacity.items()}
    mig = attributes.get((driver, "type")) == "mig"
    profile, memory = attributes.get((driver, "profile"), "") if mig else "", capacity.get((driver, "memory"))
    uuid = attributes.get((driver, "uuid"), "")
    consumes = _counters(((one.counter_set, one.counters) for one in device.consumes_counters), MEMORY_MIB_MAX * MIB)
    starts = [int(match[1]) for _, key in capacity if (match := _MEMORY_SLICE.fullmatch(key))]
    taken = [int(match[1]) for _, key in consumes if (match := _MEMORY_SLICE.fullmatch(key))]
    where = _where(driver, attributes, min(starts, default=None) if mig else None)
    return DraDevice(
        name=f"{driver}/{pool}/{device.name}", pool=pool, device=device.name, mig=mig, profile=profile,
        parent=attributes.get((driver, "parentUUID"), "") or uuid or device.name,
        start=min(starts or taken, default=None) if mig else None, product=attributes.get((driver, "productName"), ""),
        memory_bytes=None if memory is None else parse_size(memory.value), policy=_policy(memory),
        link=attributes.get(_LINK, ""), shared=device.allow_multiple_allocations, consumes=consumes, where=where,
        closed=closed or _closed(device)
        or ("" if where else "its driver publishes no attribute that identifies the device"),
    )  # fmt: skip


def _domain(key: str, driver: str) -> tuple[str, str]:
    """Return domain and name of an attribute or capacity; the default domain is the driver's."""
    domain, slash, name = key.rpartition("/")
    return (domain, name) if slash else (driver, key)


def _closed(device: _Device) -> str:
    for taint in device.taints:
        if taint.effect in _EFFECTS:
            return f"its driver tainted it {taint.key}={taint.value}:{taint.effect}"
    return f"{ATTACHED_FIRST} ({device.binding_conditions[0]})" if device.binding_conditions else ""


def _policy(memory: _Value | None) -> Policy:
    said = memory.request_policy if memory is not None else None
    if said is None:
        return Policy()
    in_range = said.valid_range or _Range()
    values = sorted(filter(None, map(parse_size, said.valid_values)))
    return Policy(
        parse_size(in_range.min) or 0,
        (parse_size(in_range.step) if in_range.step is not None else None) or 1,
        (*values,),
    )


def _where(driver: str, attributes: Mapping[tuple[str, str], str], start: int | None) -> str:
    """Return a CEL expression; empty if no attribute identifies the entry."""
    for key in SURE:
        domain, name = _domain(key, driver)
        if attributes.get((domain, name)):
            return _is(domain, name, attributes[domain, name])
    if not (attributes.get((driver, "parentUUID")) and attributes.get((driver, "profile"))):
        return ""
    said = [_is(driver, name, attributes[driver, name]) for name in ("parentUUID", "profile")]
    if start is not None:
        said.append(f"'memorySlice{start}' in device.capacity[{_text(driver)}]")
        said += [f"!('memorySlice{start - 1}' in device.capacity[{_text(driver)}])"] if start else []
    return " && ".join(said)


def _is(domain: str, name: str, value: str) -> str:
    """Build an equality test that checks presence first: reading a missing attribute would fail the claim."""
    of = f"device.attributes[{_text(domain)}]"
    return f"{_text(name)} in {of} && {of}[{_text(name)}] == {_text(value)}"


def _text(value: str) -> str:
    """Quote a string for CEL."""
    return json.dumps(value, ensure_ascii=False)
