"""A leader change at each write: it is not sent, its response is lost, or it arrives long after a change of leader.
For every kind of write (a pod, its mark, a scale, a status, a condition, an Event) the final state is that of a single
leader, and no action is performed twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from autoscaler.drivers.kubernetes.adoption import status_writer as adoption_status_writer
from autoscaler.drivers.kubernetes.adoption.annotations import LOW, WRONG
from autoscaler.drivers.kubernetes.adoption.objects import COST, REPLICA
from autoscaler.drivers.kubernetes.adoption.status import SCALED
from autoscaler.drivers.kubernetes.objects.pod_manifest import DRAIN
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources import event_writer as events
from autoscaler.kubernetes.resources import status_writer
from autoscaler.state.lifecycle import ReplicaState as S
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.adoption import OURS, workload
from tests.integration.cluster.support.installations.leader_change import Moment, Relay, Write, relay
from tests.integration.cluster.support.installations.manual_loop import condition
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.engines.fake_engine_process import command

WITHIN_S = 90.0
SCALE = Write("PATCH", "/deployments/[^/]+/scale")
MARK = Write("PATCH", "/pods/emb-[^/]+")
STATUS = Write("PATCH", "/models/[^/]+/status")
EVENT = Write("POST", "/events")
POD = Write("POST", "/pods")
UP = (EVENT, POD, SCALE, MARK, STATUS)
DOWN = (Write("PATCH", "/pods/ada-[^/]+"), Write("DELETE", "/pods/ada-[^/]+"), SCALE, MARK, STATUS)
SHOWN = Write("PATCH", "/deployments/[^/]+/status")


class Scene:
    """A Model, `ada`, and a Deployment of another owner, `emb`, both at zero, and the leader."""

    def __init__(self, api: Api, namespace: str, node: Node) -> None:
        self.api = api
        self.ada, self.emb = f"ada-{namespace}", f"emb-{namespace}"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{self.emb}"
        self.model = f"{custom_resources.models(namespace)}/{self.ada}"
        self.ran = Counter[str]()
        """Containers ever started, by the first three letters of their pods."""
        node.on_container = lambda pod, _: self.ran.update([pod[:3]])
        self.both: Relay

    async def furnish(self) -> None:
        words = command("--host", "{host}", "--port", "{port}", "--name", self.ada)
        ada = custom_resources.model(
            self.ada, image="fake", command=words, gpu={"memory": "1Gi"}, idleSeconds=0, residencySeconds=0
        )
        await self.api.create(self.model.rpartition("/")[0], ada)
        notes = {OURS + "models": self.emb, OURS + "idle-seconds": "0", OURS + "replicas-max": "1"}
        body = workload(self.emb, 0, notes)
        body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
        await self.api.create(self.deployment.rpartition("/")[0], body)

    # --- expected states ----------------------------------------------------------------------------------------------

    async def up(self) -> str:
        """Checks that both run once each and that their status shows it; returns a deviation."""
        pods = (await self.api.get(self.pods))["items"]
        notes = {pod["metadata"]["name"][:3]: pod["metadata"].get("annotations", {}) for pod in pods}
        if len(pods) != 2 or len(notes) != 2 or any("deletionTimestamp" in pod["metadata"] for pod in pods):
            return f"pods {[pod['metadata']['name'] for pod in pods]}"
        if DRAIN in notes["ada"] or COST in notes["emb"]:
            return f"marks {notes}"
        states = {one.id: one.state for one in self.both.leader.world.replicas.values()}
        (emb,) = (pod["metadata"] for pod in pods if pod["metadata"]["name"].startswith("emb-"))
        named = notes["emb"].get(REPLICA, f"{emb['name']}-{emb['uid'][:5]}")
        if list(states.values()) != [S.READY, S.READY] or named not in states:
            return f"Replicas {states}, not {named}"
        return await self._shows(1, "Serving")

    async def down(self) -> str:
        """Checks that nothing runs and that the status shows it; returns a deviation."""
        left = (await self.api.get(self.pods))["items"]
        if left or self.both.leader.world.replicas:
            return f"{len(left)} pods, {list(self.both.leader.world.replicas)}"
        return await self._shows(0, "Idle")

    async def _shows(self, replicas: int, reason: str) -> str:
        deployment, model = await self.api.get(self.deployment), await self.api.get(self.model)
        if deployment["spec"]["replicas"] != replicas:
            return f"the scale is {deployment['spec']['replicas']}"
        ready, shown = model.get("status", {}).get("replicas", {}).get("ready"), condition(model, "Ready").get("reason")
        return "" if (ready, shown) == (replicas, reason) else f"status {ready} {shown}"

    async def is_shown(self, reason: str) -> str:
        """Checks that the workload's condition has this reason; returns a deviation."""
        conditions: list[Object] = (await self.api.get(self.deployment)).get("status", {}).get("conditions", [])
        reasons = [one["reason"] for one in conditions if one["type"] == OURS + "Adopted"]
        return "" if reasons == [reason] else f"conditions {reasons}"

    # --- leader changes -----------------------------------------------------------------------------------------------

    async def until(self, so: Callable[[], Awaitable[str]]) -> None:
        """Polls until there is no deviation; fails with the last one."""
        left = "nothing yet"
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while left:
                    left = await so()
                    await asyncio.sleep(0.02)
        assert not left

    async def woken(self) -> int:
        """The number of Woken events of ada."""
        selector = f"involvedObject.name={self.ada},reason=Woken"
        events = await self.api.get(self.pods.replace("/pods", "/events"), fieldSelector=selector)
        return sum(one["count"] for one in events["items"])

    async def through(
        self, write: Write, moment: Moment, change: Awaitable[None], so: Callable[[], Awaitable[str]]
    ) -> None:
        """Applies a change, and changes the leader at a write that it causes."""
        first = self.both.leader.api
        first.end_at(write, moment)
        await change
        async with asyncio.timeout(WITHIN_S):
            await self.both.hand_over()
        await self.until(so)
        if moment is Moment.LATE:
            await first.release()
            await self.until(so)

    async def call(self, *names: str) -> None:
        """Makes requests wait for these models from now on."""
        self.both.calls = names

    async def annotate(self, key: str, value: str | None) -> None:
        """Sets an annotation as the workload's owner does."""
        await self.api.patch(self.deployment, {"metadata": {"annotations": {key: value}}})


@pytest.fixture
async def scene(
    served: Api, namespace: str, node: Node, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    for module in (events, adoption_status_writer, status_writer):
        monkeypatch.setattr(module, "RETRY_S", 0.2)  # one of the moments is a write without a response
    one = Scene(served, namespace, node)
    await one.furnish()
    async with relay(kubeconfig, namespace) as one.both:
        await one.until(one.down)
        await one.until(lambda: one.is_shown(SCALED))
        yield one


@pytest.mark.case("26")
@pytest.mark.parametrize("moment", Moment)
async def test_models_scale_up_and_down_if_leadership_changes_at_any_write(scene: Scene, moment: Moment) -> None:
    for starts, stops in zip(UP, DOWN, strict=True):
        before = scene.ran.copy()
        await scene.through(starts, moment, scene.call(scene.ada, scene.emb), scene.up)
        await scene.through(stops, moment, scene.call(), scene.down)
        late = {"ada": 1} if (starts, moment) == (POD, Moment.LATE) else {}
        assert scene.ran - before in (Counter(ada=1, emb=1), Counter(ada=1, emb=1) + Counter(late)), (starts, stops)
    assert await scene.woken() <= scene.ran["ada"] + len(UP), "at each hand-over one may have come to nothing"


@pytest.mark.case("26")
@pytest.mark.parametrize("moment", Moment)
async def test_leader_change_at_a_condition_write_ends_in_the_latest_condition(scene: Scene, moment: Moment) -> None:
    for value, shown in (("many", WRONG), (None, SCALED)):
        await scene.through(SHOWN, moment, scene.annotate(LOW, value), partial(scene.is_shown, shown))
