"""The contract of engines, for those of `make test` and for the fakes."""

from __future__ import annotations

import http.client
import select
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from autoscaler.engines.command_line import LaunchCommand
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.spec.engines import LLAMA_CPP, TRITON, VLLM
from loadtest import tiny_gguf
from loadtest.fake_engine.vllm import WAITING_FOR_CONNECTIONS
from tests.contracts.engine import (
    SENTENCE,
    VLLM_SLEEP,
    AdapterContract,
    EngineRig,
    GenerationContract,
    HangingSleeperContract,
    NativePathsContract,
    RunningMetricContract,
    SleepCalls,
    SleepContract,
    Stop,
    StreamStopContract,
    TritonText,
)
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.net.ports import free_port
from tests.support.real_services import triton
from tests.support.real_services.engine_process import ANSWERS_S_MAX, Running, launch_command

pytestmark = pytest.mark.standard

CONTEXT_TOKENS = 262_144
"""Of llama.cpp, which generates several thousand tokens a second."""

STREAM_TOKENS = 20_000
"""Of a fake engine, which takes 100 s for them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models and logs."""
    return tmp_path_factory.mktemp("engines")


def knows_llama_path(engine: Running, path: str) -> bool:
    """Whether llama.cpp has a path, with any method. `{id}` is a slot."""
    path = path.replace("{id}", "0")
    replies = (engine.request("GET", path), engine.request("POST", path, {}))
    return any("File Not Found" not in reply.text for reply in replies)


@pytest.mark.xdist_group("engine llama.cpp")
class TestLlamaCpp(StreamStopContract, GenerationContract, RunningMetricContract, NativePathsContract):
    """The server of the extra `llama`."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, folder: Path) -> Iterator[EngineRig]:
        weights = folder / "ada.gguf"
        tiny_gguf.make_model(weights, SENTENCE, context_tokens=CONTEXT_TOKENS, repeats=True)
        found = {"xllamacpp": find_installed_programs()["xllamacpp"]}
        rig = EngineRig(
            LLAMA_CPP, lambda port, _: launch_command("llama.cpp", found, weights, port, args=("--threads=1",)), folder,
            unknown_model_status=200, statuses_before_ready=frozenset({503}), metrics=frozenset({"waiting", "running"}),
            tokens_max=CONTEXT_TOKENS // 2, is_known_path=knows_llama_path,
        )  # fmt: skip
        yield rig
        rig.close()


def fake(name: str, *options: str) -> Callable[[int, int], LaunchCommand]:
    """The command of a fake engine that imitates another one."""

    def launch(port: int, _: int) -> LaunchCommand:
        words = [f"--port={port}", "--name=ada", "--slots=1", f"--sentence={SENTENCE}", f"--tokens={STREAM_TOKENS}"]
        argv = (*command(*words, f"--engine={name}", *options), "--tokens-per-s=200")
        return LaunchCommand(argv=argv, env={}, readiness_path="/health")

    return launch


@pytest.mark.xdist_group("engine fakes")
class TestFakeLlamaCpp(StreamStopContract, GenerationContract, RunningMetricContract):
    """The fake engine as llama.cpp."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, folder: Path) -> Iterator[EngineRig]:
        rig = EngineRig(
            LLAMA_CPP, fake("llama.cpp", "--loading-503", "--fail=closes-keepalive-after-stream"), folder,
            unknown_model_status=200, statuses_before_ready=frozenset({503}),
            metrics=frozenset({"waiting", "running"}), tokens_max=STREAM_TOKENS,
        )  # fmt: skip
        yield rig
        rig.close()


@pytest.mark.xdist_group("engine fakes")
class TestFakeVllm(
    StreamStopContract, GenerationContract, RunningMetricContract, HangingSleeperContract, AdapterContract
):
    """The fake engine as vLLM."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, folder: Path) -> Iterator[EngineRig]:
        rig = EngineRig(
            VLLM, fake("vllm", "--wake-delay=0.1"), folder, metrics=frozenset({"waiting", "running", "cache_use"}),
            tokens_max=STREAM_TOKENS, stop=Stop.HOLDS, stop_log=WAITING_FOR_CONNECTIONS, sleep=VLLM_SLEEP,
        )  # fmt: skip
        yield rig
        rig.close()

    @pytest.fixture(scope="class")
    @classmethod
    def adapter(cls, folder: Path) -> Path:
        (folder / "quiet").mkdir()
        return folder / "quiet"


def knows_triton_path(engine: Running, path: str) -> bool:
    """Whether Triton has a path, with any method."""
    path = path.replace("{id}", "ada")
    if path.endswith(("/load", "/unload")):
        path = path.replace("/ada/", "/unknown/")
    replies = (engine.request("GET", path), engine.request("POST", path, {}))
    return any(reply.status not in {404, 405} for reply in replies)


@pytest.fixture(scope="module")
def triton_programs() -> dict[str, str]:
    """The program of Triton, if it is installed."""
    if why := triton.why_missing():
        pytest.skip(f"Triton {triton.VERSION}: {why}")
    return {"tritonserver": str(triton.program())}


@pytest.mark.xdist_group("engine triton")
class TestTriton(StreamStopContract, GenerationContract, NativePathsContract, SleepContract):
    """tritonserver with its Python backend."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, folder: Path, triton_programs: dict[str, str]) -> Iterator[EngineRig]:
        repository = folder / "repository"
        triton.add_model(repository, "text", "ada")

        def launch(port: int, metrics_port: int) -> LaunchCommand:
            args = ("--allow-metrics=true", f"--metrics-port={metrics_port}", "--metrics-address=127.0.0.1")
            return launch_command("triton", triton_programs, repository, port, args=args)

        rig = EngineRig(
            TRITON, launch, folder, api=TritonText(), statuses_before_ready=frozenset({400}),
            metrics=frozenset({"waiting"}), has_metrics_port=True, stop=Stop.COMPLETES,
            is_known_path=knows_triton_path,
            sleep=SleepCalls(
                ("/v2/repository/models/ada/unload", {}), ("/v2/repository/models/ada/load", {}),
                lambda engine: engine.request("GET", "/v2/models/ada/ready").status != 200, 400,
            ),
        )  # fmt: skip
        yield rig
        rig.close()

    def test_model_that_cannot_be_loaded_at_start_ends_the_process(
        self, tmp_path: Path, triton_programs: dict[str, str]
    ) -> None:
        triton.add_model(tmp_path, "fails", "ada")
        command = launch_command("triton", triton_programs, tmp_path, free_port())
        done = subprocess.run(command.argv, capture_output=True, timeout=ANSWERS_S_MAX, check=False)
        assert done.returncode == 1


class TestTritonReadiness:
    """Only the readiness path of a model reports whether it can be used."""

    @pytest.fixture
    def server(self, tmp_path: Path, triton_programs: dict[str, str]) -> Iterator[triton.TritonServer]:
        assert triton_programs
        with triton.serving(tmp_path) as server:
            for kind in ("text", "fails", "hangs"):
                triton.add_model(server.repository, kind)
            yield server

    def test_server_is_ready_without_models_but_not_after_a_failed_load(self, server: triton.TritonServer) -> None:
        assert (server.status("/v2/health/ready"), server.status("/v2/models/text/ready")) == (200, 400)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.load("fails")
        server.load("text")
        assert (server.status("/v2/health/ready"), server.status("/v2/models/text/ready")) == (400, 200)

    def test_load_that_hangs_stays_in_loading_and_affects_no_other_model(self, server: triton.TritonServer) -> None:
        server.load("text")
        port = urlsplit(server.url).port
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWERS_S_MAX)) as connection:
            connection.request("POST", "/v2/repository/models/hangs/load")
            end_s = time.monotonic() + ANSWERS_S_MAX
            while server.states().get("hangs") != "LOADING":
                assert time.monotonic() < end_s
            for _ in range(20):
                assert server.status("/v2/models/text/ready") == 200
            assert server.states() == {"text": "READY", "fails": "", "hangs": "LOADING"}
            assert (server.status("/v2/health/ready"), server.status("/v2/models/hangs/ready")) == (400, 400)
            assert select.select([connection.sock], [], [], 0)[0] == []
            server.process.kill()  # SIGTERM does not end it within a minute
