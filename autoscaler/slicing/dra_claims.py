"""Dynamic Resource Allocation: ResourceSlices as inventory, claims that pin what was chosen, and what they got.

Owns the Slicer `dra`. A whole GPU is one Slice, or a shared one where it may be allocated many times (its memory is
what is consumed), or where Settings let those on it have one claim in common (`autoscaler.slicing.dra_claims`).
Of entries that cannot be had at once (a GPU and its MIG parts) only such are offered as can be: those that are `kept`,
then the largest that the counters still allow. So what claims hold must be kept, and so must what was chosen (`places`
tells what a cut of `autoscaler.slicing.mig_placement` is called here).

The scheduler takes the first entry that a claim admits, and looks at nothing else; so a claim admits one. Of parts that
do not exist yet NVIDIA's driver tells no place that a claim could name: of one profile on one GPU the first in the
driver's order is taken, and `read_allocations` tells which it was. So it does where Settings let a claim name others of
its node (`list_alternatives`) behind the chosen one, for when that is gone by then; and where they let a GPU be cut:
who was given all of one that nobody is on, and needs less, claims the smallest part that holds it, and what is left is
offered from then on; of that the same is so, as far as a claim can say where.

A GPU that many Replicas share by time-slicing or MPS has one ResourceClaim, which all their pods name. The name of the
claim is derived from its content, so the first pod creates it, and different content gets another claim. NVIDIA's
driver shares a GPU only with its feature gate (`TimeSlicingSettings`, `MPSSupport`), and no GPU that several claims may
allocate. A claim is reserved for at most 256 pods, and an MPS server has at most 48 clients per device.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from autoscaler.slicing.base import MIB, NodeFacts, Object, PodFields, SliceShare, in_mib, parse_size
from autoscaler.slicing.dra_resource_slices import DraDevice, Policy, Pools, read_pools
from autoscaler.slicing.mig import mig_profile_capacity, parent_memory_bytes
from autoscaler.slicing.mig_geometry import Cut, geometry_of
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.slicing.nvidia_sharing import REPLICAS_MAX
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId

Sharing = Literal["timeslice", "mps"]
CLIENT_BYTES = 256 * MIB
"""Of an MPS client's limit, kept for its context: that counts, and engines that take a share do not reckon with it."""
_CONFIG = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}


class Way(NamedTuple):
    """How a driver shares a GPU."""

    strategy: str
    isolation: Isolation
    holders_max: int
    parameters: Mapping[str, Object] = {}


WAYS: Mapping[Sharing, Way] = {
    "timeslice": Way("TimeSlicing", Isolation.NONE, 256, {"timeSlicingConfig": {"interval": "Default"}}),
    "mps": Way("MPS", Isolation.MEMORY, 48),
}


def shared_claim_name(entry: str, where: str, sharing: Sharing) -> str:
    """What the claim of an entry is called, which all pods on it have."""
    short = re.sub(r"[^a-z0-9]+", "-", entry.rpartition("/")[2].lower()).strip("-")[:40]
    return f"{sharing}-{short}-{hashlib.sha256(f'{entry} {where}'.encode()).hexdigest()[:16]}"


def shared_claim_config(driver: str, sharing: Sharing, request: str) -> Object:
    """What the driver is told of that request of the claim."""
    way = WAYS[sharing]
    parameters = {**_CONFIG, "sharing": {"strategy": way.strategy, **way.parameters}}
    return {"requests": [request], "opaque": {"driver": driver, "parameters": parameters}}


def sharing_environment(sharing: Sharing, part: SliceShare) -> dict[str, str]:
    """By what an MPS server holds a client to its part; who has all of its GPU is held to nothing."""
    said = {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={in_mib(part.memory_bytes)}M" if part.memory_bytes else "",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(100, part.compute_percent) or ""),
    }
    return {name: value for name, value in said.items() if value} if sharing == "mps" else {}


def shared_fraction(sharing: Sharing, part: SliceShare) -> float | None:
    """Of its GPU, what an engine is told to take, in thousandths; None: it has all of it."""
    if not part.memory_bytes:
        return None
    all_bytes = part.slice.device_bytes or part.slice.memory_bytes
    mine_bytes = part.memory_bytes - (CLIENT_BYTES if sharing == "mps" else 0)
    return max(1, mine_bytes * 1000 // all_bytes) / 1000


API = "resource.k8s.io/v1"
NVIDIA = "gpu.nvidia.com"
ALTERNATIVES_MAX = 8
REQUESTS_MAX = 32
UNKNOWN_BYTES = 1 << 30


class Smaller(msgspec.Struct, frozen=True, array_like=True):
    """A part of a GPU that nobody is on, of one profile."""

    compute_percent: int
    memory_bytes: int
    device_class: str
    where: str
    profile: str


class Handle(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a Slice's `handle` says, as JSON."""

    entry: str
    """DRIVER/POOL/DEVICE."""
    device_class: str
    where: str
    shared: bool = False
    """It is consumed by its memory, of which only these amounts are given."""
    least: int = 0
    step: int = 1
    values: tuple[int, ...] = ()
    cuts: tuple[Smaller, ...] = ()
    """What may be claimed of it by who needs less, the smallest first."""
    whole: str = ""
    """Of a part: the entry that is all of its GPU, which can be had when nobody has a part of it."""
    sharing: Sharing | None = None
    """Those on it have one claim in common, by which its driver shares it so."""


class Got(NamedTuple):
    """What a claim really has."""

    request: str
    """`NAME`, or `NAME/ALTERNATIVE`."""
    entry: str
    memory_bytes: int | None
    """Consumed; None: all of it is its own."""


class Dra(NamedTuple):
    """The Slicer of one driver."""

    driver: str = NVIDIA

    @property
    def kind(self) -> str:
        """See Slice.kind."""
        return "dra"

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """What can be had at once."""
        found = read_pools(node.devices, node.name, self.driver)
        said = node.declared.slicing if node.declared is not None else None
        offered = self._offered(found, node.kept)
        may = said is not None and said.kind == self.kind and said.cut
        cuts = self._cuts(found, offered, node.kept) if may else {}
        wholes = {one.parent: one for one in found.entries if not one.mig and not one.closed}
        return tuple(self._slice(node, one, cuts, wholes) for one in offered) or None

    def places(self, node: NodeFacts) -> dict[DeviceId, dict[Cut, str]]:
        """By Device, what each cut that it may have is called, to be `kept`."""
        named: dict[DeviceId, dict[Cut, str]] = {}
        for entry in read_pools(node.devices, node.name, self.driver).entries:
            if entry.mig and entry.start is not None:
                named.setdefault(_device(node, entry), {})[Cut(entry.profile, entry.start)] = entry.name
        return named

    def _offered(self, found: Pools, kept: Sequence[str]) -> list[DraDevice]:
        rank = {name: number for number, name in enumerate(dict.fromkeys(kept))}  # a claim holds what was chosen
        offered: list[DraDevice] = []
        taken: dict[str, list[DraDevice]] = {}
        for entry in sorted(
            found.entries,
            key=lambda one: (rank.get(one.name, len(rank)), one.closed != "", -(one.memory_bytes or 0), one.name),
        ):
            others = taken.setdefault(entry.pool, [])
            if not entry.consumes or found.room(entry.pool, [*others, entry]):
                offered.append(entry)
                if entry.consumes:
                    others.append(entry)
        return sorted(offered, key=lambda one: one.name)

    def _cuts(self, found: Pools, offered: Sequence[DraDevice], kept: Sequence[str]) -> dict[str, tuple[Smaller, ...]]:
        """By entry that nobody has the parts that can be claimed instead of it, one of each profile: the one after
        which most is left, where places are told; else the driver takes the first that fits, so there is none where
        that could be in another that is offered. Without those that have what a GPU has once.
        """
        gpus: dict[tuple[str, str], list[DraDevice]] = {}
        for one in sorted(
            found.entries,
            key=lambda one: (one.placed and one.start != _best_starts(one.product).get(one.profile), one.name),
        ):
            if one.mig and not one.closed and "+" not in one.profile:
                gpus.setdefault((one.pool, one.parent), []).append(one)
        cuts: dict[str, tuple[Smaller, ...]] = {}
        for entry in offered:
            gpu = entry.pool, entry.parent
            others = [one for one in offered if (one.pool, one.parent) == gpu and one is not entry]
            told_only = any(one.name not in kept for one in others)
            all_bytes, all_percent = _amounts(entry)
            firsts: dict[str, Smaller] = {}
            for one in gpus.get(gpu, ()) if entry.name not in kept and all_bytes else ():
                memory_bytes, percent = _amounts(one)
                if not (memory_bytes or 0) < (all_bytes or 0) or percent > min(all_percent, 99):
                    continue
                unsure = told_only and not one.placed
                if one.profile not in firsts and not unsure and found.room(entry.pool, [*others, one]):
                    cut = Smaller(percent, memory_bytes or 0, self._class(one), one.where, one.profile)
                    firsts[one.profile] = cut
            cuts[entry.name] = tuple(sorted(firsts.values(), key=_size_of))
        return cuts

    def _slice(
        self,
        node: NodeFacts,
        entry: DraDevice,
        cuts: Mapping[str, tuple[Smaller, ...]],
        wholes: Mapping[str, DraDevice],
    ) -> Slice:
        said = node.declared.slicing if node.declared is not None else None
        sharing = None if said is None or said.kind != self.kind or entry.mig or entry.shared else said.sharing
        alone = not entry.shared and sharing is None
        memory_bytes, percent = _amounts(entry)
        apart = WAYS[sharing].isolation if sharing else Isolation.HARDWARE if alone else Isolation.NONE
        most = min(said.replicas or REPLICAS_MAX, WAYS[sharing].holders_max) if said and sharing else 0
        whole = wholes.get(entry.parent) if entry.mig else None
        handle = Handle(
            entry.name, self._class(entry), entry.where, entry.shared, entry.policy.least, entry.policy.step,
            entry.policy.values, cuts.get(entry.name, ()) if alone else (),
            "" if whole is None else whole.name, sharing,
        )  # fmt: skip
        return Slice(
            id=dra_slice_id(entry.name, node.name), device=_device(node, entry), node=node.name,
            memory_bytes=memory_bytes or UNKNOWN_BYTES, compute_percent=percent, isolation=apart, shared=not alone,
            product=re.sub(r"\s+", "-", entry.product), closed=entry.closed, kind=self.kind,
            link=entry.link, handle=msgspec.json.encode(handle).decode(),
            device_bytes=self._all_of(entry, whole, memory_bytes or UNKNOWN_BYTES, percent), holders_max=most,
        )  # fmt: skip

    def _all_of(self, entry: DraDevice, whole: DraDevice | None, memory_bytes: int, percent: int) -> int:
        """The memory of the GPU that an entry is a part of, as that itself tells it; 0: it is none."""
        known = parent_memory_bytes(entry.product, memory_bytes, percent) if entry.mig else 0
        return whole.memory_bytes or known if known and whole is not None else known

    def _class(self, entry: DraDevice) -> str:
        return "mig.nvidia.com" if entry.mig and self.driver == NVIDIA else self.driver

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """One claim of the Replica's own; of GPUs that are had in common one for each, which others have too."""
        if not 0 < len(parts) <= REQUESTS_MAX:
            raise ValueError(f"{replica}: a claim is for 1 to {REQUESTS_MAX} devices, not {len(parts)}")
        told = [(part, _told(part, alone=len(parts) == 1)) for part in parts]
        own = [(part, one) for part, one in told if one.sharing is None]
        claims = [_claim(replica, [_request(f"gpu-{at}", "exactly", _wish(*one)) for at, one in enumerate(own)])]
        asks = PodFields(claims=tuple(claims if own else ()))
        sharing = next((one.sharing for _, one in told if one.sharing is not None), None)
        return asks if sharing is None else self._in_common(asks, sharing, [one for one in told if one[1].sharing])

    def _in_common(self, asks: PodFields, sharing: Sharing, told: Sequence[tuple[SliceShare, Handle]]) -> PodFields:
        """Of one node, so all are shared in one way."""
        names = [shared_claim_name(one.entry, one.where, sharing) for _, one in told]
        config = [shared_claim_config(self.driver, sharing, "gpu")]
        claims = (
            _claim(name, [_request("gpu", "exactly", _wish(*one))], config)
            for name, one in zip(names, told, strict=True)
        )
        asks = asks._replace(claims=(*asks.claims, *claims), common=frozenset(names))
        if len(told) > 1 or asks.claims[1:]:
            return asks  # who has several devices has all of them
        part = told[0][0]
        env, fraction = sharing_environment(sharing, part), shared_fraction(sharing, part)
        return asks._replace(env=env, memory_fraction=fraction)

    def either(self, replica: str, choices: Sequence[SliceShare]) -> PodFields:
        """One of these, the first that can be had: the scheduler takes them in order (a prioritized list)."""
        if not 0 < len(choices) <= ALTERNATIVES_MAX:
            raise ValueError(f"{replica}: a claim has 1 to {ALTERNATIVES_MAX} alternatives, not {len(choices)}")
        wishes = [{"name": f"choice-{at}", **_wish(part, _told(part, alone=True))} for at, part in enumerate(choices)]
        return PodFields(claims=(_claim(replica, [_request("gpu", "firstAvailable", wishes)]),))


def _device(node: NodeFacts, entry: DraDevice) -> DeviceId:
    return DeviceId(f"{node.name}/{entry.parent}")


def _amounts(entry: DraDevice) -> tuple[int | None, int]:
    """Its memory, and its percent of its GPU's compute."""
    if not entry.mig:
        return entry.memory_bytes, 100
    known_bytes, slices, of_all = mig_profile_capacity(entry.profile, entry.product)
    return entry.memory_bytes or known_bytes, max(1, 100 * slices // of_all)


@lru_cache(maxsize=64)
def _best_starts(product: str) -> Mapping[str, int]:
    """By profile, of a GPU that nobody is on; empty: it is not known. Worked out at once: the first costs 0.1 s."""
    geometry = geometry_of(product)
    if geometry is None:
        return {}
    fleet = Fleet()
    fleet.add(DeviceId("gpu"), geometry)
    found = ((one.name, fleet.find(one.name)) for one in geometry.profiles)
    return {name: one.start for name, one in found if isinstance(one, MigPlacement)}


def _size_of(cut: Smaller) -> tuple[int, int]:
    return cut.compute_percent, cut.memory_bytes


def _told(part: SliceShare, *, alone: bool) -> Handle:
    """What to claim for it: where that may be cut, and it is the only one, no more than it needs. Who asks for no
    memory wants all of it.
    """
    told = msgspec.json.decode(part.slice.handle, type=Handle)
    one = _smaller(part, told) if alone else None
    return told if one is None else Handle(told.entry, one.device_class, one.where)


def _smaller(part: SliceShare, told: Handle) -> Smaller | None:
    enough = (
        one
        for one in told.cuts
        if one.memory_bytes >= part.memory_bytes > 0 and one.compute_percent >= part.compute_percent
    )
    return next(enough, None)


def _wish(part: SliceShare, told: Handle) -> Object:
    wish: Object = {"deviceClassName": told.device_class, "selectors": [{"cel": {"expression": told.where}}]}
    if told.shared:
        memory = Policy(told.least, told.step, told.values).given(part.memory_bytes)
        wish["capacity"] = {"requests": {"memory": _quantity(memory)}}
    return wish


def _request(name: str, how: str, wish: Object | list[Object]) -> Object:
    return {"name": name, how: wish}


def _claim(name: str, requests: list[Object], config: Sequence[Object] = ()) -> Object:
    devices: Object = {"requests": requests}
    if config:
        devices["config"] = list(config)
    return {"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": name}, "spec": {"devices": devices}}


def _quantity(bytes_: int) -> str:
    return f"{bytes_ // MIB}Mi" if bytes_ % MIB == 0 else str(bytes_)


# --- what claims really have ------------------------------------------------------------------------------------------


class _Result(msgspec.Struct, frozen=True, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    consumed_capacity: dict[str, Any] = {}


def read_allocations(claim: Object) -> tuple[Got, ...]:
    """Of any claim, ours or not; what was allocated for administration takes nothing from anybody."""
    found: list[Got] = []
    for said in _results(claim):
        try:
            one = msgspec.convert(said, _Result)
        except msgspec.ValidationError:
            continue  # the API server admits no such thing
        if not one.admin_access:
            consumed = one.consumed_capacity.get("memory", one.consumed_capacity.get(f"{one.driver}/memory"))
            found.append(Got(one.request, f"{one.driver}/{one.pool}/{one.device}", parse_size(consumed)))
    return tuple(found)


def _results(claim: Object) -> Sequence[object]:
    said: Any = claim
    for key in ("status", "allocation", "devices", "results"):
        said = said.get(key) if isinstance(said, dict) else None
    return said if isinstance(said, list) else ()


def list_alternatives(of: Slice, slices: Iterable[Slice], gone: Collection[str]) -> Iterator[Slice]:
    """Those of its node that would do as well, each the first of those that one claim cannot tell apart. `gone`: ids of
    Slices that somebody has, names by which they are counted, and Devices that are closed.
    """
    if of.kind != "dra" or of.shared:
        return
    told = msgspec.json.decode(of.handle, type=Handle)
    seen, wanted = {told.where}, (of.node, of.kind, told.device_class, *_size(of))
    for one in slices:
        if one.kind != of.kind or one.closed or not one.healthy or {one.id, one.counted, one.device} & {*gone}:
            continue
        other = msgspec.json.decode(one.handle, type=Handle)
        if (one.node, one.kind, other.device_class, *_size(one)) == wanted and other.where not in seen:
            seen.add(other.where)
            yield one


def _size(of: Slice) -> tuple[object, ...]:
    return of.product, of.memory_bytes, of.compute_percent, of.isolation, of.shared


def find_slice(got: Got, slices: Iterable[Slice]) -> Slice | None:
    """Which Slice that is; None: it is none of these, so it must be `kept` to be one."""
    return next((one for one in slices if one.kind == "dra" and dra_device_name(one) == got.entry), None)


def find_whole_gpu(part: Slice) -> Slice | None:
    """All of the GPU that a Slice is a part of, as it is offered when nobody has a part; None: it is none, or never."""
    if part.kind != "dra" or not part.device_bytes:
        return None
    told = msgspec.json.decode(part.handle, type=Handle)
    return (
        None
        if not told.whole
        else replace(
            part,
            id=dra_slice_id(told.whole, part.node),
            memory_bytes=part.device_bytes,
            device_bytes=0,
            compute_percent=100,
            theirs=0,
            handle=told.whole,
        )
    )


def claimed_mig_profile(part: SliceShare) -> str:
    """Of which profile the part is that will be claimed of a whole GPU; empty: all of it will be."""
    if part.slice.kind != "dra":
        return ""
    found = _smaller(part, msgspec.json.decode(part.slice.handle, type=Handle))
    return "" if found is None else found.profile


def dra_device_name(slice_: Slice) -> str:
    """Which entry a Slice of this kind is."""
    return msgspec.json.decode(slice_.handle, type=Handle).entry


def common_claim_name(slice_: Slice) -> str:
    """What the claim is called that all on it have; empty: each has one of its own."""
    if slice_.kind != "dra":
        return ""
    told = msgspec.json.decode(slice_.handle, type=Handle)
    return "" if told.sharing is None else shared_claim_name(told.entry, told.where, told.sharing)


def dra_device_name_of_id(id: SliceId, driver: str = NVIDIA) -> str:
    """Which entry the Slice of that id is, if it is one."""
    node, _, rest = id.partition("/")
    pool, _, device = rest.rpartition("/")
    return f"{driver}/{pool or node}/{device}"


def dra_slice_id(entry: str, node: str) -> SliceId:
    """What an entry of a node is called as a Slice."""
    pool, _, device = entry.partition("/")[2].rpartition("/")
    return SliceId(f"{node}/{device}" if pool == node else f"{node}/{pool}/{device}")
