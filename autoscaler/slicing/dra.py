"""Dynamic Resource Allocation: ResourceSlices as inventory, claims that pin the chosen devices, and their allocations.

Contains the Slicer `dra`. A whole GPU is one slice. It is shared if it allows multiple allocations (claims consume its
memory), or if Settings let its replicas share one claim. Of entries that exclude each other (a GPU and its MIG parts),
it offers first those in `kept`, then the largest that the counters still allow. Devices held by claims and devices
chosen by a placement must therefore be in `kept` (`places` maps cuts of `autoscaler.slicing.mig_placement` to entries).

The scheduler allocates the first entry that matches a claim, so a claim matches exactly one. Exceptions:

- For parts that do not exist yet, NVIDIA's driver publishes no position that a claim could select, so the scheduler
  allocates the first part of the profile on that GPU.
- If Settings allow it, a claim lists alternatives on its node (`list_alternatives`), in case the chosen entry is no
  longer free.
- If Settings allow cutting, a replica on an unused whole GPU that needs less claims the smallest sufficient part, at
  its position if a claim can select it. The rest of the GPU is then offered.

`read_allocations` returns the actual allocation.

A GPU shared by time-slicing or MPS has one ResourceClaim, which all its pods reference. The claim's name is derived
from its content: the first pod creates it, and different content gets another claim. The inventory of a cluster appends
a hash of the installation to that name. NVIDIA's driver shares a GPU only with its feature gate
(`TimeSlicingSettings`, `MPSSupport`), and only a GPU that does not allow multiple allocations. A claim is reserved for
at most 256 pods, and an MPS server has at most 48 clients per device.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from autoscaler.slicing.dra_resource_slices import DraDevice, Policy, Pools, read_pools
from autoscaler.slicing.mig import mig_profile_capacity, parent_memory_bytes
from autoscaler.slicing.mig_geometry import Cut, geometry_of
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.slicing.nvidia_device_plugin import REPLICAS_MAX
from autoscaler.slicing.slicer_protocol import NodeFacts, Object, PodFields, SliceShare
from autoscaler.spec.quantity import MIB, in_mib, parse_size
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId

Sharing = Literal["timeslice", "mps"]
CLIENT_BYTES = 256 * MIB
"""Part of an MPS client's memory limit that is reserved for its context. The context counts against the limit, but
engines do not allow for it."""
_CONFIG = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}


class Way(NamedTuple):
    """A driver's mode of sharing a GPU."""

    strategy: str
    isolation: Isolation
    holders_max: int
    parameters: Mapping[str, Object] = {}


WAYS: Mapping[Sharing, Way] = {
    "timeslice": Way("TimeSlicing", Isolation.NONE, 256, {"timeSlicingConfig": {"interval": "Default"}}),
    "mps": Way("MPS", Isolation.MEMORY, 48),
}


def shared_claim_name(entry: str, where: str, sharing: Sharing) -> str:
    """Return the name of the claim that all pods of an installation on an entry share, without its suffix."""
    short = re.sub(r"[^a-z0-9]+", "-", entry.rpartition("/")[2].lower()).strip("-")[:40]
    return f"{sharing}-{short}-{hashlib.sha256(f'{entry} {where}'.encode()).hexdigest()[:16]}"


def shared_claim_config(driver: str, sharing: Sharing, request: str) -> Object:
    """Return the driver configuration for that request of the claim."""
    way = WAYS[sharing]
    parameters = {**_CONFIG, "sharing": {"strategy": way.strategy, **way.parameters}}
    return {"requests": [request], "opaque": {"driver": driver, "parameters": parameters}}


def sharing_environment(sharing: Sharing, part: SliceShare) -> dict[str, str]:
    """Return the environment by which the MPS server limits a client; empty for a replica that has the whole GPU."""
    said = {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={in_mib(part.memory_bytes)}M" if part.memory_bytes else "",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(100, part.compute_percent) or ""),
    }
    return {name: value for name, value in said.items() if value} if sharing == "mps" else {}


def shared_fraction(sharing: Sharing, part: SliceShare) -> float | None:
    """Return the memory fraction for the engine, in thousandths; None if it has the whole GPU."""
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
    """A part of an unused GPU, of one profile."""

    compute_percent: int
    memory_bytes: int
    device_class: str
    where: str
    profile: str


class Handle(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a slice's `handle`, encoded as JSON."""

    entry: str
    """DRIVER/POOL/DEVICE."""
    device_class: str
    where: str
    shared: bool = False
    """Claims consume its memory, in the amounts given by the next three fields."""
    least: int = 0
    step: int = 1
    values: tuple[int, ...] = ()
    cuts: tuple[Smaller, ...] = ()
    """Parts that a replica with smaller needs may claim instead, smallest first."""
    whole: str = ""
    """For a part: the entry of its whole GPU, available when no part is in use."""
    sharing: Sharing | None = None
    """Its replicas share one claim, for which the driver shares the device in this way."""


class Got(NamedTuple):
    """Devices that the scheduler allocated to a claim."""

    request: str
    """`NAME`, or `NAME/ALTERNATIVE`."""
    entry: str
    memory_bytes: int | None
    """Consumed memory; None for the whole device."""


class Dra(NamedTuple):
    """The Slicer of one DRA driver."""

    driver: str = NVIDIA

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""
        return "dra"

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the devices that can be allocated at the same time."""
        found = read_pools(node.devices, node.name, self.driver)
        said = node.declared.slicing if node.declared is not None else None
        offered = self._offered(found, node.kept)
        may = said is not None and said.kind == self.kind and said.cut
        cuts = self._cuts(found, offered, node.kept) if may else {}
        wholes = {one.parent: one for one in found.entries if not one.mig and not one.closed}
        return tuple(self._slice(node, one, cuts, wholes) for one in offered) or None

    def places(self, node: NodeFacts) -> dict[DeviceId, dict[Cut, str]]:
        """Return, by device, the entry name of each possible cut, for use in `kept`."""
        named: dict[DeviceId, dict[Cut, str]] = {}
        for entry in read_pools(node.devices, node.name, self.driver).entries:
            if entry.mig and entry.start is not None:
                named.setdefault(_device(node, entry), {})[Cut(entry.profile, entry.start)] = entry.name
        return named

    def _offered(self, found: Pools, kept: Sequence[str]) -> list[DraDevice]:
        rank = {name: number for number, name in enumerate(dict.fromkeys(kept))}  # may be both claimed and chosen
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
        """Return, for each unused entry, the parts that can be claimed instead of it, one per profile.
        If positions are known, it is the part that leaves the most room. Otherwise the driver takes the first part that
        fits; then no part is returned that the driver could also take from another offered entry. Profiles with
        hardware engines that a GPU has only once (`+me`) are excluded.
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
            has_free_others = any(one.name not in kept for one in others)
            all_bytes, all_percent = _amounts(entry)
            firsts: dict[str, Smaller] = {}
            for one in gpus.get(gpu, ()) if entry.name not in kept and all_bytes else ():
                memory_bytes, percent = _amounts(one)
                if not (memory_bytes or 0) < (all_bytes or 0) or percent > min(all_percent, 99):
                    continue
                unsure = has_free_others and not one.placed
                if one.profile not in firsts and not unsure and found.room(entry.pool, [*others, one]):
                    cut = Smaller(percent, memory_bytes or 0, self._class(one), one.where, one.profile)
                    firsts[one.profile] = cut
            cuts[entry.name] = tuple(sorted(firsts.values(), key=lambda one: (one.compute_percent, one.memory_bytes)))
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
        """Return the memory of the GPU of a part, if possible as the GPU reports it; 0 for a whole GPU."""
        known = parent_memory_bytes(entry.product, memory_bytes, percent) if entry.mig else 0
        return whole.memory_bytes or known if known and whole is not None else known

    def _class(self, entry: DraDevice) -> str:
        return "mig.nvidia.com" if entry.mig and self.driver == NVIDIA else self.driver

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Build one claim for the replica; each GPU shared through a common claim adds that claim."""
        if not 0 < len(parts) <= REQUESTS_MAX:
            raise ValueError(f"{replica}: a claim is for 1 to {REQUESTS_MAX} devices, not {len(parts)}")
        handle = [(part, _claimed_handle(part, alone=len(parts) == 1)) for part in parts]
        own = [(part, one) for part, one in handle if one.sharing is None]
        claims = [
            _claim(replica, [_request(f"gpu-{at}", "exactly", _device_request(*one)) for at, one in enumerate(own)])
        ]
        asks = PodFields(claims=tuple(claims if own else ()))
        sharing = next((one.sharing for _, one in handle if one.sharing is not None), None)
        return asks if sharing is None else self._in_common(asks, sharing, [one for one in handle if one[1].sharing])

    def _in_common(self, asks: PodFields, sharing: Sharing, handle: Sequence[tuple[SliceShare, Handle]]) -> PodFields:
        """Add the common claims; all devices are of one node, so they are shared in the same way."""
        names = [shared_claim_name(one.entry, one.where, sharing) for _, one in handle]
        config = [shared_claim_config(self.driver, sharing, "gpu")]
        claims = (
            _claim(name, [_request("gpu", "exactly", _device_request(*one))], config)
            for name, one in zip(names, handle, strict=True)
        )
        asks = asks._replace(claims=(*asks.claims, *claims), common=frozenset(names))
        if len(handle) > 1 or asks.claims[1:]:
            return asks  # a replica with several devices uses all of each
        part = handle[0][0]
        env, fraction = sharing_environment(sharing, part), shared_fraction(sharing, part)
        return asks._replace(env=env, memory_fraction=fraction)

    def either(self, replica: str, choices: Sequence[SliceShare]) -> PodFields:
        """Claim the first available of these: the scheduler tries them in order (prioritized list)."""
        if not 0 < len(choices) <= ALTERNATIVES_MAX:
            raise ValueError(f"{replica}: a claim has 1 to {ALTERNATIVES_MAX} alternatives, not {len(choices)}")
        subrequests = [
            {"name": f"choice-{at}", **_device_request(part, _claimed_handle(part, alone=True))}
            for at, part in enumerate(choices)
        ]
        return PodFields(claims=(_claim(replica, [_request("gpu", "firstAvailable", subrequests)]),))


def _device(node: NodeFacts, entry: DraDevice) -> DeviceId:
    return DeviceId(f"{node.name}/{entry.parent}")


def _amounts(entry: DraDevice) -> tuple[int | None, int]:
    """Return its memory, and its percent of the GPU's compute."""
    if not entry.mig:
        return entry.memory_bytes, 100
    known_bytes, slices, of_all = mig_profile_capacity(entry.profile, entry.product)
    return entry.memory_bytes or known_bytes, max(1, 100 * slices // of_all)


@lru_cache(maxsize=64)
def _best_starts(product: str) -> Mapping[str, int]:
    """Return the best start of each profile on an unused GPU; empty if unknown. The first call takes 0.1 s."""
    geometry = geometry_of(product)
    if geometry is None:
        return {}
    fleet = Fleet()
    fleet.add(DeviceId("gpu"), geometry)
    found = ((one.name, fleet.find(one.name)) for one in geometry.profiles)
    return {name: one.start for name, one in found if isinstance(one, MigPlacement)}


def _claimed_handle(part: SliceShare, *, alone: bool) -> Handle:
    """Return the handle to claim: the smallest sufficient part if the entry may be cut and is the only one, else the
    entry. A replica without a memory request gets the whole entry.
    """
    handle = msgspec.json.decode(part.slice.handle, type=Handle)
    one = _smaller(part, handle) if alone else None
    return handle if one is None else Handle(handle.entry, one.device_class, one.where)


def _smaller(part: SliceShare, handle: Handle) -> Smaller | None:
    enough = (
        one
        for one in handle.cuts
        if one.memory_bytes >= part.memory_bytes > 0 and one.compute_percent >= part.compute_percent
    )
    return next(enough, None)


def _device_request(part: SliceShare, handle: Handle) -> Object:
    request: Object = {"deviceClassName": handle.device_class, "selectors": [{"cel": {"expression": handle.where}}]}
    if handle.shared:
        memory = Policy(handle.least, handle.step, handle.values).given(part.memory_bytes)
        quantity = f"{memory // MIB}Mi" if memory % MIB == 0 else str(memory)
        request["capacity"] = {"requests": {"memory": quantity}}
    return request


def _request(name: str, how: str, request: Object | list[Object]) -> Object:
    return {"name": name, how: request}


def _claim(name: str, requests: list[Object], config: Sequence[Object] = ()) -> Object:
    devices: Object = {"requests": requests}
    if config:
        devices["config"] = list(config)
    return {"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": name}, "spec": {"devices": devices}}


# --- actual allocations of claims -------------------------------------------------------------------------------------


class _Result(msgspec.Struct, frozen=True, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    consumed_capacity: dict[str, Any] = {}


def read_allocations(claim: Object) -> tuple[Got, ...]:
    """Return the allocations of any claim, ours or not, except admin access, which consumes nothing."""
    found: list[Got] = []
    for said in _results(claim):
        try:
            one = msgspec.convert(said, _Result)
        except msgspec.ValidationError:
            continue  # not valid for the API server
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
    """Yield equivalent slices of the same node, one for each set that a claim cannot distinguish.
    `gone`: IDs of slices in use, `counted` names of slices in use, and closed devices.
    """
    if of.kind != "dra" or of.shared:
        return
    handle = msgspec.json.decode(of.handle, type=Handle)
    seen, wanted = {handle.where}, (of.node, of.kind, handle.device_class, *_size(of))
    for one in slices:
        if one.kind != of.kind or one.closed or not one.healthy or {one.id, one.counted, one.device} & {*gone}:
            continue
        other = msgspec.json.decode(one.handle, type=Handle)
        if (one.node, one.kind, other.device_class, *_size(one)) == wanted and other.where not in seen:
            seen.add(other.where)
            yield one


def _size(of: Slice) -> tuple[object, ...]:
    return of.product, of.memory_bytes, of.compute_percent, of.isolation, of.shared


def find_whole_gpu(part: Slice) -> Slice | None:
    """Return the whole GPU of a part, as offered when no part is in use; None if this is no part or it has none."""
    if part.kind != "dra" or not part.device_bytes:
        return None
    handle = msgspec.json.decode(part.handle, type=Handle)
    return (
        None
        if not handle.whole
        else replace(
            part,
            id=dra_slice_id(handle.whole, part.node),
            memory_bytes=part.device_bytes,
            device_bytes=0,
            compute_percent=100,
            theirs=0,
            handle=handle.whole,
        )
    )


def claimed_mig_profile(part: SliceShare) -> str:
    """Return the profile of the part that will be claimed of a whole GPU; empty if the whole GPU is claimed."""
    if part.slice.kind != "dra":
        return ""
    found = _smaller(part, msgspec.json.decode(part.slice.handle, type=Handle))
    return "" if found is None else found.profile


def dra_device_name(slice_: Slice) -> str:
    """Return the entry name of a slice of this kind."""
    return msgspec.json.decode(slice_.handle, type=Handle).entry


def common_claim_name(slice_: Slice) -> str:
    """Return the name, without suffix, of the claim that all replicas on the slice share; empty if each has its own."""
    if slice_.kind != "dra":
        return ""
    handle = msgspec.json.decode(slice_.handle, type=Handle)
    return "" if handle.sharing is None else shared_claim_name(handle.entry, handle.where, handle.sharing)


def rename_common_claims(asks: PodFields, name: Callable[[str], str]) -> PodFields:
    """Rename each claim that several pods share: `name` returns the new name for the old one."""
    if not asks.common:
        return asks
    named = {old: name(old) for old in asks.common}
    claims = (
        {**one, "metadata": {**one["metadata"], "name": named.get(one["metadata"]["name"], one["metadata"]["name"])}}
        for one in asks.claims
    )
    return asks._replace(claims=tuple(claims), common=frozenset(named.values()))


def dra_device_name_of_id(id: SliceId, driver: str = NVIDIA) -> str:
    """Return the entry name for a slice id of this kind."""
    node, _, rest = id.partition("/")
    pool, _, device = rest.rpartition("/")
    return f"{driver}/{pool or node}/{device}"


def dra_slice_id(entry: str, node: str) -> SliceId:
    """Return the slice id of an entry of a node."""
    pool, _, device = entry.partition("/")[2].rpartition("/")
    return SliceId(f"{node}/{device}" if pool == node else f"{node}/{pool}/{device}")
