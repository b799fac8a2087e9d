"""A real control plane for each run, a fresh namespace and node for each test; pods are local processes.

If PILOTLIGHT_TESTPLANE is set, it names a folder with the programs (`testplane`, or etcd, kube-apiserver,
kube-controller-manager, kube-scheduler, and kubectl for the tutorials). Otherwise they are built once into the
project's cache (`support.programs.build`). If PILOTLIGHT_TEST_KUBECONFIG names an existing cluster, no control plane is
started, and tests whose pods must be local processes are skipped.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.kubeconfig import load_api_access
from tests.integration import network_namespace
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.driver.node_fixture import Scene, staged
from tests.integration.cluster.support.installations.adoption import Adopting
from tests.integration.cluster.support.installations.multi_instance import Estate
from tests.integration.cluster.support.installations.single_instance import House
from tests.integration.cluster.support.kubelet.node import CONTROLLERS_S_MAX, Node, next_number
from tests.integration.cluster.support.programs.build import TESTPLANE
from tests.support.go_programs import BuildError, build

GIVEN = os.environ.get("PILOTLIGHT_TEST_KUBECONFIG")
FAILED = pytest.StashKey[bool]()
TAIL_BYTES = 6_000
"""Number of bytes printed from the end of each log of a failed test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that cannot run here as skipped, with the reason."""
    alone = network_namespace.entered()
    for item in items:
        if "tests/integration/cluster" not in str(item.path):
            continue
        if GIVEN and "node" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="its pods must be local processes; the cluster was given"))
        elif not GIVEN and not alone:
            item.add_marker(
                pytest.mark.skip(reason="needs its own network: python -m tests.integration.network_namespace")
            )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what no test can check here, in addition to the skipped tests."""
    terminalreporter.write_line("not enforced here: NetworkPolicies (no network plug-in); tests/chart checks them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the output of the processes in a failed test's folder to its report."""
    report = yield
    folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed:
        item.stash[FAILED] = True
        for log in sorted(folder.rglob("*.log")) if folder is not None else ():
            report.sections.append((log.name, log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")))
    return report


async def tell(api: Api, namespace: str) -> None:
    """Prints the nodes, and the namespace's pods and events."""
    for node in (await api.get("/api/v1/nodes"))["items"]:
        ready = [one["status"] for one in node["status"].get("conditions", ()) if one["type"] == "Ready"]
        print("node", node["metadata"]["name"], *ready, node["spec"].get("taints", ""))
    for pod in (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]:
        print("pod", pod["metadata"]["name"], pod["spec"].get("nodeName"), pod["status"])
    for event in (await api.get(f"/api/v1/namespaces/{namespace}/events"))["items"]:
        print("event", event["involvedObject"]["name"], event["reason"], event.get("message", ""))


def programs() -> Path:
    """The folder with the programs of a control plane. Skips the test if they cannot be built."""
    named = os.environ.get("PILOTLIGHT_TESTPLANE")
    try:
        return Path(named) if named else build(TESTPLANE)
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """One control plane for all tests of the run."""
    one = Plane(tmp_path_factory.mktemp("plane"), programs())
    one.start()
    yield one
    one.stop()


@pytest.fixture
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """The path of the kubeconfig file."""
    return Path(GIVEN) if GIVEN else request.getfixturevalue("plane").kubeconfig


@pytest.fixture
async def api(kubeconfig: Path) -> AsyncIterator[Api]:
    """An API client with administrator permissions."""
    async with Api(await load_api_access(kubeconfig)) as one:
        yield one


async def make_namespace(api: Api, name: str) -> None:
    """Creates a namespace and waits for its default ServiceAccount, without which no pod is admitted."""
    await api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    async with asyncio.timeout(CONTROLLERS_S_MAX):
        while True:
            try:
                await api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
            except ApiError:
                await asyncio.sleep(0.02)
            else:
                return


@pytest.fixture
async def namespace(api: Api, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A fresh namespace. If the test fails, its contents are printed."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    await make_namespace(api, name)
    yield name
    if request.node.stash.get(FAILED, False):
        await tell(api, name)
    await api.delete(f"/api/v1/namespaces/{name}")  # do not wait: deletion takes 5 to 11 s


@pytest.fixture
async def node(api: Api, tmp_path: Path) -> AsyncIterator[Node]:
    """A node for this test only with two GPUs; pods select it by the label `test`."""
    name = f"node-{uuid.uuid4().hex[:8]}"
    gpus, labels = {"nvidia.com/gpu": "2"}, {"test": name}
    async with Node(api, name, next_number(), gpus, labels, tmp_path, probe_period_s=0.05).running() as one:
        yield one


@pytest.fixture
async def scene(api: Api, namespace: str, tmp_path: Path) -> AsyncIterator[Scene]:
    """A node, and a driver of this namespace's engines, not started yet."""
    async with staged(api, namespace, tmp_path) as one:
        yield one


@pytest.fixture
async def served(api: Api, namespace: str) -> AsyncIterator[Api]:
    """Installs both of our custom resources. The namespace's Models are deleted afterwards: later tests serve all."""
    await custom_resources.install(api)
    yield api
    await api.delete(custom_resources.models(namespace))


@pytest.fixture
def house(tmp_path: Path, kubeconfig: Path, namespace: str) -> House:
    """One autoscaler and one gateway, not started yet."""
    return House(tmp_path, kubeconfig, namespace)


@pytest.fixture
async def adopting(tmp_path: Path, kubeconfig: Path, api: Api, namespace: str, node: Node) -> AsyncIterator[Adopting]:
    """One autoscaler and one gateway that adopt workloads, not started; the workloads are deleted afterwards."""
    assert node.name
    one = Adopting(tmp_path, kubeconfig, api, namespace)
    yield one
    for kind in ("deployments", "statefulsets"):
        await api.delete(f"{one.apps}/{kind}")


@pytest.fixture
def estate(tmp_path: Path, kubeconfig: Path, namespace: str, api: Api) -> Estate:
    """Several autoscalers and gateways, not started yet."""
    return Estate(tmp_path, kubeconfig, namespace, api)
