"""What a Replica asks of its node beside Devices: CPU and memory, as the documents request them.

Owns the reading of `resources` for the plan, laid over each other as the driver lays them (the Settings' pod, the
Model's resources, its pod). It knows no node: what those have is `World.hosts`, and of one that is not there any
amount fits. The local driver tells none: nothing keeps a process to what its Model requests, and on one machine more
engines than cores run well, for few of them compute at once.
"""

from __future__ import annotations

from typing import Final

from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.quantity import read_milli
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, Beside

UNASKED: Final = {"cpu": "100m"}
"""Requests of who says nothing."""
NOTHING: Final = Resources()
LEAST: Final = Beside(read_milli(UNASKED["cpu"]))


def compute_host_request(model: Model, defaults: Pod | None = None) -> Beside:
    """What a Replica of it requests; more than any node has counts as all of one."""
    spec = model.spec
    laid = (NOTHING if defaults is None else defaults.resources, spec.resources, spec.pod.resources)
    amounts: dict[str, str | int] = {}
    for over in laid:
        amounts |= {**over.limits, **over.requests}  # a limit of what nothing requests is its request
    return parse_resource_list({**UNASKED, **amounts}) if amounts else LEAST


def requests_for(model: Model, defaults: Pod) -> dict[str, str]:
    """The same as a list of resources, for a node that is added for it."""
    need = compute_host_request(model, defaults)
    return {"cpu": f"{need.cpu_milli}m", **({"memory": str(need.host_bytes)} if need.host_bytes else {})}


def parse_resource_list(amounts: dict[str, str | int]) -> Beside:
    """CPU and memory of a Kubernetes list of resources. Raises ValueError where they are no quantities."""
    cpu_milli, bytes_milli = (read_milli(amounts.get(name, 0)) for name in ("cpu", "memory"))
    return Beside(min(cpu_milli, CPU_MAX), min(-(-bytes_milli // 1000), BYTES_MAX))
