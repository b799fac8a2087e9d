"""NVIDIA GPUs of a node, how the device plugin shares them, and its Slicers. Pure.

Reads, in this order, the labels of GPU feature discovery, the device plugin's configuration and Settings; the first
source with an answer wins. An answer "not shared" is ignored if the plugin offers more GPUs than there are. Input is
untrusted: malformed or implausible numbers count as missing.

- MPS (`sharing.mps`): the plugin's control daemon gives each client 1/replicas of the memory and of the threads, and
  the MPS server enforces it. The server is the fault domain: if it fails, all clients of its device end.
- Time-slicing (`sharing.timeSlicing`): nothing protects the memory of one process from the others, so each engine is
  given its memory fraction. All slices are equal shares: the kubelet chooses a pod's GPU, and the shares on any GPU
  never exceed its memory. A fault of one process can end all processes on its device.
- Whole GPUs: one slice each, for one replica at a time. GPUs whose sharing mode is unknown are listed as closed, with
  the action to take as the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, SliceShare
from autoscaler.spec.pod import GPU
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId
from autoscaler.text import format_count

WHOLE, TIMESLICE, MPS = "whole", "timeslice", "mps"
GPU_SHARED = GPU + ".shared"
"""Resource name used instead by a plugin with `renameByDefault`."""
RESOURCES = (GPU_SHARED, GPU)
PRODUCT, MEMORY_MIB, COUNT = GPU + ".product", GPU + ".memory", GPU + ".count"
STRATEGY, REPLICAS = GPU + ".sharing-strategy", GPU + ".replicas"
SHARED = "-SHARED"
"""Suffix of the product name if the GPU is shared and the resource is not renamed."""
UNKNOWN_BYTES = 1 << 30
"""Memory assumed for a GPU of unknown memory: small, so that nothing is placed on a guess."""
REPLICAS_MAX = 1000
"""Maximum per device."""
SLICES_MAX = 1024
"""Maximum per node."""
NUMBER_DIGITS_MAX = 9

_SHORT = GPU.partition("/")[2]
"""Short resource name that the plugin also accepts."""
_STRATEGIES = {"time-slicing": TIMESLICE, "mps": MPS}
_SECTIONS = (("mps", MPS), ("timeSlicing", TIMESLICE))
"""Sections of `sharing` in the configuration; if both exist, the plugin uses the first."""


class Sharing(NamedTuple):
    """How often each device of a node is offered, and by which mechanism."""

    kind: str
    replicas: int = 1


class Gpus(NamedTuple):
    """The GPUs of a node, all of the same kind."""

    resource: str
    """The resource that pods request."""
    offered: int
    """Allocatable amount of it."""
    product: str
    memory_bytes: int
    """Memory of one device."""
    devices: int | None
    """Number of devices; None if unknown."""
    sharing: Sharing | None
    """None if the GPUs are shared in an unknown way."""


def parse_number(text: object) -> int:
    """Parse a non-negative integer from a label or amount; 0 if it is invalid."""
    said = str(text)
    return int(said) if len(said) <= NUMBER_DIGITS_MAX and said.isascii() and said.isdecimal() else 0


def read_offered_gpus(amounts: Mapping[str, Any]) -> tuple[str, int]:
    """Return (resource, amount) from a node's allocatable."""
    name = next((one for one in RESOURCES if parse_number(amounts.get(one, 0))), GPU)
    return name, min(parse_number(amounts.get(name, 0)), SLICES_MAX)


def read_gpus(node: NodeFacts) -> Gpus | None:
    """Return the node's GPUs; None if it offers none."""
    resource, many = read_offered_gpus(node.allocatable)
    if not many:
        return None
    said, labels = None if node.declared is None else node.declared.device, node.labels
    mib, count = parse_number(labels.get(MEMORY_MIB)), parse_number(labels.get(COUNT))
    memory_bytes = mib << 20 or (UNKNOWN_BYTES if said is None else int(said.memory_bytes))
    product = labels.get(PRODUCT, "").removesuffix(SHARED) or ("" if said is None else said.model)
    devices = count or (None if said is None else said.count)
    if devices is not None and many > devices:
        devices = _attached(node, many, counted=bool(count)) or devices
    is_shared = resource == GPU_SHARED or (devices is not None and many > devices)
    return Gpus(resource, many, product, memory_bytes, devices, _sharing(node, is_shared=is_shared))


def build_slices(
    node: NodeFacts, found: Gpus, sharing: Sharing, isolation: Isolation, closed: str = ""
) -> tuple[Slice, ...]:
    """Divide each device into equal slices; never more in total than the plugin offers.
    Ids are NODE/gpuN, with /sM appended for a share. The numbers are ordinals: the kubelet chooses the actual GPU.
    """
    replicas = sharing.replicas
    devices = found.offered // replicas if found.devices is None else found.devices
    many = min(devices * replicas, found.offered)
    return tuple(
        Slice(
            id=SliceId(name if replicas == 1 else f"{name}/s{at % replicas}"), device=DeviceId(name), node=node.name,
            memory_bytes=found.memory_bytes // replicas, compute_percent=100 // replicas, isolation=isolation,
            shared=False, product=found.product, kind=sharing.kind, handle=found.resource, closed=closed,
            device_bytes=found.memory_bytes if replicas > 1 else 0,
        )
        for at in range(many)
        for name in (f"{node.name}/gpu{at // replicas}",)
    )  # fmt: skip


def explain_unknown_sharing(found: Gpus) -> str:
    """Explain why nothing is placed on a node whose sharing mode is unknown."""
    of = "" if found.devices is None else f" of {format_count(found.devices, 'device')}"
    return (
        f"its node's device plug-in offers {found.offered} {found.resource}{of}, and their sharing mode is not known: "
        "set `slicing` in Settings `nodes`, or correct `device.count` there if the number of devices is wrong"
    )


def build_pod_limits(parts: Sequence[SliceShare]) -> PodFields:
    """Request one unit of its resource for each slice."""
    names = [part.slice.handle or GPU for part in parts]
    return PodFields(limits={name: str(names.count(name)) for name in dict.fromkeys(names)})


def compute_memory_fraction(parts: Sequence[SliceShare]) -> float | None:
    """Return each slice's fraction of its device, rounded down to thousandths; None if one is a whole device."""
    if not all(part.slice.device_bytes for part in parts):
        return None
    return min(part.slice.memory_bytes * 1000 // part.slice.device_bytes for part in parts) / 1000


# --- sources of the sharing mode --------------------------------------------------------------------------------------


def _sharing(node: NodeFacts, *, is_shared: bool) -> Sharing | None:
    for found in (_by_labels(node.labels), _by_plugin(node.plugin)):
        if found is not None and (found.replicas > 1 or not is_shared):
            return found
    return _declared(node) or (None if is_shared else Sharing(WHOLE))


def _attached(node: NodeFacts, many: int, *, counted: bool) -> int:
    """Return the device count if later attached devices (Settings `devicesMax`) explain the offered amount; else 0.
    `counted`: the labels give a device count, which may be outdated.
    """
    most = node.declared.devices_max if node.declared is not None else None
    sharing = _by_labels(node.labels) or _by_plugin(node.plugin) or _declared(node)
    if most is None or (sharing is None and counted):
        return 0
    devices, rest = divmod(many, 1 if sharing is None else sharing.replicas)
    return devices if not rest and devices <= most else 0


def _declared(node: NodeFacts) -> Sharing | None:
    said = node.declared.slicing if node.declared is not None else None
    if said is not None and said.kind in {WHOLE, TIMESLICE, MPS}:
        return Sharing(said.kind, said.replicas or 1)
    return None


def _by_labels(labels: Mapping[str, str]) -> Sharing | None:
    """Before MPS support, no label gave the strategy: anything with replicas was time-sliced."""
    replicas, strategy = parse_number(labels.get(REPLICAS)), labels.get(STRATEGY, "")
    kind = _STRATEGIES.get(strategy) or (TIMESLICE if not strategy else None)
    if kind is not None and 2 <= replicas <= REPLICAS_MAX:
        return Sharing(kind, replicas)
    if strategy == "none" or (not strategy and labels.get(REPLICAS) in {"0", "1"}):
        return Sharing(WHOLE)
    return None


def _by_plugin(plugin: Mapping[str, Any]) -> Sharing | None:
    """Read the plugin's configuration; one without a sharing section means that GPUs are not shared."""
    if not plugin:
        return None
    for section, kind in _SECTIONS:
        for one in _resources(plugin.get("sharing"), section):
            replicas = one.get("replicas")
            if one.get("name") != GPU and one.get("name") != _SHORT:
                continue
            if not isinstance(replicas, int) or not 1 <= replicas <= REPLICAS_MAX:
                return None
            return Sharing(kind, replicas) if replicas > 1 else Sharing(WHOLE)
    return Sharing(WHOLE)


def _resources(sharing: object, section: str) -> Iterator[Mapping[str, Any]]:
    part = sharing.get(section) if isinstance(sharing, dict) else None
    found = part.get("resources") if isinstance(part, dict) else None
    yield from (one for one in (found if isinstance(found, list) else ()) if isinstance(one, dict))


class Mps:
    """The Slicer for GPUs shared by MPS."""

    kind: ClassVar[str] = MPS
    isolation: ClassVar[Isolation] = Isolation.MEMORY

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the slices, or None if the node is not shared in this way."""
        found = read_gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return build_slices(node, found, found.sharing, self.isolation)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one unit of the resource per slice."""
        del replica
        return build_pod_limits(parts)


class TimeSlice(Mps):
    """The Slicer for time-sliced GPUs."""

    kind = TIMESLICE
    isolation = Isolation.NONE

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one unit of the resource per slice, and set the engine's memory fraction."""
        return super().fields(replica, parts)._replace(memory_fraction=compute_memory_fraction(parts))


class WholeGpu(Mps):
    """The Slicer for whole GPUs, and for GPUs whose sharing mode is unknown (closed)."""

    kind = WHOLE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per GPU; closed slices if the sharing mode is unknown; None if the GPUs are shared."""
        found = read_gpus(node)
        if found is None or (found.sharing is not None and found.sharing.kind != self.kind):
            return None
        one = Sharing(self.kind)
        if found.sharing is not None:
            return build_slices(node, found, one, Isolation.HARDWARE)
        seen = found._replace(devices=found.devices or 1)
        return build_slices(node, seen, one, Isolation.NONE, explain_unknown_sharing(found))
