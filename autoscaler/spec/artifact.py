"""What artifacts are called: the schemes of what a node's store brings, and the one name by which each is known. Pure.

Owns those schemes for the whole house, and how a document may write them. What a name means in full is the grammar of
`artifacts.source_uri` and `artifacts.reference`, which this room does not know; names that Docker has twice are made
one here as there, since Copies, looks and wishes are found by them.
"""

from __future__ import annotations

import re

HUB = re.compile(r"hf://[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?(@[A-Za-z0-9._/-]+)?")
HUB_CHOSEN = re.compile(HUB.pattern + r"(\?include=[A-Za-z0-9*?\[\]!._+=@ /,-]+)?")
BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\x00-\x1f/][^\x00-\x1f]*")
"""Begins of `artifacts.source_uri`, as is this one of `artifacts.reference`: those are asked when the weights are."""
REGISTRY = re.compile(
    r"oci://[A-Za-z0-9.:\[\]-]+(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?"
    r"(@sha(256:[0-9a-f]{64}|512:[0-9a-f]{128}))?"
)
IMAGE_WANTED = "expected oci://registry/repository:tag or ...@sha256:DIGEST, the repository in lower case"
STORED = {
    "oci": (REGISTRY, IMAGE_WANTED),
    "hf": (HUB_CHOSEN, "expected hf://org/name@revision"),
    "s3": (BUCKET, "expected s3://bucket/key or s3://bucket/prefix/"),
}
"""What a node's store can bring, unless an engine fetches it itself (`autoscaler.weights.desired`)."""
DOCKER = "docker.io"
DOCKERS = frozenset({DOCKER, "index.docker.io", "registry-1.docker.io"})


def is_stored(artifact: str | None) -> bool:
    """Whether its scheme is one of those."""
    scheme, found, _ = (artifact or "").partition("://")
    return bool(found) and scheme in STORED


def normalize_artifact(artifact: str) -> str:
    """Its one name: `oci://docker.io/ada:1` is `oci://docker.io/library/ada:1`, and a registry is in lower case."""
    scheme, found, rest = artifact.partition("://")
    if not found or scheme != "oci":
        return artifact
    first, slash, path = rest.partition("/")
    if not slash or not (any(one in first for one in ".:[") or first == "localhost" or first != first.lower()):
        first, path = DOCKER, rest  # what does not look like a host is none, as Docker has it
    host = first.lower()
    if host in DOCKERS:
        host, path = DOCKER, path if "/" in path.partition("@")[0] else f"library/{path}"
    return f"{scheme}://{host}/{path}"
