"""An exception while one Model's document is decoded, merged, converted or sized affects only that Model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Concatenate, ParamSpec

import pytest
from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, TenantName
from autoscaler.controller.loop import Loop
from autoscaler.routing import catalogue, routes
from autoscaler.spec.model import ModelSpec
from autoscaler.state.events import ModelWoken
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Leadership, World
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.effects import Refuse
from tests.simulation.environment import virtual_loop
from tests.simulation.environment.api_server import Server
from tests.simulation.installations.model_objects import KUBEAI_MODELS, DocumentTasks, ModelObjects, faults
from tests.support.builders.fold import reported
from tests.support.builders.worlds import device, level
from tests.support.fakes.driver import FakeDriver, FakeMachine
from tests.support.harness.faults.fault_injection import Faults, concerns, inject
from tests.support.harness.gateway.dispatch_script import call_of
from tests.support.harness.scenarios import hide_parameters

GATEWAY = GatewayId("g1")
SPEC = ModelSpec(engine="vllm", artifact="hf://org/name", image="vllm:1", idle_seconds=9000.0)
OTHER = ModelSpec(engine="vllm", artifact="hf://org/name", image="vllm:1", idle_seconds=9001.0, aliases=("alias",))
KUBEAI_SPEC = {
    "url": "hf://org/name", "engine": "VLLM", "features": ["TextGeneration"], "resourceProfile": "cpu:1",
    "scaleDownDelaySeconds": 9000,
}  # fmt: skip
DECODE, MERGE = "autoscaler.documents.parse:_model", "autoscaler.spec.document_names:_settled"
SIZE = "pilotlight.models.cluster_model_memory:Sizes._make"
POINTS = (DECODE, MERGE, SIZE)
P = ParamSpec("P")


class Rig:
    """A loop with two devices, and the objects that it reads its documents from."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.objects = ModelObjects(Server())
        self.tasks: list[asyncio.Task[None]] = []
        self._machine = FakeMachine(asyncio.get_running_loop(), (device("gpu0", 24), device("gpu1", 24)))
        self._reports = self._epoch = 0
        self.start()

    def start(self) -> None:
        """Start the autoscaler. It decides once it has all documents, as in a cluster."""
        self._epoch += 1
        clock = asyncio.get_running_loop().time
        world = World(epoch=self._epoch, leadership=Leadership(leads=True, leading_since_s=clock()))
        self.loop = Loop(world, FakeDriver(self._machine), clock)
        documents = DocumentTasks(self.objects.server, self.loop, "a")

        async def decide() -> None:
            await asyncio.sleep(0.5)
            await self.loop.run()

        self.tasks = [asyncio.create_task(documents.run()), asyncio.create_task(decide())]

    async def stop(self) -> None:
        """Stop the autoscaler; replicas keep running. It must not have ended before."""
        ended = [task for task in self.tasks if task.done()]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not ended

    def inject(self, point: str) -> Faults:
        """Make the function raise for the Model `b`."""
        return inject(self.patch, point, concerns("b"))

    def faults(self) -> dict[ModelName, int]:
        """Model -> number of its quarantines in a row, of those quarantined now."""
        return faults(self.loop.world)

    def idle_s(self, name: str) -> object:
        """`idleSeconds` of the document in force."""
        return self.loop.world.models[ModelName(name)].spec.idle_seconds

    async def call(self, *names: str) -> None:
        """Report one queued request for each Model, and wait for the effect."""
        self._reports += 1
        self.loop.observe([reported(self._reports, levels=[level(name, 1, wait_s=1.0) for name in names])])
        await asyncio.sleep(2.0)

    def refusal(self, name: str) -> str:
        """The code with which requests for the Model are rejected; empty: they are not."""
        route = routes.model_route(self.loop.world, ModelName(name), self.loop.now_s(), GatewayId("g1"))
        return "" if route is None or route.refusal is None else route.refusal.code

    def answer(self, name: str) -> str:
        """The code with which a new gateway rejects a request for the Model; empty: it waits or is granted."""
        gateway, now_s = Dispatcher(GATEWAY, "boot"), self.loop.now_s()
        gateway.catalogue(catalogue.catalogue_full(self.loop.world), now_s)
        gateway.routes(routes.routes_full(self.loop.world, GATEWAY, now_s), now_s)
        rejected = [
            one for one in gateway.arrive(call_of("c1", model=name, now_s=now_s), now_s) if isinstance(one, Refuse)
        ]
        return rejected[0].error.code if rejected else ""

    def ready(self) -> set[str]:
        """Models with a ready replica."""
        return {one.model for one in self.loop.world.replicas.values() if one.state is S.READY}


Scenario = Callable[Concatenate[Rig, P], Coroutine[object, object, None]]


def simulated(scenario: Scenario[P]) -> Callable[P, None]:
    """Make a test that runs the scenario in virtual time. pytest passes all parameters except the rig."""

    @wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            with pytest.MonkeyPatch.context() as patch:
                rig = Rig(patch)
                try:
                    await scenario(rig, *args, **kwargs)
                finally:
                    await rig.stop()

        virtual_loop.run(whole())

    return hide_parameters(test, scenario, 1)


async def both(rig: Rig) -> None:
    """Create the Models `a` and `b`."""
    for name in ("a", "b"):
        rig.objects.put(name, SPEC)
    await asyncio.sleep(3.0)


@pytest.mark.parametrize("point", POINTS)
@simulated
async def test_new_model_whose_document_raises_is_quarantined_and_no_other_is(rig: Rig, point: str) -> None:
    rig.inject(point)
    await both(rig)
    await rig.call("a", "b")
    assert rig.faults() == {"b": 1}
    assert (rig.refusal("a"), rig.refusal("b"), rig.ready()) == ("", "model_faulty", {"a"})
    assert (rig.answer("a"), rig.answer("b")) == ("", "model_faulty")
    await asyncio.sleep(5.0)
    assert rig.objects.conditions("b")["Faulty"] == "True"
    assert (rig.objects.conditions("a")["Faulty"], rig.objects.conditions("a")["Ready"]) == ("False", "True")


async def change_both(rig: Rig, point: str) -> None:
    """Change both Models while `b` is ready and its document raises at this point; `b` stays available."""
    await both(rig)
    await rig.call("b")
    rig.inject(point)
    rig.objects.put("b", OTHER)
    rig.objects.put("a", OTHER)
    await rig.call("b")
    assert rig.faults() == {"b": 1}
    assert (rig.idle_s("a"), rig.ready(), rig.refusal("b")) == (9001.0, {"b"}, "")


@simulated
async def test_changed_document_is_in_force_if_its_size_calculation_raises(rig: Rig) -> None:
    await change_both(rig, SIZE)
    assert rig.idle_s("b") == 9001.0


@pytest.mark.parametrize("point", [DECODE, MERGE])
@simulated
async def test_changed_document_that_raises_leaves_the_last_valid_one_in_force(rig: Rig, point: str) -> None:
    await change_both(rig, point)
    assert rig.idle_s("b") == 9000.0
    await asyncio.sleep(100.0)
    assert (rig.faults(), rig.ready()) == ({"b": 2}, {"b"})
    assert len(rig.loop.world.replicas) == 1, "no start"


@pytest.mark.parametrize("point", POINTS)
@simulated
async def test_document_that_raises_is_read_again_after_1_2_4_to_30_minutes(rig: Rig, point: str) -> None:
    fault = rig.inject(point)
    began_s = rig.loop.now_s()
    await both(rig)
    await rig.call("b")
    retried_s = list[float]()
    for times in range(2, 8):
        while rig.faults() != {"b": times}:
            assert rig.loop.world.learned.faults[ModelName("b")].times < times + 1
            await asyncio.sleep(1.0)
        retried_s.append(rig.loop.now_s() - began_s)
        assert not rig.loop.world.replicas, "no start between two quarantines"
    waits_s = [after - before for before, after in itertools.pairwise([0.0, *retried_s])]
    assert waits_s == pytest.approx([60.0, 120.0, 240.0, 480.0, 960.0, 1800.0], abs=6.0)
    fault.stop()
    await asyncio.sleep(1801.0)
    assert (rig.faults(), rig.idle_s("b")) == ({}, 9000.0)
    await rig.call("b")
    assert rig.ready() == {"b"}
    await asyncio.sleep(5.0)
    assert rig.objects.conditions("b")["Faulty"] == "False"


@pytest.mark.parametrize("point", POINTS)
@simulated
async def test_changed_document_or_wake_ends_the_quarantine_of_a_fixed_model(rig: Rig, point: str) -> None:
    first = rig.inject(point)
    await both(rig)
    assert rig.faults() == {"b": 1}
    first.stop()
    rig.objects.put("b", replace(SPEC, idle_seconds=9002.0))
    await asyncio.sleep(1.5)
    assert (rig.faults(), rig.idle_s("b")) == ({}, 9002.0)
    fault = rig.inject(point)
    rig.objects.put("b", OTHER)
    await asyncio.sleep(1.5)
    assert rig.faults() == {"b": 1}
    rig.loop.observe([ModelWoken(model=ModelName("b"))])
    await asyncio.sleep(1.5)
    assert rig.faults() == {"b": 2}, "its document still raises the exception"
    fault.stop()
    rig.loop.observe([ModelWoken(model=ModelName("b"))])
    await asyncio.sleep(1.5)
    assert (rig.faults(), rig.idle_s("b")) == ({}, 9001.0)


@pytest.mark.parametrize("point", POINTS)
@simulated
async def test_fault_count_of_a_model_restarts_only_with_another_document(rig: Rig, point: str) -> None:
    rig.inject(point)
    await both(rig)
    for times in (2, 3):
        rig.loop.observe([ModelWoken(model=ModelName("b"))])
        await asyncio.sleep(1.5)
        rig.objects.put("a", replace(SPEC, idle_seconds=9000.0 + times))
        await asyncio.sleep(1.5)
        assert rig.faults() == {"b": times}, "every document was merged and sized again"
    rig.objects.put("b", OTHER)
    await asyncio.sleep(1.5)
    assert rig.faults() == {"b": 1}, "another document"


@simulated
async def test_revert_of_a_document_that_raises_ends_the_quarantine(rig: Rig) -> None:
    await both(rig)
    fault = rig.inject(DECODE)
    rig.objects.put("b", OTHER)
    await asyncio.sleep(1.5)
    assert rig.faults() == {"b": 1}
    fault.stop()
    rig.objects.put("b", SPEC)
    await asyncio.sleep(1.5)
    assert rig.loop.world.learned.faults == {}


@simulated
async def test_invalid_document_of_a_new_quarantined_model_is_reported_invalid(rig: Rig) -> None:
    fault = rig.inject(DECODE)
    await both(rig)
    assert rig.loop.world.models[ModelName("b")].spec.artifact is None, "its stand-in"
    fault.stop()
    rig.objects.put("b", {"engine": "vllm", "slots": "many"})
    await asyncio.sleep(3.0)
    assert "b" not in rig.loop.world.models, "its stand-in was no valid version"
    assert rig.objects.conditions("b")["Ready"] == "False"
    assert rig.loop.world.learned.faults == {}


@simulated
async def test_undecodable_new_model_keeps_the_tenant_list_of_its_document(rig: Rig) -> None:
    rig.inject(DECODE)
    rig.objects.put("b", replace(SPEC, tenants=(TenantName("acme"),)))
    rig.objects.put("a", SPEC)
    await asyncio.sleep(3.0)
    assert rig.loop.world.models[ModelName("b")].spec.tenants == ("acme",)


@simulated
async def test_only_the_kubeai_model_whose_conversion_raises_is_quarantined(rig: Rig) -> None:
    fault = rig.inject("autoscaler.importers.kubeai.models:convert_live_model")
    for name in ("a", "b"):
        rig.objects.put(name, KUBEAI_SPEC, KUBEAI_MODELS)
    await asyncio.sleep(3.0)
    await rig.call("a", "b")
    assert rig.faults() == {"b": 1}
    assert (rig.ready(), rig.refusal("b")) == ({"a"}, "model_faulty")
    fault.stop()
    for _ in range(31):
        await rig.call("b")
    assert (rig.faults(), rig.ready()) == ({}, {"a", "b"})
    again = rig.inject("autoscaler.importers.kubeai.models:convert_live_model")
    rig.objects.put("b", {**KUBEAI_SPEC, "minReplicas": 1}, KUBEAI_MODELS)
    await asyncio.sleep(3.0)
    assert (rig.faults(), rig.ready()) == ({"b": 1}, {"a", "b"})
    assert rig.loop.world.models[ModelName("b")].spec.replicas.min == 0
    again.stop()
    rig.loop.observe([ModelWoken(model=ModelName("b"))])
    await asyncio.sleep(1.5)
    assert rig.loop.world.models[ModelName("b")].spec.replicas.min == 1


@simulated
async def test_deletion_of_a_quarantined_model_removes_its_recorded_fault(rig: Rig) -> None:
    rig.inject(DECODE)
    await both(rig)
    rig.objects.delete("b")
    await asyncio.sleep(3.0)
    assert rig.loop.world.learned.faults == {}
    assert [*rig.loop.world.models] == ["a"]


@simulated
async def test_alias_of_a_model_that_raises_passes_to_the_next_claimant(rig: Rig) -> None:
    """The names that a Model claimed before it raised are free again."""
    rig.inject(MERGE)
    rig.objects.put("b", OTHER)
    rig.objects.put("c", OTHER)
    await asyncio.sleep(3.0)
    world = rig.loop.world
    assert {name: tuple(one.spec.aliases) for name, one in world.models.items()} == {"b": (), "c": ("alias",)}


@simulated
async def test_ready_replica_of_an_undecodable_model_serves_after_a_restart(rig: Rig) -> None:
    rig.objects.put("b", OTHER)
    await asyncio.sleep(3.0)
    await rig.call("b")
    rig.inject(DECODE)
    await rig.stop()
    rig.start()
    await asyncio.sleep(3.0)
    for times in (1, 2):
        await rig.call("b")
        assert (rig.faults(), rig.ready(), len(rig.loop.world.replicas)) == ({"b": times}, {"b"}, 1)
        assert rig.answer("b") == ""
        await asyncio.sleep(70.0)
