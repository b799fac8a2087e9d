"""Two autoscalers and two gateways as processes: leaders are killed, stopped and paused; an API server hangs."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

import pytest

from tests.integration.cluster.support.clients.gateway_requests import Answered, good
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.installations.multi_instance import LEASE_S, Estate, model
from tests.integration.cluster.support.kubelet.node import Node

LIMIT_S = 300
LONG_S = 60


@pytest.mark.standard
async def test_follower_becomes_leader_after_the_leader_is_killed_or_stopped(estate: Estate, node: Node) -> None:
    """A request at zero waits for the next leader; a stopped leader hands over before its Lease expires."""
    loop = asyncio.get_running_loop()
    documents = model("ada"), model("bob")
    async with estate.open(*documents, gateways=2) as house, asyncio.timeout(LIMIT_S):
        first = await house.leader()
        assert good("ada", await house.call("ada", "g1"))

        await house.stop(first, signal.SIGKILL)
        waits = asyncio.create_task(house.call("bob", "g2"))
        second = await house.leader(first)
        assert await lasts(house, LEASE_S), "not as long as without Settings"
        assert good("bob", await waits)
        assert good("ada", await house.call("ada", "g2"))

        await house.start(first)
        await house.until(lambda: house.listed(first))
        house.write(*documents, leaseSeconds=LONG_S)
        for name in (first, second):
            house.signal(name, signal.SIGHUP)
        await house.until(lambda: lasts(house, LONG_S))
        stopped_s = loop.time()
        stops = asyncio.create_task(house.stop(second))
        await house.leader(second)
        assert loop.time() - stopped_s < LONG_S, "it was released"
        await stops
        assert good("bob", await house.call("bob", "g1"))
        assert (house.made("ada"), house.made("bob")) == (1, 1), "every leader took over what ran"
    assert node.name


async def lasts(house: Estate, seconds: int) -> bool:
    """Whether the holder has written that duration to the Lease."""
    return (await house.lease()).get("leaseDurationSeconds") == seconds


async def follows(house: Estate, name: str) -> bool:
    """Whether its metrics report a follower. A resumed process can answer before it has read the Lease.
    If the other leader was paused for long, it may hold the Lease again.
    """
    return not await house.leads(name) or await house.holder() == name


@pytest.mark.case("25")
async def test_resumed_former_leaders_follow_and_start_no_second_replica(estate: Estate, node: Node) -> None:
    """Each leader in turn is stopped (SIGSTOP) for longer than the Lease, with a request on which both would act.

    Their clocks are two hours apart.
    """
    estate.skews_s = {"a1": 3600.0, "a2": -3600.0}
    async with estate.open(model("ada"), model("bob"), gateways=2) as house, asyncio.timeout(LIMIT_S):
        for name in ("ada", "bob"):
            leader = await house.leading()
            house.signal(leader, signal.SIGSTOP)
            waits = asyncio.create_task(house.call(name, "g1"))
            await house.leader(leader)
            house.signal(leader, signal.SIGCONT)
            assert good(name, await waits, await house.call(name, "g2"))
            await house.until(partial(follows, house, leader))
            await house.leading()
        assert (house.made("ada"), house.made("bob")) == (1, 1)
    assert node.name


@pytest.mark.case("27")
async def test_ready_models_serve_requests_while_the_api_server_hangs(estate: Estate, plane: Plane, node: Node) -> None:
    async with estate.open(model("ada", slots=64), model("bob"), gateways=2) as house, asyncio.timeout(LIMIT_S):
        await house.leader()
        assert good("ada", await house.call("ada", "g1"), await house.call("ada", "g2"))
        plane.signal_part("kube-apiserver", signal.SIGSTOP)
        try:
            answers = [await house.call("ada", f"g{n % 2 + 1}") for n in range(20)]

            async def nobody_leads() -> bool:
                answers.append(await house.call("ada", f"g{len(answers) % 2 + 1}"))
                return not await house.somebody_leads()

            await house.until(nobody_leads)
            waits = asyncio.create_task(house.call("bob", "g1"))
            answers += [await house.call("ada", f"g{n % 2 + 1}") for n in range(20)]
        finally:
            plane.signal_part("kube-apiserver", signal.SIGCONT)
        assert good("ada", *answers)
        assert good("bob", await waits)
        assert good("ada", await house.call("ada", "g2"))
        assert (house.made("ada"), house.made("bob")) == (1, 1)
    assert node.name


@pytest.mark.case("29")
async def test_restarts_of_all_components_in_a_cold_start_cause_only_one_start(estate: Estate, node: Node) -> None:
    """Both autoscalers and two of three gateways are killed twice while requests arrive; one start suffices.
    Those that wait at the third gateway succeed without an interim response; the other clients retry until served.
    """
    async with estate.open(model("ada"), gateways=3) as house, asyncio.timeout(LIMIT_S):
        await house.leader()
        parked, others = list[asyncio.Task[Answered]](), list[asyncio.Task[Answered]]()
        for _ in range(2):
            await asyncio.gather(*(house.stop(name, signal.SIGKILL) for name in ("a1", "a2")))
            parked.extend(asyncio.create_task(house.call("ada", "g3")) for _ in range(2))
            others.extend(asyncio.create_task(served(house, gateway)) for gateway in ("g1", "g2") for _ in range(2))
            await house.until(lambda: waits(house, parked))
            await asyncio.gather(*(house.stop(name, signal.SIGKILL) for name in ("g1", "g2")))
            for name in ("g1", "g2", "a1", "a2"):
                await house.start(name)
            await house.until(lambda: house.listed("a1"))
        assert good("ada", *await asyncio.gather(*parked, *others))
        assert house.made("ada") == 1
    assert node.name


async def waits(house: Estate, calls: list[asyncio.Task[Answered]]) -> bool:
    """Whether the requests without a response wait at g3."""
    return await house.counted("g3", "pilotlight_calls_waiting") == sum(not one.done() for one in calls)


async def served(house: Estate, gateway: str) -> Answered:
    """Retries while the connection fails or the gateway has no routes yet, and returns the response."""
    while (answer := await house.call("ada", gateway)).status == 0 or answer.text.count("has just started"):
        assert answer.status == 0 or (answer.status, answer.retry_after) == (503, "1"), answer
        await asyncio.sleep(0.05)
    return answer
