"""Case 30: messages of another version are read: the contract only grows, and unknown fields are ignored.

`tests/contracts/messages.json` holds the fields of all messages of the previous version. After a release it is
regenerated: python -m tests.project.test_mixed_versions > tests/contracts/messages.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoscaler import contract
from autoscaler.agent_contract import NodeAnswer, NodeReport
from autoscaler.contract import Message

RECORDED = Path(__file__).parents[1] / "contracts" / "messages.json"
SENT = (
    contract.CatalogueDelta, contract.RoutesDelta, contract.Report, contract.ReportAnswer, NodeReport, NodeAnswer
)  # fmt: skip
"""Top-level messages; all others are parts of them."""
BOUNDS = {"minimum", "maximum", "pattern", "minLength", "maxLength", "maxItems"}
IGNORED = {"title", "description", "default", *BOUNDS}
UNKNOWN = {"of_the_next_version": {"deep": [1, {"more": None}]}}


def fields() -> dict[str, dict[str, Any]]:
    """Name -> its JSON schema, of all messages and their parts."""
    _, parts = msgspec.json.schema_components(SENT)
    return parts


def shape(schema: Any) -> Any:
    """The parts of a schema that a reader depends on.
    Left out are descriptions, defaults, which the sender may omit, and bounds, which no sender reaches.
    """
    if isinstance(schema, dict):
        return {key: shape(value) for key, value in schema.items() if key not in IGNORED}
    return [shape(one) for one in schema] if isinstance(schema, list) else schema


def recorded() -> dict[str, dict[str, Any]]:
    """The fields in the previous version."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    return found


@pytest.mark.case("30")
@pytest.mark.parametrize("name", sorted(recorded()))
def test_message_schema_adds_only_optional_fields_to_the_recorded_one(name: str) -> None:
    """No field is removed, changes its type or becomes required, and no new one is required: older senders omit it."""
    before, now = recorded()[name], fields()[name]
    assert set(now.get("required", ())) == set(before.get("required", ()))
    for field, schema in before.get("properties", {}).items():
        assert shape(now["properties"][field]) == shape(schema), field


@pytest.mark.case("30")
@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_unknown_message_fields_are_ignored_at_every_level(kind: type[Message]) -> None:
    """A message of the next version, with a new field in each of its parts."""
    whole = example(kind)
    read = contract.make_decoder(kind)
    assert read(json.dumps(whole).encode()) == read(json.dumps(grown(whole)).encode())
    assert json.dumps(grown(whole)).count("of_the_next_version") > 0


def example(kind: type[Message]) -> dict[str, Any]:
    """A message with every field set, with values of the schema's types."""
    _, parts = msgspec.json.schema_components((kind,))
    made: dict[str, Any] = value(parts[kind.__name__], parts)
    return made


def value(schema: dict[str, Any], parts: dict[str, Any]) -> Any:
    """A value of that type."""
    if "$ref" in schema:
        return value(parts[schema["$ref"].rpartition("/")[2]], parts)
    if "anyOf" in schema:
        return value(next(one for one in schema["anyOf"] if one.get("type") != "null"), parts)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {name: value(one, parts) for name, one in schema["properties"].items()}
        case "object":
            return {"a": value(schema["additionalProperties"], parts)} if schema.get("additionalProperties") else {}
        case "array":
            return [value(schema["items"], parts)] if schema.get("items") else []
        case kind:
            return {"string": "a", "integer": 1, "number": 1.5, "boolean": True}[str(kind)]


def grown(whole: Any) -> Any:
    """Add unknown fields to every part; maps of names to numbers are not parts."""
    if isinstance(whole, list):
        return [grown(one) for one in whole]
    if not isinstance(whole, dict) or set(whole) == {"a"}:
        return whole
    return {**{key: grown(one) for key, one in whole.items()}, **UNKNOWN}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(shape(fields()), indent=1, sort_keys=True) + "\n")
