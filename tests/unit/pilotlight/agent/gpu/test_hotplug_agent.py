"""GPUs detached from a node with other GPUs: one attached meanwhile, one at the same address, and partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.agent_contract import FabricReport, FabricWant, PodDevices
from pilotlight.agent.gpu.hotplug import VISIBLE_S
from tests.unit.pilotlight.agent.gpu.test_hotplug import AT_A, AT_B, A, B, Rig

C, AT_C = "GPU-cccccccc-0000-0000-0000-000000000003", "0000:5e:00.0"
LEFT = FabricReport(device=A, leave=True, done=True)
LEAVES, COMES = FabricWant(device=A, leave=True), FabricWant(device=C)
WAITS = f"the scan of the bus for this device waits until the removed device {A} is detached"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A node with two GPUs."""
    made = Rig(tmp_path)
    made.node.link(A, AT_A, here=True)
    made.node.link(B, AT_B, here=True)
    return made


def scan(rig: Rig) -> None:
    """Another process rescans the bus, and no GPU stays hidden."""
    rig.node.hidden.clear()
    (rig.node.root / "sys/bus/pci/rescan").write_text("1")
    rig.node.settle()
    rig.node.commands.clear()


# --- one is attached --------------------------------------------------------------------------------------------------


async def test_released_gpu_is_not_rescanned_before_its_detach(rig: Rig) -> None:
    rig.made.want([COMES])
    await rig.turns(3)
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    for _ in range(60):
        await rig.turns(1)
        assert rig.made.report() == (LEFT, FabricReport(device=C, says=WAITS))
        assert not rig.node.gpus[AT_A].on_bus
    assert rig.node.commands == ["rescan 1", f"drain -m 1 {AT_A}", f"drain -r {AT_A}"]
    rig.node.detach(AT_A)
    rig.node.link(C, AT_C)
    rig.made.want([COMES])
    await rig.turns(8)
    assert rig.report() == FabricReport(device=C, done=True)


async def test_new_gpu_is_scanned_for_while_another_gpu_drains(rig: Rig) -> None:
    rig.node.hold(13, rig.node.gpus[AT_A], "a-shell")
    rig.made.want([LEAVES])
    await rig.turns(3)
    rig.node.link(C, AT_C)
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    leaves = FabricReport(device=A, leave=True, says="process 13 (a-shell) has it open")
    assert rig.made.report() == (leaves, FabricReport(device=C, done=True))
    assert rig.node.commands == [f"drain -m 1 {AT_A}", "rescan 1"]


async def test_attach_waiting_too_long_for_a_detach_fails_with_reason(rig: Rig) -> None:
    rig.made.want([LEAVES, COMES])
    await rig.turns(int(VISIBLE_S) + 3)
    assert rig.made.report() == (LEFT, FabricReport(device=C, failed=True, says=WAITS))


async def test_released_gpu_that_is_rescanned_is_released_again(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    assert rig.report() == LEFT
    scan(rig)
    await rig.turns(1)
    assert rig.report() == FabricReport(device=A, leave=True, says="the node releases it")
    await rig.turns(8)
    assert rig.report() == LEFT
    assert rig.node.commands == [f"drain -m 1 {AT_A}", f"drain -r {AT_A}"]


# --- one takes the address --------------------------------------------------------------------------------------------


async def test_new_gpu_at_the_address_of_a_released_gpu_is_not_removed(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    rig.node.detach(AT_A)
    rig.node.link(C, AT_A)
    scan(rig)
    await rig.turns(8)
    assert rig.report() == LEFT
    assert rig.node.gpus[AT_A].driven
    assert rig.node.commands == []


async def test_gpu_at_a_reused_address_attaches_after_detach_is_confirmed(rig: Rig) -> None:
    rig.made.want([LEAVES])
    await rig.turns(8)
    rig.node.detach(AT_A)
    rig.node.link(C, AT_A)
    rig.node.commands.clear()
    rig.made.want([LEAVES, COMES])
    await rig.turns(8)
    assert rig.made.report() == (LEFT, FabricReport(device=C, says=WAITS))
    assert rig.node.commands == [], "it may be the one that left"
    rig.made.want([COMES])
    await rig.turns(8)
    assert rig.report() == FabricReport(device=C, done=True)
    assert rig.node.gpus[AT_A].driven


async def test_gpu_replaced_at_its_address_is_reported_as_released(rig: Rig) -> None:
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
    assert rig.node.commands == []


# --- partitions -------------------------------------------------------------------------------------------------------


async def test_mig_gpu_is_not_released_while_a_pod_uses_any_mig_device(rig: Rig) -> None:
    rig.node.gpus[AT_A].cut = True
    rig.table = [PodDevices(namespace="engines", name="bob", devices=("MIG-aaaa-1",))]
    rig.made.want([LEAVES, FabricWant(device=B, leave=True)])
    await rig.turns(8)
    kept = FabricReport(device=A, leave=True, says="pod engines/bob uses a MIG slice, possibly of this GPU")
    assert rig.made.report() == (kept, FabricReport(device=B, leave=True, done=True))
    assert not [one for one in rig.node.commands if AT_A in one]
    rig.table = []
    await rig.turns(8)
    assert LEFT in rig.made.report()


# --- incomplete observations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [True, False])
async def test_device_plugin_restarts_once_after_an_api_server_outage(rig: Rig, leaves: bool) -> None:
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
    assert not rig.report().done, "the state is unknown"
    rig.server.away = False
    await rig.turns(8)
    assert rig.report().done
    assert rig.node.pods == 2, "it was reported already"
