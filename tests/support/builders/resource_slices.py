"""ResourceSlices as drivers publish them: whole GPUs, GPUs with MIG partitions and counters, GPUs that are shared.

Names and members are those of NVIDIA's driver (dra-driver-nvidia-gpu, partitions.go, mig.go, consumable_shares.go).
"""

from __future__ import annotations

from typing import Any

from autoscaler.slicing.mig_geometry import GEOMETRIES, MigProfile

Object = dict[str, Any]
DRIVER = "gpu.nvidia.com"
H100 = GEOMETRIES["H100-80"]
GIB = 1 << 30
PROFILE_IDS = {"1g.10gb": 19, "1g.10gb+me": 20, "1g.20gb": 15, "2g.20gb": 14, "3g.40gb": 9, "4g.40gb": 5, "7g.80gb": 0}
CLASSES = {"gpu.nvidia.com": "gpu", "mig.nvidia.com": "mig"}


def classes() -> list[Object]:
    """The DeviceClasses that NVIDIA's chart creates."""
    return [
        {
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression":
                f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"}}]},
        }
        for name, kind in CLASSES.items()
    ]  # fmt: skip


def resource_slice(node: str, name: str, *, pool: str = "", count: int = 1, generation: int = 1, **spec: Any) -> Object:
    """A slice of a pool that has the name of its node by default."""
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{node}-{name}"},
        "spec": {
            "driver": DRIVER, "nodeName": node,
            "pool": {"name": pool or node, "generation": generation, "resourceSliceCount": count}, **spec,
        },
    }  # fmt: skip


def gpu(minor: int, **more: Any) -> Object:
    """A whole GPU."""
    return {
        "name": f"gpu-{minor}",
        "attributes": {
            "type": {"string": "gpu"}, "uuid": {"string": f"GPU-{minor:04x}"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"}, "driverVersion": {"version": "570.86.15"},
        },
        "capacity": {"memory": {"value": "81559Mi"}}, **more,
    }  # fmt: skip


def many(minor: int, step: str = "1Mi") -> Object:
    """A GPU that may be allocated multiple times, each time with part of its memory."""
    policy = {"default": step, "validRange": {"min": step, "step": step}}
    return gpu(minor, allowMultipleAllocations=True, capacity={"memory": {"value": "80Gi", "requestPolicy": policy}})


def cut_name(profile: str, start: int, minor: int = 0) -> str:
    """The driver's name for that partition."""
    plain = profile.replace(".", "").replace("+", "-")
    return f"gpu-{minor}-mig-{plain}-{PROFILE_IDS[profile]}-{start}"


def _counters(profile: MigProfile | None, start: int = 0) -> Object:
    """Consumed counters; None: the whole GPU."""
    compute, size, bytes_ = (7, 8, 80 * GIB) if profile is None else profile[1:4]
    media = 1 if profile is None or profile.media or profile.compute == 7 else 0
    return {
        "multiprocessors": {"value": str(16 * compute)}, "memory": {"value": str(bytes_)},
        "jpeg-engines": {"value": str(media)},
        **{f"memory-slice-{at}": {"value": "1"} for at in range(start, start + size)},
    }  # fmt: skip


def partitionable(node: str, minor: int = 0, *, places: bool = False) -> list[Object]:
    """An H100 with all possible partitions, as NVIDIA's driver publishes it with DynamicMIG: counters, then devices.

    `places`: with the memory slices of each partition in its capacity, as KEP-4815 specifies and the driver does for
    existing partitions.
    """
    counter_set = f"gpu-{minor}-counter-set"

    def consumes(profile: MigProfile | None, start: int = 0) -> list[Object]:
        return [{"counterSet": counter_set, "counters": _counters(profile, start)}]

    parts = [
        {
            "name": cut_name(profile.name, start, minor),
            "attributes": {
                "type": {"string": "mig"}, "parentUUID": {"string": f"GPU-{minor:04x}"},
                "profile": {"string": profile.name}, "productName": {"string": "NVIDIA H100 80GB HBM3"},
            },
            "capacity": {
                "memory": {"value": str(profile.memory_bytes)},
                **{f"memorySlice{at}": {"value": "1"} for at in range(start, start + profile.size) if places},
            },
            "consumesCounters": consumes(profile, start),
        }
        for profile in H100.profiles
        for start in profile.starts
    ]  # fmt: skip
    return [
        resource_slice(node, "counters", count=2, sharedCounters=[{"name": counter_set, "counters": _counters(None)}]),
        resource_slice(node, "devices", count=2, devices=[gpu(minor, consumesCounters=consumes(None)), *parts]),
    ]


def partitionables(node: str, many: int) -> list[Object]:
    """A node with that many of these GPUs."""
    counters, devices = partitionable(node)
    for minor in range(1, many):
        more, others = partitionable(node, minor)
        counters["spec"]["sharedCounters"] += more["spec"]["sharedCounters"]
        devices["spec"]["devices"] += others["spec"]["devices"]
    return [counters, devices]
