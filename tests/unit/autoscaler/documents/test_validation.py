"""Rules over several keys of one document; the tests of the documents contain more of them."""

from __future__ import annotations

import re

import pytest

from autoscaler.documents.load import DocumentError, parse_documents


@pytest.mark.parametrize(
    ("engine", "artifact", "line"),
    [
        (
            "llama.cpp",
            "oci://r.io/A:1",
            "expected oci://registry/repository:tag or ...@sha256:DIGEST, the repository in lower case",
        ),
        ("vllm", "pvc://a/b", "pvc:// is not supported yet in this version for adapters"),
        ("command", "oci://r.io/a:1", "oci:// is not supported yet in this version for adapters of engine command"),
        ("llama.cpp", "file:///a,b", "expected an absolute path such as file:///models/support.gguf, without any of"),
        ("llama.cpp", "s3://models/a.gguf", ""),
        ("vllm", "hf://a/b@main?include=*.safetensors", ""),
    ],
)
def test_adapter_artifact_is_accepted_only_from_supported_sources(engine: str, artifact: str, line: str) -> None:
    command = ", command: ['{port}']" if engine == "command" else ""
    adapters = f"adapters: [{{name: x, artifact: '{artifact}'}}]"
    spec = f"{{engine: {engine}, artifact: 'file:///m.gguf', {adapters}{command}}}"
    text = f"apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: a}}\nspec: {spec}\n"
    if not line:
        assert parse_documents([("a.yaml", text)]).models[0].spec.adapters[0].artifact == artifact
        return
    with pytest.raises(DocumentError, match=re.escape(f"a.yaml: Model a: spec.adapters[0].artifact: {line}")):
        parse_documents([("a.yaml", text)])
