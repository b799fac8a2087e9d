"""Agents that share weights: the bytes are downloaded from the registry once, and access is restricted."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web

from artifacts.http.transport import Site
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry.client import Client
from artifacts.store.store import Store
from autoscaler.kubernetes.api import Api
from pilotlight.agent.weights.peers import CERTIFIED
from tests.integration.cluster.support.installations.single_instance import House
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.integration.cluster.weights.test_agent_pull import CONTENT, Scene, ada, layout
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.registry import FakeRegistry, digest_of
from tests.support.net.certificates import OURS, leaf, write, write_authority


def named(name: str, host: str, node: Node) -> dict[str, Any]:
    """A Model with these weights that is bound to that node."""
    made = ada(host, pod={"nodeSelector": {"test": node.name}}, start={"retries": 0})
    made["metadata"]["name"] = name
    return made


async def test_node_pulls_weights_from_a_peer_instead_of_the_registry(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    name = f"node-{uuid.uuid4().hex[:8]}"
    pair = write(tmp_path, "agents", leaf(OURS, CERTIFIED))
    words = (
        "--peer-listen", "127.0.0.1:0", "--peer-cert-file", str(pair.cert), "--peer-key-file", str(pair.key),
        "--peer-ca-file", str(write_authority(tmp_path, OURS)),
    )  # fmt: skip
    second = Node(api, name, next_number(), {"nvidia.com/gpu": "2"}, {"test": name}, tmp_path, probe_period_s=0.05)
    async with second.running(), FakeRegistry().serving() as registry:
        one = Scene(house, api, namespace, node, tmp_path)
        other = Scene(house, api, namespace, second, tmp_path, name="-2")
        async with Client(Site(registry.host)) as client:
            await packed_models.push(client, OciLayout(layout(tmp_path)))
        house.write(named("ada", registry.host, node), named("bea", registry.host, second))
        async with house.running(), one.agent(*words), other.agent(*words), asyncio.timeout(300):
            status, body = await house.call("ada")
            assert status == 200, body
            blobs = registry.asked("GET", "/blobs/")
            assert [seen for seen in blobs if digest_of(CONTENT) in seen.path]

            async def away(_: web.Request) -> web.StreamResponse:
                return web.Response(status=500)

            for seen in blobs:
                registry.always["GET", seen.path] = away
            status, body = await house.call("bea")
            assert status == 200, body
            assert len(registry.asked("GET", "/blobs/")) == len(blobs), "the registry gave no byte of it again"
            assert registry.asked("GET", "/manifests/"), "what it means, and who may have it, is the registry's to say"
        mine, foreign = (Store(scene.store).rows()[0].record for scene in (one, other))
        assert mine.digest == foreign.digest
