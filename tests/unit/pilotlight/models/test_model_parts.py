"""The parts of a Model's weights: which ones the store downloads, and what the engine gets of an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.engines import EngineError
from autoscaler.spec.model import Adapter, Model, ModelSpec
from pilotlight.models.model_parts import (
    Part,
    list_adapter_parts,
    list_parts,
    use_local_files,
    use_placeholder_adapters,
)


def model(artifact: str | None, *found: str, **spec: object) -> Model:
    named = tuple(Adapter(name=f"a{at}", artifact=one) for at, one in enumerate(found))
    return Model(name=ModelName("m"), spec=ModelSpec(engine="vllm", artifact=artifact, adapters=named, **spec))  # type: ignore[arg-type]


def test_remote_artifact_used_twice_by_a_model_is_listed_once() -> None:
    one = model("oci://r.io/m:1", "oci://r.io/m:1", "file:///a", "s3://b/k", "hf://o/n", allow_unsafe=True)
    expected = [Part(text, unsafe=True) for text in ("oci://r.io/m:1", "s3://b/k", "hf://o/n")]
    assert list(list_parts(one)) == expected
    assert list_adapter_parts(one) == {"a0": expected[0], "a2": expected[1], "a3": expected[2]}
    assert list_parts(model("file:///m", "file:///a")) == ()
    assert list_parts(model(None)) == ()


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["any.gguf", "LICENSE"], "any.gguf"),
        (["base.gguf", "sub/adapter-x.gguf"], "sub/adapter-x.gguf"),
        (["adapter_config.json", "adapter_model.safetensors"], ""),
        (["x/adapter_config.json", "x/adapter_model.safetensors", "README.md"], "x"),
    ],
)
def test_fetched_adapter_is_loaded_from_its_gguf_file_or_peft_directory(paths: list[str], found: str) -> None:
    one = model("file:///m", "oci://r.io/a:1")
    spec = use_local_files(one, {Part("oci://r.io/a:1"): (Path("/c/files"), paths)}).spec
    assert (spec.artifact, spec.adapters[0].artifact) == ("file:///m", f"file://{Path('/c/files') / found}")
    assert use_local_files(one, {}) is one


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a.gguf", "b.gguf"], "adapter a0: its artifact contains no adapter"),
        (
            ["lora-a.gguf", "lora-b.gguf"],
            "its artifact contains 2 adapters: lora-a.gguf, lora-b.gguf; package only one",
        ),
        (["model.safetensors"], "adapter a0: its artifact contains no adapter"),
        (["x,y.gguf"], "adapter a0: x,y.gguf contains a character that engines interpret"),
    ],
)
def test_artifact_without_exactly_one_valid_adapter_is_rejected(paths: list[str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        use_local_files(model("file:///m", "oci://r.io/a:1"), {Part("oci://r.io/a:1"): (Path("/c"), paths)})


def test_adapters_not_yet_fetched_get_a_placeholder_path() -> None:
    one = use_placeholder_adapters(model("file:///m", "oci://r.io/a:1", "file:///b"), "/there")
    assert [each.artifact for each in one.spec.adapters] == ["file:///there", "file:///b"]
    here = model("file:///m", "file:///b")
    assert use_placeholder_adapters(here, "/there") is here
