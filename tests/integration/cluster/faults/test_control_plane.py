"""Faults of autoscalers and the API server, as clients see them: real processes on a real control plane under load.

Section D of the fault list (reliability, section 5) and similar faults that a cluster adds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from autoscaler.fold.gateway_reports import UNWATCHED_SILENT_S
from autoscaler.kubernetes.api import Api
from tests.integration.cluster.support.clients.gateway_requests import Answered, good
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.connection_loss_proxy import Cutter, port_of
from tests.integration.cluster.support.installations.multi_instance import LEASE_S, Estate, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.harness.previous_version import older

LIMIT_S = 300.0
OUTAGE_S = float(os.environ.get("OUTAGE_SECONDS", 2 * LEASE_S))
"""Duration of the API server outage. The fault list has 15 min, Lingo's test 120 s: set OUTAGE_SECONDS=120 manually."""
SOON_S = 60.0
"""A request that needs no autoscaler gets its response within this time."""
HELD_S = 4.0
"""Duration of a gateway's silence after a new leader is elected: shorter than the validity of a report."""
SILENT_S_MAX = UNWATCHED_SILENT_S - 25.0
"""A gateway that was stopped for less does not count as gone yet, even if its last report is 25 s old."""


async def pods_of(house: Estate, name: str) -> int:
    """The number of existing pods of a model."""
    found = await house.api.get(
        f"/api/v1/namespaces/{house.namespace}/pods", labelSelector=f"pilotlight.dev/model={name}"
    )
    return len(found["items"])


async def nobody_leads(house: Estate) -> bool:
    """Whether no autoscaler reports itself as leader."""
    return not await house.somebody_leads()


@pytest.mark.case("27")
async def test_ready_models_serve_requests_during_an_api_server_outage(
    estate: Estate, plane: Plane, node: Node
) -> None:
    """Requests to ready models succeed; one that needs a cold start gets a Retry-After at its deadline.
    The next leader stops no replica before each gateway has reported to it.
    """
    documents = model("ada", slots=64), model("bob")
    cat: dict[str, object] = {"gpu": {"count": 0}}
    opened = estate.open(*documents, model("cat", **cat), gateways=2)
    async with opened as house, asyncio.timeout(LIMIT_S + OUTAGE_S):
        await house.leader()
        for name in ("a1", "a2"):
            await house.until(partial(house.listed, name))
        assert good("ada", await house.call("ada", "g1"), await house.call("ada", "g2"))
        async with house.calling("ada", "g1", "g2") as answers:
            assert good("cat", await house.call("cat", "g2"))
            plane.kill_part("kube-apiserver")
            await asyncio.sleep(OUTAGE_S / 2)
            await house.until(partial(nobody_leads, house))
            # From now on cat is idle for too long, but not before: a leader would stop it while the test is late.
            house.write(*documents, model("cat", idleSeconds=1, **cat))
            for name in ("a1", "a2"):
                house.signal(name, signal.SIGHUP)
            async with asyncio.timeout(SOON_S):
                cold = await house.call("bob", "g1", Prefer="wait=1")
            assert (cold.status, "model_starting" in cold.text, int(cold.retry_after) >= 1) == (503, True, True)
            async with asyncio.timeout(SOON_S):
                warm = await house.call("cat", "g2")
            assert good("cat", warm), "no leader could stop it, so none requested its drain"
            await asyncio.sleep(OUTAGE_S / 2)
        now_s = asyncio.get_running_loop().time
        stopped_s = now_s()
        house.signal("g2", signal.SIGSTOP)
        try:
            async with house.calling("ada", "g1") as more:
                plane.start_part("kube-apiserver")
                await asyncio.to_thread(plane.until_ready)
                await house.until(house.somebody_leads)
                assert good("bob", await house.call("bob", "g1")), (
                    "a gateway starts without a response of the autoscaler"
                )
                await asyncio.sleep(HELD_S)
                left = await pods_of(house, "cat")
                assert left == 1 or now_s() - stopped_s > SILENT_S_MAX, "afterwards g2 counts as gone"
        finally:
            house.signal("g2", signal.SIGCONT)
        while await pods_of(house, "cat"):
            await asyncio.sleep(0.05)
        assert good("ada", *answers, *more), f"of {len(answers) + len(more)} Calls"
        await house.refresh_pods()
        assert (house.made("ada"), house.made("bob"), house.made("cat")) == (1, 1, 1)
    assert node.name


async def test_repeatedly_interrupted_watches_lose_no_request(
    plane: Plane, namespace: str, api: Api, tmp_path: Path, node: Node
) -> None:
    """Interrupts every connection of both autoscalers to the API server, three times per duration of the Lease.
    With the interval of the list, 10 s, it would be once.
    """
    cutter = Cutter(port_of(plane), LEASE_S / 3)
    async with cutter.running():
        estate = Estate(tmp_path, cutter.kubeconfig(plane, tmp_path), namespace, api)
        async with estate.open(model("ada", slots=64), model("bob"), gateways=2) as house, asyncio.timeout(LIMIT_S):
            await house.leader()
            assert good("ada", await house.call("ada", "g1"))
            async with house.calling("ada", "g1", "g2") as answers:
                assert good("bob", await house.call("bob", "g2"))
                cuts = cutter.cuts
                while cutter.cuts < cuts + 4:
                    await asyncio.sleep(0.05)
            assert good("ada", *answers)
            assert (house.made("ada"), house.made("bob")) == (1, 1)
    assert node.name


async def lists(house: Estate, gateway: str) -> bool:
    """Whether clients see ada there: the older version may serve a list before it has read its documents."""
    try:
        async with house.session.get(f"{house.url(gateway)}/v1/models") as answer:
            return answer.status == 200 and "ada" in [one["id"] for one in (await answer.json())["data"]]
    except aiohttp.ClientError:
        return False


@pytest.mark.case("30")
async def test_upgrade_and_rollback_of_each_component_lose_no_request(
    estate: Estate, tmp_path: Path, node: Node
) -> None:
    """Runs our version and the previous one together, with leadership in turn; then rolls back.

    Both versions serve replicas that the older one started. (Engines that only this version can start listen on ports
    of their own; even older versions cannot reach those, so none is woken before the rollback is complete.)
    """
    tree = older(tmp_path)
    estate.trees = dict.fromkeys(("a1", "a2", "g1", "g2"), tree)
    async with estate.open(model("ada", slots=64), model("bob"), gateways=2) as house, asyncio.timeout(LIMIT_S):
        await house.until(lambda: lists(house, "g1"))
        assert good("ada", await house.call("ada", "g1"))
        answers = list[Answered]()

        async def replaced(name: str, by: Path | None, through: str) -> None:
            """Replaces one process while the other gateway serves the requests."""
            async with house.calling("ada", through) as heard:
                await house.stop(name)
                if by is None:
                    del house.trees[name]
                else:
                    house.trees[name] = by
                await house.start(name)
                await house.until(lambda: house.listed(name) if name.startswith("a") else lists(house, name))
                heard.append(await house.call("ada", "g1" if name.startswith("a") else name))
            answers.extend(heard)

        for by in (None, tree):
            for name, through in (("a1", "g1"), ("g1", "g2"), ("a2", "g2"), ("g2", "g1")):
                await replaced(name, by, through)
        assert good("bob", await house.call("bob", "g1"))
        assert good("ada", *answers)
        assert (house.made("ada"), house.made("bob")) == (1, 1)
    assert node.name
