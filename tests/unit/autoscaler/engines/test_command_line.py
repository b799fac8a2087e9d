"""Engines as data: the command line of each Model, and the error if it cannot be built."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.engines import ENGINES, EngineError, LaunchCommand, artifact_path, build_launch_command, default_slots
from autoscaler.engines.command_line import LAUNCHER
from autoscaler.engines.programs.installed import computes_on_cpu_only
from autoscaler.engines.programs.xllamacpp_server import parse_flags
from autoscaler.queries.granted_memory import Given
from autoscaler.spec.model import Adapter, EngineName, EngineTls, Gpu, Model, ModelSpec


def model(engine: EngineName, *, memory_bytes: int = 0, **spec: object) -> Model:
    """A Model named m with 8 slots."""
    made = {"artifact": "file:///w/m.gguf", **spec}
    typed = ModelSpec(engine=engine, **made)  # type: ignore[arg-type]  # fields of each test
    return Model(name=ModelName("m"), spec=typed, slots=8, memory_bytes=memory_bytes)


def start(of: Model, *available: str) -> LaunchCommand:
    return build_launch_command(of, None, "127.0.0.1", 9000, {name: f"/bin/{name}" for name in available})


def test_llama_cpp_model_prefers_xllamacpp_to_llama_server_on_cpu() -> None:
    got = start(model("llama.cpp", context_tokens=512, args=("--threads=1",)), "llama-server", "xllamacpp")
    own = f"/bin/xllamacpp -I -u {LAUNCHER} --model /w/m.gguf --host 127.0.0.1 --port 9000 --slots 8 --alias m"
    assert got == LaunchCommand(
        argv=(*own.split(), "--ctx-checkpoints", "3", "--context-tokens", "512", "--threads=1"),
        env={},
        readiness_path="/health",
    )


@pytest.mark.parametrize(
    ("count", "gpus", "available", "program"),
    [
        (1, True, ("xllamacpp", "llama-server"), "/bin/llama-server"),
        (2, True, ("xllamacpp", "llama-server"), "/bin/llama-server"),
        (1, True, ("xllamacpp",), "/bin/xllamacpp"),
        (1, False, ("xllamacpp", "llama-server"), "/bin/xllamacpp"),
        (0, True, ("xllamacpp", "llama-server"), "/bin/xllamacpp"),
    ],
)
def test_llama_server_is_preferred_to_xllamacpp_only_on_gpus(
    count: int, available: tuple[str, ...], program: str, *, gpus: bool
) -> None:
    """The wheel from `pip` has no CUDA. A Model without a GPU starts fastest with it."""
    paths = {name: f"/bin/{name}" for name in available}
    got = build_launch_command(model("llama.cpp", gpu=Gpu(count=count)), None, "127.0.0.1", 9000, paths, gpus=gpus)
    assert got.argv[0] == program


@pytest.mark.standard
@pytest.mark.parametrize(
    ("devices", "cpu_only"),
    [
        ("echo GGML_BACKEND_DEVICE_TYPE_CPU", True),
        ("echo GGML_BACKEND_DEVICE_TYPE_CPU GGML_BACKEND_DEVICE_TYPE_GPU", False),
        ("echo libcuda.so.1: cannot open shared object file >&2; exit 1", False),
    ],
)
def test_xllamacpp_that_lists_only_cpu_devices_counts_as_cpu_only(tmp_path: Path, devices: str, cpu_only: bool) -> None:
    """A program that cannot be loaded does not count: its starts fail with the reason."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{devices}\n")
    python.chmod(0o755)
    assert computes_on_cpu_only(str(python)) is cpu_only


@pytest.mark.standard
def test_installed_xllamacpp_version_counts_as_cpu_only() -> None:
    assert computes_on_cpu_only(sys.executable)
    assert not computes_on_cpu_only("/nonexistent/python")


def test_llama_cpp_uses_llama_server_when_xllamacpp_is_missing() -> None:
    got = start(model("llama.cpp", context_tokens=512, args=("--mlock",), gpu=Gpu(count=0)), "llama-server")
    assert " ".join(got.argv) == (
        "/bin/llama-server --model /w/m.gguf --host 127.0.0.1 --port 9000 --alias m --parallel 8 --offline --metrics"
        " --ctx-size 4096 --gpu-layers 0 --mlock"
    )


def test_missing_engine_error_names_the_install_command() -> None:
    with pytest.raises(EngineError, match=r"^Model m: llama\.cpp is not installed here: pip install xllamacpp"):
        start(model("llama.cpp"), "vllm")


def test_unknown_launcher_flag_is_rejected_before_the_start() -> None:
    with pytest.raises(
        EngineError, match=r"^Model m: --mlock is not a flag of the xllamacpp server, which supports --model"
    ):
        start(model("llama.cpp", args=("--mlock",)), "xllamacpp")


def test_tls_with_the_xllamacpp_server_is_rejected_before_the_start() -> None:
    spoken = model("llama.cpp", tls=EngineTls())
    with pytest.raises(
        EngineError, match=r"^Model m: spec\.tls: the llama extra's server has no TLS: use llama-server"
    ):
        start(spoken, "xllamacpp", "llama-server")
    assert start(spoken, "llama-server").argv[0] == "/bin/llama-server"


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")]
)
def test_engine_on_shared_device_gets_a_memory_fraction_flag(engine: EngineName, flag: str) -> None:
    of, there = model(engine, args=("--last",)), {str(engine): "/bin/it"}
    argv = build_launch_command(of, None, "h", 1, there, gpus=True, given=Given(memory_fraction=0.333)).argv
    assert argv[-3:] == (flag, "0.333", "--last"), "the Model's own arguments come last and take precedence"
    assert flag not in build_launch_command(of, None, "h", 1, there, gpus=True).argv


def test_vllm_command_names_the_local_folder_or_the_hub_revision() -> None:
    assert " ".join(start(model("vllm", artifact="file:///w", context_tokens=8192), "vllm").argv) == (
        "/bin/vllm serve /w --host 127.0.0.1 --port 9000 --served-model-name m --max-num-seqs 8 --max-model-len 8192"
    )
    assert " ".join(start(model("vllm", artifact="hf://org/n@rev", gpu=Gpu(count=2)), "vllm").argv) == (
        "/bin/vllm serve org/n --host 127.0.0.1 --port 9000 --served-model-name m --max-num-seqs 8"
        " --tensor-parallel-size 2 --revision rev"
    )


def test_sglang_is_started_as_a_python_module() -> None:
    assert " ".join(start(model("sglang", artifact="hf://org/n", args=("--x",)), "sglang").argv) == (
        "/bin/sglang -m sglang.launch_server --model-path org/n --host 127.0.0.1 --port 9000 --served-model-name m"
        " --max-running-requests 8 --x"
    )


def test_ollama_is_configured_by_environment_variables() -> None:
    got = start(model("ollama", artifact=None, env={"OLLAMA_KEEP_ALIVE": "5m", "A": "b"}), "ollama")
    assert (got.argv, got.readiness_path) == (("/bin/ollama", "serve"), "/")
    assert got.env == {
        "OLLAMA_HOST": "[127.0.0.1]:9000",
        "OLLAMA_NUM_PARALLEL": "8",
        "OLLAMA_KEEP_ALIVE": "5m",
        "A": "b",
    }
    assert start(model("ollama", artifact="file:///store"), "ollama").env["OLLAMA_MODELS"] == "/store"


def test_sglang_health_endpoint_does_not_generate_a_token() -> None:
    """With generation it takes at least one second, which is the time limit of a probe."""
    got = start(model("sglang"), "sglang")
    assert got.env == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    assert got.readiness_path == "/health"


def test_trtllm_serve_gets_slots_context_and_devices() -> None:
    got = start(model("tensorrt-llm", artifact="hf://o/n@r", context_tokens=512, gpu=Gpu(count=2)), "trtllm-serve")
    assert " ".join(got.argv) == (
        "/bin/trtllm-serve serve o/n --host 127.0.0.1 --port 9000 --max_batch_size 8 --max_seq_len 512 --tp_size 2"
        " --revision r"
    )
    assert (got.env, got.readiness_path) == ({"TRTLLM_RESPONSES_API_DISABLE_STORE": "1"}, "/health")


def test_triton_loads_one_model_and_its_readiness_path_names_it() -> None:
    got = start(model("triton", artifact="file:///repo", args=("--log-verbose=1",)), "tritonserver")
    assert " ".join(got.argv) == (
        "/bin/tritonserver --model-repository=/repo --model-control-mode=explicit --load-model=m"
        " --http-address=127.0.0.1 --http-port=9000 --allow-grpc=false --allow-metrics=false --log-verbose=1"
    )
    assert got.readiness_path == "/v2/models/m/ready"
    assert start(model("triton", readiness_path="/x"), "tritonserver").readiness_path == "/x"


def test_text_embeddings_router_gets_the_served_name_and_the_slots() -> None:
    got = start(model("tei", artifact="hf://org/n@rev"), "text-embeddings-router")
    assert " ".join(got.argv) == (
        "/bin/text-embeddings-router --model-id org/n --hostname 127.0.0.1 --port 9000 --served-model-name m"
        " --max-concurrent-requests 8 --revision rev"
    )
    assert got.readiness_path == "/health"


def test_infinity_serves_below_v1_while_its_readiness_path_is_not() -> None:
    got = start(model("infinity"), "infinity_emb")
    assert " ".join(got.argv) == (
        "/bin/infinity_emb v2 --model-id /w/m.gguf --served-model-name m --host 127.0.0.1 --port 9000 --url-prefix /v1"
    )
    assert (got.env, got.readiness_path) == ({"DO_NOT_TRACK": "1"}, "/health")


def test_transformers_serve_is_pinned_to_the_path_of_the_weights() -> None:
    got = start(model("transformers", artifact="file:///w/m"), "transformers")
    assert " ".join(got.argv) == "/bin/transformers serve /w/m --host 127.0.0.1 --port 9000"
    assert got.readiness_path == "/health"


def test_speaches_keeps_models_loaded_and_is_ready_with_its_model() -> None:
    got = start(model("speaches", artifact="file:///cache", args=("--log-level", "info")), "speaches")
    assert " ".join(got.argv) == (
        "/bin/speaches -m uvicorn --factory speaches.main:create_app --host 127.0.0.1 --port 9000 --log-level info"
    )
    assert got.readiness_path == "/v1/models/m"
    assert (got.env["STT_MODEL_TTL"], got.env["WHISPER__NUM_WORKERS"], got.env["HF_HUB_CACHE"]) == ("-1", "8", "/cache")
    assert "HF_HUB_CACHE" not in start(model("speaches", artifact=None), "speaches").env


@pytest.mark.parametrize(
    ("word", "got"),
    [
        ("{host}:{port}", "[$(POD_IP)]:9000"),
        ("http://{host}:{port}/v1", "http://[$(POD_IP)]:9000/v1"),
        ("[{host}]:{port}", "[$(POD_IP)]:9000"),
        ("--host={host}", "--host=$(POD_IP)"),
    ],
)
def test_an_ipv6_address_before_a_port_is_in_brackets(word: str, got: str) -> None:
    made = build_launch_command(model("command", command=("run", word)), None, "$(POD_IP)", 9000, {}, ipv6=True)
    assert made.argv == ("run", got)
    local = build_launch_command(model("command", command=("run", word)), None, "::1", 9000, {})
    assert local.argv == ("run", got.replace("$(POD_IP)", "::1"))


def test_only_known_placeholders_of_command_are_replaced() -> None:
    command = ("sh", "-c", "run {model_path} {name} --m={memory_bytes} {slots}", "{host}:{port}", '{"a": 1}', "{HOME}")
    got = start(model("command", command=command, readiness_path="/ready", memory_bytes=7, args=("{port}",)))
    assert got.argv == ("sh", "-c", "run /w/m.gguf m --m=7 8", "127.0.0.1:9000", '{"a": 1}', "{HOME}", "{port}")
    assert got.readiness_path == "/ready"


def test_command_with_undefined_placeholder_value_is_rejected() -> None:
    with pytest.raises(
        EngineError, match=r"^Model m: its command line requires \{memory_bytes\}, which the Model does not"
    ):
        start(model("command", command=("run", "{memory_bytes}", "{port}")))


def test_local_weights_path_replaces_model_path_in_command() -> None:
    got = build_launch_command(model("command", command=("{port}", "{model_path}")), "/copy/m", "h", 1, {})
    assert got.argv == ("1", "/copy/m")


def test_artifact_url_is_converted_to_an_engine_path() -> None:
    assert artifact_path("file:///a b@c.gguf") == "/a b@c.gguf"
    assert artifact_path("hf://org/name@rev") == "org/name"
    assert artifact_path(None) is None


@pytest.mark.parametrize(
    ("engine", "artifact", "message"),
    [
        ("llama.cpp", "hf://org/name", "weights from the Hub are not fetched for this start: mount them"),
        ("llama.cpp", "s3://abc/a.gguf", "weights from a bucket are not fetched for this start"),
        ("vllm", "oci://r.io/a:1", "weights from a registry are not fetched for this start"),
        ("vllm", "hf://org/name?include=*", "weights from the Hub with ?include= are not fetched for this start"),
    ],
)
def test_weights_not_on_the_node_are_rejected_if_engine_cannot_fetch(
    engine: EngineName, artifact: str, message: str
) -> None:
    program = {"llama.cpp": "llama-server", "vllm": "vllm"}[engine]
    with pytest.raises(EngineError, match=re.escape(message)):
        start(model(engine, artifact=artifact), program)
    brought = build_launch_command(model(engine, artifact=artifact), "/copy", "h", 1, {program: "/bin/x"})
    assert "/copy" in brought.argv


def test_adapter_not_on_the_node_is_rejected() -> None:
    adapters = (Adapter(name="here", artifact="file:///a"), Adapter(name="x", artifact="s3://abc/x.gguf"))
    with pytest.raises(
        EngineError, match=re.escape("adapters: s3:// is not fetched for this start: mount the adapters")
    ):
        start(model("vllm", artifact="file:///m", adapters=adapters), "vllm")


def test_every_engine_with_programs_has_an_install_hint() -> None:
    for name, engine in ENGINES.items():
        assert default_slots(name) >= 1
        assert bool(engine.programs) == bool(engine.install)
        assert engine.name == name


NEEDED = ["--model", "/m", "--host", "h", "--port", "1", "--slots", "2"]


def test_launcher_parses_flags_with_space_or_equals_sign() -> None:
    got = parse_flags([*NEEDED, "--threads=3", "--embeddings", "--reranking"])
    assert (got["--model"], got["--port"], got["--threads"]) == ("/m", "1", "3")
    assert (got["--embeddings"], got["--reranking"]) == ("", "")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (NEEDED[2:], "--model is missing"),
        ([*NEEDED, "--threads"], "--threads needs a value"),
        ([*NEEDED, "--threads=x"], "--threads needs a whole number"),
        ([*NEEDED, "--threads=-1"], "--threads needs a whole number"),
        ([*NEEDED, "--warmup=1"], "--warmup takes no value"),
        ([*NEEDED, "-t", "1"], "-t is not a flag of the xllamacpp server"),
    ],
)
def test_launcher_error_names_the_invalid_flag(argv: list[str], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        parse_flags(argv)
