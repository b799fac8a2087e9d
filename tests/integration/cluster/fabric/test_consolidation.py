"""Consolidation: when demand drops, replicas on paid fabric GPUs move to owned devices, and the GPUs are released.

One autoscaler and one gateway as processes, a real API server and scheduler, nodes whose GPU count really changes.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from autoscaler.kubernetes.api import Api
from autoscaler.providers.lead_time_store import NAME, parse_lead_times
from tests.integration.cluster.placement.test_schedulability import held_by_others
from tests.integration.cluster.support.fabric.cluster import Rack, rack
from tests.integration.cluster.support.fabric.fixtures import Stream, in_order, settings, slow
from tests.support.harness.driver_events import WAIT_S_MAX

__all__ = ["rack"]
"""A fixture; pytest looks it up in this module."""


async def test_replica_on_a_rented_gpu_moves_to_a_freed_owned_gpu(rack: Rack, api: Api, namespace: str) -> None:
    rack.house.write(slow("bob", 1600), **settings(rack, node_costs=9.0))  # a new leader moves none in its first 2 min
    async with rack.running(), AsyncExitStack() as others, asyncio.timeout(6 * WAIT_S_MAX):
        await others.enter_async_context(held_by_others(api, rack.own.name))
        async with Stream(rack, "bob") as stream:
            await stream.goes_on()
            ((guest, (_, node)),) = (await rack.placed("bob")).items()
            assert node == rack.bare.name
            await others.aclose()
            while len(await rack.placed("bob")) < 2:
                await asyncio.sleep(0.05)
            assert not stream.whole, "its successor is there before it goes"
            await stream.ends()
        while f"gone {guest}" not in rack.diary:
            await asyncio.sleep(0.05)
        assert await rack.where() == {"bob": rack.own.name}
        await rack.until_gone()
        kept = await api.get(f"/api/v1/namespaces/{namespace}/configmaps/{NAME}")
        (learnt,) = parse_lead_times(next(iter(kept["data"].values()))).items()
        assert (learnt[0].provider, learnt[1].came) == ("rack", 1), "the next leader has the order in its state"
        assert rack.counts == [0, 1, 0]
        (came,) = (one for one in rack.diary if one.startswith("attached"))
        assert in_order(rack.diary, came, f"gone {guest}", came.replace("attached", "detached"))
        assert "move bob from paid capacity of rack to devices without extra cost" in rack.log()
        assert not rack.waited
