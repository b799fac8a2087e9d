"""Memory needs of a Model in a cluster from agents' inspections, and behavior until they are known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from artifacts.formats import gguf
from autoscaler.agent_contract import WeightsReport, WeightsRequest, read_weights_request
from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.drivers import resilient_tasks
from autoscaler.planner.plan import plan
from autoscaler.planner.reconcile import READ_S_MAX, UNREAD
from autoscaler.spec.model import Adapter, Gpu, Model, ModelSpec
from autoscaler.spec.quantity import BytesOrAuto
from autoscaler.state.actions import Plan, StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import World
from loadtest import tiny_gguf
from pilotlight.models import cluster_model_memory, document_loading, header_report
from pilotlight.models.cluster_model_memory import Sizes
from tests.support.builders.worlds import T0, device, gateway, level, replace_fields, replica, world

ADA, LORA = "oci://r.io/ada:1", "oci://r.io/lora:1"


def model(name: str = "ada", artifact: str | None = ADA, **spec: object) -> Model:
    given = {"engine": "llama.cpp", "artifact": artifact, "context_tokens": 256, **spec}
    return Model(name=ModelName(name), spec=ModelSpec(**given))  # type: ignore[arg-type]  # fields of each test


@pytest.fixture
def header(tmp_path: Path) -> str:
    tiny_gguf.make_model(tmp_path / "a.gguf", "Hello, I am Ada.")
    return msgspec.json.encode(
        header_report.Header("Its GGUF header", gguf.load_gguf_info(tmp_path / "a.gguf").shape)
    ).decode()


def seen(*reports: WeightsReport) -> dict[WeightsRequest, WeightsReport]:
    return {read_weights_request(one): one for one in reports}


def look(artifact: str = ADA, **fields: object) -> WeightsReport:
    return WeightsReport(artifact=artifact, look=True, digest="sha256:aa", **fields)  # type: ignore[arg-type]


def of(one: Model, *reports: WeightsReport, at: Sizes | None = None) -> Model:
    (found,) = (at or Sizes(lambda: T0)).of([one], seen(*reports)).models
    return found


def test_memory_estimate_waits_until_the_header_is_read_or_unreadable(header: str) -> None:
    assert of(model()).unread_s == T0
    assert of(model(), look()).unread_s == T0, "it was looked at as an image, without its header"
    assert of(model(), look(no_header="truncated")) == model(), "it takes whole Devices"
    sized = of(model(), look(header=header))
    assert sized.unread_s is None
    assert sized.memory_bytes > 0


def test_header_wait_time_restarts_only_for_another_artifact() -> None:
    now_s = T0
    at = Sizes(lambda: now_s)
    of(model(), at=at)
    now_s += 5
    assert of(model(), look(), at=at).unread_s == T0
    assert of(model(artifact="oci://r.io/ada:2"), at=at).unread_s == now_s


@pytest.mark.parametrize(
    "one",
    [
        model(engine="vllm"),
        model(artifact="file:///a.gguf"),
        model(gpu=Gpu(count=0)),
        replace(model(gpu=Gpu(memory_bytes=BytesOrAuto(1 << 30))), memory_bytes=1 << 30),
    ],
)
def test_model_that_needs_no_header_does_not_wait_for_one(one: Model) -> None:
    assert of(one) == one


def test_unknown_adapter_size_delays_the_memory_estimate(header: str) -> None:
    one = model(adapters=(Adapter(name="x", artifact=LORA),))
    assert of(one, look(header=header)).memory_bytes == 0
    assert of(one, look(header=header)).unread_s == T0
    both = of(one, look(header=header), look(LORA, no_header="none", bytes=1000))
    assert both.memory_bytes >= of(model(), look(header=header)).memory_bytes + 1000
    given = Gpu(memory_bytes=BytesOrAuto(1 << 30), elastic_percent=10)
    elastic = replace(model(gpu=given, adapters=one.spec.adapters), memory_bytes=1 << 30)
    assert of(elastic, look(header=header)) == elastic, (
        "nor does its cache count as the only memory that it could release"
    )


def test_new_header_recomputes_only_the_memory_estimate_of_its_model(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked, at, before = list[str](), Sizes(lambda: T0), document_loading.fill_memory_estimate

    def completed(model: Model, *known: Any, gpus: bool) -> Model:
        worked.append(model.name)
        return before(model, *known, gpus=gpus)

    monkeypatch.setattr(cluster_model_memory, "fill_memory_estimate", completed)
    models = [model(f"m{number}", f"oci://r.io/m:{number}") for number in range(50)]
    looked: dict[WeightsRequest, WeightsReport] = {}
    for one in models:
        looked = looked | seen(look(one.spec.artifact or "", header=header))
        assert sum(bool(done.memory_bytes) for done in at.of(models, looked).models) == len(looked)
    assert len(worked) == len(models)
    at.of(models[:1], looked)
    assert worked[len(models) :] == [], "one that goes is forgotten, and costs the others nothing"


def test_failed_memory_estimate_of_one_model_leaves_others_estimated(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = document_loading.fill_memory_estimate

    def completed(of: Model, *known: Any, gpus: bool) -> Model:
        if of.name == "bad":
            raise ValueError("bad header")
        return before(of, *known, gpus=gpus)

    monkeypatch.setattr(cluster_model_memory, "fill_memory_estimate", completed)
    bad, good = model("bad"), model("good")
    found = Sizes(lambda: T0).of([bad, good], seen(look(header=header)))
    assert [(fault.model, fault.reason.endswith("bad header")) for fault in found.faults] == [("bad", True)]
    assert found.models[0] is bad
    assert found.models[1].memory_bytes > 0


async def test_headers_read_after_the_first_are_reported_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    at, counts, slept, go_on = Sizes(lambda: T0), list[int](), asyncio.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        slept.set()
        await go_on.wait()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    task, before = asyncio.create_task(at.run(lambda: counts.append(number))), world()
    for number in range(100):
        after = replace_fields(before, looked=seen(look(f"oci://r.io/m:{number}")))
        at.on_step(LoopStep(before, after, Plan(), (), (), T0, T0, T0))
        if not number:
            await slept.wait()
    assert counts == [0], "the first at once"
    at.on_step(LoopStep(after, after, Plan(), (), (), T0, T0, T0))
    slept.clear()
    go_on.set()
    await slept.wait()
    assert counts == [0, 99]
    task.cancel()


async def test_memory_update_that_raises_an_exception_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilient_tasks, "PAUSE_S", 0.0)
    at, calls, reported, done = Sizes(lambda: T0), list[int](), list[str](), asyncio.Event()

    def again() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("injected")
        done.set()

    task = asyncio.create_task(resilient_tasks.retry_until_success(lambda: at.run(again), reported.append))
    before = world()
    after = replace_fields(before, looked=seen(look("oci://r.io/m:1")))
    at.on_step(LoopStep(before, after, Plan(), (), (), T0, T0, T0))
    await done.wait()
    task.cancel()
    assert len(calls) == 2
    assert "LookupError" in reported[0]


# --- the resulting plan -----------------------------------------------------------------------------------------------


def called(one: Model, **fields: Any) -> World:
    calls = [gateway(levels=[level("ada", 1)])]
    return world([one], [device(memory_gi=24)], gateways=calls, leading_since_s=T0, **fields)


def test_new_leader_waits_for_a_header_before_using_a_whole_device() -> None:
    at = called(replace(model(), unread_s=T0 - 600))
    made = plan(at, T0 + READ_S_MAX - 0.1)
    assert (made.actions, [one.reason for one in made.unmet]) == ((), [UNREAD])
    assert made.next_s == T0 + READ_S_MAX
    (start,) = plan(at, T0 + READ_S_MAX).actions
    assert isinstance(start, StartReplica), "no agent inspects it, so its full size is counted"


def test_failed_inspection_does_not_delay_the_start() -> None:
    lora = model(adapters=(Adapter(name="x", artifact=LORA),))
    for one, artifact in ((model(), ADA), (lora, LORA)):
        (start,) = plan(called(replace(one, unread_s=T0), unbrought={artifact: "away"}), T0).actions
        assert isinstance(start, StartReplica)


def test_changed_spec_rolls_out_only_after_its_artifact_header_is_read() -> None:
    before, after = model(artifact="oci://r.io/ada:0"), replace(model(), unread_s=T0)
    running = replica(before, "a1", state=S.READY)
    at = world([after], [device(), device("gpu1")], [running], gateways=[gateway(levels=[level("ada", 0, 1)])])
    assert [one.reason for one in plan(at, T0).unmet] == [UNREAD]
    assert [type(one) for one in plan(replace(at, models={after.name: model()}), T0).actions] == [StartReplica]
