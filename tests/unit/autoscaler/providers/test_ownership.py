"""Capacity orders of two installations on one API server, with providers of the same name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from autoscaler.providers.provider import RefusedError
from autoscaler.spec.installation_ownership import Ownership, installation_id
from tests.contracts.provider import Rig, one, order, release
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.providers.cro_rig import Rack
from tests.support.harness.providers.provisioning_request_rig import ProvisioningRig
from tests.unit.autoscaler.providers.cluster_autoscaler.test_provider import GroupRig
from tests.unit.autoscaler.providers.karpenter.test_provider import NodesRig
from tests.unit.autoscaler.providers.kueue.test_provider import KueueRig

BLUE, GREEN = Ownership(installation_id("blue", "pilotlight")), Ownership(installation_id("green", "pilotlight"))


def server_of(rig: Any) -> PlayedServer:
    """The API server of a rig."""
    (server,) = (one for one in vars(rig).values() if isinstance(one, PlayedServer))
    return server


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_of_another_installation_is_not_listed_or_released(made: Callable[[], Rig]) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        server.owner = BLUE
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner = GREEN
        await asyncio.sleep(60.0)
        assert await rig.provider().list() == ()
        await rig.provider().release(release(ordered))
        await asyncio.sleep(60.0)
        server.owner = BLUE
        assert (await one(rig.provider())).name == ordered.id.name

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_with_a_name_used_by_another_installation_is_rejected(made: Callable[[], Rig]) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        server.owner = BLUE
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner = GREEN
        with pytest.raises(RefusedError):
            await rig.provider().acquire(ordered)

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_without_installation_label_is_listed_by_any_installation(made: Callable[[], Rig]) -> None:
    """Older versions created orders without this label."""
    rig = made()

    async def scenario() -> None:
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server_of(rig).owner = GREEN
        await asyncio.sleep(60.0)
        assert (await one(rig.provider())).name == ordered.id.name

    rig.run(scenario())
