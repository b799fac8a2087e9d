"""Engine images that the agent pulls through the container runtime, which is a real gRPC server on a socket here."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from artifacts.credentials import docker_config
from artifacts.credentials.docker_config import Config, Login
from artifacts.protobuf import ProtobufError, encode_message, iter_messages, read_string
from artifacts.registry_errors import PolicyError
from autoscaler.agent_contract import ImageWant, NodeWants
from pilotlight.agent.kubelet import grpc_clients
from pilotlight.agent.kubelet import image_pull as images
from pilotlight.agent.kubelet.grpc_clients import IMAGES_EVERY_S, DaemonClient
from pilotlight.agent.kubelet.image_pull import (
    AGAIN_S,
    AGAIN_S_MAX,
    PULLS_MAX,
    WANTED_MAX,
    Images,
    ImageWanted,
    PullError,
    pull_image,
)

ENGINE = ImageWanted("vllm/vllm-openai:v1")
SECRET = (
    '{"auths": {"reg.example": {"username": "ada", "password": "secret-word"}, '
    '"reg.example/two": {"username": "bob", "password": "gone"}}}'
)


def asked_for(message: bytes) -> tuple[str, Login | None]:
    """Image and login of a PullImageRequest."""
    (spec,), auth = [*iter_messages(message, 1)], [*iter_messages(message, 2)]
    login = (
        Login(read_string(auth[0], 1), read_string(auth[0], 2), read_string(auth[0], 5), read_string(auth[0], 6))
        if auth
        else None
    )
    return read_string(spec, 1), login


class Runtime:
    """A fake CRI ImageService. `failing`: how often each image fails; pulls wait while `gate` is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[tuple[str, Login | None]] = []
        self.failing: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Semaphore(0)
        self.answer: bytes | None = None
        self.here: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Runtime]:
        grpc, aio = importlib.import_module("grpc"), importlib.import_module("grpc.aio")

        class Handler:
            def service(_, call: Any) -> Any:  # noqa: N805  self is the runtime
                known = {grpc_clients.PULL_IMAGE: self._pull, grpc_clients.LIST_IMAGES: self._list}
                return grpc.unary_unary_rpc_method_handler(known[call.method]) if call.method in known else None

        server = aio.server()
        server.add_generic_rpc_handlers((Handler(),))
        server.add_insecure_port(f"unix:{self.path}")
        await server.start()
        try:
            yield self
        finally:
            self.gate.set()
            await server.stop(0)

    async def _list(self, _: bytes, __: Any) -> bytes:
        return encode_message(*((1, encode_message((2, image))) for image in self.here))

    async def _pull(self, message: bytes, context: Any) -> bytes:
        image, login = asked_for(message)
        self.asked.append((image, login))
        self.began.release()
        await self.gate.wait()
        if self.failing.get(image, 0):
            self.failing[image] -= 1
            code = importlib.import_module("grpc").StatusCode.NOT_FOUND
            await context.abort(code, f"failed to resolve {image}:\nnot found")
        self.here.append(image)
        return encode_message((1, f"sha256:{image}")) if self.answer is None else self.answer

    @property
    def images(self) -> list[str]:
        return [image for image, _ in self.asked]


class Waiting:
    """A sleep that ends when the test requests it."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.called = asyncio.Semaphore(0)
        self.go = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.called.release()
        await self.go.acquire()


@asynccontextmanager
async def bringing(
    path: Path, waiting: Waiting | None = None, came: asyncio.Semaphore | None = None
) -> AsyncIterator[Images]:
    async def secret_of(name: str) -> Config:
        if name != "regcred":
            raise PolicyError(f"there is no secret {name}")
        return docker_config.parse_config(SECRET, name)

    hears = asyncio.Semaphore(0) if came is None else came
    one = Images(path, secret_of, hears.release, waiting or Waiting())
    running = asyncio.create_task(one.run())
    try:
        async with asyncio.timeout(60):
            yield one
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cri.sock"


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pilotlight.agent")


async def test_finished_image_pull_returns_the_image_id_or_a_one_line_error(path: Path) -> None:
    daemon = DaemonClient(path)
    with pytest.raises(PullError, match="the socket does not exist"):
        await pull_image(daemon, "a:1", None)
    async with Runtime(path).running() as runtime, asyncio.timeout(60):
        assert await pull_image(daemon, "a:1", Login("ada", "secret-word")) == "sha256:a:1"
        assert await pull_image(daemon, "a:1", Login(identity_token="i", registry_token="r")) == "sha256:a:1"
        assert runtime.asked == [("a:1", Login("ada", "secret-word")), ("a:1", Login("", "", "i", "r"))]
        runtime.failing["a:1"] = 1
        with pytest.raises(PullError) as failed:
            await pull_image(daemon, "a:1", None)
        assert str(failed.value) == "NOT_FOUND failed to resolve a:1: not found"
        runtime.answer = b"\xff"
        with pytest.raises(PullError, match="is incomplete"):
            await pull_image(daemon, "a:1", None)
        runtime.answer = None
        runtime.gate.clear()
        with pytest.raises(PullError, match="DEADLINE_EXCEEDED"):
            await pull_image(daemon, "a:1", None, within_s=0.05)
    await daemon.close()


async def test_image_wanted_several_times_is_pulled_only_once(path: Path) -> None:
    came = asyncio.Semaphore(0)
    async with Runtime(path).running() as runtime, bringing(path, came=came) as one:
        runtime.gate.clear()
        one.want([ENGINE])
        await runtime.began.acquire()
        one.want([])
        one.want([ENGINE])  # its pull continues
        one.want([ENGINE, ImageWanted("b:1")])
        await runtime.began.acquire()
        runtime.gate.set()
        await came.acquire()
        await came.acquire()
        one.want([ENGINE])
        one.want([ENGINE, ImageWanted("c:1")])
        await came.acquire()
        assert runtime.images == [ENGINE.image, "b:1", "c:1"]
        assert not one.failed


async def test_number_of_concurrent_and_total_image_pulls_is_limited(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, wanted = asyncio.Semaphore(0), [ImageWanted(f"e:{n:03}") for n in range(WANTED_MAX + 9)]
    gate, pulling, most = asyncio.Event(), set[str](), list[str]()

    async def slow(_: DaemonClient, image: str, login: Login | None) -> str:
        assert login is None
        pulling.add(image)
        most.append(image)
        assert len(pulling) <= PULLS_MAX
        await gate.wait()
        pulling.remove(image)
        return image

    monkeypatch.setattr(images, "pull_image", slow)
    async with bringing(path, came=came) as one:
        one.want(wanted)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert most == [want.image for want in wanted[:PULLS_MAX]], "in the order in which they are wanted"
        gate.set()
        for _ in range(WANTED_MAX):
            await came.acquire()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert most == [want.image for want in wanted[:WANTED_MAX]]


async def test_failed_image_pull_is_retried_with_backoff_while_wanted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, came = Waiting(), asyncio.Semaphore(0)
    async with Runtime(path).running() as runtime, bringing(path, waiting, came) as one:
        runtime.failing[ENGINE.image] = 8
        one.want([ENGINE])
        for _ in range(8):
            await waiting.called.acquire()
            assert "not found" in one.failed[ENGINE]
            waiting.go.release()
        await came.acquire()
        doubled = [AGAIN_S * 2**n for n in range(5)]
        assert waiting.waited == [*doubled, *[AGAIN_S_MAX] * 3]
        assert not one.failed
        runtime.failing["gone:1"] = 1
        one.want([ENGINE, ImageWanted("gone:1")])
        await waiting.called.acquire()
        one.want([ENGINE])
        assert not one.failed
        waiting.go.release()
        one.want([ENGINE, ImageWanted("b:1")])
        await came.acquire()
        assert runtime.images.count("gone:1") == 1, "the image is no longer wanted"
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "vllm" in line and "reason" in line]) == 1, "once, for it is one reason"


async def test_pull_secret_login_is_used_and_never_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waiting, came = Waiting(), asyncio.Semaphore(0)
    async with Runtime(path).running() as runtime, bringing(path, waiting, came) as one:
        one.want([ImageWanted("reg.example/team/engine:1", "regcred")])
        await came.acquire()
        one.want([ImageWanted("other.example/engine:1", "regcred")])
        await came.acquire()
        assert runtime.asked == [
            ("reg.example/team/engine:1", Login("ada", "secret-word")), ("other.example/engine:1", None),
        ]  # fmt: skip
        absent = ImageWanted("reg.example/team/engine:1", "nowhere")
        one.want([absent])
        await waiting.called.acquire()
        assert one.failed[absent] == "there is no secret nowhere"
        wrong = ImageWanted("Not A Name", "regcred")
        one.want([wrong])
        await waiting.called.acquire()
        assert "not a reference" in one.failed[wrong]
    assert "secret-word" not in caplog.text


async def test_next_matching_login_of_a_pull_secret_is_tried_after_a_failure(path: Path) -> None:
    came = asyncio.Semaphore(0)
    async with Runtime(path).running() as runtime, bringing(path, came=came) as one:
        runtime.failing["reg.example/two/engine:1"] = 1
        one.want([ImageWanted("reg.example/two/engine:1", "regcred")])
        await came.acquire()
        assert [login and login.user for _, login in runtime.asked] == ["bob", "ada"]


async def test_missing_runtime_socket_is_logged_once_and_pulls_are_retried(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, came = Waiting(), asyncio.Semaphore(0)
    wanted = [ImageWanted("a:1"), ImageWanted("b:1")]
    async with bringing(path, waiting, came) as one:
        one.want(wanted)
        for _ in range(4):
            await waiting.called.acquire()
            waiting.go.release()
        (line,) = [record.getMessage() for record in caplog.records]
        assert "socket=cri.sock" in line
        assert "the socket does not exist: kubelets pull" in line
        async with Runtime(path).running() as runtime:
            for _ in wanted * 4:
                waiting.go.release()
            await came.acquire()
            await came.acquire()
            assert sorted(runtime.images) == ["a:1", "b:1"]


def test_encoded_protobuf_omits_empty_fields_and_decodes_to_its_values() -> None:
    long = "x" * 300
    assert encode_message((1, ""), (2, b"")) == b""
    assert [*iter_messages(encode_message((1, long), (2, encode_message((1, "y")))), 1)] == [long.encode()]
    assert asked_for(grpc_clients.encode_pull_request("a:1", None)) == ("a:1", None)
    assert read_string(b"", 1) == ""
    with pytest.raises(ProtobufError):
        read_string(b"\x0a\x05abcd", 1)


@pytest.mark.standard
async def test_agent_process_pulls_wanted_images_and_reports_them(path: Path, tmp_path: Path) -> None:
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def node(request: web.Request) -> web.Response:
        reports.put_nowait(await request.json())
        return web.json_response({"epoch": 1})

    async def wants(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        wanted = NodeWants(epoch=1, images=(ImageWant(image=ENGINE.image), ImageWant(image="x:1", pull_secret="s")))
        await stream.write(msgspec.json.encode(wanted) + b"\n")
        await asyncio.sleep(60)
        return stream

    app = web.Application()
    app.add_routes([web.post("/v1/node", node), web.get("/v1/wants", wants)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "contract.sock")).start()
    words = ("agent", "--node", "n1", "--autoscaler", f"unix:{tmp_path / 'contract.sock'}", "--runtime", str(path),
             "--pod-resources", str(tmp_path / "none"), "--store", str(tmp_path))  # fmt: skip
    async with Runtime(path).running() as runtime, asyncio.timeout(IMAGES_EVERY_S - 5):
        runtime.gate.clear()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pilotlight", *words, stderr=asyncio.subprocess.PIPE
        )
        try:
            assert "images" not in await reports.get(), "it has looked, and nothing is there yet"
            runtime.gate.set()
            while ENGINE.image not in (await reports.get()).get("images", ()):
                pass
            assert runtime.asked == [(ENGINE.image, None)]
        finally:
            process.terminate()
            _, output = await process.communicate()
            assert process.returncode == 0
        assert b"this node's agent may not read pull secrets" in output, (
            "a secret that it may not read costs that image alone"
        )
    await runner.cleanup()


async def test_image_pull_that_raises_is_retried_and_other_images_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled, faults = list[str](), list[str]()

    async def pull(_: DaemonClient, image: str, login: Login | None, within_s: float = 0.0) -> str:
        del login, within_s
        if image == "faulty" and not faults:
            faults.append(image)
            raise LookupError("injected")
        pulled.append(image)
        return image

    async def pause(_: float) -> None:
        await asyncio.sleep(0.01)

    async def no_login(_: str) -> Config:
        return Config({})

    monkeypatch.setattr(images, "pull_image", pull)
    puller = Images(tmp_path / "absent.sock", no_login, wait=pause)
    puller.want([ImageWanted("faulty"), ImageWanted("healthy")])
    task = asyncio.create_task(puller.run())
    async with asyncio.timeout(60):
        while set(pulled) != {"faulty", "healthy"}:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert faults == ["faulty"]


async def test_memory_error_while_a_pull_secret_is_read_is_raised(tmp_path: Path) -> None:
    async def fail(_: str) -> Config:
        raise MemoryError

    puller = Images(tmp_path / "absent.sock", fail)
    puller.want([ImageWanted("reg.example/a:v1", "secret")])
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(60):
            await puller.run()
    assert raised.group_contains(MemoryError)
