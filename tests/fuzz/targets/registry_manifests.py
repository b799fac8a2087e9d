"""Fuzz target for registry manifests: one kind of error, no path outside the folder, no layer silently dropped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

from artifacts.dialects import artifact_contents
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Platform
from artifacts.oci.manifest import Index, Manifest

GOLDEN = Path(__file__).parents[2] / "golden" / "artifacts"
DIGEST = b"sha256:" + b"a" * 64


def _short(path: Path) -> bytes:
    """A golden manifest reduced to two layers, without spaces: short inputs."""
    found = cast("dict[str, object]", json.loads(path.read_bytes()))
    layers = cast("list[object]", found["layers"])
    return json.dumps(found | {"layers": layers[:2]}, separators=(",", ":")).encode()


SEEDS = (
    *(_short(path) for path in sorted(GOLDEN.glob("*.manifest.json"))),
    b'{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"%s","size":7,'
    b'"platform":{"os":"linux","architecture":"amd64"}}]}' % DIGEST,
)
WORDS = (
    *(b'"layers":[', b'"manifests":[', b'"config":{', b'"mediaType":"', b'"digest":"', b'"size":', b'"annotations":{'),
    *(b"../", b"/", b"\\\\", b"\\u0000", b"\\ud800", b".safetensors", b".gguf", b".py", b".bin", b"-1", b"1e9", b"NaN"),
    *(
        b"org.cncf.model.filepath",
        b"org.opencontainers.image.title",
        b"vnd.cncf.model",
        b"v1.tar+gzip",
        b"v1.raw",
        DIGEST,
    ),
)


def manifests(data: bytes) -> None:
    """Parse a manifest or an index."""
    try:
        found = manifest.parse_manifest(data)
        if isinstance(found, Index):
            assert manifest.select_manifest(found, Platform("linux", "amd64")) in found.entries
            return
        for allow_unsafe in (False, True):
            judge(found, allow_unsafe=allow_unsafe)
    except BadManifestError as error:
        text = str(error)
        if not text.isprintable():
            raise AssertionError("the error is not one line") from error


def judge(found: Manifest, *, allow_unsafe: bool) -> None:
    """The contents of a manifest may be written, or are rejected."""
    read = artifact_contents.read_contents(found, allow_unsafe=allow_unsafe)
    assert all(line.isprintable() for line in artifact_contents.explain_contents(read))
    assert len(read.layers) == len(found.layers)
    try:
        files = read.files()
    except artifact_contents.RefusedError:
        return
    for file in files:
        for path in filter(None, (file.path, file.under)):
            assert os.path.normpath(f"/store/{path}") == f"/store/{path}"
            assert "\\" not in path
        assert file.path or file.encoding != "raw"
        assert allow_unsafe or file.role not in {"code", "unknown"}
