"""The JSON Schema of the documents is checked in, up to date, and agrees with the parser."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from autoscaler.schema.json_schema import render_schemas
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.yaml import parse_yaml

ROOT = Path(__file__).parents[4]


def test_checked_in_schemas_match_the_generated_ones() -> None:
    found = {path.name: path.read_text() for path in (ROOT / "docs" / "schema").glob("*.json")}
    assert found == render_schemas(), "run `.venv/bin/python -m docs.schemas`"


@pytest.mark.parametrize("name", sorted(render_schemas()))
def test_each_generated_schema_is_valid(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(render_schemas()[name]))


def test_example_documents_match_the_schemas() -> None:
    documents = parse_yaml((ROOT / "examples" / "two-models.yaml").read_text())
    assert len(documents) == 3
    for document in documents:
        assert isinstance(document, dict)
        schema = json.loads(render_schemas()[f"{document['kind'].lower()}.json"])
        jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "spec", [{}, {"engine": "external"}, {"engine": "vllm", "x": 1}, {"engine": "vllm", "gpu": {"memory": "1GB"}}]
)
def test_invalid_model_fails_schema_validation(spec: dict[str, object]) -> None:
    document = {"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": "a"}, "spec": spec}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json.loads(render_schemas()["model.json"]), cls=jsonschema.Draft202012Validator)


def test_json_schema_default_of_a_size_includes_its_unit() -> None:
    model = json.loads(render_schemas()["model.json"])
    assert model["properties"]["spec"]["properties"]["queue"]["properties"]["bytesMax"]["default"] == "256Mi"
