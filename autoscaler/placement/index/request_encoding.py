"""Encodes a request as arrays over the distinct lanes: the amount that it takes of each, and its preference.

A lane of a lower tier is always chosen before one of a higher tier, regardless of scores. The tier depends on, in order
of precedence:

1. the position of the product in the request
2. the device price
3. nearness to other replicas of the model, or few of them in one fault domain, if requested
4. weights and image on the node
5. the size of the lane

So expensive and large lanes stay free for requests that need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.residual_waste_tables import WHOLE, Ints
from autoscaler.spec.quantity import SIZE_MAX
from autoscaler.state.resources import RequestShape, ResourceAmount, SliceClass

ALIKE: Final = 20
"""Sizes that differ by at most this fraction (one twentieth) count as equal."""
CROWD_MAX: Final = 3
"""Maximum number of replicas of a model that is counted per domain."""
LACKS: Final = 4
"""Number of ranks of missing artifacts: none, the smaller of weights and image, the larger, both."""
CROWDS: Final = (CROWD_MAX + 1) ** 2
"""Number of combinations of a rank for nearness in one domain and a rank for separation in another."""
TIERS_MAX: Final = 1 << 20
"""Tiers that fit into a key together with a score; with more, the lowest tier is found first, which takes longer."""
NEVER: Final = 1 << 62
"""More than any lane has."""

MOST: Final = {
    "devices": 1 << 20, "memory_bytes": SIZE_MAX, "compute_percent": 1 << 20, "cpu_milli": 1 << 40,
    "host_bytes": 1 << 50, "spare_bytes": SIZE_MAX,
}  # fmt: skip
"""Upper bounds of a shape: larger amounts do not exist, and would overflow computations."""


class ScoreKey(NamedTuple):
    """The parts of a request that determine its score; many requests share one key."""

    devices: int
    cpu_milli: int
    milli: tuple[int, ...] = ()
    """Per distinct lane; empty for several devices, which are taken whole."""
    least: tuple[int, ...] = ()
    """Its minimum, per distinct lane; empty: it is not elastic."""


class EncodedRequest(NamedTuple):
    """Arrays are [distinct lanes], in their order in the `NodeArrays`."""

    form: ScoreKey
    memory: Ints
    """Minimum bytes; NEVER if the lane can never hold it."""
    most: Ints
    """Bytes wanted."""
    compute: Ints
    computes: bool
    """Whether it requests compute on any lane."""
    host_bytes: int
    liking: Ints
    """Combined rank of product and price."""
    size: Ints
    """Rank of the lane size."""
    flat: bool
    """Whether all lanes are equivalent to it."""
    sizes: int
    """Number of distinct size ranks."""
    wide: bool
    """Whether it may have more than TIERS_MAX tiers."""

    def tiers(self, lacks: Ints | None, lane_of: Ints, node_of: Ints, crowd: Ints | None = None) -> Ints:
        """[lanes] -> the tier of each. `lacks` [nodes]: rank of the weights and image that each lacks; `crowd` [nodes]:
        rank by the other replicas of its model, lowest preferred, below CROWDS.
        """
        many, ranks = self.sizes, 1 if lacks is None else LACKS
        steps = ranks if crowd is None else ranks * CROWDS
        tiers = (steps * many * self.liking + self.size)[lane_of]
        tiers = tiers if lacks is None else tiers + many * lacks[node_of]
        return tiers if crowd is None else tiers + ranks * many * crowd[node_of]


def encode_request(kind: RequestShape, lanes: Sequence[SliceClass]) -> EncodedRequest:
    """Encode a shape for these distinct lanes.
    Raises ValueError for an invalid amount, or if `spare_bytes` leaves nothing or is set for whole devices.
    """
    wrong = next((name for name, most in MOST.items() if not _counts(getattr(kind, name), most)), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong} of a placement request is {getattr(kind, wrong)}: expected an integer from 0 to {MOST[wrong]}"
        )
    if kind.spare_bytes and (kind.devices != 1 or not 0 < kind.spare_bytes < kind.memory_bytes):
        raise ValueError(
            f"spare_bytes of {kind} is invalid: expected less than memory_bytes, in a request for one device"
        )
    rooms = [kind.least.takes(lane) if kind.least.rank(lane.product) is not None else None for lane in lanes]
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
    """Bytes -> rank of the size. Sizes within a twentieth share a rank, since equal cards may differ by that much."""
    ranks, rank, first = dict[int, int](), -1, 0
    for size in sorted({lane.memory_bytes for lane in lanes}):
        if rank < 0 or size > first + first // ALIKE:
            rank, first = rank + 1, size
        ranks[size] = rank
    return ranks


def _milli(lanes: Sequence[SliceClass], rooms: Sequence[ResourceAmount | None]) -> list[int]:
    """Return the share of each slice class's memory that the request takes, in thousandths, rounded up."""
    return [
        0 if room is None else -(-WHOLE * room.memory_bytes // lane.memory_bytes)
        for lane, room in zip(lanes, rooms, strict=True)
    ]


def _numbers(found: Sequence[int]) -> Ints:
    return np.array(found, np.int64)
