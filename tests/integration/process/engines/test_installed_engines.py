"""The contract of engines, for those that `make test-engines` installs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.spec.engines import VLLM
from tests.contracts.engine import (
    SENTENCE,
    AdapterContract,
    EngineRig,
    GenerationContract,
    HangingSleeperContract,
    SleepCalls,
    Stop,
    paths_of_openapi,
)
from tests.support.real_services import python_engines
from tests.support.real_services.engine_process import launch_command
from tests.support.real_services.tiny_checkpoints import make_adapter, make_language_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800), pytest.mark.xdist_group("installed engines")]

CONTEXT_TOKENS = 4096


def programs(engine: str) -> dict[str, str]:
    """The program of an engine that is a Python package, if it is installed."""
    if why := python_engines.why_missing(engine):
        pytest.skip(f"{engine}: {why} ({python_engines.install(engine)})")
    return python_engines.programs(engine)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in the format of the Hub."""
    path = tmp_path_factory.mktemp("models") / "ada"
    make_language_model(path, SENTENCE, context_tokens=CONTEXT_TOKENS)
    return path


class TestVllm(GenerationContract, HangingSleeperContract, AdapterContract):
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
            stop_log="Waiting for connections to close", is_known_path=paths_of_openapi,
            sleep=SleepCalls(
                ("/sleep?level=1", {}), ("/wake_up", {}),
                lambda engine: bool(engine.request("GET", "/is_sleeping").document["is_sleeping"]), 200,
            ),
        )  # fmt: skip
        yield rig
        rig.close()

    @pytest.fixture(scope="class")
    @classmethod
    def adapter(cls, checkpoint: Path) -> Path:
        path = checkpoint.parent / "quiet"
        make_adapter(path, checkpoint)
        return path
