"""GPUs attached to and detached from a running node: the order of steps on a simulated tree, driver and API server."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoscaler.agent_contract import FabricReport, FabricWant, PodDevices
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from pilotlight.agent.gpu import hotplug, pci_bus
from pilotlight.agent.gpu.device_plugin_pods import VERSION, Daemons, Those
from pilotlight.agent.gpu.fabric_node import FabricNode
from pilotlight.agent.gpu.hotplug import IDLE_BYTES_MAX, VISIBLE_S, Holder, Seen, Stand
from pilotlight.agent.gpu.hotplug_loop import Attaching
from pilotlight.agent.gpu.pci_bus import (
    Answer,
    Bus,
    StepError,
    is_draining,
    parse_bus_address,
    parse_device_minor,
    parse_gpu_query,
)
from tests.support.fakes.gpu_node import GPU_OPERATOR, NODE, PLUGIN, PlayedNode
from tests.support.fakes.kubernetes.kube_objects import PlayedServer

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"
AT_A, AT_B = "0000:18:00.0", "0000:3b:00.0"
ENGINE_UID = "99999999-7b1e-4d2a-9a55-0123456789ab"


class Rig:
    """The fabric part of an agent on a simulated node; the test sets the time."""

    def __init__(self, root: Path) -> None:
        self.server = PlayedServer(lambda: 1_000_000.0)
        self.node = PlayedNode(root, self.server)
        self.now_s = 0.0
        self.table: list[PodDevices] = []
        self.changes = 0
        self.made = self.begin()

    def begin(self) -> Attaching:
        """A new agent without state."""
        daemons = Daemons(self.server, NODE, [Those(GPU_OPERATOR, PLUGIN)])
        self.made = Attaching(FabricNode(Bus(self.node.root, self.node.run), daemons, lambda: self.table), self.clock)
        self.made.changed = self._changed
        return self.made

    def clock(self) -> float:
        return self.now_s

    def _changed(self) -> None:
        self.changes += 1

    def want(self, *devices: str, leave: bool = False) -> None:
        self.made.want([FabricWant(device=one, leave=leave) for one in devices])

    async def turns(self, many: int = 30, pods: bool = True) -> None:
        """Take `many` turns, one second apart; `pods`: the DaemonSet recreates pods that were terminated."""
        for _ in range(many):
            await self.made.turn()
            self.node.settle()
            if pods and not self.node.plugins():
                self.node.start_plugin()
            self.now_s += 1.0

    def report(self) -> FabricReport:
        (one,) = self.made.report()
        return one


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# --- attach -----------------------------------------------------------------------------------------------------------


async def test_attached_gpu_triggers_one_rescan_and_one_device_plugin_restart(rig: Rig) -> None:
    (before,) = rig.node.plugins()
    rig.node.link(A, AT_A)
    rig.want(A)
    await rig.turns()
    assert rig.report() == FabricReport(device=A, done=True)
    assert rig.node.commands == ["rescan 1"], "once is enough"
    (after,) = rig.node.plugins()
    assert after != before
    assert rig.node.pods == 2, "and so it is for the device plug-in"
    assert rig.changes
    rig.made.want([])
    await rig.turns(2)
    assert rig.made.report() == ()
    assert rig.node.pods == 2


async def test_attach_completes_only_after_device_plugin_is_ready(rig: Rig) -> None:
    rig.node.link(A, AT_A)
    rig.want(A)
    await rig.turns(8, pods=False)
    uid = rig.node.start_plugin(ready=False)
    await rig.turns(3)
    assert not rig.report().done
    assert rig.report().says == "pod gpu-operator/plugin-2 is starting"
    rig.server.change(f"/api/v1/namespaces/{GPU_OPERATOR}/pods/plugin-2", {"status": {"conditions": [
        {"type": "Ready", "status": "True"}]}})  # fmt: skip
    await rig.turns(2)
    assert rig.report().done
    assert rig.node.plugins() == [uid]


async def test_attach_fails_with_a_reason_if_the_driver_never_shows_the_gpu(rig: Rig) -> None:
    rig.node.deaf = True
    rig.node.link(A, AT_A)
    rig.want(A)
    await rig.turns(int(VISIBLE_S) - 1)
    assert not rig.report().failed
    await rig.turns(3)
    assert rig.report().failed
    assert rig.report().says == "it is attached, but the node's driver does not show it"
    assert 30 < len(rig.node.commands) < 150, "every few seconds: a link takes its time"


async def test_drain_state_of_a_pci_address_is_cleared_when_a_gpu_attaches(rig: Rig) -> None:
    rig.node.hidden.add(AT_A)
    rig.node.link(A, AT_A)
    rig.want(A)
    await rig.turns()
    assert rig.report().done
    assert rig.node.commands == ["rescan 1", f"drain -m 0 {AT_A}", f"drivers_probe {AT_A}", "rescan 1"]


@pytest.mark.parametrize("why", ["driver", "API server"])
async def test_attach_waits_then_fails_while_driver_or_api_server_is_unreachable(rig: Rig, why: str) -> None:
    rig.node.link(A, AT_A)
    rig.node.answers, rig.server.away = why != "driver", why != "driver"
    rig.want(A)
    await rig.turns(3)
    assert why in rig.report().says
    assert not rig.node.commands
    await rig.turns(int(VISIBLE_S))
    assert rig.report().failed


# --- detach -----------------------------------------------------------------------------------------------------------


async def test_idle_gpu_is_drained_before_it_is_removed_from_the_bus(rig: Rig) -> None:
    gpu, _ = rig.node.link(A, AT_A, here=True), rig.node.link(B, AT_B, here=True)
    gpu.kept = True
    rig.want(A, leave=True)
    await rig.turns()
    assert rig.report() == FabricReport(device=A, leave=True, done=True)
    assert rig.node.commands == [f"-pm 0 {A}", f"drain -m 1 {AT_A}", f"drain -r {AT_A}"]
    assert not (rig.node.root / "dev/nvidia0").exists()
    assert (rig.node.root / "dev/nvidia1").exists()
    assert rig.node.gpus[AT_B].driven, "no other device is removed"
    assert rig.node.pods == 2, "the device plug-in counts again"


async def test_gpu_of_a_virtual_machine_is_removed_through_sysfs(rig: Rig) -> None:
    rig.node.virtual = True
    rig.node.link(A, AT_A, here=True)
    rig.node.link(B, AT_B, here=True)
    rig.want(A, leave=True)
    await rig.turns()
    assert rig.report().done
    assert rig.node.commands[1:] == [f"drain -r {AT_A}", f"remove {AT_A}"]


async def test_kernel_modules_are_unloaded_before_the_last_gpu_is_removed(rig: Rig) -> None:
    rig.node.link(A, AT_A, here=True)
    rig.want(A, leave=True)
    await rig.turns()
    assert rig.report().done
    assert rig.node.commands == [f"drain -m 1 {AT_A}", "modprobe -r nvidia_drm nvidia_uvm", f"drain -r {AT_A}"]


async def test_gpu_in_use_is_kept_and_its_user_is_reported(rig: Rig) -> None:
    gpu = rig.node.link(A, AT_A, here=True)
    gpu.computing = (4711,)
    rig.table = [PodDevices(namespace="engines", name="bob", devices=(A,))]
    gpu.used_mib = 6000
    rig.want(A, leave=True)
    for expected in ("process 4711 computes on it", "pod engines/bob uses it", "6000 MiB of its memory are in use"):
        await rig.turns(3)
        assert (rig.report().says, rig.report().done, rig.node.commands) == (expected, False, [])
        if gpu.computing:
            gpu.computing = ()
        elif rig.table:
            rig.table = []
    gpu.used_mib = IDLE_BYTES_MAX >> 20
    await rig.turns()
    assert rig.report().done


async def test_only_node_daemons_are_stopped_to_release_a_gpu(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    gpu, (uid,) = rig.node.link(A, AT_A, here=True), rig.node.plugins()
    rig.node.link(B, AT_B, here=True)
    for pid, name, pod in ((11, "nvidia-device-p", uid), (12, "nvidia-persistenced"[:15], ""), (13, "a-shell", "")):
        rig.node.hold(pid, gpu, name, pod)
    rig.node.hold(14, rig.node.gpus[AT_B], "an-engine", ENGINE_UID)

    def end(pid: int, signal: int) -> None:
        ended.append(pid)
        rig.node.let_go(pid)

    monkeypatch.setattr("os.kill", end)
    rig.want(A, leave=True)
    await rig.turns(4)
    assert uid not in rig.node.plugins()
    rig.node.let_go(11)
    await rig.turns(4)
    assert ended == [12]
    assert rig.report().says == "process 13 (a-shell) has it open"
    assert rig.node.gpus[AT_A].driven
    rig.node.let_go(13)
    await rig.turns()
    assert rig.report().done
    assert ended == [12]
    assert rig.node.pods == 3, "one that looks at it goes, and one that counts it"


async def test_gpu_release_step_without_effect_is_not_retried_at_once(rig: Rig) -> None:
    rig.node.link(A, AT_A, here=True).kept = True
    changescommand = rig.node.run

    async def stays(words: Sequence[str]) -> Answer:
        rig.node.gpus[AT_A].kept = True
        return await changescommand(words)

    rig.node.run = stays  # type: ignore[method-assign]  # as persistenced may do
    rig.begin()
    rig.want(A, leave=True)
    assert [await rig.made.turn() for _ in range(4)] == [True, False, False, False]


async def test_cancelled_release_makes_the_gpu_visible_again(rig: Rig) -> None:
    gpu = rig.node.link(A, AT_A, here=True)
    rig.node.hold(13, gpu, "a-shell")
    rig.want(A, leave=True)
    await rig.turns(5)
    assert rig.node.hidden == {AT_A}
    rig.made.want([])
    await rig.turns(3)
    assert rig.node.hidden == set()
    assert rig.made.report() == ()
    assert rig.node.commands == [f"drain -m 1 {AT_A}", f"drain -m 0 {AT_A}"]


async def test_restarted_agent_resumes_a_gpu_release(rig: Rig) -> None:
    gpu, _ = rig.node.link(A, AT_A, here=True), rig.node.link(B, AT_B, here=True)
    rig.node.hold(13, gpu, "a-shell")
    rig.want(A, leave=True)
    await rig.turns(5)
    rig.begin()
    rig.want(A, leave=True)
    await rig.turns(5)
    assert rig.report().says == "process 13 (a-shell) has it open"
    assert AT_A in rig.node.hidden
    rig.node.let_go(13)
    await rig.turns()
    assert rig.report().done
    rig.begin()
    rig.want(A, leave=True)
    await rig.turns(5)
    assert rig.report().done, "it is not there, and all that are there are known"


async def test_restarted_agent_reverts_a_release_that_is_no_longer_wanted(rig: Rig) -> None:
    publish(rig.server)
    rig.node.hold(13, rig.node.link(A, AT_A, here=True), "a-shell")
    rig.want(A, leave=True)
    await rig.turns(5)
    assert rig.node.hidden == {AT_A}
    assert RULE in rig.server.objects
    rig.begin()
    await rig.turns(2)
    assert rig.node.hidden == {AT_A}, "no wanted state has been received yet"
    rig.made.want([])
    await rig.turns(2)
    assert not rig.node.hidden
    assert RULE not in rig.server.objects


async def test_gpu_with_unknown_bus_address_is_not_reported_as_released(rig: Rig) -> None:
    rig.node.deaf = True
    rig.node.link(A, AT_A, here=True)
    rig.want(A, leave=True)
    await rig.turns(5)
    assert not rig.report().done
    assert rig.report().says == f"the GPU at {AT_A} has no driver and may be this device"
    assert not rig.node.commands


async def test_released_gpu_that_is_wanted_again_is_attached_again(rig: Rig) -> None:
    rig.node.link(A, AT_A, here=True)
    rig.want(A, leave=True)
    await rig.turns()
    assert rig.report().done
    rig.want(A)
    await rig.made.turn()
    assert not rig.report().done
    assert not rig.report().leave
    await rig.turns()
    assert rig.report().done
    assert rig.node.gpus[AT_A].driven


# --- taints -----------------------------------------------------------------------------------------------------------


RULE = f"{VERSION}/devicetaintrules/pilotlight-leaving-{A.lower()}"


def publish(server: PlayedServer) -> None:
    """A DRA driver publishes the GPU, and the API server supports device taint rules."""
    server.put(VERSION, {"resources": [{"name": "devicetaintrules"}]})
    device = {"name": "gpu-0", "attributes": {"uuid": {"string": A}}}
    pool = {"driver": "gpu.nvidia.com", "nodeName": NODE, "pool": {"name": NODE}, "devices": [device]}
    server.put("/apis/resource.k8s.io/v1/resourceslices/one", {"spec": pool})


async def test_dra_device_is_tainted_from_the_first_step_until_detach(rig: Rig) -> None:
    publish(rig.server)
    rig.node.link(A, AT_A, here=True)
    rig.want(A, leave=True)
    await rig.turns(1)
    rule = rig.server.objects[RULE]
    assert rule["spec"] == {
        "deviceSelector": {"driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-0"},
        "taint": {"key": "pilotlight.dev/leaving", "effect": "NoSchedule"},
    }  # fmt: skip
    assert not rig.node.commands
    await rig.turns()
    assert rig.report().done
    assert RULE in rig.server.objects
    rig.made.want([])
    await rig.turns(3)
    assert RULE not in rig.server.objects


async def test_foreign_taint_rule_of_the_same_name_is_kept(rig: Rig) -> None:
    publish(rig.server)
    rig.node.link(A, AT_A, here=True)
    rig.server.put(RULE, {"spec": {}})
    rig.want(A, leave=True)
    await rig.turns()
    assert not rig.report().done
    assert not rig.node.commands, "it is not known what that does"
    assert "already exists" in rig.report().says
    rig.made.want([])
    await rig.turns(3)
    assert RULE in rig.server.objects
    assert rig.server.objects[RULE]["spec"] == {}


async def test_taint_rule_labelled_by_another_installation_is_not_removed() -> None:
    server = PlayedServer(lambda: 1_000_000.0)
    publish(server)
    daemons = {}
    for name in ("blue", "green"):
        server.owner = Ownership(name)
        daemons[name] = Daemons(server, NODE, [])
        await daemons[name].taint(A)
        assert server.objects[f"{RULE}-{name}"]["metadata"]["labels"][INSTALLATION] == name
    server.objects[RULE] = copy.deepcopy(server.objects[f"{RULE}-blue"])
    del server.objects[RULE]["metadata"]["labels"][INSTALLATION]
    server.objects[RULE]["metadata"]["name"] = RULE.rpartition("/")[2]
    rules = set()
    while await daemons["green"].tainted([]):
        await daemons["green"].untaint(A)
        rules.add(frozenset(one for one in server.objects if one.startswith(RULE)))
    assert min(rules, key=len) == {f"{RULE}-blue"}, "one without a label is from an earlier version"


# --- parsing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bus"),
    [("00000000:3B:00.0", AT_B), ("0000:3b:00.0", AT_B), ("00010000:01:00.0", "10000:01:00.0"), ("3b:00.0", ""),
     ("../../etc", "")],
)  # fmt: skip
def test_pci_address_of_nvidia_smi_is_converted_to_the_sysfs_form(text: str, bus: str) -> None:
    assert parse_bus_address(text) == bus


def test_nvidia_smi_output_is_parsed_without_its_invalid_rows() -> None:
    rows = f"{A}, 00000000:18:00.0, 4, Enabled, [N/A]", f"{B}, 00000000:3B:00.0, [N/A], Disabled, Enabled"
    text = "\n".join((*rows, "WARNING: infoROM", ", , , ,"))
    assert parse_gpu_query(text) == {A: hotplug.Gpu(AT_A, 4 << 20, kept=True), B: hotplug.Gpu(AT_B, cut=True)}
    assert parse_gpu_query(rows[0].replace("[N/A]", "[Unknown Error]"))[A].cut
    assert not parse_gpu_query(rows[1].replace("Enabled", "Disabled"))[B].cut
    assert pci_bus.parse_compute_apps(f"{A}, 12\n{A}, 13\nx, 1\n{B}, [N/A]\n") == {A: (12, 13)}
    assert is_draining("The current drain state of GPU 00000000:18:00.0 is: draining.")
    assert not is_draining("The current drain state of GPU 00000000:18:00.0 is: not draining.")
    assert not is_draining("")
    assert parse_device_minor("Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n") == 3
    assert parse_device_minor("Device Minor: \t ?\n") is None
    many = "9" * 5000
    assert parse_device_minor(f"Device Minor: {many}\n") is None
    assert parse_gpu_query(rows[0].replace(" 4,", f" {many},"))[A].used_bytes == 0
    assert pci_bus.parse_compute_apps(f"{A}, {many}\n") == {}


async def test_failed_command_error_includes_its_output(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.node.link(A, AT_A, here=True).kept = True
    with pytest.raises(StepError, match=r"drain -p .* failed with status 3: Persistence mode is on"):
        await Bus(rig.node.root, rig.node.run).act(hotplug.Step("hide", (AT_A,)))
    with pytest.raises(StepError, match="remove of the PCI bus cannot be written: No such file"):
        await Bus(rig.node.root, rig.node.run).act(hotplug.Step("remove", (AT_B,)))


def test_gpu_release_waits_for_a_process_that_is_not_a_node_daemon() -> None:
    seen = Seen(
        {}, frozenset({AT_A}), {AT_A: 0, AT_B: 1}, hidden=frozenset({AT_A}), holders={0: (Holder(7, "nvidia-smi"),)}
    )
    job = hotplug.Job(A, leave=True, since_s=0.0, bus=AT_A)
    assert hotplug.next_step(job, seen, 0.0) == Stand("process 7 (nvidia-smi) has it open")
