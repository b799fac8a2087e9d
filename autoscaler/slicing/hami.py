"""HAMi: cards shared by many pods, each limited in memory and cores by HAMi's library in each container.

Reads HAMi's annotations on nodes (cards and their capacity) and pods (actual allocations), and builds the pod fields
that request the chosen card. A card is one slice with the capacity that HAMi registers. If that exceeds the card's
memory (`deviceMemoryScaling`), the registered amount can be allocated, and no pod's memory is protected.

Malformed annotations raise no error. Source: HAMi 2.10, pkg/device/nvidia/device.go (Fit) and pkg/device/devices.go.
Three facts matter: `gpumem` is per card and in MiB; `gpucores: 100` requests the card exclusively; a card with all
cores allocated accepts no task that requests none. So HAMi accepts every task that fits a slice in whole MiB, except on
AMD or Hygon cards where only some tasks request cores.

Volcano's vGPUs use the same library and annotations of other names. Settings `pod.annotations` set the Volcano queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec

from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, SliceShare
from autoscaler.spec.quantity import MEMORY_MIB_MAX, MIB, in_mib, parse_bounded_int, parse_count, parse_mebibytes
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId

CORDON = "hami.io/device-cordon"
SCHEDULER = "hami-scheduler"
ALONE = 100
"""Percent of a card's cores: the whole card."""
TASKS = 10
"""HAMi's default maximum of tasks per card (`deviceSplitCount`)."""
CORES_MAX = 100_000
UNREADABLE_BYTES = 1 << 30
_PRODUCT, _MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CARD = re.compile(r"([^,:;]*),([0-9]+),([0-9]+),([0-9]+),([^,:;]*),-?[0-9]+,(true|false)(?:,[0-9]+,([^,:;]*))?")
_CARD_OF_VOLCANO = re.compile(r"([^,:;]*),([0-9]+),([0-9]+),([^,:;]*),(true|false),([^,:;]*)")
_HELD = re.compile(r"([^,:;\[]+)(?:\[[^,:;]*\])?,[^,:;]*,([0-9]+),([0-9]+)(?:,[^:;]*)?")


class HamiNames(NamedTuple):
    """HAMi's names for one vendor's devices: in limits, and in annotations of pods and nodes."""

    kind: str
    resource: str
    """Number of devices."""
    memory: str
    cores: str
    use: str
    """Selects devices by UUID."""
    register: str
    allocated: str
    priority: str = ""
    """Empty if the vendor has none."""
    all_cores_by_default: bool = False
    """A task that requests no cores gets all of them instead of the remaining ones."""


NVIDIA = HamiNames(
    "hami", "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/use-gpuuuid",
    "hami.io/node-nvidia-register", "hami.io/vgpu-devices-allocated", "nvidia.com/priority",
)  # fmt: skip
HANDSHAKE = "hami.io/node-handshake"
_LEFT = "Deleted"


class Card(NamedTuple):
    """A card as HAMi registered it."""

    uuid: str
    tasks_max: int
    """Maximum number of pods on it."""
    memory_mib: int
    """Allocatable memory; scaled if HAMi overcommits."""
    cores: int
    """Allocatable percent; above 100 if HAMi overcommits."""
    product: str
    healthy: bool
    mode: str = "hami-core"


class HamiAllocation(NamedTuple):
    """A pod's actual allocation on one card."""

    container: int
    """Index of the container in the pod."""
    uuid: str
    memory_bytes: int
    cores: int


class _RegisteredCard(msgspec.Struct, frozen=True):
    """A card in the JSON form, which omits zero and false."""

    id: str = ""
    count: int = 0
    devmem: int = 0
    devcore: int = 0
    type: str = ""
    mode: str = "hami-core"
    health: bool = False


class Hami(NamedTuple):
    """The Slicer of one vendor under HAMi, with settings for all its pods. `priority`: of their tasks; 0 precedes 1."""

    words: HamiNames = NVIDIA
    priority: int | None = None
    node_policy: Literal["binpack", "spread"] = "binpack"
    card_policy: str = "binpack"
    """`hami.io/gpu-scheduler-policy`; has no effect on the choice of the card, which is selected by UUID."""

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""
        return self.words.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per card."""
        said = node.annotations.get(self.words.register)
        if said is None:
            return None
        there = parse_cards(said)
        if there is None:
            id = f"{node.name}/hami"
            why = f"HAMi's annotation {self.words.register} of its node cannot be read"
            return (Slice(SliceId(id), DeviceId(id), node.name, UNREADABLE_BYTES, closed=why, kind=self.kind),)
        return tuple(self._slice(node, card) for card in there)

    def _slice(self, node: NodeFacts, card: Card) -> Slice:
        own_bytes, declared = parse_mebibytes(node.labels.get(_MEMORY)), node.declared
        memory_bytes, cores = card.memory_mib * MIB, card.cores
        if declared is not None and declared.slicing is not None and not declared.slicing.overcommit:
            own_bytes = own_bytes or int(declared.device.memory_bytes)
            memory_bytes, cores = min(memory_bytes, own_bytes), min(cores, ALONE)
        over = own_bytes is not None and memory_bytes > own_bytes
        return Slice(
            id=SliceId(f"{node.name}/{card.uuid}"), device=DeviceId(f"{node.name}/{card.uuid}"), node=node.name,
            memory_bytes=memory_bytes, compute_percent=cores,
            isolation=Isolation.NONE if over else Isolation.MEMORY, shared=card.tasks_max > 1,
            product=card.product or node.labels.get(_PRODUCT, ""), healthy=card.healthy,
            closed=_closed(node.annotations, card), kind=self.kind, handle=card.uuid, holders_max=card.tasks_max,
            overcommitted=over,
        )  # fmt: skip

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request the cards by UUID. HAMi gives a container the same amount of each card: all parts must be equal."""
        if len({(in_mib(part.memory_bytes), part.compute_percent) for part in parts}) != 1:
            raise ValueError(f"{replica}: HAMi gives a container the same amount of each card: request equal parts")
        words = self.words
        limits = {words.resource: str(len(parts)), words.memory: str(max(1, in_mib(parts[0].memory_bytes)))}
        if cores := min(_cores(part, words) for part in parts):
            limits[words.cores] = str(cores)
        if self.priority is not None and words.priority:
            limits[words.priority] = str(self.priority)
        return PodFields(
            limits=limits,
            annotations={
                words.use: ",".join(part.slice.handle for part in parts),
                "hami.io/node-scheduler-policy": self.node_policy, "hami.io/gpu-scheduler-policy": self.card_policy,
            },
            scheduler=SCHEDULER,
        )  # fmt: skip


def _cores(part: SliceShare, words: HamiNames) -> int:
    """Return the percent of cores to request: 1 % less than allowed, so that tasks never use all cores of a card.
    Otherwise a task that requests none could not share it. A task with all of the memory may have all cores. Where a
    task without a core request gets all cores (`all_cores_by_default`), it requests nearly its share of the memory.
    """
    memory_bytes = part.slice.device_bytes or part.slice.memory_bytes  # the whole card, even if others use some of it
    if part.memory_bytes >= memory_bytes and (part.compute_percent or words.all_cores_by_default):
        return min(part.compute_percent or ALONE, ALONE)
    percent = (ALONE - 1) * part.compute_percent // ALONE
    if words.all_cores_by_default and not part.compute_percent:
        percent = (ALONE - 1 - TASKS) * part.memory_bytes // memory_bytes
    return min(max(1, percent), ALONE - 1) if part.compute_percent or words.all_cores_by_default else 0


def _closed(annotations: Mapping[str, str], card: Card) -> str:
    if annotations.get(HANDSHAKE, "").startswith(_LEFT):
        return "HAMi's device plug-in has left its node"
    if card.uuid in [one.strip() for one in annotations.get(CORDON, "").split(",")]:
        return f"it is cordoned by annotation {CORDON} of its node"
    if card.mode == "mig":
        return "HAMi partitions it by MIG: its free capacity is not known"
    return ""


def parse_cards(said: str) -> tuple[Card, ...] | None:
    """Parse a node's annotation in any of its forms; None if it cannot be parsed."""
    cards = _of_json(said) if said.lstrip()[:1] == "[" else _of_commas(said)
    names = [card.uuid for card in cards or ()]
    return cards if len(set(names)) == len(names) else None


def _of_json(said: str) -> tuple[Card, ...] | None:
    try:
        cards = msgspec.json.decode(said, type=list[_RegisteredCard])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return _all([_card(one.id, (one.count, one.devmem, one.devcore), one.type, one.health, one.mode) for one in cards])


def _of_commas(said: str) -> tuple[Card, ...] | None:
    found: list[Card | None] = []
    for one in filter(None, said.strip().split(":")):
        match, other = _CARD.fullmatch(one), _CARD_OF_VOLCANO.fullmatch(one)
        if match is not None:
            uuid, count, memory, cores, product, health, mode = match.groups()
        elif other is not None:
            uuid, count, memory, product, health, mode = other.groups()
            cores = str(ALONE)
        else:
            return None
        found.append(_card(uuid, (count, memory, cores), product, health == "true", mode or "hami-core"))
    return _all(found)


def _all(found: Sequence[Card | None]) -> tuple[Card, ...] | None:
    """Return the cards; None if one is invalid."""
    good = tuple(card for card in found if card is not None)
    return good if len(good) == len(found) else None


def _card(uuid: str, numbers: Sequence[int | str], product: str, healthy: bool, mode: str) -> Card | None:
    """Build a card; None if the values are invalid."""
    tasks, memory_mib, cores = (
        parse_count(numbers[0]),
        parse_bounded_int(numbers[1], MEMORY_MIB_MAX),
        parse_bounded_int(numbers[2], CORES_MAX),
    )
    if not _UUID.fullmatch(uuid) or not tasks or not memory_mib or cores is None:
        return None
    return Card(uuid, tasks, memory_mib, cores, re.sub(r"\s+", "-", product.strip()), healthy, mode or "hami-core")


def drop_healthy_handshake(annotations: Mapping[str, str]) -> dict[str, str]:
    """Drop the handshake annotation while the plugin is healthy, because it is rewritten twice a minute."""
    return {name: said for name, said in annotations.items() if name != HANDSHAKE or said.startswith(_LEFT)}


def parse_allocations(annotations: Mapping[str, str], allocated: str = NVIDIA.allocated) -> tuple[HamiAllocation, ...]:
    """Return the cards allocated to any pod, ours or not, by HAMi's scheduler; malformed entries are skipped.
    `allocated`: the annotation of one vendor.
    """
    found: list[HamiAllocation] = []
    for container, devices in enumerate(annotations.get(allocated, "").split(";")):
        for one in devices.split(":"):
            match = _HELD.fullmatch(one.strip())
            memory_bytes = parse_mebibytes(match[2]) if match else None
            if match and memory_bytes is not None and _UUID.fullmatch(match[1]):
                found.append(
                    HamiAllocation(container, match[1], memory_bytes, parse_bounded_int(match[3], CORES_MAX) or 0)
                )
    return tuple(found)


VOLCANO = VOLCANO_SCHEDULER = "volcano"
VOLCANO_NAMES = HamiNames(
    VOLCANO, "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores",
    "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/node-vgpu-register", "volcano.sh/vgpu-ids-new",
)  # fmt: skip


class Volcano:
    """The Slicer for Volcano vGPUs."""

    kind: ClassVar[str] = VOLCANO_NAMES.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per card."""
        return Hami(VOLCANO_NAMES).inventory(node)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request the cards by UUID, with the same amount of each."""
        asked = Hami(VOLCANO_NAMES).fields(replica, parts)
        return PodFields(
            limits=asked.limits,
            annotations={VOLCANO_NAMES.use: asked.annotations[VOLCANO_NAMES.use]},
            scheduler=VOLCANO_SCHEDULER,
        )
