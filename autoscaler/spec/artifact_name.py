"""Artifact names: the schemes that a node's weights store supports, and the canonical form of a name. Pure.

Owns the list of those schemes and the syntax that documents accept. `artifacts.source_uri` and `artifacts.reference`
have the full grammar; this module does not import them. Docker has two spellings for some names. Both modules normalize
them in the same way, because copies, inspections and weights requests are looked up by name.
"""

from __future__ import annotations

import re

HUB = re.compile(r"hf://[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?(@[A-Za-z0-9._/-]+)?")
HUB_CHOSEN = re.compile(HUB.pattern + r"(\?include=[A-Za-z0-9*?\[\]!._+=@ /,-]+)?")
BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\x00-\x1f/][^\x00-\x1f]*")
"""The patterns above accept a prefix of what `artifacts.source_uri` accepts, and REGISTRY a prefix of what
`artifacts.reference` accepts. These modules check the whole name when the weights are pulled.
"""
REGISTRY = re.compile(
    r"oci://[A-Za-z0-9.:\[\]-]+(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?"
    r"(@sha(256:[0-9a-f]{64}|512:[0-9a-f]{128}))?"
)
IMAGE_WANTED = "expected oci://registry/repository:tag or ...@sha256:DIGEST, the repository in lower case"
STORED = {
    "oci": (REGISTRY, IMAGE_WANTED),
    "hf": (HUB_CHOSEN, "expected hf://org/name@revision"),
    "s3": (BUCKET, "expected s3://bucket/key or s3://bucket/prefix/, with a bucket of 3 to 63 characters"),
}
"""Scheme -> its pattern and the expected form. A node's store pulls these artifacts, unless the engine fetches them
itself (`autoscaler.weights.desired`).
"""
DOCKER = "docker.io"
DOCKERS = frozenset({DOCKER, "index.docker.io", "registry-1.docker.io"})


def is_stored(artifact: str | None) -> bool:
    """Return whether a node's store supports the scheme of an artifact."""
    scheme, found, _ = (artifact or "").partition("://")
    return bool(found) and scheme in STORED


def normalize_artifact(artifact: str) -> str:
    """Return the canonical name: `oci://DOCKER.io/ada:1` is `oci://docker.io/library/ada:1`."""
    scheme, found, rest = artifact.partition("://")
    if not found or scheme != "oci":
        return artifact
    first, slash, path = rest.partition("/")
    if not slash or not (any(one in first for one in ".:[") or first == "localhost" or first != first.lower()):
        # as in Docker, a first part that does not look like a host is part of the repository
        first, path = DOCKER, rest
    host = first.lower()
    if host in DOCKERS:
        host, path = DOCKER, path if "/" in path.partition("@")[0] else f"library/{path}"
    return f"{scheme}://{host}/{path}"
