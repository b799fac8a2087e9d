"""Elastic models (`gpu.elastic`): placed with less memory if that gives a tighter fit, and engines get that limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.drivers.local.devices import Devices
from autoscaler.engines import LaunchCommand, build_launch_command
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import explain_fit
from autoscaler.explain.model import explain_model
from autoscaler.planner.plan import plan
from autoscaler.queries.granted_memory import (
    AS_ASKED,
    Given,
    compute_slots,
    explain_rigid_memory,
    has_shrunk,
    spare_bytes,
)
from autoscaler.queries.granted_memory import compute_engine_limits as engine_limits
from autoscaler.slicing import slicers
from autoscaler.spec.model import Cache, Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.spec.quantity import Bytes, BytesOrAuto
from autoscaler.spec.settings import DeclaredDevice
from autoscaler.state.actions import StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, Slice, SliceId, World
from pilotlight.models.document_loading import fill_memory_estimate
from pilotlight.models.explain_fit_needs import load_memory_needs
from pilotlight.models.model_memory import estimate_memory
from tests.support.builders.artifacts import model_files
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, world

TENTH, KEPT = Gpu(elastic_percent=10), ReplicaRange(min=1)


# --- the plan ---------------------------------------------------------------------------------------------------------


def elastic(name: str = "a", memory_gi: float = 10, **fields: Any) -> Model:
    """A llama.cpp model: four slots of 2 GiB and a file of 2 GiB."""
    cache = Cache(total_bytes=int(memory_gi * GI), slot_bytes=2 * GI, token_bytes=GI // 1024, context_tokens=8192)
    spec = ModelSpec(engine="llama.cpp", artifact="file:///a.gguf", **{"gpu": Gpu(elastic_percent=20), **fields})
    memory_bytes = int(memory_gi * GI)
    return Model(
        name=ModelName(name), spec=spec, memory_bytes=memory_bytes, slots=4, estimated_bytes=memory_bytes, cache=cache
    )


def start(at: World) -> Replica:
    (action,) = plan(at, T0).actions
    assert isinstance(action, StartReplica)
    return action.replica


def waiting(*models: Model, slices: Sequence[Slice], replicas: Sequence[Replica] = ()) -> World:
    return world(models, slices, replicas, [gateway(levels=[level(models[0].name, 1)])])


def test_elastic_replica_with_less_memory_gets_fewer_slots() -> None:
    a, b, full = elastic(context_tokens=2048), model("b", 14, low=1), elastic("full", replicas=KEPT)
    held = [replica(b, "rb"), replica(full, "rf", on=["gpu1"])]
    at = waiting(a, b, full, slices=[device("gpu0", 23.5), device("gpu1", 10)], replicas=held)
    one = start(at)
    assert (one.resources.slices, one.resources.memory_bytes, one.slots) == (("gpu0",), int(9.5 * GI), 3)
    assert one.spec_hash == a.spec_hash() == replace(a, spec=replace(a.spec, gpu=Gpu())).spec_hash()
    assert engine_limits(a, one) == Given(None, int(9.5 * GI), 3, 0)
    runs = replace(one, state=S.READY, since_s=T0, times=replace(one.times, ready_s=T0))
    then = world([a, b, full], at.nodes.slices.values(), [*held, runs], histories=None)
    log = explain_model(then, plan(then, T0), Log(), a.name, T0).sentences
    assert any(
        f"{one.id} has been ready for 0 s on gpu0, granted 9.5Gi of 10Gi, with 3 of 4 slots" in line for line in log
    )
    fit = explain_fit(then, a, load_memory_needs(a, gpus=False), T0)
    assert fit.least_bytes == 8 * GI
    assert (
        "It can run with 8Gi for a tighter fit (gpu.elastic): its engine is started with fewer slots, at least 3."
        in (fit.sentences)
    )
    assert f"{one.id} was granted 9.5Gi of 10Gi, with 3 of 4 slots." in fit.sentences


def test_no_memory_reduction_if_a_running_replica_already_has_less() -> None:
    """One replica runs with reduced memory and none with all of it, so the next one cannot be reduced."""
    a, b = elastic(context_tokens=2048), elastic("b", context_tokens=2048, replicas=KEPT)
    x = model("x", 11, low=1)
    for granted_gi, fits in ((10, True), (9, False)):
        held = [replica(b, "rb", on=["gpu1"], memory_bytes=granted_gi * GI), replica(x, "rx")]
        made = plan(waiting(a, b, x, slices=[device("gpu0", 20), device("gpu1", 10)], replicas=held), T0)
        assert [type(action) for action in made.actions] == [StartReplica] * fits


def test_elastic_replica_with_less_memory_gets_a_shorter_default_context() -> None:
    a = elastic()
    cut = replica(a, "r", memory_bytes=9 * GI)
    assert (compute_slots(a, 9 * GI), engine_limits(a, cut).shared_context_tokens) == (4, 8192 - 1024)
    assert engine_limits(a, replica(a, "r")) == Given(None, 10 * GI, 4, 0), (
        "a replica with whole devices gets the values of the document"
    )
    half = elastic(gpu=Gpu(elastic_percent=50))
    assert spare_bytes(half) == 4 * GI, "at least half of the context stays"
    limits = engine_limits(half, replica(half, "r", memory_bytes=6 * GI))
    assert limits.shared_context_tokens == 4096


def test_memory_is_never_reduced_if_the_engine_cannot_use_less() -> None:
    assert spare_bytes(elastic(context_tokens=2048, gpu=Gpu(elastic_percent=50))) == 5 * GI
    one_slot = replace(elastic(context_tokens=2048), slots=1)
    unread = replace(elastic(), cache=None)
    unknown = replace(model("c", 0), spec=replace(model("c").spec, gpu=TENTH))
    for rigid in (one_slot, unread, unknown, model("d", 10)):
        assert spare_bytes(rigid) == 0
        assert engine_limits(rigid, replica(rigid, "r")) == AS_ASKED
    assert "it has one slot" in explain_rigid_memory(one_slot)
    assert "cannot be read" in explain_rigid_memory(unread)
    assert "set gpu.memory" in explain_rigid_memory(unknown)
    assert explain_rigid_memory(model("d", 10)) == explain_rigid_memory(elastic()) == ""


def test_memory_above_the_estimate_is_reduced_before_slots_are() -> None:
    asked = replace(elastic(context_tokens=2048), memory_bytes=11 * GI, estimated_bytes=0)
    assert [compute_slots(asked, gi * GI) for gi in (11, 10, 9, 8)] == [4, 4, 3, 3]
    assert has_shrunk(asked, replica(asked, "r", memory_bytes=10 * GI))


@pytest.mark.parametrize("context_tokens", [None, 8192])
@pytest.mark.parametrize("window", [0, 256])
def test_engine_arguments_of_a_reduced_replica_fit_its_granted_memory(
    tmp_path: Path, context_tokens: int | None, window: int
) -> None:
    """Uses the estimator itself, with a real header, for every grant from the smallest to the full request."""
    path = model_files.attending(tmp_path / "a.gguf", layers=6, window=window)
    spec = ModelSpec(
        engine="llama.cpp", artifact=f"file://{path}", context_tokens=context_tokens, gpu=Gpu(elastic_percent=30)
    )
    made = fill_memory_estimate(Model(name=ModelName("a"), spec=spec, slots=8))
    asked, spare, seen = made.memory_bytes, spare_bytes(made), set[int]()
    assert spare > 0
    for granted in range(asked - spare, asked + 1, max(1, spare // 23)):
        limits = engine_limits(made, replica(made, "r", memory_bytes=granted, slots=compute_slots(made, granted)))
        tokens = limits.shared_context_tokens
        if context_tokens is None and tokens:
            less = estimate_memory(replace(made, slots=1, spec=replace(spec, context_tokens=tokens)))
            whole = estimate_memory(
                replace(made, slots=1, spec=replace(spec, context_tokens=made.cache and made.cache.context_tokens))
            )
            assert less is not None
            assert whole is not None
            assert whole.total_bytes(gpus=True) - less.total_bytes(gpus=True) >= asked - granted
        else:
            fewer = estimate_memory(replace(made, slots=limits.slots))
            assert fewer is not None
            assert fewer.total_bytes(gpus=False) <= granted
        seen.add(tokens or limits.slots)
    assert len(seen) > 1, "the engine is configured with less memory if less is granted"


# --- engines ----------------------------------------------------------------------------------------------------------

PROGRAMS = {name: f"/bin/{name}" for name in ("vllm", "sglang", "llama-server", "xllamacpp")}


def launched(of: Model, limits: Given, *programs: str) -> LaunchCommand:
    return build_launch_command(of, None, "127.0.0.1", 9000, {name: PROGRAMS[name] for name in programs}, given=limits)


def after(argv: Sequence[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_llama_cpp_with_less_memory_gets_fewer_slots_or_less_context() -> None:
    fixed, free = elastic(context_tokens=2048), elastic()
    own = launched(fixed, Given(slots=3), "xllamacpp").argv
    assert (after(own, "--slots"), after(own, "--context-tokens")) == ("3", "2048")
    server = launched(fixed, Given(slots=3), "llama-server").argv
    assert (after(server, "--parallel"), after(server, "--ctx-size")) == ("3", str(3 * 2048))
    less = Given(slots=4, shared_context_tokens=7168)
    assert after(launched(free, less, "xllamacpp").argv, "--shared-context-tokens") == "7168"
    assert after(launched(free, less, "llama-server").argv, "--ctx-size") == "7168"
    for whole in ("xllamacpp", "llama-server"):
        assert "7168" not in launched(free, AS_ASKED, whole).argv
        assert not {"--ctx-size", "--shared-context-tokens"} & {*launched(free, AS_ASKED, whole).argv}


def test_memory_placeholder_in_a_command_becomes_the_reduced_memory() -> None:
    own = model("own", 10, gpu=TENTH, command=("run", "{port}", "--memory={memory_bytes}"))
    limits = engine_limits(own, replica(own, "r", memory_bytes=9 * GI))
    assert f"--memory={9 * GI}" in launched(own, limits).argv
    assert f"--memory={10 * GI}" in launched(own, AS_ASKED).argv


def test_vllm_pod_on_a_partial_device_gets_its_memory_fraction() -> None:
    """Three parts of one T4; the model requests 5.5 GiB, a part has 5.33."""
    spec = ModelSpec(engine="vllm", artifact="hf://org/m", image="i", gpu=TENTH)
    of = Model(name=ModelName("a"), spec=spec, memory_bytes=int(5.5 * GI), slots=64)
    part = Slice(
        id=SliceId("n/gpu0/s0"), device=device("n/gpu0").device, node=device().node, memory_bytes=16 * GI // 3,
        shared=False, kind="timeslice", handle="nvidia.com/gpu", device_bytes=16 * GI,
    )  # fmt: skip
    one = start(waiting(of, slices=[part]))
    assert (one.resources.slices, one.resources.memory_bytes, one.slots) == (("n/gpu0/s0",), 16 * GI // 3, 64)
    pod_fields = slicers.build_pod_fields(one, {part.id: part})
    assert pod_fields is not None
    made = pod_manifest.build_pod_manifest(
        one, of, launched(of, engine_limits(of, one, pod_fields.memory_fraction), "vllm"), "i", asks=pod_fields
    )
    container = made["spec"]["containers"][0]
    words = [*container.get("command", ()), *container.get("args", ())]
    assert after(words, "--gpu-memory-utilization") == "0.333"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}


# --- documents --------------------------------------------------------------------------------------------------------


def document(**spec: object) -> Model:
    text = {"apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m"}, "spec": spec}
    return parse_documents([("m.yaml", str(text))]).models[0]


FILE = {"engine": "llama.cpp", "artifact": "file:///a.gguf"}
VLLM = {"engine": "vllm", "artifact": "hf://org/m"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({**FILE, "gpu": {"elastic": 51}}, "spec.gpu.elastic: expected"),
        ({**FILE, "gpu": {"elastic": 10, "count": 2}}, "spec.gpu.elastic: only a part of one device can be smaller"),
        ({**FILE, "gpu": {"elastic": 10}, "args": ["--slots=3"]}, "spec.args[0]: not allowed with gpu.elastic"),
        ({**FILE, "gpu": {"elastic": 10}, "env": {"LLAMA_ARG_CTX_SIZE": "9"}},
         "spec.env.LLAMA_ARG_CTX_SIZE: not allowed with gpu.elastic"),
        ({**VLLM, "gpu": {"elastic": 10}},
         "spec.gpu.elastic: requires gpu.memory, because engine vllm uses all memory that it is given"),
        ({**VLLM, "gpu": {"elastic": 10, "memory": "8Gi"}, "args": ["--gpu_memory_utilization", "0.5"]},
         "spec.args[0]: not allowed with gpu.elastic"),
        ({"engine": "ollama", "gpu": {"elastic": 10, "memory": "8Gi"}},
         "spec.gpu.elastic: the cache size of engine ollama cannot be configured: remove it"),
        ({"engine": "command", "command": ["x", "{port}"], "gpu": {"elastic": 10, "memory": "8Gi"}},
         "spec.gpu.elastic: requires {memory_bytes} in spec.command, which passes the granted memory to the engine"),
    ],
)  # fmt: skip
def test_invalid_elastic_setting_is_rejected_with_its_path(spec: dict[str, object], message: str) -> None:
    with pytest.raises(DocumentError) as error:
        document(**spec)
    assert message in str(error.value)


def test_elastic_setting_is_accepted_for_an_engine_with_a_memory_option() -> None:
    assert spare_bytes(document(**VLLM, gpu={"elastic": 10, "memory": "8Gi"})) == 8 * GI // 10
    own = {"engine": "command", "command": ["x", "{port}", "{memory_bytes}"]}
    assert spare_bytes(document(**own, gpu={"elastic": 10, "memory": "8Gi"})) == 8 * GI // 10
    assert document(**FILE, gpu={"elastic": 10}).spec.gpu == TENTH


async def test_vllm_or_sglang_with_less_memory_gets_the_granted_memory_fraction() -> None:
    devices = Devices((DeclaredDevice(name="gpu0", memory_bytes=Bytes(24 * GI)),))
    await devices.open()
    spec = ModelSpec(engine="vllm", artifact="hf://org/m", gpu=TENTH)
    of = Model(name=ModelName("a"), spec=spec, memory_bytes=10 * GI, slots=64)
    cut = replica(of, "r", memory_bytes=9 * GI)
    limits = engine_limits(of, cut, devices.fraction(of, cut))
    assert after(launched(of, limits, "vllm").argv, "--gpu-memory-utilization") == "0.375"
    other = replace(of, spec=replace(spec, engine="sglang"))
    assert after(launched(other, limits, "sglang").argv, "--mem-fraction-static") == "0.375"
    rigid = replace(of, spec=replace(spec, gpu=Gpu()))
    assert devices.fraction(rigid, replica(rigid, "r")) is None


async def test_vllm_uses_no_more_device_memory_than_the_document_sets() -> None:
    """Its default is nine tenths of the device, whatever else is placed there."""
    devices = Devices((DeclaredDevice(name="gpu0", memory_bytes=Bytes(24 * GI)),))
    await devices.open()
    spec = ModelSpec(engine="vllm", artifact="hf://org/m", gpu=Gpu(memory_bytes=BytesOrAuto(6 * GI)))
    of = Model(name=ModelName("a"), spec=spec, memory_bytes=6 * GI, slots=64)
    one = replica(of, "r", memory_bytes=6 * GI)
    limits = engine_limits(of, one, devices.fraction(of, one))
    assert after(launched(of, limits, "vllm").argv, "--gpu-memory-utilization") == "0.250"
    message = replace(of, spec=replace(spec, args=("--gpu-memory-utilization", "0.5")))
    assert launched(message, limits, "vllm").argv[-2:] == ("--gpu-memory-utilization", "0.5"), "args have the last word"
    all_of_it = replace(of, spec=replace(spec, gpu=Gpu(memory_bytes=BytesOrAuto(24 * GI))), memory_bytes=24 * GI)
    assert devices.fraction(all_of_it, replica(all_of_it, "r", memory_bytes=24 * GI)) is None
