"""Artifact references, and that the weights store uses the same ones."""

from __future__ import annotations

import ast

import pytest

from artifacts import reference
from artifacts.fetch import fetch
from artifacts.reference import DOCKER, DOCKER_HOSTS
from autoscaler.spec import artifact_name
from autoscaler.spec.artifact_name import DOCKERS, STORED, normalize_artifact
from scripts.gates import SOURCES, name

SUM = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("oci://docker.io/x:1", "oci://docker.io/library/x:1"),
        ("oci://docker.io/library/x:1", "oci://docker.io/library/x:1"),
        ("oci://index.docker.io/x", "oci://docker.io/library/x"),
        ("oci://registry-1.docker.io/acme/x:1", "oci://docker.io/acme/x:1"),
        ("oci://acme/x:1", "oci://docker.io/acme/x:1"),
        (f"oci://Docker.IO/x@{SUM}", f"oci://docker.io/library/x@{SUM}"),
        (f"oci://docker.io/x:1@{SUM}", f"oci://docker.io/library/x:1@{SUM}"),
        ("oci://GHCR.io/acme/x:1", "oci://ghcr.io/acme/x:1"),
        ("oci://localhost/x", "oci://localhost/x"),
        ("oci://registry:5000/x:V1", "oci://registry:5000/x:V1"),
        ("oci://[::1]:5000/x", "oci://[::1]:5000/x"),
    ],
)
def test_spellings_of_an_artifact_have_the_same_normalized_name(text: str, one: str) -> None:
    assert normalize_artifact(text) == normalize_artifact(one) == one
    assert f"oci://{reference.parse_reference(text)}" == one
    assert DOCKERS == DOCKER_HOSTS
    assert artifact_name.DOCKER == DOCKER


@pytest.mark.parametrize("text", ["hf://acme/x@main", "s3://models/x/", "file:///x", "pvc://claim/x", "", "nothing"])
def test_artifact_outside_a_registry_is_not_normalized(text: str) -> None:
    assert normalize_artifact(text) == text


def test_stored_artifact_schemes_are_defined_in_one_module() -> None:
    for scheme, text in {"oci": "oci://r.io/x:1", "hf": "hf://acme/x", "s3": "s3://models/x"}.items():
        assert STORED[scheme][0].fullmatch(text)
        assert fetch.parse_remote_source(text), "what a document may say the store can bring"
    again = [
        name(path)
        for path in SOURCES
        if '"hf"' in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Set | ast.Dict | ast.Tuple | ast.List)
        and {"hf", "s3"}
        <= {
            one.value
            for one in (node.keys if isinstance(node, ast.Dict) else node.elts)
            if isinstance(one, ast.Constant)
        }
    ]
    assert again == ["autoscaler/spec/artifact_name"]
