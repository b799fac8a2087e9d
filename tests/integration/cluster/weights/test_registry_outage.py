"""The cluster's registry is down while a node has cached weights: models scale to zero and wake, under any leader."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.http.transport import Site
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry.client import Client
from artifacts.store.permission_cache import FRESH_S
from artifacts.store.store import Store
from autoscaler.kubernetes.api import Api
from tests.integration.cluster.support.installations.single_instance import House
from tests.integration.cluster.support.kubelet.node import Node
from tests.integration.cluster.weights.test_agent_pull import Scene, ada, layout
from tests.support.builders.artifacts import packed_models
from tests.support.real_services import docker_registry

OUTAGE_S = float(os.environ.get("OUTAGE_SECONDS", "0"))
"""Duration of the outage, half of it refusing and half of it hanging, for at least two starts each.
The fault list has 5 min: set OUTAGE_SECONDS=300 manually."""
LIMIT_S = 300.0


async def starts(scene: Scene, least_s: float) -> int:
    """Counts how often the model scales to zero and wakes, at least twice and for at least `least_s`."""
    ends_s, count = time.monotonic() + least_s, 0
    while count < 2 or time.monotonic() < ends_s:
        age(scene.store)
        await scene.at_zero()
        await scene.answers()
        count += 1
    return count


def age(store: Path) -> None:
    """Backdates the registry's permits to before the outage, so that they are due for renewal."""
    said_s = time.time() - 2 * FRESH_S
    permits = [one for one in (store / "permits").iterdir() if not one.name.startswith(".")]
    assert permits, "these weights need a login"
    for one in permits:
        os.utime(one, (said_s, said_s))


async def nobody_failed(scene: Scene) -> None:
    assert "failed" not in str(await scene.ops("explain/model/ada"))
    assert [row.record.private for row in Store(scene.store).rows()] == [True], "it is one Copy all the time"


async def test_models_restart_from_stored_weights_during_a_registry_outage(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    """A real registry with weights that need a login: starts use the earlier permits.
    So do those of the next leader and agent, which have never connected to it.
    """
    scene = Scene(house, api, namespace, node, tmp_path)
    user, password = docker_registry.USER, docker_registry.PASSWORD
    words = ("--pull-secrets", namespace, "--kubeconfig", str(house.kubeconfig))
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(docker_registry.registry(tmp_path, docker_registry.htpasswd(tmp_path)))
        async with Client(Site(host), Known(host, Login(user, password))) as client:
            await packed_models.push(client, OciLayout(layout(tmp_path)))
        text = json.dumps({"auths": {host: {"username": user, "password": password}}})
        await api.create(f"/api/v1/namespaces/{namespace}/secrets", {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"},
            "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": text},
        })  # fmt: skip
        house.write(ada(host, pullSecret="login", start={"retries": 0}))
        async with house.running(), asyncio.timeout(LIMIT_S + OUTAGE_S):
            async with scene.agent(*words):
                await scene.answers()
                await stack.aclose()
                refused = await starts(scene, OUTAGE_S / 2)
                stack.enter_context(socket.create_server(("127.0.0.1", int(host.partition(":")[2]))))  # accepts none
                hung = await starts(scene, OUTAGE_S / 2)
                await nobody_failed(scene)
            await house.autoscaler_anew()
            async with scene.agent(*words):
                await starts(scene, 0)
                await nobody_failed(scene)
        print(f"{refused} starts while the registry refused, {hung} while it hung, in {OUTAGE_S:.0f} s")
