"""What is known of a node's NVIDIA GPUs, and who told how they are shared. Pure.

Owns the reading of labels (GPU feature discovery's), of the device plug-in's configuration and of the Settings, in this
order: the first that tells wins. Who says that nothing is shared is not believed where the plug-in offers more GPUs
than there are. Numbers come from outside: one that is none, or beyond all reason, counts as not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autoscaler.slicing.base import NodeFacts, PodFields, SliceShare
from autoscaler.spec.pod import GPU
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId
from autoscaler.text import format_count

WHOLE, TIMESLICE, MPS, KAI, VOLCANO = "whole", "timeslice", "mps", "kai", "volcano"
GPU_SHARED = GPU + ".shared"
"""What a plug-in with `renameByDefault` offers instead."""
RESOURCES = (GPU_SHARED, GPU)
PRODUCT, MEMORY_MIB, COUNT = GPU + ".product", GPU + ".memory", GPU + ".count"
STRATEGY, REPLICAS = GPU + ".sharing-strategy", GPU + ".replicas"
SHARED = "-SHARED"
"""After the product's name, where it is shared and not renamed."""
UNKNOWN_BYTES = 1 << 30
"""Of a GPU whose memory nobody tells: little, so that nothing is placed on a guess."""
REPLICAS_MAX = 1000
"""Of one device."""
SLICES_MAX = 1024
"""Of one node."""
NUMBER_DIGITS_MAX = 9

_SHORT = GPU.partition("/")[2]
"""A plug-in knows it by that, too."""
_STRATEGIES = {"time-slicing": TIMESLICE, "mps": MPS}
_SECTIONS = (("mps", MPS), ("timeSlicing", TIMESLICE))
"""Of a configuration's `sharing`; where both are there the plug-in takes the first."""


class Sharing(NamedTuple):
    """Each device of a node is offered so many times."""

    kind: str
    replicas: int = 1


class Gpus(NamedTuple):
    """A node's GPUs, all of a kind."""

    resource: str
    """What pods ask for."""
    offered: int
    """How many of it."""
    product: str
    memory_bytes: int
    """Of one device."""
    devices: int | None
    """How many there are; None: nobody tells."""
    sharing: Sharing | None
    """None: they are shared, and nobody tells how."""


def parse_number(text: object) -> int:
    """A whole number as labels and amounts have it; 0 for whatever is none."""
    said = str(text)
    return int(said) if len(said) <= NUMBER_DIGITS_MAX and said.isascii() and said.isdecimal() else 0


def read_offered_gpus(amounts: Mapping[str, Any]) -> tuple[str, int]:
    """(resource, how many of it): of a node's allocatable."""
    name = next((one for one in RESOURCES if parse_number(amounts.get(one, 0))), GPU)
    return name, min(parse_number(amounts.get(name, 0)), SLICES_MAX)


def read_gpus(node: NodeFacts) -> Gpus | None:
    """What is known of them; None: it offers none."""
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
    """Its devices, each in as many equal Slices; never more in all than are offered. A Slice's id is NODE/gpuN, with
    /sM behind it where it is a share: a plug-in's counting, for which of them a pod gets is its kubelet's choice.
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
    """Why nothing is placed on a node, since nobody tells how its plug-in shares."""
    of = "" if found.devices is None else f" of {format_count(found.devices, 'device')}"
    return (
        f"its node's device plug-in offers {found.offered} {found.resource}{of}, and nobody tells how they are shared: "
        "say it in Settings `nodes`, by `slicing`, or by `device.count` where there are more devices"
    )


def build_pod_limits(parts: Sequence[SliceShare]) -> PodFields:
    """One of its resource for each Slice."""
    names = [part.slice.handle or GPU for part in parts]
    return PodFields(limits={name: str(names.count(name)) for name in dict.fromkeys(names)})


def compute_memory_fraction(parts: Sequence[SliceShare]) -> float | None:
    """The part of its Device that each Slice is, in thousandths and never more than it; None: one is a whole Device."""
    if not all(part.slice.device_bytes for part in parts):
        return None
    return min(part.slice.memory_bytes * 1000 // part.slice.device_bytes for part in parts) / 1000


# --- who tells --------------------------------------------------------------------------------------------------------


def _sharing(node: NodeFacts, *, is_shared: bool) -> Sharing | None:
    for told in (_by_labels(node.labels), _by_plugin(node.plugin)):
        if told is not None and (told.replicas > 1 or not is_shared):
            return told
    return _declared(node) or (None if is_shared else Sharing(WHOLE))


def _attached(node: NodeFacts, many: int, *, counted: bool) -> int:
    """How many devices there are that are offered so often, where some may have been attached since they were counted
    (Settings `devicesMax`); 0: that does not explain it. `format_count`: labels tell how many there are, or were.
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
    """Before there was MPS no label told the strategy: what had replicas was time-sliced."""
    replicas, strategy = parse_number(labels.get(REPLICAS)), labels.get(STRATEGY, "")
    kind = _STRATEGIES.get(strategy) or (TIMESLICE if not strategy else None)
    if kind is not None and 2 <= replicas <= REPLICAS_MAX:
        return Sharing(kind, replicas)
    if strategy == "none" or (not strategy and labels.get(REPLICAS) in {"0", "1"}):
        return Sharing(WHOLE)
    return None


def _by_plugin(plugin: Mapping[str, Any]) -> Sharing | None:
    """What its configuration says; one that says nothing of sharing says that there is none."""
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
