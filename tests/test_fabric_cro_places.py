"""How many Devices a node can have of fabrics behind the operator (CRO): who says it, and what that bounds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from autoscaler.capacity.base import RefusedError
from autoscaler.settings import Settings
from tests.kit.cro_rack import SETTINGS, Rack, world


@pytest.mark.parametrize(("selector", "most"), [({}, None), ({"fabric": "rack-2"}, 4)])
def test_where_nobody_says_of_any_node_that_it_can_have_more_that_is_told_with_its_mend(
    selector: Mapping[str, str], most: int | None
) -> None:
    rack = Rack()

    async def scenario() -> None:
        rack.world = world(Settings(nodes=(replace(SETTINGS.nodes[0], selector=dict(selector), devices_max=most),)))
        with pytest.raises(RefusedError, match="add `devicesMax` to an entry of Settings `nodes` whose `selector`"):
            await rack.provider().offers()

    rack.run(scenario())
