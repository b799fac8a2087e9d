"""Generates the reference of all fields of the custom resources: `.venv/bin/python -m docs.custom_resources`.

It reads the CustomResourceDefinitions of the chart, which are generated from the types of the documents.
tests/project/test_docs.py compares the page with what this module would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from autoscaler.schema.structural import KUBERNETES

Schema = dict[str, Any]

PAGE = Path(__file__).parent / "reference" / "custom-resource-fields.md"
DEFINITIONS = Path(__file__).parents[1] / "charts" / "pilotlight" / "crds"
BEGINNING = """# Fields of the custom resources

With this page you can look up every field and every column of the custom resources Model and Tenant. It is generated
from their CustomResourceDefinitions (`.venv/bin/python -m docs.custom_resources`), and a test fails if it is not
current. [Model and Tenant as custom resources](crds.md) describes how they behave, and
[configuration](configuration.md) describes each key in detail. `[]` stands for the items of a list, `*` for the keys
of a map.
"""
OPAQUE = {f"spec.pod.{key}": kind for (_, key), kind in KUBERNETES.items()}
"""Fields with a type of Kubernetes, which documents their parts."""


def fields(schema: Schema, at: str) -> Iterator[tuple[str, Schema, bool]]:
    """Yield (path, schema, whether it is required) of each field below a schema."""
    for name, value in schema.get("properties", {}).items():
        path = f"{at}{name}"
        yield path, value, name in schema.get("required", ())
        if path in OPAQUE:
            continue
        entries = value.get("additionalProperties")
        for inner, mark in ((value, "."), (value.get("items", {}), "[]."), (entries or {}, ".*.")):
            yield from fields(inner, path + mark)


def type_of(schema: Schema) -> str:
    """The type of a field, with its possible values and bounds."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = "integer or string" if schema.get("x-kubernetes-int-or-string") else schema.get("type", "object")
    if kind == "array":
        kind = f"list of {type_of(schema['items'])}"
    elif "additionalProperties" in schema:
        kind = f"map of {type_of(schema['additionalProperties'])}"
    words = ("above" if schema.get("exclusiveMinimum") else "from", "to")
    bounds = (schema.get("minimum"), schema.get("maximum"))
    return " ".join(
        [kind, *(f"{word} {bound:.15g}" for word, bound in zip(words, bounds, strict=True) if bound is not None)]
    )


def table(*rows: Sequence[str]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def section(definition: Schema) -> str:
    """The fields and the columns of one kind."""
    (version,) = definition["spec"]["versions"]
    parts = version["schema"]["openAPIV3Schema"]["properties"]
    rows = []
    for path, schema, required in fields({"properties": {part: parts[part] for part in ("spec", "status")}}, ""):
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "required" if required else ""
        kind = f"`{OPAQUE[path]}` of Kubernetes" if path in OPAQUE else type_of(schema)
        rows.append((f"`{path}`", kind, default, schema.get("description", "")))
    columns = [
        (one["name"], f"`{one['jsonPath']}`", "with `-o wide`" if one.get("priority") else "always")
        for one in version["additionalPrinterColumns"]
    ]
    names = definition["spec"]["names"]
    selectors = " and ".join(f"`{one['jsonPath'][1:]}`" for one in version.get("selectableFields", ())) or "none"
    return (
        f"## {names['kind']}\n\n"
        f"`{definition['metadata']['name']}`, version `{version['name']}`, scope {definition['spec']['scope']}, "
        f"short name `{names['shortNames'][0]}`.\nFields for field selectors: {selectors}.\n\n"
        f"{table(('field', 'type', 'default', 'description'), *rows)}\n"
        f"### Columns of `kubectl get {names['shortNames'][0]}`\n\n"
        f"{table(('column', 'source', 'shown'), *columns)}"
    )


def page() -> str:
    """The whole page."""
    definitions = [yaml.safe_load(path.read_text()) for path in sorted(DEFINITIONS.glob("*.yaml"))]
    return "\n".join([BEGINNING, *(section(definition) for definition in definitions)])


if __name__ == "__main__":
    PAGE.write_text(page())
