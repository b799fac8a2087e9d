"""Poisoned objects of every kind that Pilotlight lists or watches: no process exits, and valid Models are served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from pilotlight.doctor.cluster_checks import Scene, installations
from tests.integration.cluster.conftest import make_namespace, programs
from tests.integration.cluster.support.control_plane import custom_resources, malformed_objects
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore:Sending a large body")]  # of aiohttp, at 1 MiB

NAMESPACE, CLAIMED = "poisoned", "claimed"
WATCHED = {"Model", "Tenant", "ResourceClaim", "ScaledObject"}
"""Kinds whose objects are no longer counted from an earlier list after their deletion."""
WITHIN_S = 420.0
SETTINGS = {
    "nodes": [{"selector": {"pool": "a"}, "device": {"model": "A100", "memory": "80Gi"}}],
    "capacity": [
        {"name": "fabric", "cro": {"model": "A100"}},
        {"name": "karpenter", "karpenter": {"nodePool": "pool"}},
        {"name": "group", "clusterAutoscaler": {"nodeLabels": {"pool": "a"}}},
        {
            "name": "queue",
            "provisioningRequest": {"class": "check-capacity.autoscaling.x-k8s.io", "selector": {"pool": "a"}},
        },
    ],
}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """The API of a control plane of this test's own, since its definitions must not affect other tests."""
    (tmp_path / "plane").mkdir()
    plane = Plane(tmp_path / "plane", programs())
    plane.start()
    try:
        async with Api(await load_api_access(plane.kubeconfig)) as one:
            yield one
    finally:
        plane.stop()


async def counted(one: House) -> dict[str, int]:
    """Kind -> number of unreadable objects, from the autoscaler's metrics."""
    async with one.session.get(f"http://127.0.0.1:{one.ops}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'^pilotlight_unreadable_objects\{kind="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {kind: int(number) for kind, number in found}


async def check_claim(api: Api, one: House, claim: str) -> None:
    """A Lease that cannot be decoded delays only the Models of its namespace; it is served once the Lease is gone."""
    assert (await counted(one))["Lease"] == 1
    assert (await one.call("cat"))[0] == 200, "a Model of another namespace"
    assert (await one.call("dog"))[0] == 503, "another installation may serve it"
    found = await installations(api, Scene(engines=NAMESPACE, home=NAMESPACE, scope="cluster"))
    (said,) = [finding.says for finding in found if finding.grade == "warning"]
    assert said.startswith(f"Lease {CLAIMED}/models.pilotlight.dev cannot be decoded, its values are nested more than")
    await api.delete(claim)
    while (await one.call("dog"))[0] != 200:
        await asyncio.sleep(0.5)
    assert "Lease" not in await counted(one)


async def test_valid_models_are_served_despite_malformed_objects_of_every_kind(api: Api, tmp_path: Path) -> None:
    house = House(tmp_path, tmp_path / "plane" / "kubeconfig", NAMESPACE, "--watch-kubeai")
    healthy = [model(name, idleSeconds=600) for name in ("ada", "bob", "eve")]
    house.write(*healthy, model("large", gpu={"memory": "79Gi"}, queue={"waitSecondsMax": 5}), **SETTINGS)
    node = Node(api, "healthy", next_number(), {"nvidia.com/gpu": "3"}, {}, tmp_path, probe_period_s=0.05)
    async with asyncio.timeout(WITHIN_S):
        await malformed_objects.install(api)
        await malformed_objects.create_named(api)
        for namespace, name in ((NAMESPACE, "cat"), (CLAIMED, "dog")):
            await make_namespace(api, namespace)
            await api.create(custom_resources.models(namespace), model(name, gpu={"count": 0}))
        claim = await malformed_objects.create_claim(api, CLAIMED)
        before = await malformed_objects.create(api, NAMESPACE, "before")
        assert not malformed_objects.listed() - before.kinds.keys(), "the API server accepts some of each kind"
        async with node.running(), house.running() as one:
            assert (await one.call("ada"))[0] == 200
            assert {"Model", "ResourceClaim"} <= (await counted(one)).keys()
            await check_claim(api, one, claim)
            after = await malformed_objects.create(api, NAMESPACE, "after")
            assert (await one.call("bob"))[0] == 200
            assert (await one.call("large"))[0] == 503, "providers of capacity are asked, and have nothing"
            for poisoned in (before, after):
                await malformed_objects.delete(api, poisoned)
            while WATCHED & (await counted(one)).keys():
                await asyncio.sleep(0.1)
            assert (await one.call("eve"))[0] == 200
            assert one.autoscaler.returncode is None
    assert "Traceback" not in (tmp_path / "autoscaler.log").read_text()
