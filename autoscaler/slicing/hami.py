"""HAMi: cards that many pods share, each up to its memory and cores, as HAMi's own library in each container enforces.

Owns the reading of what HAMi writes onto nodes (which cards, how much of each) and pods (which they really got), and
what a pod must say to get the card that was chosen. A card is one Slice, told as it is told: where its memory is more
than it has (`deviceMemoryScaling`), that is what may be given out, and nobody's memory is safe there.

Promises: what anybody wrote into an annotation raises nothing. Facts: HAMi 2.10, pkg/device/nvidia/device.go (Fit) and
pkg/device/devices.go. Three that matter here: `gpumem` is per card and in MiB; `gpucores: 100` wants the card alone; a
card of which all cores are given takes no task that names none. So what fits a Slice, in whole MiB, HAMi takes; but
where of AMD's or Hygon's cards some tasks say their share of the cores and others do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from autoscaler.slicing.base import (
    MEMORY_MIB_MAX,
    MIB,
    NodeFacts,
    PodFields,
    SliceShare,
    in_mib,
    parse_bounded_int,
    parse_count,
    parse_mebibytes,
)
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId

CORDON = "hami.io/device-cordon"
SCHEDULER = "hami-scheduler"
ALONE = 100
"""So many cores of a card are all of it."""
TASKS = 10
"""On a card at most, unless HAMi is told otherwise (`deviceSplitCount`)."""
CORES_MAX = 100_000
UNREADABLE_BYTES = 1 << 30
_PRODUCT, _MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CARD = re.compile(r"([^,:;]*),([0-9]+),([0-9]+),([0-9]+),([^,:;]*),-?[0-9]+,(true|false)(?:,[0-9]+,([^,:;]*))?")
_CARD_OF_VOLCANO = re.compile(r"([^,:;]*),([0-9]+),([0-9]+),([^,:;]*),(true|false),([^,:;]*)")
_HELD = re.compile(r"([^,:;\[]+)(?:\[[^,:;]*\])?,[^,:;]*,([0-9]+),([0-9]+)(?:,[^:;]*)?")


class HamiNames(NamedTuple):
    """What HAMi calls one vendor's devices: in limits, and in annotations of pods and nodes."""

    kind: str
    resource: str
    """How many."""
    memory: str
    cores: str
    use: str
    """By UUID."""
    register: str
    allocated: str
    priority: str = ""
    """Empty: it has none."""
    all_unless_said: bool = False
    """A task that names no cores gets all of them, and not what others leave."""


NVIDIA = HamiNames(
    "hami", "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/use-gpuuuid",
    "hami.io/node-nvidia-register", "hami.io/vgpu-devices-allocated", "nvidia.com/priority",
)  # fmt: skip
HANDSHAKE = "hami.io/node-handshake"
_LEFT = "Deleted"


class Card(NamedTuple):
    """One card, as HAMi registered it."""

    uuid: str
    tasks_max: int
    """How many pods may be on it."""
    memory_mib: int
    """That may be given out: scaled, where HAMi overcommits."""
    cores: int
    """Percent that may be given out: above 100 where HAMi overcommits."""
    product: str
    healthy: bool
    mode: str = "hami-core"


class HamiAllocation(NamedTuple):
    """What a pod really has of one card."""

    container: int
    """Its position among the pod's."""
    uuid: str
    memory_bytes: int
    cores: int


class _Told(msgspec.Struct, frozen=True):
    """A card in the JSON form; what is zero or false is left out there."""

    id: str = ""
    count: int = 0
    devmem: int = 0
    devcore: int = 0
    type: str = ""
    mode: str = "hami-core"
    health: bool = False


class Hami(NamedTuple):
    """The Slicer of one vendor's, and what is to be said of all pods. `priority`: of their tasks, 0 before 1."""

    words: HamiNames = NVIDIA
    priority: int | None = None
    node_policy: Literal["binpack", "spread"] = "binpack"
    card_policy: str = "binpack"
    """`hami.io/gpu-scheduler-policy`; which card it is is ours to say in any case."""

    @property
    def kind(self) -> str:
        """See Slice.kind."""
        return self.words.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """One Slice for each card."""
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
        """Cards by their UUIDs. HAMi gives each card of a container as much, so all parts are alike."""
        if len({(in_mib(part.memory_bytes), part.compute_percent) for part in parts}) != 1:
            raise ValueError(f"{replica}: HAMi gives as much of each card to a container; ask for equal parts")
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
    """A hundredth less than all that a task may have, so that together they never have all of a card: else one that
    asks for none could not be beside them. Who has all of the memory may have all cores. Where who asks for none gets
    all, it asks for nearly as much of them as of the memory.
    """
    memory_bytes = part.slice.device_bytes or part.slice.memory_bytes  # all of it, also where others have some
    if part.memory_bytes >= memory_bytes and (part.compute_percent or words.all_unless_said):
        return min(part.compute_percent or ALONE, ALONE)
    percent = (ALONE - 1) * part.compute_percent // ALONE
    if words.all_unless_said and not part.compute_percent:
        percent = (ALONE - 1 - TASKS) * part.memory_bytes // memory_bytes
    return min(max(1, percent), ALONE - 1) if part.compute_percent or words.all_unless_said else 0


def _closed(annotations: Mapping[str, str], card: Card) -> str:
    if annotations.get(HANDSHAKE, "").startswith(_LEFT):
        return "HAMi's device plug-in has left its node"
    if card.uuid in [one.strip() for one in annotations.get(CORDON, "").split(",")]:
        return f"its node's annotation {CORDON} names it"
    if card.mode == "mig":
        return "HAMi cuts it by MIG: what still fits is not known"
    return ""


def parse_cards(said: str) -> tuple[Card, ...] | None:
    """What a node's annotation says, in any of its forms; None: it cannot be read."""
    told = _of_json(said) if said.lstrip()[:1] == "[" else _of_commas(said)
    names = [card.uuid for card in told or ()]
    return told if len(set(names)) == len(names) else None


def _of_json(said: str) -> tuple[Card, ...] | None:
    try:
        told = msgspec.json.decode(said, type=list[_Told])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return _all([_card(one.id, (one.count, one.devmem, one.devcore), one.type, one.health, one.mode) for one in told])


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
    """None where one is."""
    good = tuple(card for card in found if card is not None)
    return good if len(good) == len(found) else None


def _card(uuid: str, numbers: Sequence[int | str], product: str, healthy: bool, mode: str) -> Card | None:
    """None: it cannot be."""
    tasks, memory_mib, cores = (
        parse_count(numbers[0]),
        parse_bounded_int(numbers[1], MEMORY_MIB_MAX),
        parse_bounded_int(numbers[2], CORES_MAX),
    )
    if not _UUID.fullmatch(uuid) or not tasks or not memory_mib or cores is None:
        return None
    return Card(uuid, tasks, memory_mib, cores, re.sub(r"\s+", "-", product.strip()), healthy, mode or "hami-core")


def drop_healthy_handshake(annotations: Mapping[str, str]) -> dict[str, str]:
    """Without the handshake while it is well, which is written anew twice a minute."""
    return {name: said for name, said in annotations.items() if name != HANDSHAKE or said.startswith(_LEFT)}


def parse_allocations(annotations: Mapping[str, str], allocated: str = NVIDIA.allocated) -> tuple[HamiAllocation, ...]:
    """What any pod, ours or not, has of which cards, as HAMi's scheduler decided; what cannot be read is left out.
    `allocated`: the annotation of one vendor's.
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
