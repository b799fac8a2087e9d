"""The checked-in CRDs are up to date and valid. tests/integration/cluster/kubernetes/resources/test_crds.py tests them
on a real API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from autoscaler.documents.document_rules import KEYS
from autoscaler.documents.document_types import ModelDocument
from autoscaler.kubernetes.resources.model_status import LearnedStatus
from autoscaler.schema.cel_rules import RULES
from autoscaler.schema.crds import LATER, MODEL, TENANT, CrdKind, render_crds
from autoscaler.schema.structural import Schema
from autoscaler.spec.model import ModelSpec
from docs.schemas import field_docs

FOLDER = Path(__file__).parents[4] / "charts" / "pilotlight" / "crds"


def schemas(kind: CrdKind) -> Iterator[tuple[str, Schema]]:
    """(path, schema) of every schema of a kind."""
    found = yaml.safe_load(render_crds(field_docs)[f"{kind.plural}.yaml"])
    yield from _below(found["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "")


def _below(schema: Schema, at: str) -> Iterator[tuple[str, Schema]]:
    yield at, schema
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    for key, value in properties.items():
        yield from _below(value, f"{at}.{key}")
    for inner, mark in (("items", "[]"), ("additionalProperties", ".*")):
        one = schema.get(inner)
        if isinstance(one, dict):
            yield from _below(one, at + mark)


def test_checked_in_crds_match_the_generated_crds() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.yaml")}
    assert found == render_crds(field_docs), "run `.venv/bin/python -m docs.schemas`"


@pytest.mark.parametrize("kind", [MODEL, TENANT], ids=lambda kind: kind.name)
def test_crd_schemas_are_structural(kind: CrdKind) -> None:
    for path, schema in schemas(kind):
        loose = "x-kubernetes-preserve-unknown-fields" in schema or "x-kubernetes-int-or-string" in schema
        assert isinstance(schema.get("type"), str) or loose, path
        assert not {"$ref", "allOf", "oneOf", "additionalItems"} & schema.keys(), path
        assert "anyOf" not in schema or "x-kubernetes-int-or-string" in schema, path


def test_arrays_and_strings_of_a_model_spec_are_bounded() -> None:
    """Otherwise the API server estimates the cost of a validation rule as too high."""
    for path, schema in schemas(MODEL):
        if path.startswith(".spec") and not path.startswith(".spec.fallbacks"):
            needed = {"array": "maxItems", "string": "maxLength"}.get(str(schema.get("type")))
            later = f"{path.removeprefix('.')}" in LATER
            assert needed is None or needed in schema or "enum" in schema or later, path


def test_no_field_accepts_values_of_unbounded_depth() -> None:
    """The API server accepts up to 10,000 levels in a field that preserves unknown keys."""
    for kind in (MODEL, TENANT):
        loose = {path: schema for path, schema in schemas(kind) if "x-kubernetes-preserve-unknown-fields" in schema}
        values = {path: schema for path, schema in loose.items() if path.startswith(".spec.policy.")}
        assert loose.keys() - values.keys() <= {".spec.env.*"}
        for path, schema in values.items():
            is_empty = (schema["maxItems"], schema["maxProperties"]) == (0, 0)
            assert is_empty != ({f"{path}[]", f"{path}.*"} <= values.keys())
    variable = dict(schemas(MODEL))[".spec.env.*"]
    assert (variable["maxItems"], variable["maxProperties"], variable["required"]) == (0, 1, ["valueFrom"])


def test_crd_status_contains_every_field_of_the_learned_values() -> None:
    """The API server drops other keys."""
    known = {path.rpartition(".")[2] for path, _ in schemas(MODEL) if path.startswith(".status.learned.")}
    assert {field.encode_name for field in msgspec.structs.fields(LearnedStatus)} == known - {"startSeconds[]"}


def test_crds_are_small_enough_for_a_client_side_apply() -> None:
    """`kubectl apply` stores the definition in an annotation, and annotations are limited to 256 KiB in total."""
    for text in render_crds(field_docs).values():
        assert len(msgspec.json.encode(yaml.safe_load(text))) < 128 << 10


def test_every_validation_rule_appears_in_a_crd() -> None:
    """A renamed type or key would silently lose its rules."""
    shown = str([yaml.safe_load(text) for text in render_crds(field_docs).values()])
    for rules in RULES.values():
        for rule in rules:
            assert repr(rule.rule) in shown, rule


def test_keys_listed_as_not_yet_supported_are_known_document_keys() -> None:
    assert LATER.keys() <= {key for keys in KEYS.values() for key in keys}


def test_crd_field_descriptions_come_from_the_field_documentation() -> None:
    assert field_docs(ModelSpec)["slots"] == "Concurrent requests per replica. None: the engine's default."
    assert field_docs(ModelDocument) == {}
    shown = {path: schema.get("description") for path, schema in schemas(MODEL)}
    assert shown[".spec.tls"] == "TLS of the engine. Absent: the engine uses plain HTTP."
    assert "pullSecret" in str(shown[".spec.image"]), "keys are called what they are called in documents"


@pytest.mark.parametrize(("memory", "taken"), [("auto", True), ("16Gi", True), ("automatic", False), ("16 Gi", False)])
def test_crd_accepts_only_a_size_or_auto_as_model_memory(memory: str, taken: bool) -> None:
    pattern = dict(schemas(MODEL))[".spec.gpu.memory"]["pattern"]
    assert isinstance(pattern, str)
    assert bool(re.search(pattern, memory)) is taken
