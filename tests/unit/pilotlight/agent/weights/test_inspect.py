"""Reports of an agent about artifacts that it only inspects."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from artifacts import reference
from artifacts.fetch import fetch, image_file_list
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Registries
from artifacts.fetch.remote_header import NO_TENSORS
from artifacts.formats import gguf
from artifacts.formats.cpu_time_limit import CpuTime
from artifacts.pack import oci_layout
from artifacts.pack.pack import Form
from autoscaler.agent_contract import WeightsReport, read_weights_request
from autoscaler.contract import ModelName
from autoscaler.explain.fit import Needs
from autoscaler.spec.model import Adapter, Model, ModelSpec
from loadtest import tiny_gguf
from pilotlight.agent.weights.inspect import NOT_WHOLE, inspect_artifact
from pilotlight.cli.weights.pack import plan_artifact
from pilotlight.models import header_report
from pilotlight.models.document_loading import fill_memory_estimate
from pilotlight.models.explain_fit_needs import load_memory_needs, read_reported_needs
from pilotlight.models.model_memory import Known
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.hub import FakeHub
from tests.support.fakes.registry import StillClock


async def looked(
    folder: Path, form: Form, seen: list[str] | None = None, *, allow_unsafe: bool = False
) -> WeightsReport:
    files = {"a.gguf": b"GGUF" + bytes(300_000), "LICENSE": b"free"} | ({"m.py": b"pass"} if allow_unsafe else {})
    plan = plan_artifact(packed_models.model(folder / "in", files), allow_unsafe=allow_unsafe)
    oci_layout.write_layout(folder / "layout", plan, form, "v1")
    with packed_models.served(folder / "layout", seen) as host:
        artifact = f"oci://{host}/{packed_models.NAME}:v1"
        report = WeightsReport(artifact=artifact, look=True, allow_unsafe=allow_unsafe)
        return await inspect_artifact(report, reference.parse_reference(artifact), Ways())


async def test_packed_weights_are_reported_as_mountable_image_with_gguf_files(tmp_path: Path) -> None:
    asked = list[str]()
    found = await looked(tmp_path, "modelpack", asked)
    assert (found.image, found.no_image, found.ggufs) == ("", "", ("a.gguf",))
    assert found.digest.startswith("sha256:")
    assert any(one.endswith(found.digest) and "/manifests/" in one for one in asked), "it is the image's own manifest"


async def test_raw_modelpack_artifact_is_reported_as_not_mountable(tmp_path: Path) -> None:
    found = await looked(tmp_path, "modelpack-raw")
    assert (found.image, found.no_image, found.ggufs) == (None, "it is not an image (ModelPack)", ())
    assert found.digest


@pytest.mark.parametrize("allowed", [True, False])
async def test_image_with_code_is_mountable_only_with_allow_unsafe(tmp_path: Path, *, allowed: bool) -> None:
    found = await looked(tmp_path, "modelpack", allow_unsafe=True)
    if allowed:
        assert found.image == ""
        return
    with packed_models.served(tmp_path / "layout") as host:
        artifact = f"oci://{host}/{packed_models.NAME}:v1"
        found = await inspect_artifact(
            WeightsReport(artifact=artifact, look=True), reference.parse_reference(artifact), Ways()
        )
    assert found.image is None
    assert "code is not accepted" in found.no_image


@pytest.mark.parametrize("allowed", [True, False])
async def test_partly_inspected_image_is_mountable_only_with_allow_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    await looked(tmp_path, "modelpack")
    monkeypatch.setattr(image_file_list, "SPANS_MAX", 0)
    with packed_models.served(tmp_path / "layout") as host:
        report = WeightsReport(artifact=ADA, look=True, allow_unsafe=allowed)
        found = await inspect_artifact(
            report, reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1"), Ways()
        )
    assert (found.image, found.no_image) == (("", "") if allowed else (None, NOT_WHOLE))


async def read(folder: Path, source: Path, form: Form = "modelpack") -> tuple[WeightsReport, Model, Needs]:
    """The report about these files, the Model that uses it, and its needs."""
    packed_models.packed(source, folder / "layout", form)
    with packed_models.served(folder / "layout") as host:
        of = reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1")
        report = await inspect_artifact(WeightsReport(artifact=ADA, look=True), of, Ways(), folder / "headers")
    assert not (folder / "headers").exists(), "nothing of it stays"
    looked = {read_weights_request(report): report}
    known = header_report.find_artifact_facts(MODEL, looked)
    return (
        report,
        MODEL if known is None else fill_memory_estimate(MODEL, known, gpus=True),
        read_reported_needs(MODEL, looked),
    )


ADA = "oci://r.io/ada:1"
MODEL = Model(name=ModelName("ada"), spec=ModelSpec(engine="llama.cpp", artifact=ADA, context_tokens=256), slots=2)


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
async def test_memory_estimate_from_a_remote_header_equals_the_local_one(tmp_path: Path, form: Form) -> None:
    source = tmp_path / "in"
    source.mkdir()
    tiny_gguf.make_model(source / "ada.gguf", "Hello, I am Ada.")
    report, sized, found = await read(tmp_path, source, form)
    there = replace(MODEL, spec=replace(MODEL.spec, artifact=f"file://{source / 'ada.gguf'}"))
    assert sized.memory_bytes == sized.estimated_bytes == fill_memory_estimate(there, gpus=True).memory_bytes > 0
    assert found == load_memory_needs(there, gpus=True)
    assert report.bytes > 0, "were it an adapter"


async def test_long_architecture_name_in_a_header_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def long(path: Path, cpu: CpuTime) -> gguf.GgufInfo:
        return replace(gguf.load_gguf_info(path, cpu), architecture="\N{GRINNING FACE}" * 90_000)

    (tmp_path / "in").mkdir()
    tiny_gguf.make_model(tmp_path / "in" / "ada.gguf", "Hello, I am Ada.")
    monkeypatch.setattr(
        header_report,
        "gguf",
        SimpleNamespace(load_gguf_info=long, list_base_files=gguf.list_base_files, GgufError=gguf.GgufError),
    )
    report, sized, _ = await read(tmp_path, tmp_path / "in")
    assert len(report.header.encode()) < 10_000
    assert sized.memory_bytes


async def test_remote_config_json_gives_the_memory_estimate_of_a_local_one(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "max_position_embeddings": 512, "vocab_size": 1000}  # fmt: skip
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": NO_TENSORS + bytes(90_000)}
    source = packed_models.model(tmp_path / "in", files)
    vllm = replace(MODEL, spec=replace(MODEL.spec, engine="vllm"))
    report, _, _ = await read(tmp_path, source, "modelpack-raw")
    found = read_reported_needs(vllm, {read_weights_request(report): report})
    assert found == load_memory_needs(replace(vllm, spec=replace(vllm.spec, artifact=f"file://{source}")), gpus=True)
    assert found.source == "Its config.json (llama)"


async def test_error_for_an_unreadable_remote_header_contains_no_local_path(tmp_path: Path) -> None:
    report, sized, found = await read(tmp_path, packed_models.model(tmp_path / "in", {"a.gguf": b"GGUF"}))
    assert report.no_header.startswith("a.gguf: truncated")
    assert (sized, found.problem) == (MODEL, f"its artifact does not state its memory needs: {report.no_header}")
    assert read_reported_needs(MODEL, {}).problem == "no agent has inspected its artifact yet"
    many = packed_models.model(tmp_path / "two" / "in", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    assert (await read(tmp_path / "two", many))[0].no_header


async def test_model_with_a_remote_adapter_needs_memory_for_its_size(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    tiny_gguf.make_model(source / "ada.gguf", "Hello, I am Ada.")
    report, alone, _ = await read(tmp_path, source)
    both = replace(MODEL, spec=replace(MODEL.spec, adapters=(Adapter(name="x", artifact="oci://r.io/x:1"),)))
    lora = WeightsReport(artifact="oci://r.io/x:1", look=True, digest="sha256:aa", bytes=1000)
    known = header_report.find_artifact_facts(
        both, {read_weights_request(report): report, read_weights_request(lora): lora}
    )
    assert fill_memory_estimate(both, known, gpus=True).memory_bytes >= alone.memory_bytes + 1000


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
@pytest.mark.parametrize("below", ["", "lora/"])
async def test_size_of_a_peft_adapter_counts_only_its_own_safetensors(tmp_path: Path, form: Form, below: str) -> None:
    files = {
        f"{below}adapter_config.json": b"{}", f"{below}adapter_model.safetensors": NO_TENSORS + bytes(90_000),
        f"{below}README.md": bytes(500), f"{below}old/adapter_model.safetensors": NO_TENSORS + bytes(7_000),
    }  # fmt: skip
    report, _, _ = await read(tmp_path, packed_models.model(tmp_path / "in", files), form)
    size = len(NO_TENSORS) + 90_000
    assert size <= report.bytes < size + 7_000, "in an archive with its head"
    lora = Adapter(name="x", artifact=f"file://{tmp_path / 'in' / below}".rstrip("/"))
    tiny_gguf.make_model(tmp_path / "ada.gguf", "Hello, I am Ada.")
    alone = replace(MODEL, spec=replace(MODEL.spec, engine="vllm", artifact=f"file://{tmp_path / 'ada.gguf'}"))
    both = replace(alone, spec=replace(alone.spec, adapters=(lora,)))
    (there,) = [one for one in load_memory_needs(both, gpus=True).parts if one.name == "adapters"]
    assert there.bytes == size


@pytest.mark.parametrize("wrong", [{"weights_bytes": -1}, {"width": 10**400}, {"layers": [{"key_elements": -1}]}])
def test_report_with_an_invalid_header_shape_yields_no_weights_info(wrong: dict[str, object]) -> None:
    shape = {"weights_bytes": 10, "layers": [], "context_tokens": 1, "vocabulary": 1, "width": 1, "inner": 1}
    lora = Adapter(name="x", artifact="oci://r.io/x:1")
    model = replace(MODEL, spec=replace(MODEL.spec, adapters=(lora,)))
    less = WeightsReport(artifact=lora.artifact, look=True, digest="sha256:aa", bytes=-(1 << 40))

    def known(shape: dict[str, object]) -> Known | None:
        text = json.dumps({"words": "w", "shape": shape})
        report = WeightsReport(artifact=ADA, look=True, digest="sha256:aa", header=text)
        return header_report.find_artifact_facts(
            model, {read_weights_request(report): report, read_weights_request(less): less}
        )

    assert known(shape | wrong) is None
    found = known(shape)
    assert found is not None
    assert found.adapters_bytes == 0


async def test_hugging_face_weights_are_reported_with_header_but_without_image(tmp_path: Path) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "Hello, I am Ada.")
    async with FakeHub({}, {"ada.gguf": (tmp_path / "ada.gguf").read_bytes()}).both() as fake:
        report = WeightsReport(artifact="hf://acme/tiny@main", look=True)
        ways = Ways(Registries(pace=StillClock()), fake.env(), tmp_path)
        found = await inspect_artifact(report, fetch.parse_remote_source(report.artifact), ways, tmp_path / "headers")
    assert (found.image, found.no_image, found.no_header) == (None, "it is not in a registry", "")
    assert json.loads(found.header)["words"] == "Its GGUF header (llama)"
    assert not (tmp_path / "headers").exists()
