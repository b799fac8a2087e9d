"""Weights from a registry in a cluster: each node's agent pulls them, and a pod is created when they are present."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.http.transport import Site
from artifacts.pack import oci_layout
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry.client import Client
from artifacts.store.store import Store
from autoscaler.documents import parse
from autoscaler.drivers.kubernetes import weight_volumes
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.kubernetes.api import Api, Object
from autoscaler.spec.model import Model
from autoscaler.state.world import STORE
from autoscaler.text import format_size
from loadtest import tiny_gguf
from pilotlight.cli.weights.pack import plan_artifact
from pilotlight.models.document_loading import fill_memory_estimate
from tests.integration.cluster.support.clients.coldstart_command import PARTS, coldstart
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.custom_resources import models
from tests.integration.cluster.support.installations.manual_loop import until
from tests.integration.cluster.support.installations.single_instance import House, process
from tests.integration.cluster.support.installations.single_instance import model as house_model
from tests.integration.cluster.support.kubelet.node import Node
from tests.integration.cluster.support.kubelet.pod import PULL_SECONDS
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.fakes.hub import FakeHub
from tests.support.fakes.registry import FakeRegistry, digest_of
from tests.support.fakes.s3 import FakeS3
from tests.support.real_services import docker_registry

LOADS = """import os, sys
with open(sys.argv[1], 'rb') as file:
    if file.read(4) != b'GGUF':
        sys.exit('these are no weights')
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""An engine that reads its weights like a real one, and then runs the fake engine."""
CONTENT = b"GGUF" + bytes(range(256)) * 4000


def ada(host: str, **spec: Any) -> dict[str, Any]:
    """A Model with these weights, for one GPU."""
    fake = command("--host", "{host}", "--port", "{port}", "--name", "ada")
    words = [sys.executable, "-c", LOADS, "{model_path}", *fake[1:]]
    return custom_resources.model("ada", **{
        "image": "fake-engine", "command": words, "gpu": {"memory": "1Gi"}, "artifact": f"oci://{host}/{packed_models.NAME}:v1",
        "idleSeconds": 1, "residencySeconds": 0, **spec,
    })  # fmt: skip


FILES = {"ada.gguf": CONTENT, "tokenizer.json": b'{"a": 1}'}


class Scene:
    """A House, a node with its agent, and a registry. `name`: distinguishes one of several nodes."""

    def __init__(self, house: House, api: Api, namespace: str, node: Node, folder: Path, *, name: str = "") -> None:
        self.house, self.node, self.store = house, node, folder / f"store{name}"
        self._api, self._folder, self._log = api, folder, folder / f"agent{name}.log"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        node.shown[STORE] = self.store

    @asynccontextmanager
    async def agent(self, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
        way = f"unix:{self._folder / 'contract.sock'}"
        words = ("--node", self.node.name, "--autoscaler", way, "--store", str(self.store))
        nowhere = str(self._folder / "no.sock")
        async with process(self._log, "agent", *words, "--pod-resources", nowhere, *more) as one:
            yield one

    async def pods(self) -> list[dict[str, Any]]:
        return list((await self._api.get(self._pods))["items"])

    async def at_zero(self) -> None:
        while await self.pods():
            await asyncio.sleep(0.05)

    async def ops(self, path: str) -> Any:
        async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/api/v1/{path}") as answer:
            return await answer.json()

    async def answers(self) -> dict[str, float]:
        """Checks that a request succeeds and returns the phases of the start."""
        status, body = await self.house.call("ada")
        assert (status, "I am ada" in body) == (200, True), body
        return dict((await self.ops("models/ada"))["last_start_phases"])


def layout(folder: Path) -> Path:
    packed_models.packed(packed_models.model(folder / "model", FILES), folder / "layout", "modelpack-raw")
    return folder / "layout"


@pytest.mark.standard
async def test_agent_pulls_weights_once_and_keeps_them_for_the_next_start(
    house: House, served: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, served, namespace, node, tmp_path)
    house.write()
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(packed_models.served(layout(tmp_path)))
        await served.create(models(namespace), ada(host, idleSeconds=600))
        async with house.running(), scene.agent(), asyncio.timeout(180):
            first = await scene.answers()
            assert {"decide", "pull", "place", "load"} <= set(first)
            (pod,) = await scene.pods()
            (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == weight_volumes.NAME]
            (row,) = Store(scene.store).rows()
            assert volume["persistentVolumeClaim"]["readOnly"] is True
            assert row.in_use, "the agent holds it"
            await served.patch(f"{models(namespace)}/ada", {"spec": {"idleSeconds": 1}})  # only now it may end
            await scene.at_zero()
            stack.close()  # the registry is down
            await scene.answers()


async def test_coldstart_measures_every_phase_with_and_without_cached_weights(
    house: House, served: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    """The image is pulled after the weights: each is a phase, and the phases add up to the wait of the request."""
    scene = Scene(house, served, namespace, node, tmp_path)
    house.write()
    with packed_models.served(layout(tmp_path)) as host:
        await served.create(models(namespace), ada(host, pod={"annotations": {PULL_SECONDS: "0.6"}}))
        async with house.running(), scene.agent(), asyncio.timeout(180):
            for since in ("gone", "cached"):
                ((one,), spreads) = (found := await coldstart(house, since))["rounds"], found["spreads_ms"]
                phases: dict[str, float] = one["phases_ms"]
                own = ["decide", "pull", "place", *PARTS, "image", "load", "ready"]
                assert list(phases) == ["queue", *own, "upstream"]
                assert list(spreads)[-2:] == ["first byte", "total"]
                assert sum(phases[name] for name in own if "." not in name) == pytest.approx(phases["queue"], abs=2)
                assert phases["image"] >= 550, "so long was its image pulled"
            expected = {"decide", "pull", "place", *PARTS, "image", "load"}
            await until(served, f"{models(namespace)}/ada", lambda found: start_phases(found) == expected)


def start_phases(found: Object) -> set[str]:
    """The phases of the last start in the status of a Model."""
    return set(found.get("status", {}).get("lastStart", {}).get("phases", {}))


async def test_pull_resumes_after_the_agent_was_killed(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    async with FakeRegistry().serving() as registry:
        async with Client(Site(registry.host)) as client:
            await packed_models.push(client, OciLayout(layout(tmp_path)))
        weights_at, other_at = (f"/v2/{packed_models.NAME}/blobs/{digest_of(content)}" for content in FILES.values())
        stuck = asyncio.Event()

        async def hangs(_: web.Request) -> web.StreamResponse:
            stuck.set()
            await registry.hang()
            return web.Response(status=500)

        registry.always["GET", other_at] = hangs
        house.write(ada(registry.host))
        async with house.running(), asyncio.timeout(180):
            call = asyncio.create_task(scene.answers())
            async with scene.agent() as agent:
                await stuck.wait()
                while not list(scene.store.rglob(f"sha256-{digest_of(CONTENT)[7:]}")):
                    await asyncio.sleep(0.05)
                agent.kill()
                await agent.wait()
            assert not await scene.pods(), "there is no pod before its weights"
            registry.always.clear()
            async with scene.agent():
                await call
            assert len(registry.asked("GET", weights_at)) == 1, "what was whole came once"
            assert "failed" not in str(await scene.ops("explain/model/ada")), "it is the same try"


async def test_failed_weights_pull_fails_the_start_with_its_reason(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    async with FakeRegistry().serving() as registry:
        house.write(ada(registry.host, start={"retries": 0}))
        async with house.running(), scene.agent(), asyncio.timeout(180):
            status, body = await house.call("ada")
            assert status == 503, body
            explained = str(await scene.ops("explain/model/ada"))
            assert f"its weights: {registry.host}: there is no manifest v1 of {packed_models.NAME}" in explained
            assert not await scene.pods()


async def test_private_weights_are_pulled_only_with_the_model_pull_secret(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    async with docker_registry.registry(tmp_path, docker_registry.htpasswd(tmp_path)) as host:
        user, password = docker_registry.USER, docker_registry.PASSWORD
        text = json.dumps({"auths": {host: {"username": user, "password": password}}})
        async with Client(Site(host), Known(host, Login(user, password))) as client:
            await packed_models.push(client, OciLayout(layout(tmp_path)))
        await api.create(f"/api/v1/namespaces/{namespace}/secrets", {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"},
            "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": text},
        })  # fmt: skip
        house.write(ada(host, start={"retries": 0}))
        words = ("--pull-secrets", namespace, "--kubeconfig", str(house.kubeconfig))
        async with house.running(), scene.agent(*words), asyncio.timeout(180):
            assert (await house.call("ada"))[0] == 503, "without a login it is given nothing"
            house.tell(ada(host, pullSecret="login"))
            while (await house.call("ada"))[0] != 200:
                await asyncio.sleep(0.2)
            (row,) = Store(scene.store).rows()
            assert row.record.private
            assert docker_registry.PASSWORD not in (tmp_path / "agent.log").read_text()


async def test_model_with_hub_or_bucket_artifact_starts_from_pulled_weights(
    house: House, served: Api, namespace: str, node: Node, tmp_path: Path, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server admits the Models; the Model `ada` of another test may still exist."""
    scene, s3 = Scene(house, served, namespace, node, tmp_path), FakeS3({"tiny/ada.gguf": CONTENT})
    house.write()
    async with FakeHub({}, FILES).both() as hub, s3.serving():
        for name, value in (hub.env() | s3.env()).items():
            monkeypatch.setenv(name, value)
        for name, artifact in (("cleo", "hf://acme/tiny?include=*.gguf"), ("dora", "s3://models/tiny/ada.gguf")):
            one = ada("", artifact=artifact, start={"retries": 0})
            one["metadata"]["name"] = name
            await served.create(models(namespace), one)
        async with house.running(), scene.agent(), asyncio.timeout(180):
            for name in ("cleo", "dora"):
                status, body = await house.call(name)
                assert status == 200, body
            copies = {row.record.reference for row in Store(scene.store).rows()}
            assert copies == {"hf://acme/tiny?include=*.gguf", "s3://models/tiny/ada.gguf"}


LLAMA = f"""#!{sys.executable}
import os, sys
said = dict(zip(sys.argv[1:], sys.argv[2:]))
for path in (said['--model'], said['--lora-scaled'].removesuffix(':0')):
    with open(path, 'rb') as file:
        if file.read(4) != b'GGUF':
            sys.exit(path + ' is no weights')
os.execv(sys.executable, {command()!r} + ['--host', said['--host'], '--port', said['--port'], '--name', 'ada'])
"""
"""A `llama-server` that reads its weights and its adapter."""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts it on the PATH of containers."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(LLAMA)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.mark.usefixtures("llama")
async def test_adapter_and_allowed_unsafe_files_are_pulled_with_the_weights(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    async with FakeRegistry().serving() as registry:
        async with Client(Site(registry.host)) as client:
            unsafe = plan_artifact(
                packed_models.model(tmp_path / "model", {**FILES, "modeling.py": b"pass"}), allow_unsafe=True
            )
            oci_layout.write_layout(tmp_path / "layout", unsafe, "modelpack-raw", "v1")
            await packed_models.push(client, OciLayout(tmp_path / "layout"))
            lora = packed_models.model(tmp_path / "lora", {"lora.gguf": b"GGUF" + bytes(99)})
            await packed_models.push(client, packed_models.packed(lora, tmp_path / "oci"), tag="lora")
        spec = {
            "engine": "llama.cpp", "image": "llama", "gpu": {"memory": "1Gi"}, "start": {"retries": 0},
            "artifact": f"oci://{registry.host}/{packed_models.NAME}:v1", "idleSeconds": 30, "residencySeconds": 0,
            "adapters": [{"name": "lora", "artifact": f"oci://{registry.host}/{packed_models.NAME}:lora"}],
        }  # fmt: skip
        house.write(custom_resources.document("Model", "ada", spec=spec))
        async with house.running(), scene.agent(), asyncio.timeout(180):
            assert (await house.call("ada"))[0] == 503
            assert "code is not accepted from a registry" in str(await scene.ops("explain/model/ada"))
            house.tell(custom_resources.document("Model", "ada", spec={**spec, "allowUnsafe": True}))
            while (await house.call("ada"))[0] != 200:
                await asyncio.sleep(0.2)
            assert (await house.call("ada:lora"))[0] == 200
            (pod,) = await scene.pods()
            seen = {one["mountPath"]: one for one in pod["spec"]["containers"][0]["volumeMounts"]}
            assert set(seen) == {"/weights", "/adapters/lora"}
            folders = pod["metadata"]["annotations"][pods.WEIGHTS].split(",")
            assert sorted(folders) == sorted(one["subPath"] for one in seen.values())
            rows = Store(scene.store).rows()
            assert [row.in_use for row in rows] == [True, True]
            assert sorted(row.record.unsafe for row in rows) == [False, True]


IMAGES = {"mount": "image"}


async def test_weights_image_is_mounted_by_digest_without_a_pull_by_the_agent(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    await node.runs("containerd://2.1.4")  # only reported: a process kubelet mounts no image, and its engine needs none
    async with FakeRegistry().serving() as registry:
        async with Client(Site(registry.host)) as client:
            await packed_models.push(
                client, packed_models.packed(packed_models.model(tmp_path / "model", FILES), tmp_path / "image")
            )
            await packed_models.push(client, OciLayout(layout(tmp_path)), "team/other")  # only a ModelPack
        plain = house_model("ada", artifact=f"oci://{registry.host}/{packed_models.NAME}:v1", start={"retries": 0})
        house.write(plain, weights=IMAGES)
        async with house.running(), scene.agent(), asyncio.timeout(180):
            while (
                "has not been inspected yet" in (message := str(await scene.ops("explain/model/ada")))
                or "as an image" not in message
            ):
                await asyncio.sleep(0.1)  # an agent checks before any request
            assert (await house.call("ada"))[0] == 200
            (pod,) = await scene.pods()
            (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == weight_volumes.NAME]
            assert volume["image"]["reference"].startswith(f"{registry.host}/{packed_models.NAME}@sha256:")
            assert pods.WEIGHTS not in pod["metadata"]["annotations"]
            assert Store(scene.store).rows() == []
            digest = volume["image"]["reference"].rpartition("@")[2]
            assert f"/v2/{packed_models.NAME}/manifests/{digest}" in {one.path for one in registry.seen}
            other = house_model("ada", artifact=f"oci://{registry.host}/team/other:v1", start={"retries": 0})
            house.tell(other, weights=IMAGES)
            while "it is not an image (ModelPack)" not in str(await scene.ops("explain/model/ada")):
                await asyncio.sleep(0.1)


async def test_memory_need_is_read_from_the_gguf_header_before_any_request(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, api, namespace, node, tmp_path)
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "ada.gguf"
    tiny_gguf.make_model(file, "Hello, I am Ada.")
    packed_models.packed(tmp_path / "model", tmp_path / "layout")
    spec: dict[str, Any] = {"engine": "llama.cpp", "image": "llama", "contextTokens": 256}
    with packed_models.served(tmp_path / "layout") as host:
        artifact = f"oci://{host}/{packed_models.NAME}:v1"
        house.write(custom_resources.document("Model", "ada", spec={**spec, "artifact": artifact}))
        async with house.running(), asyncio.timeout(180):
            assert (await scene.ops("explain/fit/ada"))["basis"] == "device", "as long as no agent has looked"
            async with scene.agent():
                while (fit := await scene.ops("explain/fit/ada"))["basis"] != "artifact":
                    await asyncio.sleep(0.1)
            assert Store(scene.store).rows() == [], "nothing was brought"
    document = custom_resources.document("Model", "ada", spec={**spec, "artifact": f"file://{file}"})
    found = parse.read_document(document)
    assert isinstance(found, Model)
    there = fill_memory_estimate(found, gpus=True)
    assert fit["memory_bytes"] == there.memory_bytes
    assert (
        f"ada is assumed to need {format_size(there.memory_bytes)}, estimated from its artifact." in fit["sentences"][0]
    )
