"""Cases 31 to 33 of reliability section 5 on a real API server: failing fabrics, reclaimed nodes, stuck devices.
The operator (CRO) is a fake; autoscaler, gateway and engines are processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.providers.cro.objects import ONLINE, REQUESTS, RESOURCES, build_composability_request
from tests.integration.cluster.support.clients.gateway_requests import chat
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.entry_points import held_engine
from tests.integration.cluster.support.fabric.cluster import GPU, Rack
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.driver_events import WAIT_S_MAX

LATE_S = 60.0
"""Capacity delivered after its order was cancelled is used or released within this time."""
SPOT = "aws-node-termination-handler/spot-itn"
DRAINS_S = 2.0
"""A spot notice is noticed within this time."""
PAUSE_S = 20.0
"""A busy machine may pause a process for this long."""
ADMISSION = "admissionregistration.k8s.io/v1"
PLURALS = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}


@pytest.fixture
async def racks(api: Api, house: House, namespace: str, tmp_path: Path) -> AsyncIterator[tuple[Rack, Rack]]:
    """The fabric that fails to deliver, and the next one by price."""
    both = Rack(api, house, f"{namespace}-a", tmp_path), Rack(api, house, f"{namespace}-b", tmp_path)
    yield both
    for one in both:
        await one.clean()


def settings(*racks: Rack) -> dict[str, Any]:
    """Settings with those fabrics, each more expensive than the one before."""
    return {
        "nodes": [one.kind() for one in racks],
        "capacity": [
            {"name": f"rack{at}", "cro": {"model": one.model}, "expectedSeconds": 1, "keepSeconds": 0}
            for at, one in enumerate(racks)
        ],
        "prices": [
            {"device": one.model, "perHour": 1.0 + at, "class": "fabric"} for at, one in enumerate(racks)
        ],
    }  # fmt: skip


@asynccontextmanager
async def both_running(broken: Rack, good: Rack) -> AsyncIterator[None]:
    """Runs the second fabric's node in addition to all of the first; one operator serves both."""
    broken.cro.pool[good.model] = 4
    racks = {broken.bare.name: broken, good.bare.name: good}
    broken.cro.attached = lambda node, uuid: racks[node].changes(node, uuid, 1)
    broken.cro.detached = lambda node, uuid: racks[node].changes(node, uuid, -1)
    async with good.bare.running(), broken.running():
        yield


async def until(holds: Callable[[], Awaitable[object]], within_s: float = WAIT_S_MAX) -> None:
    """Polls until `holds` is true."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


# --- case 31 ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def rejecting(rack: Rack) -> AsyncIterator[None]:
    """Makes the API server reject requests for that fabric with an admission policy; yields once it is in effect."""
    rule = {
        "apiGroups": ["cro.hpsys.ibm.ie.com"], "apiVersions": ["*"], "operations": ["CREATE"],
        "resources": ["composabilityrequests"],
    }  # fmt: skip
    fields = {"expression": f"object.spec.resource.model != '{rack.model}'", "message": "no quota is left"}
    spec: Object = {"matchConstraints": {"resourceRules": [rule]}, "validations": [fields]}
    bound: Object = {"policyName": rack.name, "validationActions": ["Deny"]}
    kinds = {"ValidatingAdmissionPolicy": spec, "ValidatingAdmissionPolicyBinding": bound}
    for kind, body in kinds.items():
        made = {"apiVersion": ADMISSION, "kind": kind, "metadata": {"name": rack.name}, "spec": body}
        await rack.api.create(f"/apis/{ADMISSION}/{PLURALS[kind]}", made)
    try:
        await until(lambda: refused(rack))
        yield
    finally:
        for kind in reversed(kinds):
            await rack.api.delete(f"/apis/{ADMISSION}/{PLURALS[kind]}/{rack.name}")


async def refused(rack: Rack) -> bool:
    """Whether a request for that fabric is rejected (a dry run)."""
    try:
        await rack.api.create(
            f"{REQUESTS}?dryRun=All", build_composability_request(rack.model, f"{rack.name}-own", 1, {})
        )
    except ApiError as error:
        return "no quota is left" in error.message
    return False


def ada_and(name: str, **spec: object) -> tuple[Object, Object]:
    """The Model that uses the available GPU, and one that needs another."""
    return model("ada", replicas={"min": 1, "max": 1}), model(name, **{"idleSeconds": 1, **spec})


@pytest.mark.case("31")
@pytest.mark.parametrize("how", ["never", "half", "rejects"])
async def test_undelivered_capacity_order_is_abandoned_for_the_next_offer(racks: tuple[Rack, Rack], how: str) -> None:
    broken, good = racks
    gpus = 2 if how == "half" else 1
    broken.cro.never = {broken.model} if how == "never" else ()
    broken.cro.pool[broken.model] = 1 if how == "half" else 4
    house = broken.house
    house.write(*ada_and("bob", gpu={"count": gpus}, idleSeconds=600), **settings(broken, good))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(4 * WAIT_S_MAX))
        await custom_resources.install_foreign(broken.api, "cro")
        if how == "rejects":
            await stack.enter_async_context(rejecting(broken))
        await stack.enter_async_context(both_running(broken, good))
        await broken.answered("ada")
        await broken.answered("bob")
        await until(lambda: serves(good, gpus))
        assert [one["spec"]["resource"]["size"] for one in await good.requests()] == [gpus], "once"
        house.tell(*ada_and("bob", gpu={"count": gpus}), **settings(broken, good))  # from now on, bob is idle soon
        await until(lambda: nothing_of(broken), LATE_S)
        await until(lambda: nothing_of(good))
        assert broken.counts[-1] == good.counts[-1] == 0


async def serves(rack: Rack, gpus: int) -> bool:
    """Whether that many GPUs of a fabric are attached to stay; the operator may report it after the node does."""
    there = [one for one in (await rack.api.get(RESOURCES))["items"] if one["spec"]["model"] == rack.model]
    states = [one.get("status", {}).get("state") for one in there if "deletionTimestamp" not in one["metadata"]]
    return states.count(ONLINE) == gpus


async def nothing_of(rack: Rack) -> bool:
    """Whether neither requests nor resources for a fabric are left."""
    left = (await rack.api.get(RESOURCES))["items"]
    return not await rack.requests() and not any(one["spec"]["model"] == rack.model for one in left)


@pytest.mark.case("31")
@pytest.mark.standard
async def test_requests_fail_with_no_capacity_when_no_provider_delivers(racks: tuple[Rack, Rack]) -> None:
    broken, _ = racks
    broken.cro.never = {broken.model}
    broken.house.write(model("bob"), **settings(broken))
    broken.nodes = [broken.bare]
    async with broken.running(), asyncio.timeout(3 * WAIT_S_MAX):
        answer = await chat(broken.house.session, broken.house.url, "bob", {"Prefer": "wait=500"})
        assert (answer.status, '"code": "no_capacity"' in answer.text.replace('":"', '": "')) == (503, True), answer
        assert int(answer.retry_after) > 0
        await until(lambda: nothing_of(broken), LATE_S)
        assert broken.counts == [0]


@pytest.mark.case("31")
async def test_capacity_delivered_after_its_order_was_cancelled_is_returned(racks: tuple[Rack, Rack]) -> None:
    """Its request is cancelled, and the order is withdrawn before the GPU is attached; it is delivered nevertheless."""
    late, _ = racks
    not_yet = {late.model}
    late.cro.late, late.cro.never = True, not_yet
    late.house.write(*ada_and("bob"), **settings(late))
    async with late.running(), asyncio.timeout(3 * WAIT_S_MAX):
        await late.answered("ada")
        calling = asyncio.create_task(late.house.call("bob"))
        await until(lambda: attaching(late))
        calling.cancel()
        await until(lambda: taken_back(late))
        assert late.counts == [0], "before it came"
        not_yet.clear()
        await until(lambda: came(late))
        await until(lambda: nothing_of(late), LATE_S)
        assert late.counts == [0, 1, 0]
        await late.answered("bob")


async def attaching(rack: Rack) -> bool:
    """Whether the operator has begun to attach a GPU. It drops an order that is withdrawn before."""
    there = [one for one in (await rack.api.get(RESOURCES))["items"] if one["spec"]["model"] == rack.model]
    return any(one.get("status", {}).get("state") == "Attaching" for one in there)


async def taken_back(rack: Rack) -> bool:
    """Whether no GPU is requested any more."""
    return all(one["spec"]["resource"]["size"] == 0 for one in await rack.requests())


async def came(rack: Rack) -> bool:
    """Whether a GPU was attached."""
    return 1 in rack.counts


# --- case 32 ----------------------------------------------------------------------------------------------------------


class Pair:
    """Two nodes with a GPU each, of which one is reclaimed, and the starts on them."""

    def __init__(self, house: House, api: Api, name: str, logs: Path) -> None:
        self.house, self.api, self.starts = house, api, list[str]()
        self.nodes = [
            Node(api, f"{which}-{name}", next_number(), {GPU: "1"}, {"test": name}, logs, probe_period_s=0.05)
            for which in ("a", "b")
        ]
        for node in self.nodes:
            node.on_container = self._started(node.name)

    def _started(self, node: str) -> Callable[[str, Container], None]:
        return lambda pod, container: self.starts.append(node)

    def model(self, name: str, *knobs: str, release: Path | None = None) -> Object:
        """A Model whose engine has these options. With `release` it holds its responses until that file exists."""
        knobs = ("--host", "{host}", "--port", "{port}", "--name", "ada", *knobs)
        words = command(*knobs) if release is None else held_engine.command(release, *knobs)
        return model("ada", command=words, pod={"nodeSelector": {"test": name}}, slots=1)

    async def take(self, node: Node) -> None:
        """Adds the taint of a spot reclaim."""
        taint = {"key": SPOT, "effect": "NoSchedule"}
        await self.api.patch(f"/api/v1/nodes/{node.name}", {"spec": {"taints": [taint]}}, MERGE)


@pytest.fixture
def pair(house: House, api: Api, namespace: str, tmp_path: Path) -> Pair:
    """Creates a Pair."""
    return Pair(house, api, namespace, tmp_path)


@pytest.mark.case("32")
async def test_node_reclaimed_during_weight_loading_causes_one_more_start(
    pair: Pair, namespace: str, tmp_path: Path
) -> None:
    """The first engine never finishes loading, so its node is reclaimed while it loads, however slow the test is."""
    first, second = pair.nodes
    house = pair.house
    house.write(pair.model(namespace, "--fail", "never-ready", "--once", str(tmp_path / "first")))
    async with first.running(), house.running(), asyncio.timeout(3 * WAIT_S_MAX):
        calling = asyncio.create_task(house.call("ada"))
        await until(lambda: begun(tmp_path / "first"))
        assert pair.starts == [first.name]
        async with second.running():
            await pair.take(first)
            status, body = await calling
            assert (status, "I am ada" in body) == (200, True), body
            assert pair.starts == [first.name, second.name]


async def begun(first: Path) -> bool:
    """Whether the first engine has created its file: it runs, and will not become ready."""
    return first.exists()


@pytest.mark.case("32")
@pytest.mark.standard
async def test_replica_on_a_reclaimed_spot_node_drains_within_22_seconds(
    pair: Pair, namespace: str, tmp_path: Path
) -> None:
    first, second = pair.nodes
    house, clock, release = pair.house, asyncio.get_running_loop().time, tmp_path / "release"
    house.write(pair.model(namespace, "--tokens", "80", release=release))
    async with first.running(), house.running(), asyncio.timeout(3 * WAIT_S_MAX):
        calling = asyncio.create_task(house.call("ada"))
        await until(lambda: serves_one(house))
        await pair.take(first)
        taken_s = clock()
        await until(lambda: has(house, "draining"))
        assert clock() - taken_s <= DRAINS_S + PAUSE_S
        assert not calling.done()
        async with second.running():
            other = asyncio.create_task(house.call("ada"))
            release.touch()
            status, body = await calling
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 80)
            assert (await other)[0] == 200
            assert pair.starts == [first.name, second.name]


async def has(house: House, state: str) -> bool:
    """Whether a replica of ada is in that state."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/models/ada") as answer:
        return bool((await answer.json())["replicas"].get(state))


async def serves_one(house: House) -> bool:
    """Whether a request runs on a replica of ada: without one, the replica would drain at once."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/models/ada") as answer:
        return bool((await answer.json())["demand"]["running"] == 1)


# --- case 33 ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("33")
@pytest.mark.standard
async def test_gpu_is_detached_only_after_its_engine_has_ended(racks: tuple[Rack, Rack]) -> None:
    """An engine that ignores SIGTERM holds its memory until it is killed; the GPU must not be detached before."""
    rack, _ = racks
    alive: list[Container] = []
    rack.bare.on_container = lambda pod, container: alive.append(container)
    asked: list[bool] = []

    def busy(node: str, uuid: str) -> bool:
        asked.append(runs(alive))
        return asked[-1]

    rack.cro.busy = busy
    words = command("--host", "{host}", "--port", "{port}", "--name", "bob", "--fail", "ignores-sigterm")
    rack.house.write(*ada_and("bob", command=words), **settings(rack))
    async with rack.running(), asyncio.timeout(3 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        await until(lambda: nothing_of(rack))
        assert asked
        assert not any(asked), "the device was unused when its detach began"
        assert rack.counts == [0, 1, 0]


def runs(containers: list[Container]) -> bool:
    """Whether an engine process is running."""
    return any(one.process is not None and one.process.returncode is None for one in containers)


@pytest.mark.case("33")
async def test_hanging_detach_is_requested_only_once(racks: tuple[Rack, Rack]) -> None:
    rack, _ = racks
    hangs = [True]
    rack.cro.busy = lambda node, uuid: hangs[0]
    rack.house.write(*ada_and("bob"), **settings(rack))
    async with rack.running(), asyncio.timeout(3 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        await until(lambda: detaches(rack))
        (before,) = await rack.requests()
        await asyncio.sleep(30.0)
        (after,) = await rack.requests()
        for written in ("generation", "annotations"):
            assert after["metadata"][written] == before["metadata"][written], "the detach is not requested again"
        assert "being released" in await rack.explained("bob")
        async with rack.house.session.get(f"http://127.0.0.1:{rack.house.ops}/metrics") as answer:
            assert 'pilotlight_leases{provider="rack0",state="leaving"} 1.0' in await answer.text()
        await rack.answered("ada")
        hangs[0] = False
        await until(lambda: nothing_of(rack))
        assert rack.counts == [0, 1, 0]


async def detaches(rack: Rack) -> bool:
    """Whether the operator reports an error that prevents the detach."""
    found = (await rack.api.get(RESOURCES))["items"]
    return any(one["spec"]["model"] == rack.model and one.get("status", {}).get("error") for one in found)
