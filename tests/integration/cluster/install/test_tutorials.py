"""The tutorials for a cluster: every command of a page runs, in the order of the page.

kubectl, curl, sed and pilotlight run as written. What needs images, a kubelet or separate networks is replaced:

| on the page | here |
| --- | --- |
| `make image`, `skopeo copy`, `kind load` | no operation (STUBS): no image is built or pulled |
| the images of Pilotlight and of the engines | programs of this checkout on a process kubelet (ENTRYPOINTS) |
| `helm` | `support.clients.helm`: Helm's library, with the VALUES for pods that share one network |
| two autoscalers, if requests need keys | one (ONE_AUTOSCALER) |
| `kubectl port-forward` | a TCP proxy to a pod (`Cluster.forwarding`): the process kubelet forwards no ports |
| `REGISTRY`, `NAME`, `YOUR_KEY`, `PASTE_THE_HASH` | what a reader writes in their place (`Reader.words`) |
| Lingo, KubeAI | a Deployment without pods, KubeAI's definition of Model, and its ConfigMap |
| the GPU of the KubeAI Model | a number and labels of the node (GPU) |
| `idleSeconds: 30` of `examples/tiny.yaml` | 1 s while `load coldstart` measures, so that each round starts at zero |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import pytest
import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from tests.integration.cluster.conftest import make_namespace, programs
from tests.integration.cluster.install.test_chart import loose_chart
from tests.integration.cluster.kubernetes.resources import test_kubeai_watcher
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.adoption import workload
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.integration.cluster.support.network.dns_server import addresses, names
from tests.support.fakes.engines.fake_engine_process import command as fake_engine
from tests.support.net.breakable_proxy import Cuttable
from tests.support.tutorial import ROOT, TUTORIALS, Reader, blocks, commands

pytestmark = pytest.mark.standard

STUBS = ("make", "skopeo", "kind")
ENTRYPOINTS = {
    "pilotlight": [str(ROOT / ".venv/bin/pilotlight")],
    "embed": fake_engine("--host", "$(POD_IP)", "--port", "8080", "--name", "embed"),
}
"""Repository of an image, without its registry -> what a container of it runs if its pod names no command."""
VLLM = f"""\
#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in --host) host=$2 ;; --port) port=$2 ;; --served-model-name) name=$2 ;; esac
  shift
done
exec {" ".join(fake_engine())} --host "$host" --port "$port" --name "$name"
"""
"""The program `vllm` of the image vllm/vllm-openai."""
GPU = {"nvidia.com/gpu": "1"}
GPU_LABELS = {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.memory": "46068"}
VALUES: dict[str, Any] = {
    "listenHost": "$(POD_IP)",
    "gateway": {"extraArgs": ["--ops=127.0.0.1:0"], "preStopSeconds": 1, "graceSeconds": 10},
    "autoscaler": {"extraArgs": ["--ops=$(POD_IP):8081"]},
}
LOOPBACK = ("127.0.0.1", 8083)
ONE_AUTOSCALER = {"replicas": 1, "maxUnavailable": 0, "extraArgs": [f"--ops={LOOPBACK[0]}:{LOOPBACK[1]}"]}
"""If requests need keys, the operations port must be on the loopback address, which is the same for all pods."""
FORWARD = re.compile(r"kubectl port-forward -n (\S+) (svc|deploy)/(\S+) (\d+):\d+\s*")
WITHOUT_KEY = {"  -H 'Authorization: Bearer YOUR_KEY' \\\n": ""}
HOME, ENGINES = "pilotlight", "pilotlight-engines"
"""The namespaces of the pages."""
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
WAIT_S_MAX = 180.0


class Cluster(NamedTuple):
    """A reader with a cluster."""

    reader: Reader
    api: Api

    async def run(self, command: str) -> str:
        """Runs a command or a block of the page and returns its output."""
        return await asyncio.to_thread(self.reader.run, command)

    async def until(self, command: str, text: str) -> str:
        """Repeats a command until it succeeds with a text in its output, and returns the output."""
        message = ""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while True:
                    done = await asyncio.to_thread(self.reader.attempt, command)
                    message = done.stdout + done.stderr
                    if done.returncode == 0 and text in message:
                        return done.stdout
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{command}: no {text!r} in {message}") from None

    @contextlib.asynccontextmanager
    async def forwarding(self, command: str, to: tuple[str, int] | None = None) -> AsyncIterator[None]:
        """Does what a `kubectl port-forward` of the page does; `to`: the address, if it is not that of the pod."""
        found = FORWARD.fullmatch(command)
        assert found is not None, command
        self.reader.omit(command)
        namespace, kind, name, port = found.groups()

        async def reach() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            if to is not None:
                return await asyncio.open_connection(*to)
            if kind == "svc":
                return await asyncio.open_connection((await addresses(self.api, name, namespace))[0], 8080)
            lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/pilotlight"
            leader = (await self.api.get(lease))["spec"]["holderIdentity"].partition("_")[0]
            pod = await self.api.get(f"/api/v1/namespaces/{namespace}/pods/{leader}")
            return await asyncio.open_connection(pod["status"]["podIP"], 8081)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await Cuttable(reach).connected(reader, writer)
            except (ApiError, OSError, IndexError):  # no such pod yet
                writer.transport.abort()

        async with await asyncio.start_server(connected, "127.0.0.1", int(port)) as server:
            yield
            server.close()

    async def create(self, namespace: str, *controllers: str) -> None:
        """Creates a namespace, and in it Deployments of controllers that the pages scale to zero."""
        await make_namespace(self.api, namespace)
        for name in controllers:
            await self.api.create(DEPLOYMENTS.format(namespace), workload(name, 1, {}))

    async def install(self) -> None:
        """Installs the chart as its tutorial shows for a cluster on one machine."""
        _, install_on_kind, *_ = blocks((TUTORIALS / "kubernetes.md").read_text())["sh"]
        await self.run(install_on_kind)

    async def replicas(self, namespace: str, name: str) -> int:
        """The scale of a Deployment."""
        return int((await self.api.get(f"{DEPLOYMENTS.format(namespace)}/{name}"))["spec"]["replicas"])


def enter_image(_: str, container: Container) -> None:
    """Runs what the image of a container would run."""
    entrypoint = ENTRYPOINTS.get(container.spec["image"].rpartition("/")[2].partition(":")[0])
    if entrypoint is not None:
        container.spec.setdefault("command", entrypoint)


@pytest.fixture(autouse=True)
def curl() -> None:
    """Skips the tests without curl."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")


@pytest.fixture
async def node(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node for all pods, with the programs of their images on the PATH."""
    vllm = tmp_path / "images" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(VLLM)
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{vllm.parent}:{Path(sys.executable).parent}", prepend=":")
    one = Node(api, f"node-{uuid.uuid4().hex[:8]}", next_number(), GPU, GPU_LABELS, tmp_path)
    one.on_container = enter_image
    async with one.running(), names(api):
        yield one


@pytest.fixture
async def cluster(api: Api, kubeconfig: Path, node: Node, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A reader in a clone, with the programs of the pages on the PATH; deletes what the pages create."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:
        reader = Reader(Path(folder))
        reader.environment["KUBECONFIG"] = str(kubeconfig)
        shutil.copytree(loose_chart(tmp_path), reader.folder / "charts" / "pilotlight")
        for file in ("tiny.yaml", "values-local.yaml"):
            shutil.copyfile(ROOT / "examples" / file, reader.folder / "examples" / file)
        reader.write("values.json", json.dumps(VALUES))
        plane = programs()
        kubectl = f"{plane}/testplane kubectl" if (plane / "testplane").exists() else f"{plane}/kubectl"
        helm = f"{sys.executable} -m tests.integration.cluster.support.clients.helm {folder}/values.json {node.logs}"
        for name, program in {"kubectl": f"exec {kubectl}", "helm": f"exec {helm}"}.items():
            reader.write(f".venv/bin/{name}", f'#!/bin/sh\n{program} "$@"\n', 0o755)
        for name in STUBS:
            reader.write(f".venv/bin/{name}", "#!/bin/sh\n", 0o755)
        yield Cluster(reader, api)
    for path in (f"{custom_resources.TENANTS}/me", custom_resources.models(ENGINES)):
        with contextlib.suppress(ApiError):
            await api.delete(path)
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=HOME) as config:
        await asyncio.to_thread(config.uninstall, "pilotlight", ignore_not_found=True)
    await remove(api, HOME, ENGINES, "team-a", "lingo", "kubeai")


async def remove(api: Api, *namespaces: str) -> None:
    """Deletes namespaces and waits until they are gone, because the next page creates them again."""
    for name in namespaces:
        with contextlib.suppress(ApiError):
            await api.delete(f"/api/v1/namespaces/{name}")
    async with asyncio.timeout(WAIT_S_MAX):
        while {one["metadata"]["name"] for one in (await api.get("/api/v1/namespaces"))["items"]} & {*namespaces}:
            await asyncio.sleep(0.1)


def sessions(page: dict[str, list[str]]) -> list[str]:
    """The commands of all console sessions of a page."""
    return [line for session in page["console"] for line in commands(session)]


def content(answer: str) -> str:
    """The text of a chat completion."""
    return str(json.loads(answer)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("registry", [True, False], ids=["registry", "kind"])
async def test_each_command_of_the_kubernetes_tutorial_succeeds(cluster: Cluster, registry: bool) -> None:
    """With a registry and keys, and on kind without keys."""
    reader = cluster.reader
    with reader.following("kubernetes.md") as page:
        (
            install, install_on_kind, check, make_key, write_tenant, create, create_on_kind, list_models,
            forward_gateway, request, forward_autoscaler, look, show_lease, measure,
        ) = page["sh"]  # fmt: skip
        with_registry, on_kind = (install, make_key, write_tenant, create), (install_on_kind, create_on_kind)
        reader.omit(*(on_kind if registry else with_registry))
        reader.words = {"REGISTRY": "registry.example"} if registry else WITHOUT_KEY
        if registry:
            reader.write("values.json", json.dumps({**VALUES, "autoscaler": ONE_AUTOSCALER}))
        await cluster.run(install if registry else install_on_kind)
        report = await cluster.run(check)
        assert re.search(r"(?m)^ok +", report), report
        if registry:
            key = await cluster.run(make_key)
            (secret,), (digest,) = re.findall(r"\bpl-\S+", key), re.findall(r"\b[0-9a-f]{64}\b", key)
            reader.words |= {"YOUR_KEY": secret, "PASTE_THE_HASH": digest}
            await cluster.run(write_tenant)
        await cluster.run(create if registry else create_on_kind)
        await cluster.until(list_models, "Idle")
        pods = f"/api/v1/namespaces/{ENGINES}/pods"
        assert (await cluster.api.get(pods))["items"] == []
        ops = LOOPBACK if registry else None
        async with cluster.forwarding(forward_gateway), cluster.forwarding(forward_autoscaler, ops):
            pieces = re.findall(r"^data: (\{.*\})$", await cluster.until(request, "[DONE]"), re.MULTILINE)
            assert "tiny" in "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in pieces)
            output = await cluster.run(look)
            for fact in (
                r"^tiny-\S+ .* Running ", r" Started .* is ready after ", r"^tiny +ready +1 ready ",
                r"^1 replica is needed: ", r"^tiny-\S+ has been ready for .*: wake tiny: 1 waiting",
            ):  # fmt: skip
                assert re.search(fact, output, re.MULTILINE), (fact, output)
            assert re.search(r"^pilotlight +pilotlight-autoscaler-", await cluster.run(show_lease), re.MULTILINE)
            patch = '{"spec": {"idleSeconds": 1, "residencySeconds": 0}}'
            await cluster.run(f"kubectl patch models.pilotlight.dev tiny -n {ENGINES} --type merge -p '{patch}'")
            assert "3 requests, 3 completed, 0 failed" in await cluster.run(measure)
            async with asyncio.timeout(WAIT_S_MAX):
                while (await cluster.api.get(pods))["items"]:
                    await asyncio.sleep(0.1)
            await cluster.until(list_models, "Idle")


async def test_each_command_of_the_lingo_tutorial_succeeds(cluster: Cluster) -> None:
    with cluster.reader.following("from-lingo.md") as page:
        (convert,) = page["sh"]
        save, patch, stop, upgrade, forward_gateway, forward_autoscaler, request, explain, condition = sessions(page)
        manifest, annotations = page["yaml"]
        await cluster.create("team-a")
        await cluster.create("lingo", "lingo")
        await cluster.install()
        cluster.reader.write("embed.yaml", manifest)
        await cluster.run("kubectl apply -n team-a -f embed.yaml")
        assert await cluster.run(convert) == annotations
        for command in (save, patch, stop, upgrade):
            await cluster.run(command)
        found = await cluster.api.get(f"{DEPLOYMENTS.format('team-a')}/embed")
        expected = yaml.safe_load(annotations)["metadata"]["annotations"].items()
        assert expected <= found["metadata"]["annotations"].items()
        assert await cluster.replicas("lingo", "lingo") == 0
        async with cluster.forwarding(forward_gateway), cluster.forwarding(forward_autoscaler):
            answer = await cluster.until(request, '"embedding"')
            assert json.loads(answer)["data"][0]["embedding"]
            assert await cluster.replicas("team-a", "embed") == 1
            output = await cluster.run(explain)
            assert "Pilotlight scales Deployment team-a/embed." in output
            assert re.search(r"(?m)^text-\S+ has been ready for .*: wake text-embedding-ada-002: 1 waiting", output), (
                output
            )
            shown = json.loads(await cluster.until(condition, "Adopted"))
            assert (shown["status"], shown["reason"]) == ("True", "Scaled")


@contextlib.asynccontextmanager
async def kubeai(cluster: Cluster) -> AsyncIterator[None]:
    """Installs KubeAI's definition of Model, its configuration and a Deployment in place of its controller."""
    configuration: Object = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kubeai-config"},
        "data": {"system.yaml": "resourceProfiles: {}\n"},
    }  # fmt: skip
    await test_kubeai_watcher.install(cluster.api)
    try:
        await cluster.create("kubeai", "kubeai")
        await cluster.api.create("/api/v1/namespaces/kubeai/configmaps", configuration)
        yield
    finally:
        await cluster.api.delete(f"{test_kubeai_watcher.CRDS}/models.kubeai.org")


async def test_each_command_of_the_kubeai_tutorial_succeeds(cluster: Cluster) -> None:
    """The Model of the page is converted first; then it is deleted, and KubeAI's Model is followed."""
    cluster.reader.words = {"NAME": "kubeai-config"}
    with cluster.reader.following("from-kubeai.md") as page:
        (convert,) = page["sh"]
        (
            export, export_configuration, save, edit, apply, stop, upgrade, forward_gateway, forward_autoscaler,
            request, explain, list_models,
        ) = sessions(page)  # fmt: skip
        foreign, own = page["yaml"]
        async with kubeai(cluster):
            await cluster.install()
            cluster.reader.write("models.yaml", foreign)
            await cluster.run("kubectl apply -n kubeai -f models.yaml")
            assert await cluster.run(convert) == own
            for command in (export, export_configuration, save, edit, apply):
                await cluster.run(command)
            async with cluster.forwarding(forward_gateway), cluster.forwarding(forward_autoscaler):
                await it_serves_the_model(cluster, request, explain)
                assert re.search(r"(?m)^chat-8b .* Serving ", await cluster.until(list_models, "Serving"))
                await cluster.run(f"kubectl delete -n {ENGINES} -f models.yaml")
                await cluster.until(request, "model_not_found")
                await cluster.run(stop)
                assert await cluster.replicas("kubeai", "kubeai") == 0
                await cluster.run(upgrade)
                await it_serves_the_model(cluster, request, explain)
                assert "chat-8b" not in await cluster.run(list_models)


async def it_serves_the_model(cluster: Cluster, request: str, explain: str) -> None:
    """Checks that the request of the page is answered by a replica that `explain` names."""
    answer = await cluster.until(request, '"content"')
    assert "chat-8b" in content(answer)
    output = await cluster.run(explain)
    assert re.search(r"(?m)^chat-8b-\S+ has been ready for .* on node-\w+/gpu0: wake chat-8b: 1 waiting", output), (
        output
    )
