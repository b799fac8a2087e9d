"""Whether anybody uses Devices of a node, by what pods there ask for."""

from __future__ import annotations

import pytest

from autoscaler.capacity.using import in_use
from tests.kit.objects import PlayedServer
from tests.sim.virtual import run


@pytest.mark.parametrize(
    ("resource", "uses"),
    [
        ("nvidia.com/gpu", True), ("nvidia.com/gpu.shared", True), ("nvidia.com/mig-1g.10gb", True),
        ("volcano.sh/vgpu-number", True), ("amd.com/gpu", True), ("cpu", False), ("rdma/hca", False),
    ],
)  # fmt: skip
def test_who_asks_for_a_device_of_whatever_name_uses_it(resource: str, uses: bool) -> None:
    async def scenario() -> None:
        server = PlayedServer(lambda: 0.0)
        limits = {"containers": [{"resources": {"limits": {resource: "1"}}}]}
        pod = {"metadata": {"namespace": "x", "name": "p"}, "spec": {"nodeName": "w1", **limits}}
        server.put("/api/v1/namespaces/x/pods/p", pod)
        assert await in_use(server, "w1", {"GPU-1"}) == ("pod x/p" if uses else "")

    run(scenario())
