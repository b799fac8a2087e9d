"""config.json and safetensors: the memory they imply, and a one-line error where they state nothing."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from artifacts.formats.cpu_time_limit import CpuTime
from artifacts.formats.hf_config import CONFIG_BYTES_MAX, INDEX, WIDE_BYTES_MAX, ConfigError, load_config_info
from artifacts.formats.memory_estimate import BYTES_MAX, ServingOptions, estimate_paged_engine
from autoscaler.contract import ModelName
from autoscaler.explain.fit import explain_fit
from autoscaler.spec.model import Model, ModelSpec
from pilotlight.models.document_loading import fill_memory_estimate
from pilotlight.models.explain_fit_needs import load_memory_needs
from tests.support.builders.worlds import T0, device, world
from tests.support.example_budget import examples

LLAMA: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
DATA = 1000


def tensors(path: Path, header: object = None, data: int = DATA) -> None:
    """Write a weights file."""
    fit = {"w": {"dtype": "F16", "shape": [500], "data_offsets": [0, DATA]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(fit if header is None else header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tensors(tmp_path / "model.safetensors")
    return tmp_path


def layers(folder: Path, **fields: object) -> list[tuple[int, int]]:
    """Return (elements per token, bytes of state) of each layer, with these keys in config.json."""
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return [(one.key_elements + one.value_elements, one.state_bytes) for one in load_config_info(folder).shape.layers]


def wrong(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_info(folder)
    line = str(caught.value)
    assert line.startswith(str(folder))
    assert "\n" not in line
    return line.removeprefix(f"{folder}").removeprefix("/")


def test_8b_model_config_yields_weights_size_and_cache_bytes_per_token(folder: Path) -> None:
    made = load_config_info(folder)
    assert made.architecture == "llama"
    assert made.shape.weights_bytes == (folder / "model.safetensors").stat().st_size
    assert estimate_paged_engine(made.shape, ServingOptions(slots=1)).token_bytes == 128 << 10
    assert (made.shape.context_tokens, made.shape.vocabulary) == (131072, 128256)


@pytest.mark.parametrize(
    ("checks", "file"),
    [(0, "config.json"), (1, "model.safetensors.index.json"), (2, "a.safetensors"), (3, "a.safetensors")],
)
def test_error_after_the_cpu_time_limit_names_the_file_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: int, file: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{"a":"a.safetensors"}}')
    tensors(tmp_path / "a.safetensors")
    done = iter([False] * checks + [True])
    monkeypatch.setattr(CpuTime, "is_spent", lambda _: next(done))
    assert wrong(tmp_path) == f"{file}: its header takes more than 2 s to read; no real model has such a header"


def test_latent_attention_and_recurrent_state_are_counted_per_layer(folder: Path) -> None:
    assert layers(folder, kv_lora_rank=512, qk_rope_head_dim=64) == [(576, 0)] * 32
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    delta = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
    state = 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert layers(folder, layer_types=kinds * 8, **delta) == ([(0, state)] * 3 + [(2048, 0)]) * 8
    assert layers(folder, **delta) == [(2048, state)] * 32, "no layer has a type: both kinds count"
    assert layers(folder, mamba_d_state=16)[0] == (2048, 4 * (16 * 8192 + 3 * (8192 + 32)))
    kda = layers(folder, linear_attn_config={"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4})
    assert kda[0][1] == 4 * (32 * 128 * 128 + 9 * 32 * 128)
    assert layers(folder, model_type="rwkv7")[0][1] > 0


def test_sliding_window_does_not_change_the_estimate_of_a_paged_engine(folder: Path) -> None:
    plain = layers(folder)
    assert layers(folder, sliding_window=128, layer_types=["sliding_attention"] * 32) == plain


def test_missing_or_invalid_layer_count_is_named_in_the_error(folder: Path) -> None:
    assert layers(folder, intermediate_size="many", head_dim=None, layer_types=[1, 2]) == layers(folder)
    for value in ("x", -1, None, True, 2.5, 1 << 70):
        layers_said = {**LLAMA, "num_hidden_layers": value}
        (folder / "config.json").write_text(json.dumps(layers_said))
        assert wrong(folder) == "config.json: num_hidden_layers is missing or not a number: not a language model?"
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 4097}))
    assert wrong(folder) == "config.json: num_hidden_layers is above 4096"


def test_model_shape_is_read_from_a_nested_text_config(folder: Path) -> None:
    inside = {"model_type": "big", "text_config": LLAMA}
    (folder / "config.json").write_text(json.dumps(inside))
    assert (load_config_info(folder).architecture, len(load_config_info(folder).shape.layers)) == ("big", 32)
    (folder / "config.json").write_text(json.dumps(inside | {"text_config": 3}))
    assert wrong(folder) == "config.json: text_config is not an object"


def test_weights_size_is_the_sum_of_all_indexed_files(folder: Path) -> None:
    tensors(folder / "model-2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert load_config_info(folder).shape.weights_bytes == 2 * (folder / "model.safetensors").stat().st_size
    (folder / "model-2.safetensors").unlink()
    assert wrong(folder) == "model-2.safetensors: No such file or directory"
    for name in ("../x", "", "..", "a\0b"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        assert "is not a file name" in wrong(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "\x1b[31m"}}))
    assert wrong(folder).endswith("'\\x1b[31m' is not a file name")
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')
    assert wrong(folder) == f"{INDEX}: not valid JSON: Expected `str`, got `int` - at `$.weight_map[...]`"


def test_truncated_invalid_or_missing_model_files_raise_config_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors(weights, data=10)
    assert wrong(folder) == "model.safetensors: truncated: its last tensor ends behind the end of the file"
    weights.write_bytes(b"\xff" * 100)
    assert wrong(folder) == "model.safetensors: not a safetensors file, or truncated"
    tensors(weights, {"w": {"dtype": "F16"}})
    assert wrong(folder) == "model.safetensors: a tensor without data_offsets"
    weights.unlink()
    assert wrong(folder) == ": contains no .safetensors file"
    (folder / "config.json").write_bytes(b"[" * 100_000)
    assert "config.json: not valid JSON" in wrong(folder)
    (folder / "config.json").write_bytes(b" " * (CONFIG_BYTES_MAX + 1))
    assert wrong(folder) == "config.json: larger than 4 MiB"
    (folder / "config.json").write_text("[]")
    assert wrong(folder) == "config.json: not valid JSON: Expected `object`, got `array`"
    (folder / "config.json").unlink()
    assert wrong(folder) == "config.json: No such file or directory"
    with pytest.raises(ConfigError, match="File name too long"):
        load_config_info(folder / ("a" * 300))


@pytest.mark.parametrize("file", ["model.safetensors", INDEX])
@pytest.mark.parametrize("start", ["\U0001f600", "\\ud83d\\ude00", "\\n", ""])
def test_header_or_index_over_16_mib_must_be_ascii_without_escapes(folder: Path, file: str, start: str) -> None:
    for size, accepted in ((WIDE_BYTES_MAX, True), (WIDE_BYTES_MAX + 1, not start)):
        if file == INDEX:
            begin, end = b'{"weight_map":{"' + start.encode(), b'":"model.safetensors"}}'
            (folder / file).write_bytes(begin + b"x" * (size - len(begin) - len(end)) + end)
        else:
            begin, end = b'{"' + start.encode(), b'":{"data_offsets":[0,0]}}'
            text = begin + b"x" * (size - len(begin) - len(end)) + end
            (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
        if accepted:
            load_config_info(folder)
        else:
            assert wrong(folder) == f"{file}: larger than 16 MiB, with escapes or characters outside of ASCII"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_fifo_in_a_model_folder_is_rejected_without_waiting_for_a_writer(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert wrong(folder) == f"{name}: it is not a regular file"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*LLAMA, "head_dim"]), inner),
    max_leaves=6,
)
NAMES = (
    *(*LLAMA, "text_config", "layer_types", "kv_lora_rank", "linear_attn_config", "mamba_d_state"),
    *("expand", "head_dim"),
)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES), header=VALUES, garbage=st.binary(max_size=40))
def test_arbitrary_model_files_give_a_bounded_estimate_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object], header: object, garbage: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    for write in (
        lambda: tensors(weights),
        lambda: tensors(weights, {"w": header}),
        lambda: weights.write_bytes(garbage),
    ):
        write()
        (folder / "config.json").write_text(json.dumps(LLAMA | fields))
        with contextlib.suppress(ConfigError):  # any other error fails
            made = estimate_paged_engine(
                load_config_info(folder).shape, ServingOptions(slots=100_000, context_tokens=1_000_000_000)
            )
            assert 0 < made.total_bytes(gpus=True) <= BYTES_MAX
    (folder / "config.json").write_bytes(garbage)
    with contextlib.suppress(ConfigError):
        load_config_info(folder)


def test_vllm_model_without_configured_memory_needs_whole_devices(folder: Path) -> None:
    spec = ModelSpec(engine="vllm", artifact=f"file://{folder}", context_tokens=8192)
    of = Model(name=ModelName("big"), spec=spec, slots=64)
    assert fill_memory_estimate(of).memory_bytes == 0
    fit = explain_fit(world([of], [device("gpu0", 24)]), of, load_memory_needs(of, gpus=False), T0)
    assert (
        fit.sentences[0]
        == "big is assumed to need all memory of each of its devices. Its config.json (llama) gives this estimate:"
    )
    rest = int(0.9 * (24 << 30)) - sum(one.bytes for one in fit.needs.parts if one.name != "cache")
    assert fit.places[0].calls == rest // (8192 * (128 << 10)) > 10
    half = replace(of, spec=replace(spec, args=("--kv-cache-dtype=fp8",)))
    assert load_memory_needs(half, gpus=False).token_bytes == 64 << 10
    (folder / "config.json").write_text("{")
    assert (
        "its artifact cannot be read: "
        in explain_fit(world([of], [device()]), of, load_memory_needs(of, gpus=False), T0).sentences[0]
    )


def test_layer_types_that_are_lists_are_treated_as_unknown(folder: Path) -> None:
    usual = layers(folder, mamba_d_state=16, layer_types=["x"] * 32)
    assert layers(folder, mamba_d_state=16, layer_types=[["x"]] * 32) == usual


def test_recurrent_state_of_huge_dimensions_is_capped_at_the_byte_limit(folder: Path) -> None:
    many = 2**32 - 1
    (_, state_bytes), *_ = layers(
        folder, linear_num_value_heads=many, linear_key_head_dim=many, linear_value_head_dim=9
    )
    assert state_bytes == BYTES_MAX
