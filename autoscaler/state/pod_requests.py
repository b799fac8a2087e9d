"""CPU and memory requests of a replica's pod, as the documents state them.

Merges `resources` as the driver does: the pod of the Settings, the resources of the model, and its pod. The capacity of
nodes is in `World.nodes.hosts`; a node that is missing there has unlimited capacity. The local driver lists no node: it
does not limit processes, and a machine can run more engines than it has cores, since few of them compute at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.quantity import read_milli
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, NOTHING, HostAmount

Resourced = Mapping[str, Any]
"""Has `resources`: a container, or a pod's spec."""


UNASKED: Final = {"cpu": "100m"}
"""Requests of a pod that specifies none."""
NO_RESOURCES: Final = Resources()
LEAST: Final = HostAmount(read_milli(UNASKED["cpu"]))


def compute_host_request(model: Model, defaults: Pod | None = None) -> HostAmount:
    """Return the requests of a replica, capped at CPU_MAX and BYTES_MAX."""
    spec = model.spec
    layers = (NO_RESOURCES if defaults is None else defaults.resources, spec.resources, spec.pod.resources)
    amounts: dict[str, str | int] = {}
    for over in layers:
        amounts |= {**over.limits, **over.requests}  # a limit without a request is its request
    return parse_resource_list({**UNASKED, **amounts}) if amounts else LEAST


def requests_for(model: Model, defaults: Pod) -> dict[str, str]:
    """Return the same as a Kubernetes resource list, for an order of a node."""
    need = compute_host_request(model, defaults)
    return {"cpu": f"{need.cpu_milli}m", **({"memory": str(need.host_bytes)} if need.host_bytes else {})}


def parse_resource_list(amounts: dict[str, str | int]) -> HostAmount:
    """Return CPU and memory of a Kubernetes resource list. Raises ValueError if they are not quantities."""
    cpu_milli, bytes_milli = (read_milli(amounts.get(name, 0)) for name in ("cpu", "memory"))
    return HostAmount(min(cpu_milli, CPU_MAX), min(-(-bytes_milli // 1000), BYTES_MAX))


def sum_pod_requests(spec: Resourced) -> HostAmount:
    """Return a pod's requests: the higher of the sum over containers and sidecars and the peak while an init container
    runs. Pod-level requests replace this; the pod overhead is added.
    Source: https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    staying, peak = NOTHING, NOTHING
    for one in spec.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            staying = staying.plus(_container_requests(one))
            peak = peak.most(staying)
        else:
            peak = peak.most(staying.plus(_container_requests(one)))
    for one in spec["containers"]:
        staying = staying.plus(_container_requests(one))
    amounts, whole = staying.most(peak), _requests(spec)
    said = parse_resource_list(dict(whole))
    amounts = HostAmount(
        said.cpu_milli if "cpu" in whole else amounts.cpu_milli,
        said.host_bytes if "memory" in whole else amounts.host_bytes,
    )
    return amounts.plus(parse_resource_list(spec.get("overhead") or {}))


def _container_requests(container: Resourced) -> HostAmount:
    return parse_resource_list(dict(_requests(container)))


def _requests(of: Resourced) -> Mapping[str, str | int]:
    found: Mapping[str, str | int] = of.get("resources", {}).get("requests") or {}
    return found
