"""Whether devices of a node are in use, according to the requests of its pods."""

from __future__ import annotations

import pytest

from autoscaler.providers.release_checks import CLAIMS, SLICES, find_device_user
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import run_with


@pytest.mark.parametrize(
    ("resource", "uses"),
    [
        ("nvidia.com/gpu", True), ("nvidia.com/gpu.shared", True), ("nvidia.com/mig-1g.10gb", True),
        ("volcano.sh/vgpu-number", True), ("amd.com/gpu", True), ("cpu", False), ("rdma/hca", False),
    ],
)  # fmt: skip
@run_with(run)
async def test_pod_uses_devices_if_limits_include_a_device_resource(resource: str, uses: bool) -> None:
    server = PlayedServer(lambda: 0.0)
    limits = {"containers": [{"resources": {"limits": {resource: "1"}}}]}
    pod = {"metadata": {"namespace": "x", "name": "p"}, "spec": {"nodeName": "w1", **limits}}
    server.put("/api/v1/namespaces/x/pods/p", pod)
    assert await find_device_user(server, "w1", {"GPU-1"}) == ("pod x/p" if uses else "")


PART = {"type": {"string": "mig"}, "uuid": {"string": "MIG-1"}, "parentUUID": {"string": "GPU-1"}}


@pytest.mark.parametrize(
    ("attributes", "sought", "uses"),
    [
        ({"uuid": {"string": "GPU-1"}}, "GPU-1", True),
        ({"gpu.nvidia.com/uuid": {"string": "GPU-1"}, "index": {"int": 0}}, "GPU-1", True),
        (PART, "GPU-1", True),
        ({f"gpu.nvidia.com/{name}": value for name, value in PART.items()}, "GPU-1", True),
        (PART, "GPU-2", False),
        ({"model": {"string": "GPU-1"}}, "GPU-1", False),
        (PART, "", True),
        ({}, "", True),
    ],
)  # fmt: skip
@run_with(run)
async def test_gpu_of_a_reserved_resource_claim_counts_as_in_use(
    attributes: dict[str, object], sought: str, uses: bool
) -> None:
    server, driver = PlayedServer(lambda: 0.0), "gpu.nvidia.com"
    device = {"name": "a", "attributes": attributes}
    server.put(
        f"{SLICES}/s", {"spec": {"driver": driver, "nodeName": "w1", "pool": {"name": "w1"}, "devices": [device]}}
    )
    given = {"devices": {"results": [{"driver": driver, "pool": "w1", "device": "a"}]}}
    claim = f"{CLAIMS.replace('resourceclaims', 'namespaces/x/resourceclaims')}/c"
    for status, used in (({"allocation": given}, False), ({"allocation": given, "reservedFor": [{"name": "p"}]}, uses)):
        server.put(claim, {"metadata": {"namespace": "x"}, "status": status})
        assert await find_device_user(server, "w1", {sought}) == ("claim x/c" if used else "")
    assert await find_device_user(server, "w2", {sought}) == "", "it is of another node"
