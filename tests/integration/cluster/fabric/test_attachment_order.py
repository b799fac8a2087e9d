"""A GPU of a fabric is detached only after everything on it has ended, and attached before a pod is pending.

One autoscaler and one gateway as processes, a real API server and scheduler, nodes whose GPU count really changes.
"""

from __future__ import annotations

import asyncio

from autoscaler.kubernetes.api import Api
from tests.integration.cluster.capacity.test_cluster_autoscaler import ranked
from tests.integration.cluster.support.controllers.fake_cluster_autoscaler import Group
from tests.integration.cluster.support.entry_points import held_engine
from tests.integration.cluster.support.fabric.cluster import Rack, rack
from tests.integration.cluster.support.fabric.fixtures import Agent, Stream, ada, in_order, settings, slow
from tests.integration.cluster.support.installations.single_instance import model
from tests.support.harness.driver_events import WAIT_S_MAX

__all__ = ["rack"]
"""A fixture; pytest looks it up in this module."""


async def noted(rack: Rack, stream: Stream) -> None:
    """Writes the end of a complete response into the diary, whatever the test waits for at that time."""
    await stream.ends()
    rack.diary.append("whole")


async def test_gpu_is_detached_only_after_its_streams_end_and_memory_is_free(
    rack: Rack, api: Api, namespace: str
) -> None:
    """A node is removed while a stream runs there: another GPU is attached elsewhere and gets new requests.
    The stream completes, its engine ends, its GPU is proven clean and detached, and then the node is removed.
    """
    calls = f"{rack.logs}/calls-{{port}}.jsonl"
    rack.house.write(ada(), slow("bob", 300, "--transcript", calls), **rack.settings())
    rack.nodes, group = [rack.own], Group(rack, gpus=0, most=2, least=2, unneeded_s=600.0, shared_fabric=True)
    async with group.running(), rack.running(), asyncio.timeout(4 * WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        await rack.answered("ada")
        async with Stream(rack, "bob") as stream:
            await stream.goes_on()
            whole = tasks.create_task(noted(rack, stream))
            ((pod, (_, node)),) = (await rack.placed("bob")).items()
            (came,) = (one for one in rack.diary if one.startswith("attached"))
            agent = Agent(rack, node, came.removeprefix("attached "), pod)
            reports, going = tasks.create_task(agent.run()), tasks.create_task(group.remove(node))
            while "draining" not in rack.log():
                await asyncio.sleep(0.05)
            async with Stream(rack, "bob") as other:
                await other.goes_on()
                await whole
                while f"gone {pod}" not in rack.diary:
                    await asyncio.sleep(0.05)
                agent.runs = False
                await agent.wait_until_sent(times=10)
                detached = came.replace("attached", "detached")
                assert detached not in rack.diary, "its memory is still in use"
                agent.used_bytes = 0
                await going
                await other.ends()
        reports.cancel()
        assert in_order(rack.diary, came, f"closed {node}", "whole", f"gone {pod}", detached, f"removed {node}")
        log = rack.log_at[agent.uuid]
        moves = [" ".join(line.split()[1:3]) for line in log.splitlines() if "  bob  " in line]
        assert in_order(moves, "bob draining", "bob stopping", "bob gone")
        assert "clean: measured" in log
        assert rack.counts == [0, 1, 2, 1]
        assert sorted(len(one.read_text().splitlines()) for one in rack.logs.glob("calls-*.jsonl")) == [1, 1], (
            "the second Call went to the other engine"
        )


async def test_excess_requests_attach_a_gpu_before_any_pod_is_pending(rack: Rack, api: Api, namespace: str) -> None:
    """No GPU is attached while the existing GPUs suffice for the requests."""
    release = rack.logs / "release"
    knobs = ("--host", "{host}", "--port", "{port}", "--name", "bob", "--tokens-per-s", "10", "--tokens", "40")
    bob = model("bob", command=held_engine.command(release, *knobs), idleSeconds=600, slots=1, replicas={"max": 2})
    rack.house.write(bob, **settings(rack, node_costs=9.0))
    group = Group(rack, gpus=1, most=2)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        release.touch()
        await rack.answered("bob")
        assert rack.counts == [0]
        release.unlink()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(rack.answered("bob"))
            while {node for _, node in (await rack.placed("bob")).values()} != {rack.own.name, rack.bare.name}:
                await asyncio.sleep(0.05)
            release.touch()
        assert rack.counts[1] == 1, "one was attached"
        assert {node for _, node in (await rack.placed("bob")).values()} == {rack.own.name, rack.bare.name}
        assert not rack.waited
        assert not group.brought
