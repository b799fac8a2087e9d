"""Manifests and indexes: what is accepted, which index entry is selected, and a one-line error for all else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artifacts import digest as digests
from artifacts.dialects import artifact_contents
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Platform
from artifacts.oci.manifest import DOCKER_INDEX, OCI_INDEX, OCI_MANIFEST, Index, Manifest
from tests.support.example_budget import examples

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
AMD64 = Platform("linux", "amd64")


def descriptor(**changed: object) -> dict[str, object]:
    return {"mediaType": "application/octet-stream", "digest": A, "size": 7, **changed}


def document(**changed: object) -> dict[str, object]:
    whole = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": descriptor(), "layers": [descriptor()]}
    return {**whole, **changed}


def parsed(found: object, **also: Any) -> Manifest | Index:
    return manifest.parse_manifest(json.dumps(found).encode(), **also)


def refusal(found: object, **also: Any) -> str:
    with pytest.raises(BadManifestError) as caught:
        parsed(found, **also)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 420
    return str(caught.value)


def test_manifest_is_parsed_with_its_layers_but_without_their_urls() -> None:
    layer = descriptor(digest=B, size=0, annotations={"x": "y"}, urls=["http://169.254.169.254/"], name="a")
    found = parsed(document(artifactType="application/vnd.x+json", layers=[layer], subject=descriptor()))
    assert isinstance(found, Manifest)
    assert found.artifact_type == "application/vnd.x+json"
    assert [(one.digest, one.size, one.annotations, one.name) for one in found.layers] == [(B, 0, {"x": "y"}, "a")]
    assert found.subject is not None
    assert "http" not in repr(found), "urls of strangers are not even kept"


@pytest.mark.point("2")
@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_manifest_that_does_not_match_its_digest_is_rejected(algorithm: str) -> None:
    content = json.dumps(document()).encode()
    good = digests.parse_digest(f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}")
    assert isinstance(manifest.parse_manifest(content, digest=good), Manifest)
    for other in (content + b" ", content + b"\n", json.dumps(document(layers=[])).encode()):
        with pytest.raises(BadManifestError, match="not the requested one"):
            manifest.parse_manifest(other, digest=good)


@pytest.mark.point("2")
def test_config_that_does_not_match_its_digest_or_size_is_rejected() -> None:
    config = b'{"config":{}}'
    described = descriptor(
        mediaType="application/vnd.cncf.model.config.v1+json", digest=digests.compute_digest(config), size=len(config)
    )
    of = parsed(document(config=described))
    assert isinstance(of, Manifest)
    artifact_contents.read_contents(of, config)
    wrong = of._replace(config=of.config._replace(size=len(config) + 1))
    with pytest.raises(BadManifestError, match="config does not match the manifest"):
        artifact_contents.read_contents(wrong, config)
    for other in (b'{"config":[]}', config + b" "):
        with pytest.raises(BadManifestError, match="config does not match the manifest"):
            artifact_contents.read_contents(of, other)


@pytest.mark.point("3")
@pytest.mark.parametrize("bad", ["sha256:../..", "sha256:" + "A" * 64, "sha256:", "md5:" + "a" * 32, "", None, 5, [A]])
@pytest.mark.parametrize("at", ["config", "layers", "subject"])
def test_invalid_digests_are_rejected_in_every_field(bad: object, at: str) -> None:
    one = descriptor(digest=bad)
    message = refusal(document(**{at: [one] if at == "layers" else one}))
    assert f"{at}{'[0]' if at == 'layers' else ''}.digest" in message
    assert "manifests[0].digest" in refusal({"schemaVersion": 2, "manifests": [one]})


@pytest.mark.point("7")
def test_manifest_above_4_mib_is_rejected() -> None:
    content = json.dumps(document(annotations={"x": "y" * (4 << 20)})).encode()
    with pytest.raises(BadManifestError, match="larger than 4 MiB"):
        manifest.parse_manifest(content)
    fits = json.dumps(document(annotations={"x": "y" * ((4 << 20) - 1000)})).encode()
    assert isinstance(manifest.parse_manifest(fits), Manifest)


@pytest.mark.point("7")
def test_too_many_layers_or_index_entries_are_rejected() -> None:
    small = b'{"mediaType":"a/b"}'
    content = b'{"schemaVersion":2,"config":%s,"layers":[%s]}' % (
        json.dumps(descriptor()).encode(),
        b",".join([small] * 100_000),
    )
    with pytest.raises(BadManifestError, match="layers has more than 16384"):
        manifest.parse_manifest(content)
    assert "manifests has more than 1024" in refusal({"schemaVersion": 2, "manifests": [descriptor()] * 1025})


@pytest.mark.point("7")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 2_000_000, "nested deeper|with more than"),
        (b'{"a":' * 300_000, "nested deeper|with more than"),
        (b'{"annotations":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
        (b'{"annotations":' + b"[" * 34 + b"]" * 34 + b"}", "nested deeper"),
        (b'{"a":[' + b"{}," * 1_000_000 + b"{}]}", "with more than 400000 commas and opening brackets"),
    ],
)
def test_manifest_json_with_too_many_levels_or_elements_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(BadManifestError, match=message):
        manifest.parse_manifest(content)


@pytest.mark.point("7")
def test_manifest_with_a_duplicate_json_key_is_rejected() -> None:
    with pytest.raises(BadManifestError, match="key 'layers' twice"):
        manifest.parse_manifest(b'{"schemaVersion":2,"layers":[],"layers":[{}]}')
    with pytest.raises(BadManifestError, match="key 'digest' twice"):
        manifest.parse_manifest(b'{"schemaVersion":2,"config":{"digest":"a","digest":"b"},"layers":[]}')


@pytest.mark.point("7")
def test_manifest_with_index_fields_or_a_wrong_media_type_is_rejected() -> None:
    both = document(manifests=[descriptor()])
    assert "both a manifest and an index" in refusal(both)
    assert "both a manifest and an index" in refusal({**both, "mediaType": OCI_INDEX})
    assert "but its content is not" in refusal(document(mediaType=OCI_INDEX))
    assert "but its content is not" in refusal({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "manifests": []})
    assert "Content-Type" in refusal(document(), content_type=OCI_INDEX)
    unsaid = {key: value for key, value in document().items() if key != "mediaType"}
    assert "but its content is not" in refusal(unsaid, content_type=DOCKER_INDEX)
    assert isinstance(parsed(unsaid, content_type=f"{OCI_MANIFEST}; charset=utf-8"), Manifest)
    assert isinstance(parsed(unsaid, content_type="application/json"), Manifest)
    assert isinstance(parsed({"schemaVersion": 2, "manifests": []}), Index)


@pytest.mark.point("7")
@pytest.mark.parametrize("size", [-1, 1.0, 7.5, 1e3, "7", None, True, (1 << 44) + 1, 10**30, [7]])
def test_manifest_with_a_size_that_is_no_valid_integer_is_rejected(size: object) -> None:
    assert "layers[0].size is not a whole number" in refusal(document(layers=[descriptor(size=size)]))
    assert "config.size is not a whole number" in refusal(document(config=descriptor(size=size)))


@pytest.mark.point("7")
@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1" * 5000, b"1e999"])
def test_manifest_with_non_finite_or_huge_numbers_is_rejected(text: bytes) -> None:
    with pytest.raises(BadManifestError):
        manifest.parse_manifest(json.dumps(document(layers=[descriptor(size="@")])).encode().replace(b'"@"', text))
    with pytest.raises(BadManifestError, match="NaN is not a number"):
        manifest.parse_manifest(json.dumps(document(an_unknown_field=float("nan"))).encode())


@pytest.mark.point("7")
def test_manifest_that_states_a_config_above_4_mib_is_rejected() -> None:
    assert "config.size is above 4 MiB" in refusal(document(config=descriptor(size=(4 << 20) + 1)))


@pytest.mark.point("7")
def test_self_referencing_and_too_deeply_nested_indexes_are_rejected() -> None:
    inner = parsed({"schemaVersion": 2, "manifests": [descriptor(mediaType=OCI_INDEX)]})
    assert isinstance(inner, Index)
    assert manifest.select_manifest(inner, AMD64).digest == A
    with pytest.raises(BadManifestError, match="contains itself"):
        manifest.select_manifest(inner, AMD64, [digests.parse_digest(A)])
    with pytest.raises(BadManifestError, match="deeper than 3"):
        manifest.select_manifest(inner, AMD64, [digests.parse_digest(B)] * 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schemaVersion": 1}, "schemaVersion"),
        ({"schemaVersion": 2.0}, "schemaVersion"),
        ({"mediaType": "application/vnd.docker.distribution.manifest.v1+json"}, "not a media type of a manifest"),
        ({"mediaType": 7}, "mediaType is not a text"),
        ({"fsLayers": []}, "an obsolete format"),
        ({"layers": {}}, "layers is missing"),
        ({"layers": [[]]}, "layers[0] is not an object"),
        ({"config": None}, "config is not an object"),
        ({"artifactType": "a\nb/c"}, "artifactType"),
        ({"annotations": {"a": 1}}, "annotations is not an object of texts"),
        ({"annotations": {str(n): "" for n in range(257)}}, "annotations has more than 256"),
        ({"layers": [{**descriptor(), "mediaType": "x"}]}, "layers[0].mediaType"),
        ({"layers": [{**descriptor(), "platform": []}]}, "layers[0].platform is not an object"),
        ({"layers": [{**descriptor(), "platform": {"os": 1}}]}, "layers[0].platform.os"),
        ({"layers": [{**descriptor(), "platform": {"os": "a\nb"}}]}, "layers[0].platform may only have"),
        ({"layers": [{**descriptor(), "platform": {"architecture": "x" * 65}}]}, "layers[0].platform may only have"),
        ({"layers": [{**descriptor(), "name": 1}]}, "layers[0].name is not a text"),
    ],
)
def test_invalid_manifest_field_is_named_in_the_error(changed: dict[str, object], message: str) -> None:
    assert message in refusal(document(**changed))


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"7", b'"x"', b"{", b"\xff\xfe{}", b'{"a":"\\ud8"}', b"{}"])
def test_non_manifest_content_is_rejected(content: bytes) -> None:
    with pytest.raises(BadManifestError):
        manifest.parse_manifest(content)


def entry(digest: str, platform: str = "", **changed: object) -> dict[str, object]:
    parts = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
    return descriptor(mediaType=OCI_MANIFEST, digest=digest, **({"platform": parts} if platform else {}), **changed)


def chosen(*entries: dict[str, object], platform: Platform = AMD64) -> str:
    index = parsed({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(entries)})
    assert isinstance(index, Index)
    return manifest.select_manifest(index, platform).digest


def test_index_entry_of_the_requested_platform_is_selected() -> None:
    arm, amd = entry(A, "linux/arm64/v8"), entry(B, "linux/amd64")
    assert chosen(arm, amd) == B
    assert chosen(arm, amd, platform=Platform("linux", "arm64")) == A
    v6, v7 = entry(A, "linux/arm/v6"), entry(B, "linux/arm/v7")
    assert chosen(v6, v7, platform=Platform("linux", "arm", "v7")) == B
    with pytest.raises(BadManifestError, match="no entry for linux/amd64; it has linux/arm64/v8"):
        chosen(arm)


def test_model_entry_of_an_index_is_preferred_to_platform_images() -> None:
    model = entry(B, artifactType="application/vnd.cncf.model.manifest.v1+json")
    assert chosen(entry(A, "linux/amd64"), model) == B
    assert chosen(entry(A, "linux/amd64"), entry(B, "linux/arm64", annotations={"org.cnai.model.model": "true"})) == B
    attestation = {"vnd.docker.reference.type": "attestation-manifest"}
    assert chosen(entry(A, "linux/amd64", annotations=attestation), entry(B, "linux/amd64")) == B
    with pytest.raises(BadManifestError, match="it has none"):
        chosen(entry(A, annotations=attestation))


SCALARS = st.sampled_from([None, True, 0, -1, 7, 1.5, 10**20, "", "a/b", A, OCI_MANIFEST, OCI_INDEX, DOCKER_INDEX])
KEYS = st.sampled_from(["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size", "annotations"])
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=12
)
CONFIGS = [
    *("application/vnd.cncf.model.config.v1+json", "application/vnd.docker.ai.model.config.v0.1+json"),
    *("application/vnd.kitops.modelkit.config.v1+json", "application/vnd.oci.image.config.v1+json"),
    *("application/vnd.oci.empty.v1+json", "application/x-config"),
]
LAYERS = [
    *("application/vnd.cncf.model.weight.v1.raw", "application/vnd.cncf.model.weight.config.v1.raw", "text/plain"),
    *("application/vnd.cncf.model.weight.v1.gguf", "application/vnd.cnai.model.code.v1.tar+gzip"),
    *("application/vnd.docker.ai.gguf.v3", "application/vnd.docker.ai.model.file", "application/x-mlmodel"),
    *("application/vnd.kitops.modelkit.model.v1.tar", "application/vnd.ollama.image.model"),
    *("application/vnd.ollama.image.tensor", "application/vnd.oci.image.layer.v1.tar+zstd"),
]
NAMES = [
    *("model.safetensors", "a/b.gguf", "a/B.gguf", "a", "x.py", "..", "", "/a.gguf", "a/config.json"),
    *("\ud800", "a\0"),
]
PATHS = st.sampled_from(NAMES) | st.text("ab./\\:\u0301eE", max_size=8)
NOTES = st.dictionaries(
    st.sampled_from(
        [
            *("org.cncf.model.filepath", "org.opencontainers.image.title", "org.cncf.model.file.metadata+json"),
            *("io.deis.oras.content.unpack", "org.cnai.model.filepath"),
        ]
    ),
    PATHS | st.sampled_from(["true", '{"typeflag":50}', '{"size":7}']),
    max_size=2,
)
LAYER = st.builds(
    lambda kind, digest, notes, name: descriptor(mediaType=kind, digest=digest, annotations=notes, name=name),
    *(st.sampled_from(LAYERS), st.sampled_from([A, B]), NOTES, PATHS),
)
VALID = [
    descriptor(mediaType=LAYERS[number], digest=digest, annotations={"org.cncf.model.filepath": path})
    for number, digest, path in ((0, A, "sub/model.safetensors"), (1, B, "config.json"))
]
KITFILE = st.builds(
    lambda path, digest: {"model": {"path": path, **digest}}, PATHS, st.sampled_from([{}, {"digest": A}])
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.binary(max_size=200) | ANYTHING.map(lambda found: json.dumps(found).encode()))
def test_arbitrary_content_is_rejected_with_bad_manifest_error(content: bytes) -> None:
    try:
        manifest.parse_manifest(content)
    except BadManifestError:
        return
    pytest.fail("what is arbitrary is not a manifest")


@settings(derandomize=True, deadline=None, max_examples=examples(600))
@example(kind=CONFIGS[0], layers=VALID, config={}, allow_unsafe=False)
@given(st.sampled_from(CONFIGS), st.lists(LAYER, max_size=4), KITFILE | ANYTHING, st.booleans())
def test_nearly_valid_manifests_yield_only_safe_paths(
    kind: str, layers: list[dict[str, object]], config: object, allow_unsafe: bool
) -> None:
    raw = json.dumps(config).encode()
    described = descriptor(mediaType=kind, digest=digests.compute_digest(raw), size=len(raw))
    of = parsed(document(config=described, layers=layers))
    assert isinstance(of, Manifest)
    try:
        read = artifact_contents.read_contents(of, raw, allow_unsafe=allow_unsafe)
        assert all(line.isprintable() for line in artifact_contents.explain_contents(read))
        files = read.files()
    except BadManifestError:
        assert layers != VALID
        return
    assert len(files) == len(of.layers), "nothing is left out silently"
    for file in files:
        for path in (file.path, file.under):
            assert not path.startswith("/")
            assert not {"..", "."} & set(path.split("/"))
            assert path.isprintable()
            assert "\\" not in path
        assert file.path or file.encoding != "raw"
        assert allow_unsafe or file.role not in {"code", "unknown"}
    raws = [file.path for file in files if file.encoding == "raw"]
    assert len({path.casefold() for path in raws}) == len(raws)
