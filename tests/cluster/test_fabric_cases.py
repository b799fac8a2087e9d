"""The four cases of Dynamic Device Scaling with somebody beside us who adds nodes and takes them away (Cluster
Autoscaler, played), and the demonstration that Fsas shows: a GPU is attached for a GPU, a node is added for memory.

One autoscaler and one gateway as processes, a real API server and scheduler, nodes whose GPU count really changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from autoscaler.drivers.kubernetes.api import Api
from tests.cluster.group import Group
from tests.cluster.house import House, model
from tests.cluster.rack import Rack
from tests.cluster.test_nodegroups import ranked
from tests.kit.fake_process import command
from tests.kit.observed import WAIT_S_MAX

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


@pytest.fixture
async def rack(api: Api, house: House, namespace: str, tmp_path: Path) -> AsyncIterator[Rack]:
    """See Rack; at the end nothing of it is left."""
    one = Rack(api, house, namespace, tmp_path)
    yield one
    await one.clean()


def settings(rack: Rack, node_costs: float, gpu_costs: float = 1.0, expected_s: float = 1) -> dict[str, object]:
    """A fabric and a group, each with its price."""
    said = rack.settings(expected_s=expected_s)
    kind = {"selector": {"group": rack.name}, "device": {"model": "T4", "memory": "16Gi"}}
    group = {"nodeLabels": {"group": rack.name}, "nodesMax": 2, "priorityClass": rack.name}
    prices = [
        {"device": "T4", "class": "on-demand", "perHour": node_costs},
        {"device": "A100", "class": "fabric", "perHour": gpu_costs},
    ]
    more = {"name": "group", "clusterAutoscaler": group, "expectedSeconds": 5}
    nodes, capacity = said["nodes"], said["capacity"]
    assert isinstance(nodes, list)
    assert isinstance(capacity, list)
    return {"nodes": [*nodes, kind], "capacity": [*capacity, more], "prices": prices}


def ada(**spec: object) -> dict[str, object]:
    """It has the only GPU."""
    return model("ada", replicas={"min": 1, "max": 1}, **spec)


def in_order(diary: list[str], *said: str) -> bool:
    """Whether each stands there once it is looked for behind the one before."""
    rest = iter(diary)
    return all(one in rest for one in said)


def slow(name: str, tokens: int, *words: str, **spec: object) -> dict[str, object]:
    """Ten tokens a second."""
    at = ("--host", "{host}", "--port", "{port}", "--name", name)
    does = command(*at, "--tokens-per-s", "10", "--tokens", str(tokens), *words)
    return model(name, **{"command": does, "idleSeconds": 600, "replicas": {"max": 1}, **spec})


class Stream:
    """One answer as it comes."""

    def __init__(self, rack: Rack, model: str) -> None:
        self._rack, self._model, self.tokens, self.whole = rack, model, 0, False
        self._came = asyncio.Event()

    async def __aenter__(self) -> Stream:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _read(self) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        house = self._rack.house
        async with house.session.post(f"{house.url}/v1/chat/completions", json=body, timeout=NO_TIMEOUT) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                self.tokens += b'"content"' in line
                self.whole |= line.startswith(b"data: [DONE]")
                self._came.set()

    async def goes_on(self) -> None:
        """Waits for its next token."""
        before = self.tokens
        while self.tokens == before:
            assert not self._task.done(), "it has ended"
            self._came.clear()
            await self._came.wait()

    async def ends(self) -> None:
        """Waits until it is whole."""
        await self._task
        assert self.whole


async def test_case_1_a_gpu_is_attached_where_a_node_would_be_added_and_no_pod_ever_waits(
    rack: Rack, api: Api, namespace: str
) -> None:
    """Who adds nodes is there, and would add one for any pod that waits: it hears of none."""
    rack.house.write(
        ada(), model("bob", idleSeconds=600, replicas={"max": 1}), **settings(rack, node_costs=9.0)
    )  # fmt: skip
    group = Group(rack, gpus=1, most=2)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert await rack.where() == {"ada": rack.own.name, "bob": rack.bare.name}
        assert rack.counts == [0, 1]
        assert not rack.waited
        assert not group.brought
        assert not group.nodes


async def test_case_2_a_gpu_is_attached_where_a_node_is_wanted_and_the_group_is_at_its_maximum(
    rack: Rack, api: Api, namespace: str
) -> None:
    """The node would be cheaper, and is asked for first."""
    rack.house.write(
        ada(), model("bob", idleSeconds=600, replicas={"max": 1}, queue={"waitSecondsMax": 300}),
        **settings(rack, node_costs=0.1),
    )  # fmt: skip
    group = Group(rack, gpus=1, most=0)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert list(group.brought.values()) == [""], "it was asked, once, and had none"
        assert (await rack.where())["bob"] == rack.bare.name
        assert rack.counts == [0, 1]
        (told,) = (one for one in rack.diary if one.startswith("full"))
        (came,) = (one for one in rack.diary if one.startswith("attached"))
        assert rack.diary.index(told) < rack.diary.index(came)


async def test_case_3_of_a_node_that_nobody_needs_the_gpus_go_first_and_then_the_node(
    rack: Rack, api: Api, namespace: str
) -> None:
    """It would be kept for long, for it is dear to have again: it goes since its node does."""
    rack.house.write(
        ada(), model("bob", idleSeconds=1, replicas={"max": 1}), **rack.settings(expected_s=300)
    )  # fmt: skip
    rack.nodes, group = [rack.own], Group(rack, gpus=0, most=1, least=1, unneeded_s=90.0, shared_fabric=True)
    async with group.running(), rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        (node,) = group.nodes
        await rack.answered("ada")
        await rack.answered("bob")
        assert (await rack.where())["bob"] == node
        while group.nodes:
            await asyncio.sleep(0.1)
        (pod,) = (one for one in rack.diary if one.startswith("gone"))
        (came,) = (one for one in rack.diary if one.startswith("attached"))
        gone = came.replace("attached", "detached")
        assert in_order(rack.diary, came, pod, gone, f"closed {node}", f"removed {node}")
        assert in_order(rack.diary[::-1], gone, f"candidate {node}"), "it was taken for unneeded before"
        assert not await rack.requests()
        await rack.answered("ada")


async def test_case_4_of_a_node_that_cannot_be_removed_only_the_idle_gpu_goes(
    rack: Rack, api: Api, namespace: str
) -> None:
    """Somebody else's pod keeps it, and eve is on another of its GPUs, which ResourceSlices tell apart."""
    rack.dra, rack.nodes = {}, [rack.own]
    rack.house.write(
        ada(), model("bob", idleSeconds=1, replicas={"max": 1}), slow("eve", 2000),
        **rack.settings(slicing={"kind": "dra"}),
    )  # fmt: skip
    group = Group(rack, gpus=0, most=1, least=1, unneeded_s=5.0, shared_fabric=True)
    async with group.running(), rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        (node,) = group.nodes
        stranger = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
            "spec": {"nodeName": node, "containers": [{"name": "a", "image": "a", "command": ["sleep", "600"]}]},
        }  # fmt: skip
        await api.create(f"/api/v1/namespaces/{namespace}/pods", stranger)
        await rack.answered("ada")
        async with Stream(rack, "eve") as stream:
            await stream.goes_on()
            await rack.answered("bob")
            of_eve, of_bob = (one.removeprefix("attached ") for one in rack.diary if one.startswith("attached"))
            while f"detached {of_bob}" not in rack.diary:
                await asyncio.sleep(0.1)
            await stream.goes_on()
            assert f"detached {of_eve}" not in rack.diary
        assert rack.counts == [0, 1, 2, 1]
        assert group.nodes == [node]
        assert not any(one.startswith("candidate") for one in rack.diary[1:]), "before the stranger came it was one"
        assert await rack.where() == {"ada": rack.own.name, "eve": node}


async def test_the_demonstration_of_fsas_a_gpu_is_attached_for_a_gpu_and_a_node_is_added_for_memory(
    rack: Rack, api: Api, namespace: str
) -> None:
    """Two nodes, each with one GPU that is in use and a place for another."""
    nodes = [rack.node(name, 1, fabric=rack.name) for name in ("n1", "n2")]
    rack.nodes, rack.may_have = nodes, {one.name: one for one in nodes}
    rack.has, rack.counts = {one.name: 1 for one in nodes}, [2]
    full = (model(name, replicas={"min": 1, "max": 1}) for name in ("ada", "eve"))
    large = {"requests": {"memory": "400Gi"}}
    rack.house.write(
        *full, model("bob", idleSeconds=600, replicas={"max": 1}),
        model("big", idleSeconds=600, replicas={"max": 1}, resources=large), **settings(rack, node_costs=9.0),
    )  # fmt: skip
    group = Group(rack, gpus=1, most=2, memory="512Gi")
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        for name in ("ada", "eve", "bob"):
            await rack.answered(name)
        assert rack.counts == [2, 3]
        assert not group.brought
        assert not rack.waited, "no pod has waited for a node"
        await rack.answered("big")
        assert rack.counts == [2, 3], "nothing was attached for it"
        (node,) = group.nodes
        assert (await rack.where())["big"] == node


async def test_nothing_is_detached_before_streams_are_whole_engines_have_ended_and_memory_is_clean(
    rack: Rack, api: Api, namespace: str
) -> None:
    """A node is to go while an answer runs there: another GPU is attached elsewhere, new Calls go there, the answer
    becomes whole, its engine ends, its GPU is proven clean and detached, and then the node goes.
    """
    calls = f"{rack.logs}/calls-{{port}}.jsonl"
    rack.house.write(ada(), slow("bob", 150, "--transcript", calls), **rack.settings())
    rack.nodes, group = [rack.own], Group(rack, gpus=0, most=2, least=2, unneeded_s=600.0, shared_fabric=True)
    async with group.running(), rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        async with Stream(rack, "bob") as stream:
            await stream.goes_on()
            first = (await rack.where())["bob"]
            going = asyncio.create_task(group.remove(first))
            while "draining" not in rack.log():
                await asyncio.sleep(0.05)
            async with Stream(rack, "bob") as other:
                await other.goes_on()
                await stream.ends()
                rack.diary.append("whole")
                await going
                await other.ends()
        uuids = [one.removeprefix("attached ") for one in rack.diary if one.startswith("attached")]
        (pod,) = (one for one in rack.diary if one.startswith("gone"))
        assert in_order(rack.diary, f"closed {first}", "whole", pod, f"detached {uuids[0]}", f"removed {first}")
        moves = [line.split()[1:3] for line in rack.log_at[uuids[0]].splitlines() if "  bob  " in line]
        assert in_order([" ".join(one) for one in moves], "bob draining", "bob stopping", "bob gone")
        assert "clean: " in rack.log_at[uuids[0]], "its memory is known to be free"
        assert rack.counts == [0, 1, 2, 1]
        assert sorted(len(one.read_text().splitlines()) for one in rack.logs.glob("calls-*.jsonl")) == [1, 1], (
            "the second Call went to the other engine"
        )


async def test_calls_beyond_what_all_gpus_serve_have_one_attached_before_any_pod_waits(
    rack: Rack, api: Api, namespace: str
) -> None:
    """While the Calls are as many as the GPUs that are there serve, none is."""
    rack.house.write(slow("bob", 40, slots=1, replicas={"max": 2}), **settings(rack, node_costs=9.0))
    group = Group(rack, gpus=1, most=2)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("bob")
        assert rack.counts == [0]
        await asyncio.gather(*(rack.answered("bob") for _ in range(4)))
        assert rack.counts[1] == 1, "one was attached"
        assert {node for _, node in (await rack.placed("bob")).values()} == {rack.own.name, rack.bare.name}
        assert not rack.waited
        assert not group.brought
