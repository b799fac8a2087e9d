"""Leader election, known gateways, and the tokens that permit reports, on a real API server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.contract import GatewayId
from autoscaler.kubernetes import gateway_pods, leader_election
from autoscaler.kubernetes.api import Api, FencedError, Object
from autoscaler.kubernetes.gateway_pods import GatewayPods
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.server.auth import AGENT, BOTH, GATEWAY, Authenticated
from autoscaler.server.token_review import KEPT_S, STANDS_S, Tokens
from autoscaler.spec.installation_ownership import INSTALLATION, installation_id
from autoscaler.state.events import GatewayGone, GatewaySeen
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.service_accounts import make_account, token
from tests.integration.cluster.support.kubelet.node import Node

D = 8
"""A request about the Lease times out after a fifth of it."""
LONG_S = 40
"""A leader may write for four fifths of it after a renewal: it keeps the Lease when a process is paused for 20 s."""
LIMIT_S = 90


class Played:
    """A candidate for leadership, and the epochs in which it led (None: it follows)."""

    def __init__(self, api: Api, namespace: str, name: str, duration_s: int = LONG_S) -> None:
        self.elector = Elector(api, namespace, "pilotlight", name)
        self._duration_s = duration_s
        self.epochs: list[int | None] = []
        self.known = 0
        self.changed = asyncio.Event()

    def lease_seconds(self) -> int:
        return self._duration_s

    def heard(self) -> tuple[int, ...]:
        return (self.known,)

    def lead(self, epoch: int) -> None:
        assert self.elector.writes_s() > 0
        self.epochs.append(epoch)
        self.changed.set()

    async def follow(self) -> None:
        assert self.elector.writes_s() == 0
        self.epochs.append(None)
        self.changed.set()

    async def until(self, *expected: int | None) -> None:
        """Waits until `self.epochs` begins with these."""
        async with asyncio.timeout(LIMIT_S):
            while self.epochs[: len(expected)] != list(expected):
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def standing(self, *, releases: bool = True) -> AsyncIterator[Played]:
        task = asyncio.create_task(self.elector.run(self))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if releases:
                await self.elector.release()


def path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/pilotlight"


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await what():
            await asyncio.sleep(0.02)


async def test_released_lease_is_acquired_before_expiry_with_a_higher_epoch(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_election, "RELEASE_S_MAX", LIMIT_S)  # a paused API server answers later than in 2 s
    loop = asyncio.get_running_loop()
    a, b = Played(api, namespace, "a"), Played(api, namespace, "b")
    async with AsyncExitStack() as stack:
        async with a.standing():
            await a.until(1)
            await api.patch(path(namespace), {"metadata": {"labels": {"kept": "yes"}}})
            await stack.enter_async_context(b.standing())
            held = (await api.get(path(namespace)))["spec"]
            await asyncio.sleep(1.2 * LONG_S)
            assert (a.epochs, b.epochs) == ([1], []), "it is renewed"
            renewed = (await api.get(path(namespace)))["spec"]
            assert renewed["renewTime"] > held["renewTime"]
            assert (renewed["acquireTime"], renewed["leaseTransitions"]) == (held["acquireTime"], 1)
        released_s = loop.time()
        await b.until(2)
        assert loop.time() - released_s < LONG_S, "the Lease is not waited for"
        lease = await api.get(path(namespace))
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("b", 2)
        assert lease["metadata"]["labels"] == {"kept": "yes", INSTALLATION: installation_id(namespace, "pilotlight")}
    assert (await api.get(path(namespace)))["spec"]["holderIdentity"] == ""


async def test_vanished_leader_is_replaced_after_its_lease_expires(api: Api, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    a, b = Played(api, namespace, "a"), Played(api, namespace, "b")
    async with AsyncExitStack() as stack:
        async with a.standing(releases=False):
            await a.until(1)
            await stack.enter_async_context(b.standing())
        gone_s = loop.time()
        assert a.elector.writes_s() > 0
        await b.until(2)
        assert a.elector.writes_s() == 0, "two never may write at once"
        assert loop.time() - gone_s < 3 * LONG_S


async def test_deleted_lease_is_recreated_with_a_higher_epoch(api: Api, namespace: str) -> None:
    a = Played(api, namespace, "a")
    async with a.standing():
        await a.until(1)
        a.known = 7
        await a.until(1, None, 8)
        await api.delete(path(namespace))
        await a.until(1, None, 8, None, 9)


async def test_leader_with_a_hanging_api_server_steps_down_and_cannot_write(
    plane: Plane, kubeconfig: Path, namespace: str
) -> None:
    way = await load_api_access(kubeconfig)
    async with Api(way) as leasing:
        a = Played(leasing, namespace, "a", D)
        async with Api(way, a.elector.writes_s) as acting, a.standing():
            await a.until(1)
            maps = f"/api/v1/namespaces/{namespace}/configmaps"
            await acting.create(maps, {"metadata": {"name": "one"}})
            plane.signal_part("kube-apiserver", signal.SIGSTOP)
            try:
                await a.until(1, None)
                with pytest.raises(FencedError):
                    await acting.create(maps, {"metadata": {"name": "two"}})
            finally:
                plane.signal_part("kube-apiserver", signal.SIGCONT)
            await a.until(1, None, 2)
            await acting.create(maps, {"metadata": {"name": "three"}})
            assert "two" not in [one["metadata"]["name"] for one in (await acting.get(maps))["items"]]


# --- gateways --------------------------------------------------------------------------------------------------------


def gateway_pod(name: str, node: Node, *command: str) -> Object:
    container = {"name": "gateway", "image": "x", "command": list(command)}
    spec = {"containers": [container], "restartPolicy": "Never", "nodeName": node.name}
    labels = {"app.kubernetes.io/component": "gateway"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def test_gateway_is_reported_gone_when_its_pod_fails_or_is_deleted(api: Api, namespace: str, node: Node) -> None:
    events: list[GatewaySeen | GatewayGone] = []
    pods = f"/api/v1/namespaces/{namespace}/pods"
    await api.create(pods, gateway_pod("g1", node, "/bin/sleep", "600"))
    await api.create(pods, gateway_pod("g2", node, "/bin/sleep", "600"))
    await api.create(pods, gateway_pod("g3", node, "/bin/false"))
    task = asyncio.create_task(GatewayPods(api, namespace, events.extend).run())

    async def seen(kind: type[GatewaySeen | GatewayGone], *names: str) -> bool:
        return {one.gateway for one in events if isinstance(one, kind)} >= set(names)

    try:
        await until(lambda: seen(GatewaySeen, "g1", "g2"))
        await until(lambda: seen(GatewayGone, "g3"))
        node.fall_silent()  # the pods are no longer reported: they may still run
        await api.delete(f"{pods}/g1", grace_s=0)
        await until(lambda: seen(GatewayGone, "g1", "g3"))
    finally:
        task.cancel()


async def test_silent_gateway_is_removed_if_its_pod_no_longer_exists(
    api: Api, namespace: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are known only from their reports and are silent. A pod's name is `DEPLOYMENT-HASH-RANDOM`."""
    monkeypatch.setattr(gateway_pods, "LOOK_S", 0.1)
    one = gateway_pod("", node, "/bin/sleep", "600")
    one["metadata"] |= {"generateName": "pl-gateway-7c9d8f6b5-", "name": None}
    one["metadata"]["labels"]["pod-template-hash"] = "7c9d8f6b5"
    made = (await api.create(f"/api/v1/namespaces/{namespace}/pods", one))["metadata"]["name"]
    before, strangers = "pl-gateway-5d4f9b8c7-x2x4z", ("g1", "pl-gateway", "pl-gateway-extra-5d4f9b8c7-x2x4z")
    events: list[GatewaySeen | GatewayGone] = []
    silent = [GatewayId(name) for name in (*strangers, made, before)]
    task = asyncio.create_task(GatewayPods(api, namespace, events.extend, silent=lambda: silent).run())

    async def gone() -> bool:
        return sum(isinstance(one, GatewayGone) for one in events) >= 3

    try:
        await until(gone)
    finally:
        task.cancel()
    assert {one.gateway for one in events if isinstance(one, GatewayGone)} == {before}


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_only_pilotlight_audience_tokens_of_listed_accounts_are_admitted(
    api: Api, namespace: str, plane: Plane
) -> None:
    for name in ("gateway", "agent", "other"):
        await make_account(api, namespace, name)
    now_s = 0.0
    users = {
        f"system:serviceaccount:{namespace}:{name}": roles for name, roles in (("gateway", GATEWAY), ("agent", AGENT))
    }
    tokens = Tokens(api, users, clock=lambda: now_s)
    own = await token(api, namespace, "gateway", audiences=["pilotlight"])
    new = await token(api, namespace, "gateway", audiences=["pilotlight"])
    for_the_api_server = await token(api, namespace, "gateway", audiences=["https://kubernetes.default.svc"])

    async def taken(shown: str) -> bool:
        return await tokens.admits(shown) is not None

    await until(lambda: taken(own))  # a review that times out counts as rejected
    of_agent = await token(api, namespace, "agent", audiences=["pilotlight"])
    await until(lambda: taken(of_agent))
    assert await tokens.admits(of_agent) == Authenticated(roles=AGENT)
    assert not await tokens.admits(for_the_api_server)
    assert not await tokens.admits(await token(api, namespace, "other", audiences=["pilotlight"]))
    assert not await tokens.admits(own[:-4] + "AAAA")
    assert not await tokens.admits("")

    asked = api.requests
    assert await tokens.admits(own)
    assert api.requests == asked, "the answer is kept for a while"
    now_s += KEPT_S
    plane.signal_part("kube-apiserver", signal.SIGSTOP)
    try:
        known, unknown = await asyncio.gather(tokens.admits(own), tokens.admits(new))
        assert (known, unknown) == (Authenticated(roles=GATEWAY), None), (
            "the last verdict stays valid, and no new token is admitted"
        )
        now_s += STANDS_S
        assert not await tokens.admits(own)
    finally:
        await tokens.close()
        plane.signal_part("kube-apiserver", signal.SIGCONT)
    await until(lambda: taken(new))


async def test_pod_bound_token_yields_the_node_of_its_pod(api: Api, namespace: str, node: Node) -> None:
    await make_account(api, namespace, "agent")
    container = {"name": "a", "image": "a", "command": ["/bin/sleep", "600"]}
    spec = {"serviceAccountName": "agent", "nodeName": node.name, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": spec}
    uid = (await api.create(f"/api/v1/namespaces/{namespace}/pods", pod))["metadata"]["uid"]
    bound = {"apiVersion": "v1", "kind": "Pod", "name": "agent", "uid": uid}
    shown = await token(api, namespace, "agent", audiences=["pilotlight"], boundObjectRef=bound)
    tokens, found = Tokens(api, {f"system:serviceaccount:{namespace}:agent": BOTH}), list[str]()

    async def known() -> bool:
        admitted = await tokens.admits(shown)
        found.extend([] if admitted is None else [admitted.node])
        return bool(found)

    await until(known)
    assert found == [node.name]
