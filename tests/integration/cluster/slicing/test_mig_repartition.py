"""MIG repartitioning of nodes, from documents to labels and pods, with a fake of NVIDIA's mig-manager.

The autoscalers are processes on a real API server; their delays are shorter than in a cluster (`short_mig_delays`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.queries.mig_status import TRIES_MAX
from autoscaler.slicing.mig import STATE
from tests.integration.cluster.slicing.test_device_allocation import occupied, own_pod
from tests.integration.cluster.support.clients.gateway_requests import good
from tests.integration.cluster.support.controllers.fake_mig_manager import (
    CONFIG_MAP,
    POOL,
    REBOOTING,
    Manager,
    managed,
    settings,
)
from tests.integration.cluster.support.entry_points import short_mig_delays
from tests.integration.cluster.support.installations.multi_instance import SETTINGS, Estate, model

LIMIT_S = 300
SMALL, HALF, WHOLE = "5Gi", "30Gi", "70Gi"


@pytest.fixture
def cutting(estate: Estate) -> Estate:
    """An Estate whose autoscalers may repartition and wait for less time than in a cluster."""
    estate.settings = SETTINGS | settings(estate.namespace)
    estate.module = "tests.integration.cluster.support.entry_points.short_mig_delays"
    return estate


@pytest.fixture
async def managers(api: Api, namespace: str, tmp_path: Path) -> AsyncIterator[list[Manager]]:
    """The fake mig-managers of three nodes."""
    async with managed(api, namespace, tmp_path, 3) as found:
        yield found


def asking(name: str, memory: str, estate: Estate, node: Manager | None = None) -> dict[str, object]:
    """A Model for any of the nodes, or for that one."""
    where = {POOL: estate.namespace} if node is None else {"test": node.node.name}
    return model(name, gpu={"memory": memory}, pod={"nodeSelector": where})


async def states(estate: Estate, name: str, words: str, autoscaler: str = "a1") -> None:
    """Waits until `explain` shows these words for a model."""

    async def is_told() -> bool:
        return words in await estate.read_ops(autoscaler, f"/api/v1/explain/model/{name}")

    await estate.until(is_told)


async def placed(api: Api, estate: Estate, name: str) -> tuple[str, dict[str, str]]:
    """The node and the resource limits of a model's pod."""
    pod = (await own_pod(api, estate.namespace))[name]
    return pod["spec"]["nodeName"], pod["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.case("24")
async def test_idle_node_is_repartitioned_for_a_model_and_busy_nodes_are_not(
    cutting: Estate, managers: list[Manager], api: Api
) -> None:
    """A pod of others runs on the first of three nodes and a replica on the second."""
    first, second, idle = managers
    foreign = await occupied(
        api, cutting.namespace, first.node, {"limits": {"nvidia.com/mig-1g.10gb": "1"}}
    )  # fmt: skip
    small, half = asking("small", SMALL, cutting, second), asking("half", HALF, cutting)
    async with (
        cutting.open(small, half, asking("whole", WHOLE, cutting), autoscalers=1) as house,
        asyncio.timeout(LIMIT_S),
    ):
        assert good("small", await house.call("small"))
        assert good("half", await house.call("half"))
        assert await placed(api, house, "half") == (idle.node.name, {"nvidia.com/mig-3g.40gb": "1"})
        assert [len(one.states) for one in managers] == [0, 0, 1]

        waits = asyncio.create_task(house.call("whole"))
        await states(house, "whole", "could be repartitioned for it, once it is idle")
        await asyncio.sleep(2 * (short_mig_delays.EVERY_S + short_mig_delays.NODE_EVERY_S))
        assert [len(one.states) for one in managers] == [0, 0, 1]
        assert good("small", await house.call("small"))
        await api.delete(foreign)
        assert good("whole", await waits)
        assert await placed(api, house, "whole") == (first.node.name, {"nvidia.com/mig-7g.80gb": "1"})
        assert [len(one.states) for one in managers] == [1, 0, 1]
        assert [one.harmed for one in managers] == [[], [], []]


@pytest.mark.case("24")
async def test_failing_node_is_skipped_after_max_repartition_attempts(
    cutting: Estate, managers: list[Manager], api: Api
) -> None:
    """Replicas run on the other nodes; one of them receives requests all the time."""
    bad, *others = managers
    bad.fate = lambda: "failed"
    kept = [asking(f"small-{at}", SMALL, cutting, one) for at, one in enumerate(others)]
    async with cutting.open(asking("half", HALF, cutting), *kept, autoscalers=1) as house, asyncio.timeout(LIMIT_S):
        for at in range(len(kept)):
            assert good(f"small-{at}", await house.call(f"small-{at}"))
        waits = asyncio.create_task(house.call("half"))
        async with house.calling("small-1", "g1") as answers:
            await states(house, "half", f"could not be repartitioned in {TRIES_MAX} attempts")
            await asyncio.sleep(2 * (short_mig_delays.RETRY_S[-1] + short_mig_delays.EVERY_S))
        assert good("small-1", *answers)
        assert len(bad.orders) == len({*bad.orders}) == TRIES_MAX, "an unchanged order has no effect"
        assert not waits.done()
        bad.fate = lambda: "success"
        await bad.say(config="all-disabled")
        assert good("half", await waits)
        assert (await placed(api, house, "half"))[0] == bad.node.name
        assert len(bad.orders) == TRIES_MAX + 1
        assert [one.states for one in others] == [[], []]
        assert [one.harmed for one in managers] == [[], [], []]


@pytest.mark.case("24")
async def test_new_leader_waits_for_a_node_that_reboots_for_repartitioning(
    cutting: Estate, managers: list[Manager], api: Api
) -> None:
    """The new leader reads the order from the node, which is not ready. The idle other nodes are not repartitioned."""
    first, *others = managers
    first.fate = lambda: REBOOTING
    async with cutting.open(asking("half", HALF, cutting)) as house, asyncio.timeout(LIMIT_S):
        leader = await house.leader()
        waits = asyncio.create_task(house.call("half"))

        async def is_down() -> bool:
            return (await first.labels())[STATE] == REBOOTING

        await house.until(is_down)
        await house.stop(leader, signal.SIGKILL)
        second = await house.leader(leader)
        await states(house, "half", f"node {first.node.name} is being repartitioned and will have room for it", second)
        await asyncio.sleep(2 * (short_mig_delays.EVERY_S + short_mig_delays.NODE_EVERY_S))
        assert not waits.done()
        first.fate = lambda: "success"
        assert good("half", await waits)
        assert (await placed(api, house, "half"))[0] == first.node.name
        assert [len(one.states) for one in (first, *others)] == [1, 0, 0]


@pytest.mark.case("24")
async def test_killing_leaders_during_repartitioning_causes_only_one_order(
    cutting: Estate, managers: list[Manager], api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leader wrote the ConfigMap but not the node; the second labeled it, and the repartitioning runs."""
    monkeypatch.setenv(
        short_mig_delays.SETTLE, "30"
    )  # the leader must be killed in this time, even if this process is paused
    first, *others = managers
    first.may_end.clear()
    async with cutting.open(asking("half", HALF, cutting)) as house, asyncio.timeout(LIMIT_S):
        leader = await house.leader()
        waits = asyncio.create_task(house.call("half"))

        async def is_written() -> bool:
            try:
                await api.get(f"/api/v1/namespaces/{house.namespace}/configmaps/{CONFIG_MAP}")
            except ApiError:
                return False
            return True

        await house.until(is_written)
        await house.stop(leader, signal.SIGKILL)
        assert first.states == []
        second = await house.leader(leader)
        await house.start(leader)

        async def is_told() -> bool:
            return bool(first.states)

        await house.until(is_told)
        await house.until(lambda: house.listed(leader))
        await house.stop(second, signal.SIGKILL)
        assert await house.leader(second) == leader
        await states(house, "half", f"node {first.node.name} is being repartitioned and will have room for it", leader)
        await asyncio.sleep(2 * (short_mig_delays.EVERY_S + short_mig_delays.NODE_EVERY_S))
        first.may_end.set()
        assert good("half", await waits)
        assert (await placed(api, house, "half"))[0] == first.node.name
        assert [len(one.states) for one in (first, *others)] == [1, 0, 0]
        assert house.made("half") == 1
