"""GPUs that come and leave beside others, and while not all of them is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.contract import FabricReport
from autoscaler.nodewants import FabricWant
from tests.test_hotplug import AT_A, AT_B, A, B, Rig

LEAVES = FabricWant(device=A, leave=True)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """With two GPUs."""
    made = Rig(tmp_path)
    made.node.link(A, AT_A, here=True)
    made.node.link(B, AT_B, here=True)
    return made


@pytest.mark.parametrize("leaves", [True, False])
async def test_what_came_or_left_while_the_api_server_was_away_is_told_of_once_as_any_other(
    rig: Rig, leaves: bool
) -> None:
    want = LEAVES if leaves else FabricWant(device=B)
    rig.server.away = True
    rig.made.want([want])
    await rig.turns(3)
    rig.server.away = False
    await rig.turns(8)
    assert rig.report() == FabricReport(device=want.device, leave=leaves, done=True)
    assert rig.node.pods == 2
    rig.server.away = True
    await rig.turns(3, pods=False)
    assert not rig.report().done, "nobody knows"
    rig.server.away = False
    await rig.turns(8)
    assert rig.report().done
    assert rig.node.pods == 2, "it was told already"
