"""Polling a fabric takes time: orders placed during a poll are not in its result, and must not count as missing."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.contracts.provider import order, release
from tests.support.fakes.redfish import FakeFabric
from tests.support.harness.async_tests import run_in
from tests.support.harness.providers.redfish_rig import FabricRig
from tests.unit.autoscaler.providers.redfish.test_provider_faults import phase, until

pytestmark = pytest.mark.standard


class Slow(FabricRig):
    """A rig whose usage check blocks until `go` is set; it sets `asked` when it starts to wait."""

    asked: asyncio.Event
    go: asyncio.Event
    waits = False

    async def in_use(self, node: str, uuids: tuple[str, ...]) -> str:
        if self.waits:
            self.asked.set()
            await self.go.wait()
        return await super().in_use(node, uuids)


@run_in(partial(Slow, FakeFabric(tasks=False)))
async def test_order_placed_while_a_poll_is_running_is_attached(rig: Slow) -> None:
    """The result of that poll does not contain the order's marks, and must not fail the order."""
    rig.asked, rig.go = asyncio.Event(), asyncio.Event()

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
