"""Contents of artifacts: a golden manifest for each dialect, and what is rejected under any name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from artifacts import digest as digests
from artifacts import file_kinds as kinds
from artifacts import file_policy
from artifacts.dialects import artifact_contents
from artifacts.dialects.artifact_contents import Contents, RefusedError
from artifacts.dialects.base import Said
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import OCI_MANIFEST, Manifest
from artifacts.safe_paths import Tree

GOLDEN = Path(__file__).parents[3] / "golden" / "artifacts"
NAMES = sorted(path.name.removesuffix(".manifest.json") for path in GOLDEN.glob("*.manifest.json"))
MODELPACK = "application/vnd.cncf.model."
TITLE, FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"


def golden(name: str, *, allow_unsafe: bool = False) -> Contents:
    """Parse a golden manifest. Its types and names are those in the tools' own sources."""
    config = GOLDEN / f"{name}.config.json"
    found = manifest.parse_manifest((GOLDEN / f"{name}.manifest.json").read_bytes())
    assert isinstance(found, Manifest)
    return artifact_contents.read_contents(
        found, config.read_bytes() if config.exists() else None, allow_unsafe=allow_unsafe
    )


def one(media_type: str, path: str = "", **notes: str) -> Descriptor:
    annotations = {FILEPATH: path} if path else {}
    return Descriptor(media_type, digests.compute_digest(media_type.encode()), 7, annotations | notes)


def read(*layers: Descriptor, config: str = f"{MODELPACK}config.v1+json", allow_unsafe: bool = False) -> Contents:
    descriptor = Descriptor(config, digests.compute_digest(b"{}"), 2, {})
    return artifact_contents.read_contents(
        Manifest(OCI_MANIFEST, "", descriptor, layers, {}), allow_unsafe=allow_unsafe
    )


def modelkit(kitfile: bytes, layer: Descriptor) -> Contents:
    """Return the contents of a KitOps ModelKit with this Kitfile and one layer."""
    media_type = "application/vnd.kitops.modelkit.config.v1+json"
    config = Descriptor(media_type, digests.compute_digest(kitfile), len(kitfile), {})
    return artifact_contents.read_contents(Manifest(OCI_MANIFEST, "", config, (layer,), {}), kitfile)


def refusals(*layers: Descriptor, allow_unsafe: bool = False) -> list[str]:
    return [layer.refusal for layer in read(*layers, allow_unsafe=allow_unsafe).layers]


@pytest.mark.parametrize("name", NAMES)
def test_parsed_golden_manifest_matches_its_expected_listing(name: str) -> None:
    found = golden(name)
    rows = [f"{file.path!r} under {file.under!r} in {list(found.roots)}" for file in (x.file for x in found.layers)]
    expected = (GOLDEN / f"{name}.expected.txt").read_text().splitlines()
    assert [*artifact_contents.explain_contents(found), *rows] == expected


def test_golden_manifests_contain_an_example_of_every_dialect() -> None:
    fields = {golden(name).dialect for name in NAMES}
    assert fields == {
        *("ModelPack", "ModelPack by its older name (cnai)", "Docker Model Runner", "KitOps ModelKit", "Ollama"),
        *("ramalama image, raw", "ramalama image, car", "image (modelcar or image volume)", "OMLMD"),
        "ORAS (files by their titles)",
    }


def test_modelpack_manifest_lists_files_with_role_size_and_digest() -> None:
    files = golden("modelpack").files()
    assert [(file.role, file.encoding) for file in files[:2]] == [("weight", "raw")] * 2
    assert files[0].path == "model-00001-of-00002.safetensors"
    assert files[0].size == 4976698672
    assert digests.parse_digest(files[0].digest) == files[0].digest


@pytest.mark.parametrize("kind", ["weight", "weight.config", "doc", "dataset"])
@pytest.mark.parametrize("ending", ["raw", "tar", "tar+gzip", "tar+zstd"])
@pytest.mark.parametrize("name", ["cncf", "cnai"])
def test_modelpack_layer_types_other_than_code_are_accepted(kind: str, ending: str, name: str) -> None:
    layer = one(f"application/vnd.{name}.model.{kind}.v1.{ending}", "x.safetensors")
    found = read(layer, one(f"application/vnd.{name}.model.weight.v1.raw", "model.safetensors"))
    assert found.files()[0].encoding == ending


@pytest.mark.point("16")
@pytest.mark.parametrize("ending", ["raw", "tar", "tar+gzip", "tar+zstd"])
@pytest.mark.parametrize("path", ["", "modeling.py", "src", "config.json"])
def test_code_layers_are_rejected_unless_unsafe_files_are_allowed(ending: str, path: str) -> None:
    layer = one(f"{MODELPACK}code.v1.{ending}", path)
    (message,) = refusals(layer)
    assert "code is not accepted" in message or (not path and ending == "raw" and "names no file" in message)
    found = read(layer, one(f"{MODELPACK}weight.v1.gguf"), allow_unsafe=True)
    if path or ending != "raw":
        assert found.files()[0].role == "code"


@pytest.mark.point("16")
@pytest.mark.parametrize("kind", ["weight", "weight.config", "doc", "dataset"])
@pytest.mark.parametrize(
    "path",
    [
        *("pytorch_model.bin", "a/model.PT", "x.pth", "optimizer.pkl", "m.joblib", "w.ckpt", "a.npz", "m.keras"),
        *("m.h5", "pytorch_model.bin.1", "consolidated.00.pth", "model.nemo", "rank0.engine", "model.llamafile"),
    ],
)
def test_weights_that_can_run_code_are_rejected_unless_unsafe_is_allowed(kind: str, path: str) -> None:
    (message,) = refusals(one(f"{MODELPACK}{kind}.v1.raw", path))
    assert "can run programs" in message
    assert "allowUnsafe: true" in message
    assert refusals(one(f"{MODELPACK}{kind}.v1.raw", path), allow_unsafe=True) == [""]
    assert "can run programs" in refusals(one(f"{MODELPACK}{kind}.v1.tar", path))[0], "in an archive as well"


@pytest.mark.point("16")
@pytest.mark.parametrize("kind", ["weight", "weight.config", "doc", "dataset"])
@pytest.mark.parametrize(
    "path",
    [
        *("modeling_x.py", "a.PY", "lib/x.so", "x.so.1.2", "run.sh", "n.ipynb", "setup.cfg", "requirements.txt"),
        *("Makefile", "Dockerfile", "kernel.cu", "a.whl", "requirements-dev.txt", "m.wasm"),
    ],
)
def test_code_files_are_rejected_for_every_layer_type(kind: str, path: str) -> None:
    assert "code is not accepted" in refusals(one(f"{MODELPACK}{kind}.v1.raw", path))[0]
    assert "code is not accepted" in refusals(one(f"{MODELPACK}{kind}.v1.tar", path))[0]


@pytest.mark.point("16")
def test_weights_other_than_safetensors_or_gguf_are_rejected() -> None:
    for path in ("model.onnx", "model.ggml", "weights", "model", "model.dduf", "model.safetensors.exe.x"):
        assert refusals(one(f"{MODELPACK}weight.v1.raw", path))[0], path
    for path in ("model.safetensors", "M.GGUF", "a/b-00001-of-00002.gguf"):
        assert refusals(one(f"{MODELPACK}weight.v1.raw", path)) == [""]
    assert refusals(one(f"{MODELPACK}weight.v1.gguf", "no-suffix")) == [""], "its media type determines its kind"
    assert "can run programs" in refusals(one(f"{MODELPACK}weight.v1.gguf", "model.bin"))[0], "a name that lies counts"
    assert "can run programs" in refusals(one(f"{MODELPACK}weight.v1.pickle"))[0]
    assert "safetensors or GGUF" in refusals(one(f"{MODELPACK}weight.v1.newform"))[0]


@pytest.mark.point("16")
def test_artifact_with_any_rejected_layer_yields_no_files() -> None:
    found = golden("refused")
    assert not found.layers[0].refusal
    with pytest.raises(RefusedError, match=r"^ModelPack: layer 2: weights in this format .*; 7 more layers are"):
        found.files()
    allowed = golden("refused", allow_unsafe=True)
    assert [bool(layer.refusal) for layer in allowed.layers] == [False] * 6 + [True] * 3, "paths and types stay refused"


@pytest.mark.point("16")
def test_file_policy_rejects_files_of_unsafe_or_unknown_type() -> None:
    assert file_policy.evaluate_file("model.safetensors").refusal == ""
    assert file_policy.evaluate_file("tokenizer.model").role == "tokenizer"
    assert "its purpose is unknown" in file_policy.evaluate_file("blob").refusal
    assert file_policy.evaluate_file("blob", allow_unsafe=True).role == "unknown"
    assert "can run programs" in file_policy.evaluate_file("a/b.pkl").refusal
    assert "code is not accepted" in file_policy.evaluate_file("a/b.py").refusal


@pytest.mark.parametrize(
    ("path", "role"),
    [
        *((path, "weight") for path in ("model.safetensors", "exploration.gguf")),
        *((path, "adapter") for path in ("adapter_model.safetensors", "lora-support.gguf")),
        ("mmproj-model-f16.gguf", "projector"),
        *((path, "tokenizer") for path in ("tokenizer.json", "spiece.model", "vocab.txt", "qwen.tiktoken")),
        ("special_tokens_map.json", "tokenizer"),
        ("chat_template.jinja", "template"),
        *((path, "config") for path in ("config.json", "model.safetensors.index.json")),
        *((path, "license") for path in ("LICENSE", "LICENSE.txt", "USE_POLICY.md")),
        *((path, "doc") for path in ("README.md", ".gitattributes")),
        ("data/train.parquet", "dataset"),
    ],
)
def test_role_of_a_file_is_derived_from_its_name(path: str, role: str) -> None:
    found = kinds.classify_file(path)
    assert found is not None
    assert found.role == role


def test_unknown_layer_types_are_rejected_even_with_allow_unsafe() -> None:
    found = read(one(f"{MODELPACK}weight.v1.gguf"), one("application/vnd.example.thing", "x.json"))
    assert "is not a layer type of ModelPack" in found.layers[1].refusal
    assert artifact_contents.explain_contents(found)[2].endswith(
        "refused: application/vnd.example.thing is not a layer type of ModelPack"
    )
    still = read(one(f"{MODELPACK}weight.v1.gguf"), one("application/vnd.example.thing", "x.json"), allow_unsafe=True)
    with pytest.raises(RefusedError, match="layer 2"):
        still.files()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"typeflag":50}', "no regular file"),
        ('{"typeflag":53}', "no regular file"),
        ('{"typeflag":"0"}', "no regular file"),
        ('{"size":8}', "another size"),
        ('{"size":7.0}', "another size"),
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"size":7,"size":8}', "key 'size' twice"),
    ],
)
def test_layer_with_invalid_file_metadata_is_rejected(metadata: str, message: str) -> None:
    layer = one(f"{MODELPACK}weight.v1.raw", "a.gguf", **{"org.cncf.model.file.metadata+json": metadata})
    assert message in refusals(layer)[0]
    good = '{"name":"a.gguf","size":7,"typeflag":48}'
    assert refusals(layer._replace(annotations={FILEPATH: "a.gguf", "org.cncf.model.file.metadata+json": good})) == [""]


def test_unknown_docker_model_version_is_rejected() -> None:
    layer = one("application/vnd.docker.ai.gguf.v3")
    with pytest.raises(RefusedError, match=r"version v99\.0; supported are v0\.1 and v0\.2"):
        read(layer, config="application/vnd.docker.ai.model.config.v99.0+json").files()


def test_modelkit_with_model_from_another_artifact_is_rejected() -> None:
    docs = one("application/vnd.kitops.modelkit.docs.v1.tar")
    with pytest.raises(RefusedError, match=r"refers to a model in another place .'ghcr\.io/a/base:v1'"):
        modelkit(b'{"model":{"path":"ghcr.io/a/base:v1"}}', docs).files()


@pytest.mark.point("4")
@pytest.mark.parametrize("path", ["../up/model.gguf", "/etc/model.gguf", "./../x"])
def test_kitfile_path_outside_the_artifact_is_rejected(path: str) -> None:
    layer = one("application/vnd.kitops.modelkit.model.v1.tar")
    found = modelkit(b'{"model":{"path":"%s"}}' % path.encode(), layer)
    with pytest.raises(RefusedError, match="its path"):
        found.files()


def test_kitfile_with_a_different_layer_digest_is_rejected() -> None:
    layer = one("application/vnd.kitops.modelkit.model.v1.tar")
    for digest, expected in (
        (layer.digest, ""),
        (digests.compute_digest(b""), "its Kitfile states another digest for it"),
    ):
        found = modelkit(b'{"model":{"path":"model.gguf","digest":"%s"}}' % digest.encode(), layer)
        assert [each.refusal for each in found.layers] == [expected]


@pytest.mark.point("4")
def test_archive_target_folder_outside_the_artifact_is_rejected() -> None:
    assert "in it" in artifact_contents._path_refusal(Said(encoding="tar", under="../x"), Tree())
    assert artifact_contents._path_refusal(Said(encoding="tar", under="x"), Tree()) == ""


def test_oras_folder_layer_is_an_archive_only_with_unpack_annotation() -> None:
    layer = one("application/vnd.oci.image.layer.v1.tar+gzip", **{TITLE: "parts.d"})
    marked = layer._replace(annotations={**layer.annotations, "io.deis.oras.content.unpack": "true"})
    empty = "application/vnd.oci.empty.v1+json"
    assert read(layer, config=empty).layers[0].file.encoding == "raw"
    assert read(marked, config=empty).layers[0].file.encoding == "tar+gzip"


def test_oras_py_tar_layer_is_raw_and_tar_gzip_layer_is_an_archive() -> None:
    empty, kind = "application/vnd.oci.empty.v1+json", "application/vnd.oci.image.layer.v1.tar"
    layers = (one(kind, **{TITLE: "LICENSE"}), one(f"{kind}+gzip", **{TITLE: "parts"}))
    assert [layer.file.encoding for layer in read(*layers, config=empty).layers] == ["raw", "tar+gzip"]


def test_nondistributable_and_foreign_image_layers_are_rejected() -> None:
    image = "application/vnd.oci.image.config.v1+json"
    layers = (
        one("application/vnd.oci.image.layer.v1.tar+gzip"),
        one("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"),
        one("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
    )
    assert [bool(layer.refusal) for layer in read(*layers, config=image).layers] == [False, True, True]


def test_artifacts_that_contain_no_model_weights_are_rejected() -> None:
    signature = one("application/vnd.dev.cosign.simplesigning.v1+json")
    with pytest.raises(BadManifestError, match="a signature, not a model"):
        read(signature, config="application/vnd.oci.image.config.v1+json")
    with pytest.raises(BadManifestError, match="not a model in a known dialect"):
        read(one("text/plain"), config="application/vnd.oci.empty.v1+json")
    with pytest.raises(RefusedError, match="contains no weights"):
        read(one(f"{MODELPACK}doc.v1.raw", "README.md")).files()
    with pytest.raises(RefusedError, match="contains no weights"):
        read().files()


def test_layers_with_equal_digest_but_different_sizes_are_rejected() -> None:
    first, second = one(f"{MODELPACK}weight.v1.raw", "a.gguf"), one(f"{MODELPACK}weight.v1.raw", "b.gguf")
    assert len(read(first, second).files()) == 2, "two names for the same bytes are nothing odd"
    with pytest.raises(RefusedError, match="two sizes for one digest"):
        read(first, second._replace(size=8)).files()


def test_path_of_180_kb_is_rejected_within_5_cpu_seconds() -> None:
    long = "tokenizer" * 20_000
    begin_s = time.process_time()
    assert "longer than 1024" in refusals(one(f"{MODELPACK}weight.config.v1.raw", long))[0]
    assert time.process_time() - begin_s < 5, "it is refused before anything looks for words in it"


def test_artifact_larger_than_32_tib_is_rejected() -> None:
    whole = one(f"{MODELPACK}weight.v1.raw")._replace(size=1 << 44)
    layers = (whole._replace(annotations={FILEPATH: f"{n}.gguf"}) for n in range(3))
    with pytest.raises(RefusedError, match="larger than 32 TiB"):
        read(*layers).files()
