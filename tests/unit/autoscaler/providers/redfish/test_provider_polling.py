"""A look at a fabric takes time: what is ordered meanwhile is not in it, and it says nothing of that."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.provider import order, release
from tests.kit.fake_redfish import FakeFabric
from tests.kit.redfish_rig import FabricRig
from tests.unit.autoscaler.providers.redfish.test_provider_faults import phase, until

pytestmark = pytest.mark.standard


class Slow(FabricRig):
    """It takes until `go` before it is known who uses what, once `asked` is watched."""

    asked: asyncio.Event
    go: asyncio.Event
    waits = False

    async def in_use(self, node: str, uuids: tuple[str, ...]) -> str:
        if self.waits:
            self.asked.set()
            await self.go.wait()
        return await super().in_use(node, uuids)


def test_order_placed_while_a_poll_is_running_is_attached() -> None:
    """That look does not show its Marks, and says nothing of it."""
    rig = Slow(FakeFabric(tasks=False))
    rig.asked, rig.go = asyncio.Event(), asyncio.Event()

    async def scenario() -> None:
        provider = rig.provider()
        offer = (await provider.offers())[0]
        await provider.acquire(order(offer))
        await until(provider, phase("here"))
        await provider.release(release(order(offer)))
        rig.waits = True
        await rig.asked.wait()
        other = next(one for one in await provider.offers() if one.product == offer.product and one.node == offer.node)
        await provider.acquire(order(other, 1))
        rig.waits = False
        rig.go.set()
        await until(provider, phase("here"))
        assert len(rig.fabric.attached("1")) == 1

    rig.run(scenario())
