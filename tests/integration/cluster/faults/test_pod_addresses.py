"""Address faults in a cluster: some component has not been informed that a pod is gone, or its address is reused.

Cases 18 and 19 of the fault list, with several gateways. For the driver's part see driver/test_api_server_faults.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects.pod_manifest import assign_engine_port
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.kubeconfig import load_api_access
from tests.integration.cluster.support.clients.gateway_requests import Answered, good
from tests.integration.cluster.support.control_plane.event_loss_proxy import Lossy
from tests.integration.cluster.support.installations.gpu_node import Stage, runs, staged
from tests.integration.cluster.support.installations.multi_instance import Estate, model
from tests.integration.cluster.support.kubelet.pod import EVICTED

GATEWAYS = ("g1", "g2")
LIMIT_S = 240.0


@pytest.mark.case("18")
@pytest.mark.parametrize("how", ["evicted", "its end is not reported", "watches are cut"])
async def test_deleted_pod_is_removed_from_routes_without_failed_requests(
    how: str, api: Api, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    """One of two replicas is gone: it is evicted, which clears its address, or its DELETED event is lost.
    Or watches are interrupted all the time (here every 0.5 s, in the list every 10 s).
    """
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        lossy = Lossy(await load_api_access(kubeconfig))
        lossy.watch_s = 0.5 if how == "watches are cut" else None
        way = await stack.enter_async_context(lossy.running(tmp_path))
        stage = await stack.enter_async_context(staged(api, namespace, tmp_path))
        ada = stage.ada(0, 8, replicas={"min": 2, "max": 2})
        one = Estate(tmp_path, way, namespace, api)
        await stack.enter_async_context(one.open(ada, autoscalers=1, gateways=2))
        await runs(one, 2, 0)
        victim, _ = await stage.engines()
        async with one.calling("ada", *GATEWAYS) as reported:
            lossy.loses_ends = how == "its end is not reported"
            if how == "evicted":
                await api.patch(f"{stage.pods}/{victim}", {"metadata": {"annotations": {EVICTED: "1"}}})
            else:
                await api.delete(f"{stage.pods}/{victim}", grace_s=0)
            await one.until(lambda: replaced(one, stage, victim))
            count = len(reported)
            await one.until(lambda: moved_on(reported, count + 20))
        assert good("ada", *reported)
        for gateway in GATEWAYS:
            assert await one.counted(gateway, "pilotlight_upstream_retries_total", 'reason="connect"') <= 1
        assert (lossy.lost > 0) == (how == "its end is not reported")
        assert (lossy.cuts > 0) == (how == "watches are cut")


async def replaced(one: Estate, stage: Stage, victim: str) -> bool:
    """Whether another replica is ready in its place."""
    return victim not in (pods := await stage.engines()) and (len(pods), await ready(one)) == (2, 2)


async def ready(one: Estate) -> int:
    """The number of ready replicas."""
    return (await one.counts("ada"))[0].get("ready", 0)


async def moved_on(reported: list[Answered], number: int) -> bool:
    return len(reported) >= number


def stranger(stage: Stage, port: int) -> Object:
    """A pod of another model that Pilotlight does not know; it responds to every request."""
    words = stage.engine("bob", "--tokens-per-s", "0", host="$(POD_IP)", port=str(port))
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    container = {
        "name": "engine", "image": "bob", "command": words, "env": env,
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bob"},
        "spec": {"nodeName": stage.node.name, "containers": [container], "terminationGracePeriodSeconds": 1},
    }  # fmt: skip


@pytest.mark.case("19")
async def test_requests_never_reach_a_foreign_pod_that_reuses_an_address(
    api: Api, namespace: str, tmp_path: Path, estate: Estate
) -> None:
    """The autoscaler hangs, so no gateway knows that the pod is gone: all of them connect to its address.
    They are refused, since each replica listens on a port of its own, and the foreign pod on another.
    """
    async with (
        staged(api, namespace, tmp_path, late_s=0) as stage, asyncio.timeout(LIMIT_S),
        estate.open(stage.ada(0, 8), autoscalers=1, gateways=2) as one,
    ):  # fmt: skip
        assert {(await one.call("ada", gateway)).status for gateway in GATEWAYS} == {200}
        (first,) = await stage.engines()
        ip = (await api.get(f"{stage.pods}/{first}"))["status"]["podIP"]
        one.signal("a1", signal.SIGSTOP)
        await api.delete(f"{stage.pods}/{first}", grace_s=0)
        await stage.ended(first)
        while ip in stage.node._taken:  # the kubelet frees the address when it has observed the end, too
            await asyncio.sleep(0.02)
        await api.create(stage.pods, stranger(stage, 8000))
        assert await is_ready(api, f"{stage.pods}/bob") == ip
        calls = [asyncio.create_task(one.call("ada", gateway)) for gateway in GATEWAYS for _ in range(5)]
        await one.until(lambda: refused_by_all(one))
        one.signal("a1", signal.SIGCONT)
        assert good("ada", *await asyncio.gather(*calls))
        await api.get(f"{stage.pods}/bob")
        assert stage.calls("bob") == []


async def is_ready(api: Api, pod: str) -> str:
    """Waits until the pod is ready and returns its address."""
    while True:
        found = (await api.get(pod))["status"]
        if any(one["type"] == "Ready" and one["status"] == "True" for one in found.get("conditions", ())):
            return str(found["podIP"])
        await asyncio.sleep(0.02)


async def refused_by_all(one: Estate) -> bool:
    """Whether every gateway has had a connection refused."""
    tried = [await one.counted(name, "pilotlight_upstream_retries_total", 'reason="connect"') for name in GATEWAYS]
    return all(tried)


@pytest.mark.case("19")
async def test_two_models_that_reuse_an_address_get_only_their_own_requests(
    api: Api, namespace: str, tmp_path: Path, estate: Estate
) -> None:
    """Each scales to zero before the other gets requests, and its address is reused at once by the other."""
    async with staged(api, namespace, tmp_path, late_s=0) as stage, asyncio.timeout(LIMIT_S):
        both = [
            model(
                name, command=stage.engine(name, "--tokens-per-s", "0"), gpu={"count": 0}, residencySeconds=0,
                idleSeconds=0.2,
            ) for name in ("ada", "bob")
        ]  # fmt: skip
        async with estate.open(*both, autoscalers=1, gateways=2) as one:
            for name in ("ada", "bob", "ada", "bob"):
                assert good(name, *await asyncio.gather(*(one.call(name, gateway) for gateway in GATEWAYS)))
                while await stage.engines():
                    await asyncio.sleep(0.02)
        addresses = {pod: stage.addresses[pod] for pod in one.pods_made}
        assert len(set(addresses.values())) < len(addresses), "one was given out again"
        assert len({assign_engine_port(ReplicaId(pod)) for pod in addresses}) == len(addresses)
