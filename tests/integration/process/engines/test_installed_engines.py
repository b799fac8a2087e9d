"""The contract of engines, for those that `make test-engines` installs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from autoscaler.engines.command_line import LaunchCommand
from autoscaler.spec.engines import INFINITY, OLLAMA, TRANSFORMERS, VLLM
from loadtest import tiny_gguf
from tests.contracts.engine import (
    SENTENCE,
    TOKENS,
    VLLM_SLEEP,
    AdapterContract,
    Chat,
    Embeddings,
    EngineContract,
    EngineRig,
    GenerationContract,
    HangingSleeperContract,
    NativePathsContract,
    RunningMetricContract,
    SleepCalls,
    SleepContract,
    Stop,
    StopContract,
    StreamStopContract,
    is_path_of_fastapi,
)
from tests.support.real_services import ollama, python_engines
from tests.support.real_services.engine_process import Running, launch_command
from tests.support.real_services.tiny_checkpoints import make_adapter, make_embedding_model, make_language_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800), pytest.mark.xdist_group("installed engines")]

CONTEXT_TOKENS = 4096


def programs(engine: str) -> dict[str, str]:
    """The program of an engine that is a Python package, if it is installed."""
    if why := python_engines.why_missing(engine):
        pytest.skip(f"{engine}: {why}")
    return python_engines.programs(engine)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in the format of the Hub."""
    path = tmp_path_factory.mktemp("models") / "ada"
    make_language_model(path, SENTENCE, context_tokens=CONTEXT_TOKENS)
    return path


class TestVllm(
    StreamStopContract,
    GenerationContract,
    RunningMetricContract,
    NativePathsContract,
    HangingSleeperContract,
    AdapterContract,
):
    """vLLM on a CPU. It rejects --enable-sleep-mode there, but has the endpoints."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, checkpoint: Path) -> Iterator[EngineRig]:
        found = programs("vllm")
        words = "--dtype float32 --enforce-eager --enable-lora --max-lora-rank 8 --enable-prompt-tokens-details"
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        }  # fmt: skip
        rig = EngineRig(
            VLLM,
            lambda port, _: launch_command(
                "vllm", found, checkpoint, port, args=tuple(words.split()), env=env, context_tokens=CONTEXT_TOKENS
            ),
            checkpoint.parent, metrics=frozenset({"waiting", "running", "cache_use"}), stop=Stop.HOLDS,
            stop_log="Waiting for connections to close", is_known_path=is_path_of_fastapi,
            sleep=VLLM_SLEEP,
        )  # fmt: skip
        yield rig
        rig.close()

    @pytest.fixture(scope="class")
    @classmethod
    def adapter(cls, checkpoint: Path) -> Path:
        path = checkpoint.parent / "quiet"
        make_adapter(path, checkpoint)
        return path


OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class TransformersBehavior:
    """Further behavior of this engine."""

    def test_responses_are_streamed_unless_the_request_forbids_it(self, rig: EngineRig) -> None:
        body = {"model": rig.model, "input": "Who are you?", "max_output_tokens": TOKENS, "temperature": 0}
        assert rig.engine.request("POST", "/v1/responses", body).text.startswith(("event:", "data:"))
        whole = rig.engine.request("POST", "/v1/responses", body | {"stream": False})
        assert SENTENCE in json.dumps(whole.document)


class TestTransformers(StreamStopContract, GenerationContract, NativePathsContract, TransformersBehavior):
    """`transformers serve`, which serves the model under the path of its weights."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, checkpoint: Path) -> Iterator[EngineRig]:
        found = programs("transformers")
        rig = EngineRig(
            TRANSFORMERS, lambda port, _: launch_command("transformers", found, checkpoint, port, env=OFFLINE),
            checkpoint.parent, api=Chat(has_stream_options=False, has_done=False), model=str(checkpoint),
            model_in_responses=str(checkpoint), unknown_model_status=400, stop=Stop.COMPLETES,
            is_known_path=is_path_of_fastapi,
        )  # fmt: skip
        yield rig
        rig.close()


class InfinityBehavior:
    """Further behavior of this engine."""

    def test_embedding_has_the_width_of_the_model_and_the_number_of_tokens(self, rig: EngineRig) -> None:
        document = rig.ask().document
        assert (rig.api.text(document), document["model"]) == ("64 numbers", "ada")
        assert rig.api.usage(document)[0] > 0

    def test_length_of_the_queue_is_in_the_list_of_models_and_in_no_metric(self, rig: EngineRig) -> None:
        (model,) = rig.engine.request("GET", "/v1/models").document["data"]
        assert model["stats"]["queue_absolute"] == 0
        assert "queue" not in rig.engine.metrics()


class TestInfinity(StopContract, EngineContract, NativePathsContract, InfinityBehavior):
    """Infinity with a BERT."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
        found, folder = programs("infinity"), tmp_path_factory.mktemp("infinity")
        make_embedding_model(folder / "bert")
        rig = EngineRig(
            INFINITY, lambda port, _: launch_command("infinity", found, folder / "bert", port, env=OFFLINE), folder,
            api=Embeddings(), text="64 numbers", unknown_model_status=200,
            is_known_path=partial(is_path_of_fastapi, prefix="/v1"),
        )  # fmt: skip
        yield rig
        rig.close()


class OllamaBehavior:
    """Further behavior of this engine."""

    def test_health_path_does_not_exist(self, rig: EngineRig) -> None:
        assert rig.engine.request("GET", "/health").status == 404

    def test_members_of_json_are_recognized_in_any_case(self, rig: EngineRig) -> None:
        body = {"MODEL": "ada", "Prompt": "Who are you?", "STREAM": False, "options": {"num_predict": TOKENS}}
        assert rig.engine.request("POST", "/api/generate", body).document["response"] == SENTENCE


class TestOllama(StreamStopContract, GenerationContract, NativePathsContract, SleepContract, OllamaBehavior):
    """Ollama with a GGUF file."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
        if why := ollama.why_missing():
            pytest.skip(f"Ollama {ollama.VERSION}: {why}")
        folder = tmp_path_factory.mktemp("ollama")
        tiny_gguf.make_model(folder / "ada.gguf", SENTENCE, context_tokens=CONTEXT_TOKENS, pools=False, repeats=True)
        with ollama.serving(folder) as server:
            server.create("ada", folder / "ada.gguf", ollama.CHAT_TEMPLATE)
        found = {"ollama": str(ollama.program())}

        def launch(port: int, _: int) -> LaunchCommand:
            env = {"HOME": str(folder)}
            return launch_command("ollama", found, folder / "models", port, env=env, context_tokens=CONTEXT_TOKENS)

        rig = EngineRig(
            OLLAMA, launch, folder, tokens_max=1_000_000, is_known_path=knows_ollama_path,
            sleep=SleepCalls(
                ("/api/generate", {"model": "ada", "keep_alive": 0}), ("/api/generate", {"model": "ada"}),
                lambda engine: engine.request("GET", "/api/ps").document["models"] == [], 200,
            ),
        )  # fmt: skip
        yield rig
        rig.close()


def knows_ollama_path(engine: Running, path: str) -> bool:
    """Whether Ollama has a path, with any method. Gin's own 404 has this text."""
    path = path.replace("{id}", "x")
    return any("404 page not found" not in engine.request(method, path).text for method in ("GET", "POST", "DELETE"))
