"""The reference of custom resource fields is generated from the definitions, and crds.md matches the code."""

from __future__ import annotations

import ast
import json
import re

from autoscaler.documents.document_rules import ADAPTERS_MAX
from autoscaler.kubernetes.resources import events, status_writer
from autoscaler.schema.structural import ENTRIES_MAX, ITEMS_MAX, TEXT_CHARS_MAX
from docs import custom_resources
from scripts.gates import ROOT

PAGE = (ROOT / "docs" / "reference" / "crds.md").read_text()
EVENTS = PAGE.partition("\n## Events\n")[2]


def event_reasons() -> set[str]:
    """The reason of every Event of a Model in the source."""
    tree = ast.parse((ROOT / "autoscaler" / "kubernetes" / "resources" / "events.py").read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    reasons = (call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ModelEvent")
    return {ast.literal_eval(reason) for reason in reasons if isinstance(reason, ast.Constant)}


def test_reference_of_custom_resource_fields_equals_the_generated_one() -> None:
    assert custom_resources.PAGE.read_text() == custom_resources.page(), (
        "run `.venv/bin/python -m docs.custom_resources`"
    )


def test_every_document_key_is_listed_in_the_custom_resource_reference() -> None:
    for kind in ("Model", "Tenant"):
        schema = json.loads((ROOT / "docs" / "schema" / f"{kind.lower()}.json").read_text())
        section = custom_resources.PAGE.read_text().partition(f"## {kind}\n")[2].partition("\n## ")[0]
        listed = set(re.findall(r"^\| `(spec\.\w+)` ", section, re.MULTILINE))
        assert {f"spec.{key}" for key in schema["properties"]["spec"]["properties"]} <= listed


def test_documented_events_of_a_model_equal_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`.+?) \|", EVENTS, re.MULTILINE)
    assert sorted(word for row in rows for word in re.findall(r"`(\w+)`", row)) == sorted(event_reasons())
    assert f"gets an Event `{events.UNREADABLE}`" in EVENTS
    assert f"at most {events.MINUTE_MAX} write\nrequests per minute" in EVENTS


def test_documented_bounds_of_custom_resources_match_the_code() -> None:
    bounds = f"at most {ITEMS_MAX} items (aliases and adapters {ADAPTERS_MAX}), a map {ENTRIES_MAX} entries, and a text"
    assert f"{bounds} {TEXT_CHARS_MAX} characters" in PAGE
    assert f"at most {status_writer.PER_S:g} writes per second" in PAGE
