"""The data of engines: flags that Models must not set, and native paths that clients cannot reach."""

from __future__ import annotations

import pytest

from autoscaler.contract import ModelName
from autoscaler.engines import EngineError
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.spec.engine_definition import reserved_flags
from autoscaler.spec.engines import ENGINES, LLAMA_CPP, TRITON, VLLM
from autoscaler.spec.model import Model, ModelSpec
from gateway.request.api_routes import Kind, find_operation
from pilotlight.processes.cluster import IN_IMAGES, require_image

NATIVE = [
    (name, path.replace("{id}", "m"))
    for name, engine in ENGINES.items()
    for path in (*engine.behavior.native_paths, *([engine.behavior.metrics.path] if engine.behavior.metrics else []))
]


def test_reserved_flags_are_those_whose_values_pilotlight_fills_in() -> None:
    assert reserved_flags(VLLM) == {
        "--host": "host", "--port": "port", "--served-model-name": "name", "--max-num-seqs": "slots",
        "--max-model-len": "context_tokens", "--model": "model_path",
    }  # fmt: skip
    llama = reserved_flags(LLAMA_CPP)
    assert {llama["--slots"], llama["--parallel"], llama["-np"]} == {"slots"}, "the flags of both of its programs"
    assert not llama.keys() & {"--gpu-layers", "--ctx-checkpoints", "--offline"}


def test_flag_that_may_be_repeated_is_not_reserved() -> None:
    assert reserved_flags(TRITON).keys() == {"--model-repository", "--http-address", "--http-port"}


@pytest.mark.parametrize(("engine", "path"), NATIVE)
@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE"])
def test_native_path_of_an_engine_is_never_forwarded(engine: str, path: str, method: bytes) -> None:
    operation = find_operation(method, path.encode())
    assert operation is None or operation.kind is not Kind.INFER or operation.engine_path != path.encode(), engine


def test_every_program_is_looked_up_on_the_machine_and_in_images() -> None:
    programs = {program.found for engine in ENGINES.values() for program in engine.programs}
    assert find_installed_programs().keys() <= programs
    assert programs - IN_IMAGES.keys() == {"xllamacpp"}
    assert IN_IMAGES["sglang"] == IN_IMAGES["speaches"] == "python3"


def test_error_for_a_missing_image_suggests_the_known_image_of_the_engine() -> None:
    with pytest.raises(EngineError, match=r"set it to an image with the engine, such as vllm/vllm-openai$"):
        require_image(Model(name=ModelName("m"), spec=ModelSpec(engine="vllm")))
    with pytest.raises(EngineError, match=r"set it to an image with the engine$"):
        require_image(Model(name=ModelName("m"), spec=ModelSpec(engine="transformers")))


def test_every_engine_names_the_sources_of_its_facts() -> None:
    assert [name for name, engine in ENGINES.items() if not engine.behavior.sources] == []
