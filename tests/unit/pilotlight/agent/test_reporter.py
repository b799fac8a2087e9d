"""The node agent: what it finds, when it reports, and that autoscalers receive its reports."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from pytest_aiohttp import AiohttpClient

from autoscaler.agent_contract import NODE_EXPIRY_S, NODE_PERIOD_S, DeviceReport, NodeReport, PodDevices, PodUse
from autoscaler.contract import BYTES_PER_S_MAX, TOTAL_MAX, make_decoder
from autoscaler.drivers.local.nvml import NvmlGpu
from autoscaler.server.agents import NODE_BYTES_MAX, PEER_CHARS_MAX
from autoscaler.server.auth import ContractAuth
from autoscaler.server.gateways import ContractServer
from autoscaler.state.events import NodeReported
from pilotlight.agent import autoscaler_client, node_observer
from pilotlight.agent import reporter as agent_room
from pilotlight.agent.autoscaler_client import HttpWay
from pilotlight.agent.kubelet.grpc_clients import pod_uid
from pilotlight.agent.node_observer import NodeLook, NodeLooks, sees_node, should_report
from pilotlight.agent.reporter import Agent, WayError
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.cli import agent
from pilotlight.cli.agent import build_health_app
from tests.support.builders.worlds import world
from tests.support.fakes.nvml import FakeNvml
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

UID = "0f3a1c52-7b1e-4d2a-9a55-0123456789ab"
SYSTEMD = (
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-x.scope\n"
)
CGROUPFS = f"12:pids:/kubepods/besteffort/pod{UID}/4711\n0::/kubepods/besteffort/pod{UID}/4711\n"


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (SYSTEMD, UID),
        (CGROUPFS, UID),
        (f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-x.scope", UID),
        ("0::/user.slice/user-0.slice/session-1.scope\n", ""),
        (f"0::/docker/pod{UID}/x\n", ""),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_pod_uid_is_read_only_from_a_cgroup_path_below_kubepods(cgroup: str, uid: str) -> None:
    assert pod_uid(cgroup) == uid


# --- findings -------------------------------------------------------------------------------------------------------


def looks(nvml: FakeNvml | None, proc: Path, *, host: bool = True) -> NodeLooks:
    return NodeLooks(lambda: nvml, proc, lambda: host)


async def test_agent_reports_each_gpu_with_its_memory_use_and_pods(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.found = (NvmlGpu("GPU-a", "H200", 100, used_bytes=40), NvmlGpu("GPU-b", "H200", 100, healthy=False))
    nvml.holders = {"GPU-a": {11: 30, 12: 10, 13: 0}}
    processes(tmp_path, {11: SYSTEMD, 12: "0::/system.slice/x.service"})
    assert await looks(nvml, tmp_path).look() == NodeLook(
        (
            DeviceReport(id="GPU-a", product="H200", memory_bytes=100, used_bytes=40),
            DeviceReport(id="GPU-b", product="H200", memory_bytes=100, healthy=False),
        ),
        (PodDevices(pod_uid=UID, devices=("GPU-a",)),),
        uses=(PodUse(pod_uid=UID, device="GPU-a", used_bytes=30),),
    )
    inside = await looks(nvml, tmp_path, host=False).look()
    assert (inside.pods, inside.uses) == ((), ()), "process ids of another namespace say nothing"


async def test_pod_memory_use_is_summed_per_device_unless_a_part_is_unknown(tmp_path: Path) -> None:
    """Two pods share GPU-a; a device with a process of unknown memory use is omitted rather than reported too low."""
    nvml, other = FakeNvml(), UID[:-1] + "c"
    nvml.found = tuple(NvmlGpu(f"GPU-{name}", "H200", 100) for name in "abc")
    nvml.holders = {"GPU-a": {11: 30, 12: 10, 21: 7}, "GPU-b": {11: 5}, "GPU-c": {11: 5, 12: 0, 21: 9}}
    processes(tmp_path, {11: SYSTEMD, 12: SYSTEMD, 21: CGROUPFS.replace(UID, other)})
    found = await looks(nvml, tmp_path).look()
    assert found.pods == (
        PodDevices(pod_uid=UID, devices=("GPU-a", "GPU-b", "GPU-c")),
        PodDevices(pod_uid=other, devices=("GPU-a", "GPU-c")),
    )
    assert [(one.pod_uid, one.device, one.used_bytes) for one in found.uses] == [
        (UID, "GPU-a", 40), (UID, "GPU-b", 5), (other, "GPU-a", 7), (other, "GPU-c", 9),
    ]  # fmt: skip
    assert not should_report(found, found._replace(uses=())), "the device's use already shows it"


async def test_invalid_memory_sizes_of_a_driver_are_clamped_in_the_node_report(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.found = (NvmlGpu("GPU-a", "H200", -1, used_bytes=(1 << 64) - 1), NvmlGpu("GPU-b", "H200", 100, used_bytes=40))
    nvml.holders = {"GPU-a": {11: (1 << 64) - 1}, "GPU-b": {11: 30}}
    processes(tmp_path, {11: SYSTEMD})
    found = await looks(nvml, tmp_path).look()
    report = NodeReport(node="n1", boot="b", sequence=1, devices=found.devices, pods=found.pods, uses=found.uses)
    assert make_decoder(NodeReport)(msgspec.json.encode(report)) == report
    assert [(one.memory_bytes, one.used_bytes) for one in found.devices] == [(0, TOTAL_MAX), (100, 40)]
    assert [one.used_bytes for one in found.uses] == [TOTAL_MAX, 30]


def processes(proc: Path, cgroups: dict[int, str]) -> None:
    """Process files as on a node."""
    for pid, text in cgroups.items():
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "cgroup").write_text(text)


async def test_a_node_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    assert await looks(None, tmp_path).look() == NodeLook()


async def test_nvml_that_fails_or_hangs_makes_its_devices_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    one = looks(nvml, tmp_path)
    assert {device.healthy for device in (await one.look()).devices} == {True}
    monkeypatch.setattr(node_observer, "ANSWER_S_MAX", 0.02)
    nvml.failure = "GPU is lost"
    assert {device.healthy for device in (await one.look()).devices} == {False}
    nvml.failure = ""
    nvml.answers.clear()
    asked = nvml.asked
    for _ in range(3):
        assert {device.healthy for device in (await one.look()).devices} == {False}
    assert nvml.asked == asked + 1, "never a second question beside one that is not answered"
    nvml.answers.set()
    await asyncio.to_thread(threading.Event().wait, 0.01)
    async with asyncio.timeout(60):
        while not all(device.healthy for device in (await one.look()).devices):
            pass


async def test_process_in_a_cgroup_with_a_name_that_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.holders = {"GPU-a": {11: 30, 12: 10}}
    processes(tmp_path, {11: SYSTEMD, 12: ""})
    (tmp_path / "12/cgroup").write_bytes(b"0::/kubepods.slice/\xff.scope\n")
    assert [one.used_bytes for one in (await looks(nvml, tmp_path).look()).uses] == [30]


async def test_observation_after_an_unexpected_exception_succeeds(tmp_path: Path) -> None:
    nvml = FakeNvml()
    failures = [ValueError("unexpected")]

    def opened() -> FakeNvml:
        if failures:
            raise failures.pop()
        return nvml

    one = NodeLooks(opened, tmp_path, lambda: True)
    with pytest.raises(ValueError, match="unexpected"):
        await one.look()
    assert len((await one.look()).devices) == 2


def test_gpu_memory_change_below_64_mib_triggers_no_report() -> None:
    def used(bytes_: int, *, healthy: bool = True) -> NodeLook:
        return NodeLook((DeviceReport(id="a", used_bytes=bytes_, healthy=healthy),))

    assert not should_report(used(0), used((64 << 20) - 1))
    assert should_report(used(0), used(64 << 20))
    assert should_report(used(0), used(0, healthy=False))
    assert should_report(used(0), NodeLook())
    assert should_report(used(0), used(0)._replace(pods=(PodDevices(pod_uid=UID, devices=("a",)),)))


def test_processes_of_the_node_are_visible_only_in_initial_pid_namespace(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    link = tmp_path / "self/ns/pid"
    assert not sees_node(tmp_path)
    link.symlink_to("pid:[4026532000]")
    assert not sees_node(tmp_path)
    link.unlink()
    link.symlink_to("pid:[4026531836]")
    assert sees_node(tmp_path)


# --- when it reports ------------------------------------------------------------------------------------------------


class Noted:
    """A fake connection that records accepted reports; it can be made to fail or hang."""

    def __init__(self, name: str = "one") -> None:
        self.name = name
        self.taken: asyncio.Queue[bytes] = asyncio.Queue()
        self.refuses = ""
        self.hangs = False

    async def send(self, body: bytes) -> None:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.refuses:
            error = WayError(self.refuses)
            await asyncio.sleep(0)
            raise error
        self.taken.put_nowait(body)


class RunningAgent:
    """A node with a state that the test sets, and its agent."""

    def __init__(self, ways: Sequence[Noted], period_s: float) -> None:
        self.now = 0
        self.agent = Agent(self.look, lambda a, b: a != b, lambda now, n, _: f"{now}/{n}".encode(), ways, period_s)

    async def look(self) -> int:
        return self.now

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.agent.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_room, "LOOK_S", 0.005)


async def test_node_state_is_reported_at_once_on_change_and_periodically() -> None:
    way = Noted()
    agent_run = RunningAgent([way], period_s=60)
    async with asyncio.timeout(60), agent_run.running():
        assert await way.taken.get() == b"0/1"
        agent_run.now = 5
        assert await way.taken.get() == b"5/2"
        assert way.taken.empty()
    often = Noted()
    async with asyncio.timeout(60), RunningAgent([often], period_s=0.01).running():
        assert [await often.taken.get() for _ in range(3)] == [b"0/1", b"0/2", b"0/3"]


async def test_hanging_or_rejecting_autoscaler_delays_no_reports_to_others(caplog: pytest.LogCaptureFixture) -> None:
    bad, ugly, good = Noted("bad"), Noted("ugly"), Noted("good")
    bad.hangs, ugly.refuses = True, "it responded with 401"
    agent_run = RunningAgent([bad, ugly, good], period_s=0.005)
    async with asyncio.timeout(60), agent_run.running():
        for _ in range(5):
            await good.taken.get()
        ugly.refuses = ""
        assert await ugly.taken.get()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["event=report_failed autoscaler=ugly reason='it responded with 401'"], "once"


async def test_agent_is_ready_only_while_its_reports_are_delivered(
    aiohttp_client: AiohttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Noted()

    async def look() -> NodeLook:
        return NodeLook()

    one = Agent(look, should_report, lambda _, number, age_s: f"{number} {age_s >= 0}".encode(), [way], period_s=0.01)
    client = await aiohttp_client(build_health_app(one, StoreMetrics().text))

    async def status_of(path: str) -> int:
        return (await client.get(path)).status

    assert (await status_of("/healthz"), await status_of("/readyz")) == (503, 503), "it has not looked yet"
    task = asyncio.create_task(one.run())
    async with asyncio.timeout(60):
        assert (await way.taken.get()).endswith(b" True")
        await way.taken.get()
        assert (await status_of("/healthz"), await status_of("/readyz"), await status_of("/metrics")) == (200, 200, 200)
        way.refuses = "it responded with 401"
        while await status_of("/readyz") == 200:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(agent, "LOOK_S_MAX", 0.0)
        assert await status_of("/healthz") == 503
    task.cancel()


def test_node_expiry_is_longer_than_three_report_periods() -> None:
    assert 3 * NODE_PERIOD_S < NODE_EXPIRY_S


# --- the receiver ---------------------------------------------------------------------------------------------------


def body(**fields: object) -> bytes:
    return msgspec.json.encode({"node": "n1", "boot": "b", "sequence": 1, **fields})


async def test_invalid_node_report_is_rejected_with_400_or_413(aiohttp_client: AiohttpClient) -> None:
    loop = SteppedLoop(world()).loop
    client = await aiohttp_client(ContractServer(loop).application())
    devices = [{"id": "GPU-a", "memory_bytes": 10, "used_bytes": 4, "later": "ignored"}]
    answer = await client.post("/v1/node", data=body(devices=devices))
    assert (answer.status, await answer.json()) == (200, {"epoch": 1})
    for wrong, status in ((b"{", 400), (body(node=""), 400), (body(node="x" * 254), 400), (body(sequence="1"), 400),
                          (b"[" * 5000, 400), (b" " * (NODE_BYTES_MAX + 1), 413)):  # fmt: skip
        assert (await client.post("/v1/node", data=io.BytesIO(wrong))).status == status
    device = DeviceReport(id="GPU-a", memory_bytes=10, used_bytes=4)
    assert loop.observed == [NodeReported(report=NodeReport(node="n1", boot="b", sequence=1, devices=(device,)))]


ROWS = {
    "devices": '"id": "GPU-a"',
    "weights": '"artifact": "oci://r.io/a:1"',
    "uses": '"pod_uid": "u", "device": "GPU-a"',
}
"""The required fields of a row of each kind."""
DIGITS = "9" * 4000


@pytest.mark.parametrize(
    ("kind", "field"),
    [("devices", "memory_bytes"), ("devices", "used_bytes"), ("weights", "bytes"), ("weights", "total_bytes"),
     ("weights", "bytes_per_s"), ("uses", "used_bytes")],
)  # fmt: skip
@pytest.mark.parametrize(
    "number", ["-1", "1e26", str(10**26), "1e308", "1e999", pytest.param(DIGITS, id="4000 digits")]
)
async def test_node_report_error_names_the_field_of_an_out_of_range_number(
    aiohttp_client: AiohttpClient, kind: str, field: str, number: str
) -> None:
    loop = SteppedLoop(world()).loop
    client = await aiohttp_client(ContractServer(loop).application())
    row = f', "{kind}": [{{{ROWS[kind]}, "{field}": {number}}}]}}'
    answer = await client.post("/v1/node", data=body()[:-1] + row.encode())
    error = (await answer.json())["error"]
    assert answer.status == 400
    assert error.startswith("invalid node report: ")
    assert error.endswith(f" - at `$.{kind}[0].{field}`")
    assert len(error) < 200
    assert loop.observed == []


async def test_numbers_at_their_limits_are_accepted_in_a_node_report(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(ContractServer(SteppedLoop(world()).loop).application())
    device = {"id": "GPU-a", "memory_bytes": TOTAL_MAX, "used_bytes": TOTAL_MAX}
    weights = {"artifact": "a", "bytes": TOTAL_MAX, "total_bytes": TOTAL_MAX, "bytes_per_s": BYTES_PER_S_MAX}
    uses = [{"pod_uid": "u", "device": "GPU-a", "used_bytes": TOTAL_MAX}]
    answer = await client.post("/v1/node", data=body(devices=[device], weights=[weights], uses=uses))
    assert answer.status == 200


@pytest.mark.parametrize(
    ("folder", "status"),
    [("", 200), ("copies/0a1b/sha256-0a1b/files", 200), ("/etc", 400), ("..", 400), ("copies", 400),
     ("copies/../../../etc", 400), ("copies/a/../../x", 400), ("copies//x", 400), ("copies/a\n", 400)],
)  # fmt: skip
async def test_reported_folder_outside_store_copies_is_rejected(
    aiohttp_client: AiohttpClient, folder: str, status: int
) -> None:
    client = await aiohttp_client(ContractServer(SteppedLoop(world()).loop).application())
    weights = [{"artifact": "oci://r.io/a:1", "folder": folder}]
    assert (await client.post("/v1/node", data=body(weights=weights))).status == status


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"weights": [{"artifact": "oci://r.io/a:1", "digest": "sha256:" + "0a" * 32}]}, 200),
     ({"weights": [{"artifact": "oci://r.io/a:1", "digest": "sha256:0a\n"}]}, 400),
     ({"weights": [{"artifact": "oci://r.io/a:1", "digest": "x" * 1000}]}, 400),
     ({"peer": "https://" + "n" * PEER_CHARS_MAX + ":1"}, 400)],
)  # fmt: skip
async def test_malformed_digest_or_oversized_peer_url_is_rejected(
    aiohttp_client: AiohttpClient, fields: dict[str, object], status: int
) -> None:
    client = await aiohttp_client(ContractServer(SteppedLoop(world()).loop).application())
    assert (await client.post("/v1/node", data=body(**fields))).status == status


async def test_error_for_a_rejected_agent_token_names_the_token_file_option(tmp_path: Path) -> None:
    loop = SteppedLoop(world()).loop
    runner = web.AppRunner(ContractServer(loop).application(ContractAuth(lambda: ("right",))))
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    way, wrong = (HttpWay(f"unix:{tmp_path / 's'}", partial(str, reported), None) for reported in ("right", "wrong"))
    removed = HttpWay(f"unix:{tmp_path / 'gone'}", None, None)
    try:
        await way.send(body())
        assert [type(one) for one in loop.observed] == [NodeReported]
        with pytest.raises(WayError, match="it responded with 401: --token-file"):
            await wrong.send(body())
        with pytest.raises(WayError, match="UnixClientConnectorError"):
            await removed.send(body())
    finally:
        for one in (way, wrong, removed):
            await one.close()
        await runner.cleanup()


async def test_report_to_a_dns_name_is_delivered_unless_the_name_is_unknown() -> None:
    loop = SteppedLoop(world()).loop
    runner = web.AppRunner(ContractServer(loop).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    way = HttpWay(f"dns+http://localhost:{port}", None, None)
    try:
        with contextlib.suppress(WayError):  # ::1 may be one of its addresses too
            await way.send(body())
        assert loop.observed
        unreachable = HttpWay("dns+http://autoscaler.invalid:1", None, None)
        with pytest.raises(WayError, match="the name cannot be resolved"):
            await unreachable.send(body())
    finally:
        await way.close()
        await runner.cleanup()


async def test_report_answered_with_an_oversized_body_fails(tmp_path: Path) -> None:
    sizes = iter((autoscaler_client.ANSWER_BYTES_MAX, 2))

    async def node(_: web.Request) -> web.Response:
        return web.Response(body=bytes(next(sizes)))

    app = web.Application()
    app.router.add_post("/v1/node", node)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    way = HttpWay(f"unix:{tmp_path / 's'}", None, None)
    try:
        with pytest.raises(WayError, match="MessageTooLargeError"):
            await way.send(body())
        await way.send(body())
    finally:
        await way.close()
        await runner.cleanup()


async def test_memory_error_while_a_report_is_sent_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(_: HttpWay) -> tuple[list[str], None]:
        return ["http://a", "http://b"], None

    async def post(_way: HttpWay, url: str, *_: object) -> None:
        raise MemoryError if url == "http://b" else OSError

    monkeypatch.setattr(HttpWay, "_addresses", addresses)
    monkeypatch.setattr(HttpWay, "_post", post)
    with pytest.raises(MemoryError):
        await HttpWay("dns+http://autoscaler:1", None, None).send(body())


async def test_agent_reconnects_when_an_autoscaler_stream_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_client, "AGAIN_S", 0.01)
    asked, heard = list[str](), asyncio.Queue[bytes]()

    async def wants(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["node"])
        return web.Response(body=b"\n%d\n" % len(asked))

    app = web.Application()
    app.router.add_get("/v1/wants", wants)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    way = HttpWay(f"unix:{tmp_path / 's'}", None, None)
    following = asyncio.create_task(way.follow("/v1/wants?node=n1", heard.put_nowait))
    try:
        async with asyncio.timeout(60):
            assert [await heard.get() for _ in range(3)] == [b"1\n", b"2\n", b"3\n"], "blank lines say nothing"
        assert set(asked) == {"n1"}
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await way.close()
        await runner.cleanup()
