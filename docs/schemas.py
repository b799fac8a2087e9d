"""Writes the JSON Schemas of documents and the CustomResourceDefinitions: `.venv/bin/python -m docs.schemas`.

`autoscaler.schema` generates them; `field_docs` reads the attribute docstrings from the source of the types.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path

from autoscaler.schema.crds import render_crds
from autoscaler.schema.json_schema import render_schemas

SCHEMAS = Path(__file__).parent / "schema"
DEFINITIONS = Path(__file__).parents[1] / "charts" / "pilotlight" / "crds"


def field_docs(kind: type) -> dict[str, str]:
    """The docstring of each field of a type and of its base classes, in one line."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not one.__module__.startswith("autoscaler."):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, doc in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                docs[field.target.id] = " ".join(str(ast.literal_eval(doc.value)).split())
    return docs


if __name__ == "__main__":
    for folder, files in ((SCHEMAS, render_schemas()), (DEFINITIONS, render_crds(field_docs))):
        for file_name, text in files.items():
            (folder / file_name).write_text(text)
