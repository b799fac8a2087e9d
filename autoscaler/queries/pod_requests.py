"""CPU and memory requests of a replica's pod, as the documents state them.

Reads `resources` for the plan, merged as the driver merges them (the Settings' pod, the model's resources, its pod).
Nodes' capacities are in `World.nodes.hosts`; a node that is not there fits any amount. The local driver lists none:
nothing limits a process to what its model requests, and one machine runs more engines than cores well, since few of
them compute at once.
"""

from __future__ import annotations

from typing import Final

from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.quantity import read_milli
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, HostAmount

UNASKED: Final = {"cpu": "100m"}
"""Requests of a pod that states none."""
NOTHING: Final = Resources()
LEAST: Final = HostAmount(read_milli(UNASKED["cpu"]))


def compute_host_request(model: Model, defaults: Pod | None = None) -> HostAmount:
    """Requests of a replica, capped at CPU_MAX and BYTES_MAX."""
    spec = model.spec
    laid = (NOTHING if defaults is None else defaults.resources, spec.resources, spec.pod.resources)
    amounts: dict[str, str | int] = {}
    for over in laid:
        amounts |= {**over.limits, **over.requests}  # a limit without a request is its request
    return parse_resource_list({**UNASKED, **amounts}) if amounts else LEAST


def requests_for(model: Model, defaults: Pod) -> dict[str, str]:
    """The same as a resource list, for a node that is added for it."""
    need = compute_host_request(model, defaults)
    return {"cpu": f"{need.cpu_milli}m", **({"memory": str(need.host_bytes)} if need.host_bytes else {})}


def parse_resource_list(amounts: dict[str, str | int]) -> HostAmount:
    """CPU and memory of a Kubernetes resource list. Raises ValueError if they are not quantities."""
    cpu_milli, bytes_milli = (read_milli(amounts.get(name, 0)) for name in ("cpu", "memory"))
    return HostAmount(min(cpu_milli, CPU_MAX), min(-(-bytes_milli // 1000), BYTES_MAX))
