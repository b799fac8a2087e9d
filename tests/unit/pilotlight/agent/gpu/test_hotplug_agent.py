"""GPUs that leave a node beside others: one that comes meanwhile, one that has their place by then, parts of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.agent_contract import FabricWant
from autoscaler.contract import FabricReport, PodDevices
from pilotlight.agent.gpu.hotplug import VISIBLE_S
from tests.unit.pilotlight.agent.gpu.test_hotplug import AT_A, AT_B, A, B, Rig

C, AT_C = "GPU-cccccccc-0000-0000-0000-000000000003", "0000:5e:00.0"
LEFT = FabricReport(device=A, leave=True, done=True)
LEAVES, COMES = FabricWant(device=A, leave=True), FabricWant(device=C)
WAITS = f"it is scanned for once {A}, which has left, is detached"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """With two GPUs."""
    made = Rig(tmp_path)
    made.node.link(A, AT_A, here=True)
    made.node.link(B, AT_B, here=True)
    return made


def scan(rig: Rig) -> None:
    """Somebody else does, and nothing is hidden any more."""
    rig.node.hidden.clear()
    (rig.node.root / "sys/bus/pci/rescan").write_text("1")
    rig.node.settle()
    rig.node.said.clear()


# --- one comes --------------------------------------------------------------------------------------------------------


async def test_what_has_left_is_not_brought_back_by_scans_for_another_until_it_is_detached(rig: Rig) -> None:
    rig.made.want([COMES])
    await rig.turns(3)
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    for _ in range(60):
        await rig.turns(1)
        assert rig.made.report() == (LEFT, FabricReport(device=C, says=WAITS))
        assert not rig.node.gpus[AT_A].on_bus
    assert rig.node.said == ["rescan 1", f"drain -m 1 {AT_A}", f"drain -r {AT_A}"]
    rig.node.detach(AT_A)
    rig.node.link(C, AT_C)
    rig.made.want([COMES])
    await rig.turns(8)
    assert rig.report() == FabricReport(device=C, done=True)


async def test_who_comes_is_scanned_for_while_another_is_let_go_of_whose_hidden_bus_stays_so(rig: Rig) -> None:
    rig.node.hold(13, rig.node.gpus[AT_A], "a-shell")
    rig.made.want([LEAVES])
    await rig.turns(3)
    rig.node.link(C, AT_C)
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    leaves = FabricReport(device=A, leave=True, says="process 13 (a-shell) has it open")
    assert rig.made.report() == (leaves, FabricReport(device=C, done=True))
    assert rig.node.said == [f"drain -m 1 {AT_A}", "rescan 1"]


async def test_who_waits_for_a_detach_for_too_long_has_failed_and_says_what_it_waited_for(rig: Rig) -> None:
    rig.made.want([LEAVES, COMES])
    await rig.turns(int(VISIBLE_S) + 3)
    assert rig.made.report() == (LEFT, FabricReport(device=C, failed=True, says=WAITS))


async def test_what_others_brought_back_is_not_said_to_have_left_and_is_let_go_of_once_more(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    assert rig.report() == LEFT
    scan(rig)
    await rig.turns(1)
    assert rig.report() == FabricReport(device=A, leave=True, says="it is being let go")
    await rig.turns(8)
    assert rig.report() == LEFT
    assert rig.node.said == [f"drain -m 1 {AT_A}", f"drain -r {AT_A}"]


# --- one has its place ------------------------------------------------------------------------------------------------


async def test_what_somebody_put_in_the_place_of_one_that_left_stays(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    rig.node.detach(AT_A)
    rig.node.link(C, AT_A)
    scan(rig)
    await rig.turns(8)
    assert rig.report() == LEFT
    assert rig.node.gpus[AT_A].driven
    assert rig.node.said == []


async def test_what_comes_to_the_place_of_one_that_left_is_taken_once_that_is_known_to_be_detached(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    rig.node.detach(AT_A)
    rig.node.link(C, AT_A)
    rig.node.said.clear()
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    assert rig.made.report() == (LEFT, FabricReport(device=C, says=WAITS))
    assert rig.node.said == [], "it may be the one that left"
    rig.made.want([COMES])
    await rig.turns(8)
    assert rig.report() == FabricReport(device=C, done=True)
    assert rig.node.gpus[AT_A].driven


async def test_where_another_is_shown_in_its_place_it_is_gone_though_nobody_saw_it_leave(rig: Rig) -> None:
    rig.made.want([LEAVES])
    rig.node.hold(13, rig.node.gpus[AT_A], "a-shell")
    await rig.turns(4)
    rig.node.let_go(13)
    (rig.node.root / f"sys/bus/pci/devices/{AT_A}/remove").write_text("1")
    rig.node.settle()
    rig.node.detach(AT_A)
    rig.node.link(C, AT_A)
    scan(rig)
    await rig.turns(8)
    assert rig.report() == LEFT
    assert rig.node.said == []


# --- parts ------------------------------------------------------------------------------------------------------------


async def test_a_gpu_in_mig_mode_stays_while_a_pod_has_a_part_of_whichever_and_one_that_is_whole_goes(rig: Rig) -> None:
    rig.node.gpus[AT_A].cut = True
    rig.table = [PodDevices(namespace="engines", name="bob", devices=("MIG-aaaa-1",))]
    rig.made.want([LEAVES, FabricWant(device=B, leave=True)])
    await rig.turns(8)
    kept = FabricReport(device=A, leave=True, says="pod engines/bob has a MIG part, which may be of it")
    assert rig.made.report() == (kept, FabricReport(device=B, leave=True, done=True))
    assert not [one for one in rig.node.said if AT_A in one]
    rig.table = []
    await rig.turns(8)
    assert LEFT in rig.made.report()


# --- what was seen in part --------------------------------------------------------------------------------------------


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
