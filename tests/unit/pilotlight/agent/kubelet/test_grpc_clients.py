"""Kubelet and container runtime over gRPC: real servers on sockets with hand-written responses.

`message` encodes protocol buffers by their specification, independently of the code that reads them. The messages are
those of the API definitions (see `pilotlight.agent.kubelet.grpc_clients`), and include fields that no code here reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.protobuf import NUMBER_MAX, ProtobufError, iter_fields, iter_strings, read_string
from autoscaler.agent_contract import PodDevices
from pilotlight.agent.kubelet import grpc_clients as nodesockets
from pilotlight.agent.kubelet.grpc_clients import (
    MISSING,
    AssignedPod,
    NodeSockets,
    decode_assigned_pods,
    decode_image_names,
)
from pilotlight.agent.node_observer import NodeLook, NodeLooks, should_report
from tests.support.fakes.nvml import FakeNvml
from tests.support.net.ports import free_port

Value = int | str | bytes


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value % 0x80 + 0x80)
        value //= 0x80
    return bytes([*out, value])


def message(*parts: tuple[int, Value]) -> bytes:
    """Encode fields in this order."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += varint(number * 8) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number * 8 + 2) + varint(len(data)) + data
    return out


def devices(resource: str, *ids: str) -> bytes:
    """ContainerDevices: resource_name, device_ids, topology (a NUMA node)."""
    return message((1, resource), *((2, id) for id in ids), (3, message((1, message((1, 1))))))


def pod(namespace: str, name: str, *containers: bytes) -> bytes:
    """PodResources: name, namespace, containers, then cpu_ids and memory as newer kubelets have them."""
    return message((1, name), (2, namespace), *((3, one) for one in containers), (4, 7), (5, b"later"))


def container(*given: bytes) -> bytes:
    """ContainerResources: name, devices, cpu_ids (packed), memory, dynamic_resources."""
    return message((1, "engine"), *((2, one) for one in given), (3, b"\x01\x02"), (5, message((1, "claim"))))


PODS = message(
    (1, pod("engines", "ada-1", container(devices("nvidia.com/gpu", "GPU-b", "GPU-a")))),
    (1, pod("engines", "shares", container(devices("nvidia.com/gpu", "GPU-c::1"), devices("rdma/hca", "mlx5")))),
    (1, pod("kube-system", "dns", container())),
    (1, pod("other", "nic", container(devices("rdma/hca", "mlx5")))),
    (1, pod("other", "mig", container(), container(devices("nvidia.com/mig-1g.10gb", "MIG-x")))),
)
IMAGES = message(
    (1, message((1, "sha256:1"), (2, "engine:1"), (2, "engine:latest"), (3, "engine@sha256:2"), (4, 9_000_000_000),
                (5, message((1, 1000))), (6, "root"), (8, 1))),
    (1, message((1, "sha256:3"), (2, "another:1"))),
)  # fmt: skip


def test_assigned_pods_are_decoded_with_their_gpus() -> None:
    assert decode_assigned_pods(PODS) == (
        AssignedPod("engines", "ada-1", ("GPU-a", "GPU-b")), AssignedPod("engines", "shares", ("GPU-c",)),
        AssignedPod("other", "mig", ("MIG-x",)),
    )  # fmt: skip
    assert decode_assigned_pods(b"") == ()


def test_image_list_of_the_runtime_is_decoded_to_sorted_names() -> None:
    assert decode_image_names(IMAGES) == ("another:1", "engine:1", "engine:latest", "engine@sha256:2")


# --- the wire format --------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.integers(0, (1 << 64) - 1), st.text(), st.binary())
FIELDS = st.lists(st.tuples(st.integers(1, NUMBER_MAX), VALUES))


@settings(derandomize=True, deadline=None)
@given(FIELDS)
def test_encoded_protobuf_fields_decode_to_the_same_values(parts: list[tuple[int, Value]]) -> None:
    wanted = [(number, one.encode() if isinstance(one, str) else one) for number, one in parts]
    assert list(iter_fields(message(*parts))) == wanted


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_or_raise_protobuf_error(data: bytes) -> None:
    for read in (lambda: list(iter_fields(data)), lambda: decode_assigned_pods(data), lambda: decode_image_names(data)):
        with contextlib.suppress(ProtobufError):
            assert read() is not None


@settings(derandomize=True, deadline=None)
@given(FIELDS, st.data())
def test_protobuf_message_truncated_within_a_field_is_rejected(
    parts: list[tuple[int, Value]], draw: st.DataObject
) -> None:
    whole = message(*parts)
    ends = {len(message(*parts[:count])) for count in range(len(parts) + 1)}
    cut = draw.draw(st.integers(0, len(whole)))
    if cut in ends:
        list(iter_fields(whole[:cut]))
    else:
        with pytest.raises(ProtobufError):
            list(iter_fields(whole[:cut]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x00", "there is no field 0"), (b"\x0b", "wire type 3"), (b"\x0c", "wire type 4"), (b"\x0e", "wire type 6"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "is incomplete"), (b"\x08" + b"\xff" * 9 + b"\x02", "is incomplete"),
        (b"\x0a\x05abcd", "longer than the rest of the input"), (b"\x09abcd", "longer"), (b"\x0dabc", "longer"),
    ],
)  # fmt: skip
def test_invalid_protobuf_message_error_names_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(ProtobufError, match=why):
        list(iter_fields(data))


def test_string_field_that_occurs_twice_decodes_to_its_last_value() -> None:
    data = b"\x11" + b"8" * 8 + b"\x1d" + b"4" * 4 + message((1, "a"), (1, "b"))
    assert [number for number, _ in iter_fields(data)] == [2, 3, 1, 1]
    assert (read_string(data, 1), read_string(data, 9)) == ("b", "")
    for wrong in (message((1, 5)), message((1, b"\xff"))):
        with pytest.raises(ProtobufError, match="field 1"):
            list(iter_strings(wrong, 1))


# --- the sockets ------------------------------------------------------------------------------------------------------


class Daemon:
    """A gRPC server on a socket; `answers` is method -> bytes, and other methods are unimplemented."""

    def __init__(self, path: Path, answers: dict[str, bytes]) -> None:
        self.path = path
        self.answers = answers
        self.asked: list[tuple[str, bytes]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        grpc, aio = importlib.import_module("grpc"), importlib.import_module("grpc.aio")
        daemon = self

        class Handler:
            def service(self, call: Any) -> Any:
                answer = daemon.answers.get(call.method)
                return None if answer is None else grpc.unary_unary_rpc_method_handler(daemon._answer(call.method))

        server = aio.server()
        server.add_generic_rpc_handlers((Handler(),))
        server.add_insecure_port(f"unix:{self.path}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    def _answer(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def answer(asked: bytes, _: Any) -> bytes:
            self.asked.append((method, asked))
            return self.answers[method]

        return answer


@pytest.fixture
async def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NodeSockets]:
    monkeypatch.setattr(nodesockets, "ASK_S_MAX", 20.0)
    one = NodeSockets(tmp_path / "kubelet.sock", tmp_path / "cri.sock")
    yield one
    await one.close()


async def test_pods_are_read_from_the_kubelet_and_images_from_the_runtime(sockets: NodeSockets, tmp_path: Path) -> None:
    kubelet = Daemon(tmp_path / "kubelet.sock", {nodesockets.LIST_PODS: PODS})
    runtime = Daemon(tmp_path / "cri.sock", {nodesockets.LIST_IMAGES: IMAGES})
    async with kubelet.running(), runtime.running():
        assert (await sockets.pods(), await sockets.images()) == (
            decode_assigned_pods(PODS),
            decode_image_names(IMAGES),
        )
        kubelet.answers[nodesockets.LIST_PODS] = b""
        assert await sockets.pods() == ()
        assert await sockets.images() == decode_image_names(IMAGES)
    assert kubelet.asked == [("/v1.PodResourcesLister/List", b"")] * 2
    assert runtime.asked == [("/runtime.v1.ImageService/ListImages", b"")], "not so often"


async def test_kubelet_failure_is_logged_once_and_its_last_pod_list_is_kept(
    sockets: NodeSockets, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert [await sockets.pods() for _ in range(3)] == [None] * 3
    kubelet = Daemon(tmp_path / "kubelet.sock", {nodesockets.LIST_PODS: PODS})
    async with kubelet.running():
        assert await sockets.pods() == decode_assigned_pods(PODS)
        kubelet.answers[nodesockets.LIST_PODS] = b"\xff"
        assert [await sockets.pods() for _ in range(2)] == [decode_assigned_pods(PODS)] * 2
        del kubelet.answers[nodesockets.LIST_PODS]
        assert [await sockets.pods() for _ in range(2)] == [decode_assigned_pods(PODS)] * 2
        kubelet.answers[nodesockets.LIST_PODS] = b""
        assert await sockets.pods() == ()
    messages = [record.getMessage().partition("reason=")[2] for record in caplog.records]
    assert messages[:2] == ["'the socket does not exist'", "'a number is incomplete'"]
    assert len(messages) == 3
    assert messages[2].startswith("'UNIMPLEMENTED")


async def test_missing_grpc_is_logged_with_install_advice(
    sockets: NodeSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kubelet.sock").touch()
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert [await sockets.pods() for _ in range(2)] == [None, None]
    (line,) = [record.getMessage() for record in caplog.records]
    assert MISSING in line


# --- in one look ------------------------------------------------------------------------------------------------------


async def test_node_observation_includes_pods_from_the_kubelet_socket(sockets: NodeSockets, tmp_path: Path) -> None:
    looks = NodeLooks(FakeNvml, tmp_path, lambda: False, sockets)
    before = await looks.look()
    assert (before.pods, before.images) == ((), ())
    kubelet = Daemon(tmp_path / "kubelet.sock", {nodesockets.LIST_PODS: PODS})
    async with kubelet.running():
        now = await looks.look()
    assert now.pods[0] == PodDevices(namespace="engines", name="ada-1", devices=("GPU-a", "GPU-b"))
    assert now.devices == before.devices
    assert should_report(before, now)
    assert should_report(now, NodeLook(now.devices, now.pods, ("an:image",)))
    assert not should_report(now, now)


@pytest.mark.standard
async def test_agent_process_reports_pods_and_images_from_sockets(tmp_path: Path) -> None:
    """The process has an event loop of its own."""
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def node(request: web.Request) -> web.Response:
        reports.put_nowait(await request.json())
        return web.json_response({"epoch": 1})

    app = web.Application()
    app.router.add_post("/v1/node", node)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "contract.sock")).start()
    health = free_port()
    kubelet = Daemon(tmp_path / "kubelet.sock", {nodesockets.LIST_PODS: PODS})
    runtime = Daemon(tmp_path / "cri.sock", {nodesockets.LIST_IMAGES: IMAGES})
    words = ("agent", "--node", "n1", "--autoscaler", f"unix:{tmp_path / 'contract.sock'}", "--pod-resources",
             str(kubelet.path), "--runtime", str(runtime.path), "--health", f"127.0.0.1:{health}")  # fmt: skip
    async with kubelet.running(), runtime.running(), asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pilotlight", *words)
        try:
            report = await reports.get()
            while "images" not in report or "pods" not in report:
                report = await reports.get()
            assert (report["node"], report["images"], report["pods"][0]["devices"]) == (
                "n1", list(decode_image_names(IMAGES)), ["GPU-a", "GPU-b"],
            )  # fmt: skip
            async with aiohttp.ClientSession() as session:
                for path in ("healthz", "readyz"):
                    async with session.get(f"http://127.0.0.1:{health}/{path}") as answer:
                        assert (answer.status, await answer.text()) == (200, "ok\n")
        finally:
            process.terminate()
            assert await process.wait() == 0
    await runner.cleanup()
