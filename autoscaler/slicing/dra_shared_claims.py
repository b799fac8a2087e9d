"""A GPU that many Replicas have by one ResourceClaim in common, as its DRA driver shares it: time-slicing or MPS. Pure.

Owns what that claim says, and what each pod says of its own part. Pods have a device together only by one claim, so all
on a GPU name the same, and what it is called says all of it: whoever comes first makes it, and whoever would say
anything else of that GPU makes another. Facts: NVIDIA's driver does either only with its feature gate
(`TimeSlicingSettings`, `MPSSupport`), and neither of devices that several claims may have. A claim is reserved for no
more than 256 pods, and an MPS server has 48 clients of a device at the most.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from autoscaler.slicing.base import MIB, Object, Part, in_mib
from autoscaler.state.resources import Isolation

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


def name_of(entry: str, where: str, sharing: Sharing) -> str:
    """What the claim of an entry is called, which all pods on it have."""
    short = re.sub(r"[^a-z0-9]+", "-", entry.rpartition("/")[2].lower()).strip("-")[:40]
    return f"{sharing}-{short}-{hashlib.sha256(f'{entry} {where}'.encode()).hexdigest()[:16]}"


def config(driver: str, sharing: Sharing, request: str) -> Object:
    """What the driver is told of that request of the claim."""
    way = WAYS[sharing]
    parameters = {**_CONFIG, "sharing": {"strategy": way.strategy, **way.parameters}}
    return {"requests": [request], "opaque": {"driver": driver, "parameters": parameters}}


def environment(sharing: Sharing, part: Part) -> dict[str, str]:
    """By what an MPS server holds a client to its part; who has all of its GPU is held to nothing."""
    said = {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={in_mib(part.memory_bytes)}M" if part.memory_bytes else "",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(100, part.compute_percent) or ""),
    }
    return {name: value for name, value in said.items() if value} if sharing == "mps" else {}


def fraction(sharing: Sharing, part: Part) -> float | None:
    """Of its GPU, what an engine is told to take, in thousandths; None: it has all of it."""
    if not part.memory_bytes:
        return None
    all_bytes = part.slice.device_bytes or part.slice.memory_bytes
    mine_bytes = part.memory_bytes - (CLIENT_BYTES if sharing == "mps" else 0)
    return max(1, mine_bytes * 1000 // all_bytes) / 1000
