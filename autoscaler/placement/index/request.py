"""A request as numbers: for each of the different lanes that there are, how much it takes, and how well it likes it.

Owns the translation of a Kind into arrays, and the tiers: a lane of a lower tier is always taken before one of a higher
tier, however the two score. First the order of products that the request names, then the price of the Device, then
most of its Model near, or fewer of it in one fault domain, where it asks for that, then a node with its Copy and its
image, then the smallest lane that is large enough: what is dear or large is kept for who needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.residual_waste import WHOLE, Ints
from autoscaler.spec.quantity import SIZE_MAX
from autoscaler.state.resources import RequestShape, ResourceAmount, SliceClass

ALIKE: Final = 20
"""Sizes that differ by so small a part are one."""
CROWD_MAX: Final = 3
"""So many Replicas of a Model in one domain, and more, count alike."""
LACKS: Final = 4
"""Ranks of what a node lacks of weights and image: nothing, the smaller of the two, the larger, both."""
CROWDS: Final = (CROWD_MAX + 1) ** 2
"""Of a domain to be near in, and of one to be apart in."""
TIERS_MAX: Final = 1 << 20
"""So many fit into a key beside a score; of more the lowest tier is looked for first, which takes longer."""
NEVER: Final = 1 << 62
"""More than any lane has."""

MOST: Final = {
    "devices": 1 << 20, "memory_bytes": SIZE_MAX, "compute_percent": 1 << 20, "cpu_milli": 1 << 40,
    "host_bytes": 1 << 50, "spare_bytes": SIZE_MAX,
}  # fmt: skip
"""Of a Kind: more is no amount of anything that there is, and what is computed with it would overflow."""


class ScoreKey(NamedTuple):
    """What of a request its score depends on: many requests have one Form."""

    devices: int
    cpu_milli: int
    milli: tuple[int, ...] = ()
    """Of each of the different lanes; of who takes several it is all of each."""
    least: tuple[int, ...] = ()
    """With how much it makes do; empty: with no less."""


class EncodedRequest(NamedTuple):
    """[different lanes], in their order in the NodeArrays."""

    form: ScoreKey
    memory: Ints
    """Bytes that are enough; NEVER where it can never be."""
    most: Ints
    """Bytes that it would have."""
    compute: Ints
    computes: bool
    """It asks for compute by name anywhere."""
    host_bytes: int
    liking: Ints
    """Rank of product and price together."""
    size: Ints
    """Rank of its size."""
    flat: bool
    """All lanes are alike to it."""
    sizes: int
    """Different ranks of it."""
    wide: bool
    """It may have more tiers than TIERS_MAX."""

    def tiers(self, lacks: Ints | None, lane_of: Ints, node_of: Ints, crowd: Ints | None = None) -> Ints:
        """[lanes] -> the tier of each; `lacks` [nodes]: the rank of what each lacks of weights and image; `crowd`
        [nodes]: how little each is liked for the others of its Model, less than CROWDS.
        """
        many, ranks = self.sizes, 1 if lacks is None else LACKS
        steps = ranks if crowd is None else ranks * CROWDS
        tiers = (steps * many * self.liking + self.size)[lane_of]
        tiers = tiers if lacks is None else tiers + many * lacks[node_of]
        return tiers if crowd is None else tiers + ranks * many * crowd[node_of]


def encode_request(kind: RequestShape, lanes: Sequence[SliceClass]) -> EncodedRequest:
    """That Kind among these different lanes. Raises ValueError for an amount that is none, and for one that makes do
    with nothing or with parts of what is whole.
    """
    wrong = next((name for name, most in MOST.items() if not _counts(getattr(kind, name), most)), None)
    if wrong is not None:
        raise ValueError(f"{wrong} of a request is {getattr(kind, wrong)}: expected a whole number, 0 to {MOST[wrong]}")
    if kind.spare_bytes and (kind.devices != 1 or not 0 < kind.spare_bytes < kind.memory_bytes):
        raise ValueError(f"{kind} can not spare that: name less than its memory, of one Device")
    rooms = _rooms(kind.least, lanes)
    milli = _milli(lanes, rooms)
    least = tuple(milli)
    most = [0 if room is None else room.memory_bytes for room in rooms]
    if kind.spare_bytes:
        most = [min(kind.memory_bytes, lane.memory_bytes) for lane in lanes]
        milli = [-(-WHOLE * bytes_ // lane.memory_bytes) for lane, bytes_ in zip(lanes, most, strict=True)]
    sizes = _sizes(lanes)
    likes = [(kind.rank(lane.product) or 0, lane.price) for lane in lanes]
    ranks = {like: rank for rank, like in enumerate(sorted(set(likes)))}
    liking = [ranks[like] for like in likes]
    memory = [NEVER if room is None else room.memory_bytes for room in rooms]
    size = [sizes[lane.memory_bytes] for lane in lanes]
    many_sizes = max(size, default=0) + 1
    return EncodedRequest(
        form=ScoreKey(
            kind.devices, kind.cpu_milli, tuple(milli) if kind.devices == 1 else (), least if kind.spare_bytes else ()
        ),
        memory=_numbers(memory),
        most=_numbers(most),
        compute=_numbers([0 if room is None else room.compute_percent for room in rooms]),
        computes=any(room is not None and room.compute_percent for room in rooms),
        host_bytes=kind.host_bytes,
        liking=_numbers(liking),
        size=_numbers(size),
        flat=len({*zip(liking, memory, size, strict=True)}) == 1,
        sizes=many_sizes,
        wide=LACKS * CROWDS * many_sizes * len(ranks) > TIERS_MAX,
    )


def _counts(amount: object, most: int) -> bool:
    return isinstance(amount, int) and 0 <= amount <= most


def _sizes(lanes: Sequence[SliceClass]) -> dict[int, int]:
    """Bytes -> rank of the size, of which those count as one that differ by a twentieth: so much may equal cards."""
    ranks, rank, first = dict[int, int](), -1, 0
    for size in sorted({lane.memory_bytes for lane in lanes}):
        if rank < 0 or size > first + first // ALIKE:
            rank, first = rank + 1, size
        ranks[size] = rank
    return ranks


def _rooms(kind: RequestShape, lanes: Sequence[SliceClass]) -> list[ResourceAmount | None]:
    return [kind.takes(lane) if kind.rank(lane.product) is not None else None for lane in lanes]


def _milli(lanes: Sequence[SliceClass], rooms: Sequence[ResourceAmount | None]) -> list[int]:
    """Of each lane, rounded up."""
    return [
        0 if room is None else -(-WHOLE * room.memory_bytes // lane.memory_bytes)
        for lane, room in zip(lanes, rooms, strict=True)
    ]


def _numbers(found: Sequence[int]) -> Ints:
    return np.array(found, np.int64)
