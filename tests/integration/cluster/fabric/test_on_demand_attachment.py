"""Requests beyond the capacity of all GPUs are served by one that a fake fabric operator (CRO) attaches and detaches.
One autoscaler and one gateway as processes, a real API server, a node whose GPU count really changes.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from autoscaler.providers.cro.objects import NOTE
from tests.integration.cluster.support.fabric.cluster import Rack, rack
from tests.integration.cluster.support.installations.single_instance import model
from tests.support.harness.driver_events import WAIT_S_MAX

__all__ = ["rack"]
"""A fixture; pytest looks it up in this module."""


def ada_and_bob(idle_s: float) -> tuple[dict[str, object], dict[str, object]]:
    """A Model that occupies the only GPU, and one that needs another for as long as it is not idle."""
    return model("ada", replicas={"min": 1, "max": 1}), model("bob", idleSeconds=idle_s, replicas={"max": 1})


@pytest.mark.standard
async def test_request_without_a_free_gpu_is_served_by_an_attached_one(rack: Rack, namespace: str) -> None:
    """Case 1 of Dynamic Device Scaling: a GPU on an existing node suffices, so no node is added."""
    rack.house.write(*ada_and_bob(idle_s=600), **rack.settings())
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        assert not await rack.requests(), "a GPU that is there is not asked for"
        await rack.answered("bob")
        assert await rack.where() == {"ada": rack.own.name, "bob": rack.bare.name}
        (request,) = await rack.requests()
        assert request["spec"]["resource"]["size"] == 1
        (note,) = [text for key, text in request["metadata"]["annotations"].items() if key.startswith(NOTE)]
        assert msgspec.json.decode(note)["owner"] == "bob"
        assert rack.counts == [0, 1]
        rack.house.tell(*ada_and_bob(idle_s=1), **rack.settings())
        await rack.until_gone()
        assert rack.counts == [0, 1, 0]
        await rack.answered("ada")


@pytest.mark.parametrize("rack", [1], indirect=True)
async def test_only_missing_gpus_are_attached_if_the_node_has_some(rack: Rack, namespace: str) -> None:
    """Case 2: no node can be added. One more GPU suffices on a node that has one, after trying one at a time."""
    rack.house.write(model("two", idleSeconds=600, gpu={"count": 2}), **rack.settings(most=4))
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("two")
        assert rack.counts == [1, 2]
        assert await rack.where() == {"two": rack.bare.name}
        (request,) = await rack.requests()
        assert request["spec"]["resource"]["size"] == 1


async def test_restarted_autoscaler_detaches_attached_gpus_when_idle(rack: Rack, namespace: str) -> None:
    rack.house.write(*ada_and_bob(idle_s=600), **rack.settings())
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert rack.counts == [0, 1]
        await rack.house.autoscaler_anew()
        await rack.house.until_up()
        await rack.answered("bob")
        assert rack.counts == [0, 1], "it is the same one"
        rack.house.tell(*ada_and_bob(idle_s=1), **rack.settings())
        await rack.until_gone()
        assert rack.counts == [0, 1, 0]
