"""Memory estimates of a Model from its document and command line, and the output of `explain fit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from artifacts.formats.memory_estimate import Estimate
from autoscaler.contract import ModelName
from autoscaler.documents.document_rules import check_model
from autoscaler.engines import ENGINES, build_launch_command
from autoscaler.explain.fit import Fit, explain_fit
from autoscaler.queries.granted_memory import PAGED, compute_engine_limits, explain_rigid_memory, spare_bytes
from autoscaler.spec.decode import WrongKeyError, decode_value
from autoscaler.spec.model import EngineName, Gpu, Model, ModelSpec
from autoscaler.spec.quantity import BytesOrAuto
from pilotlight.models.document_loading import fill_memory_estimate
from pilotlight.models.explain_fit_needs import load_memory_needs
from pilotlight.models.model_memory import estimate_memory, read_serving_options
from pilotlight.models.model_parts import is_fetched_by_store
from tests.support.builders.artifacts import model_files
from tests.support.builders.worlds import T0, device, replica, world
from tests.unit.artifacts.formats.test_hf_config import LLAMA, tensors

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return model_files.attending(tmp_path / "ada.gguf", layers=6, window=256)


def model(file: Path, engine: EngineName = "llama.cpp", **spec: Any) -> Model:
    made = ModelSpec(engine=engine, artifact=f"file://{file}", **spec)
    return Model(name=ModelName("ada"), spec=made, slots=4)


def made(of: Model) -> Estimate:
    found = estimate_memory(of)
    assert found is not None
    return found


def part(of: Model, name: str) -> int:
    return sum(item.bytes for item in made(of).items if item.name == name)


def test_llama_cpp_flags_and_variables_override_memory_defaults(file: Path) -> None:
    def options(*args: str, **env: str) -> object:
        return read_serving_options(model(file, args=args, env=env, context_tokens=1024))

    plain = read_serving_options(model(file, context_tokens=1024))
    assert (plain.checkpoints, plain.prompts_bytes, plain.batch_tokens) == (3, 0, 512)
    assert options("-ctxcp", "8") == options("--ctx-checkpoints=8") == options("--swa-checkpoints", "8")
    assert options("-ctxcp", "8") == replace(plain, checkpoints=8)
    assert options(LLAMA_ARG_CTX_CHECKPOINTS="8") == replace(plain, checkpoints=8)
    assert options("-ctxcp", "2", LLAMA_ARG_CTX_CHECKPOINTS="8") == replace(plain, checkpoints=2), "a flag wins"
    assert options("--cache-ram", "100") == replace(plain, prompts_bytes=100 * MIB)
    assert options("-cram", "-1") == replace(plain, prompts_bytes=8192 * MIB), "no limit: what it would be by itself"
    assert options("-ctk", "q8_0", "-ctv=f32") == replace(plain, key_bytes=34 / 32, value_bytes=4.0)
    assert options("-ub", "64", "-c", "8192") == replace(plain, batch_tokens=64, context_tokens=2048)
    assert options("--swa-full", "-fa", "off") == replace(plain, whole_windows=True, scores=True)
    assert options("--cache-ram", "many") == plain, "the engine will refuse it"
    assert options("--cache-ram") == plain


def test_engine_is_launched_with_the_checkpoint_count_of_the_estimate(file: Path) -> None:
    of = model(file, context_tokens=1024)
    own_one = build_launch_command(of, None, "127.0.0.1", 1, {"xllamacpp": "/bin/python"})
    assert own_one.argv[own_one.argv.index("--ctx-checkpoints") + 1] == str(read_serving_options(of).checkpoints)
    server = build_launch_command(of, None, "127.0.0.1", 1, {"llama-server": "/bin/llama-server"})
    assert server.env == {"LLAMA_ARG_CTX_CHECKPOINTS": "3", "LLAMA_ARG_CACHE_RAM": "0"}
    assert "--ctx-checkpoints" not in server.argv, "an older server would refuse the flag, and ignores the variable"
    own = build_launch_command(
        model(file, env={"LLAMA_ARG_CACHE_RAM": "64"}), None, "127.0.0.1", 1, {"llama-server": "/bin/x"}
    )
    assert own.env["LLAMA_ARG_CACHE_RAM"] == "64"


def test_custom_llama_server_command_is_estimated_with_its_defaults(file: Path) -> None:
    words = ("/usr/bin/llama-server", "--model", "{model_path}", "--port", "{port}")
    assert read_serving_options(model(file, "command", command=words)).checkpoints == 32
    assert read_serving_options(model(file, "command", command=words)).prompts_bytes == 8192 * MIB
    assert read_serving_options(model(file, "command", command=(*words, "-cram", "0"))).prompts_bytes == 0
    assert read_serving_options(model(file, "command", command=("other", "{port}"))).checkpoints == 0


def test_context_checkpoints_are_counted_as_model_memory_only_without_gpus(file: Path) -> None:
    of = model(file, context_tokens=1024)
    host, gpu = fill_memory_estimate(of).memory_bytes, fill_memory_estimate(of, gpus=True).memory_bytes
    host_bytes = part(of, "checkpoints") + part(of, "embedding") + part(of, "overhead")
    assert part(of, "checkpoints") > 0
    assert host - gpu == host_bytes - part(of, "context")


def test_memory_needs_include_the_gpu_context_only_with_gpus(file: Path) -> None:
    names = [{one.name for one in load_memory_needs(model(file), gpus=gpus).parts} for gpus in (False, True)]
    assert names[1] - names[0] == {"context"}
    assert names[0] < names[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_vllm_and_sglang_memory_estimate_ignores_slots_and_context(file: Path, engine: EngineName) -> None:
    """The estimate is the document's gpu.memory or the whole device, not slots x context."""
    for context in (None, 512):
        of = model(file, engine, context_tokens=context)
        assert fill_memory_estimate(replace(of, slots=64)).memory_bytes == 0
        assert fill_memory_estimate(replace(of, memory_bytes=7 * MIB)).memory_bytes == 7 * MIB
        assert part(replace(of, slots=64), "cache") == part(replace(of, slots=1), "cache")


def auto(folder: Path, **spec: Any) -> Model:
    """An 8B vLLM model, described by config.json and safetensors."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tensors(folder / "model.safetensors")
    spec = {"gpu": Gpu(memory_bytes=BytesOrAuto(0)), "context_tokens": 8192} | spec
    return fill_memory_estimate(replace(model(folder, "vllm", **spec), slots=spec.get("slots") or 64), gpus=True)


@pytest.mark.parametrize("engine", sorted(PAGED))
def test_vllm_or_sglang_memory_auto_is_estimated_from_config_json(tmp_path: Path, engine: EngineName) -> None:
    of = auto(tmp_path)
    of = fill_memory_estimate(replace(of, memory_bytes=0, spec=replace(of.spec, engine=engine)))
    items = {item.name: item.bytes for item in made(of).items}
    assert items["cache"] == 8192 * (128 << 10), "one Call of the whole context"
    assert of.memory_bytes == of.estimated_bytes == sum(items.values())
    assert int(of.memory_bytes * 0.9) >= sum(items.values()) - items["reserve"], "its own share of that is enough"
    assert part(auto(tmp_path, slots=3), "cache") == 3 * items["cache"], "the document sets the number of requests"
    assert auto(tmp_path, gpu=Gpu()).memory_bytes == 0, "else it takes a whole Device, as ever"


def test_kv_cache_is_split_evenly_across_several_devices(tmp_path: Path) -> None:
    one, two = auto(tmp_path), auto(tmp_path, gpu=Gpu(count=2, memory_bytes=BytesOrAuto(0)))
    assert part(two, "cache") == part(one, "cache") // 2
    assert part(two, "activation") == part(one, "activation")


def test_paged_engines_are_those_with_a_memory_fraction_in_their_command() -> None:
    argvs = {name: str([program.argv for program in engine.programs]) for name, engine in ENGINES.items()}
    assert {name for name, argv in argvs.items() if "{memory_fraction}" in argv} == PAGED


def test_model_with_memory_auto_gets_a_memory_fraction_limit(tmp_path: Path) -> None:
    of = auto(tmp_path)
    mine = replica(of, "a1", memory_bytes=of.memory_bytes)
    assert compute_engine_limits(of, mine, 0.25).memory_fraction == 0.25
    more = replace(of, memory_bytes=of.memory_bytes * 2)  # measured: as much again in addition to its limit
    assert compute_engine_limits(
        more, replica(more, "a1", memory_bytes=more.memory_bytes), 0.5
    ).memory_fraction == pytest.approx(0.25)
    fit = explained(of)
    assert fit.basis == "artifact"
    assert fit.sentences[0].endswith("estimated from its artifact. Its config.json (llama) gives this estimate:")
    assert any(line.startswith("  reserve ") for line in fit.sentences)
    assert any(line.startswith("On a shared device, vllm is limited to that amount; ") for line in fit.sentences)
    assert (fit.places[0].fits, fit.places[0].calls) == (True, 1)
    assert not explained(of, gib=2).places[0].fits


def test_memory_auto_with_a_memory_utilization_flag_is_rejected() -> None:
    at = {"engine": "vllm", "artifact": "file:///a", "gpu": {"memory": "auto"}}
    check_model(decode_value(at, ModelSpec))
    with pytest.raises(WrongKeyError, match=r"gpu.memory: auto, which sets the memory"):
        check_model(decode_value({**at, "args": ["--gpu-memory-utilization=0.5"]}, ModelSpec))
    check_model(decode_value({**at, "gpu": {"memory": "auto", "growth": 50}}, ModelSpec))
    elastic = decode_value({**at, "gpu": {"memory": "auto", "elastic": 10}}, ModelSpec)
    of = Model(name=ModelName("a"), spec=elastic, memory_bytes=1 << 30, estimated_bytes=1 << 30)
    assert spare_bytes(of) == 0, "it is the least with which it starts"
    assert "set a larger size" in explain_rigid_memory(of)


def explained(of: Model, gib: int = 24) -> Fit:
    return explain_fit(world([of], [device("gpu0", gib)]), of, load_memory_needs(of, gpus=False), T0)


def test_fit_explanation_of_a_gguf_model_lists_memory_parts_and_devices(file: Path) -> None:
    fit = explained(fill_memory_estimate(model(file, context_tokens=1024)))
    assert (fit.basis, fit.needs.share) == ("artifact", 0.0)
    assert fit.sentences[0].startswith("ada is assumed to need ")
    assert fit.sentences[0].endswith(", estimated from its artifact. Its GGUF header (gemma3) gives this estimate:")
    assert any(line.startswith("  checkpoints ") and line.endswith(", in host memory.") for line in fit.sentences)
    assert "  cache 38Mi: 1 layer keeps all of 4 x 1024 tokens, 5 the last 256." in fit.sentences
    assert fit.sentences[-2:] == (
        "llama.cpp allocates its memory at its start, for all slots.",
        "gpu0: nothing prevents a placement.",
    )
    assert sum(one.bytes for one in fit.needs.parts) == fit.memory_bytes
    assert (fit.places[0].fits, fit.places[0].calls) == (True, None)


def test_fit_explanation_names_devices_smaller_than_the_set_memory(file: Path) -> None:
    of = replace(model(file), memory_bytes=30 << 30)
    of = replace(of, spec=replace(of.spec, gpu=replace(of.spec.gpu, memory_bytes=BytesOrAuto(30 << 30))))
    fit = explained(of)
    assert fit.basis == "document"
    assert fit.sentences[0].startswith(
        "ada is assumed to need 30Gi, as set in its document (gpu.memory). Its GGUF header"
    )
    assert fit.sentences[-1] == "gpu0: it has 24Gi in total, which does not satisfy 30Gi on one device."
    assert not fit.places[0].fits


def test_fit_explanation_of_paged_engine_shows_request_capacity(file: Path) -> None:
    fit = explained(model(file, "vllm", context_tokens=4096, args=("--gpu-memory-utilization", "0.5")))
    assert fit.basis == "device"
    assert fit.sentences[0].startswith("ada is assumed to need all memory of each of its devices. ")
    assert any(line.startswith("vllm always reserves 50% of its devices at its start") for line in fit.sentences)
    (place,) = fit.places
    rest = (12 << 30) - sum(one.bytes for one in fit.needs.parts if one.name != "cache")
    assert place.calls == rest // (fit.needs.token_bytes * 4096) > 0
    small = explained(model(file, "vllm", context_tokens=4096), gib=1).places[0]
    assert (small.fits, small.calls) == (False, 0)
    assert "too little for one request" in small.words


def test_unreadable_artifact_is_explained_in_one_sentence(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300 + ".gguf")
    for file, why in ((tmp_path / "none.gguf", "No such file"), (long, "File name too long")):
        fit = explained(model(file))
        assert len(fit.sentences) == 2
        assert why in fit.sentences[0]
        assert "\n" not in fit.sentences[0]
    remote = replace(model(tmp_path), spec=ModelSpec(engine="vllm", artifact="hf://org/name"))
    assert "not a local file" in explained(remote).sentences[0]
    folder = explained(model(tmp_path, "command", command=("x", "{port}")))
    assert "does not state memory needs" in folder.sentences[0]


def test_fit_of_a_model_that_needs_no_device_lists_no_placement(file: Path) -> None:
    of = model(file)
    of = replace(of, spec=replace(of.spec, gpu=replace(of.spec.gpu, count=0)))
    fit = explained(of)
    assert fit.places == ()
    assert fit.sentences[0].startswith("ada requests no device (gpu.count is 0). ")


@pytest.mark.parametrize(
    ("artifact", "args", "brought"),
    [
        ("oci://r.io/a:1", (), True),
        ("s3://abc/a", (), True),
        ("hf://a/b", (), True),
        ("hf://a/b", ("--trust-remote-code",), False),
        ("hf://a/b?include=*", ("--trust-remote-code",), True),
        ("file:///a", (), False),
        (None, (), False),
    ],
)
def test_store_fetches_remote_weights_unless_the_engine_runs_remote_code(
    tmp_path: Path, artifact: str | None, args: tuple[str, ...], brought: bool
) -> None:
    wanted = replace(model(tmp_path), spec=ModelSpec(engine="vllm", artifact=artifact, args=args))
    assert is_fetched_by_store(wanted) == brought
    allows = replace(wanted, spec=replace(wanted.spec, allow_unsafe=True))
    assert is_fetched_by_store(allows) == (brought or artifact == "hf://a/b"), (
        "the store takes code for one that allows it"
    )
