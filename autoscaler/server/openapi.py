"""The description of the operations port's API as OpenAPI (interfaces, section 4), generated from the answers' types.

Owns the list of what is read and what is ordered there, and what each path may answer. It cannot say anything else than
the answers do. Pure: knows nothing of HTTP.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from autoscaler.explain.fit import Fit
from autoscaler.explain.model import Explanation
from autoscaler.planner.what_if import PATH as WHAT_IF
from autoscaler.planner.what_if import Answer, Question
from autoscaler.queries.views import (
    DeviceView,
    DocumentsView,
    ModelView,
    NodeView,
    OffView,
    Problem,
    Row,
    Sentences,
    TenantView,
    Told,
)
from autoscaler.server.operator_orders import Wish
from autoscaler.state.actions import Plan

VERSION = "3.1.0"
PATH = "/api/v1/openapi.json"
JSON = "application/json"
REF = "#/components/schemas/{name}"


class Read(NamedTuple):
    """One path of the API: what it says, and of which type the answer is."""

    path: str
    summary: str
    kind: object
    named: bool = False
    """Ends in {name}: a Model's name or alias, which may be unknown."""


READS = (
    Read("/api/v1/status", "What runs, waits and sleeps, and why", tuple[Row, ...]),
    Read("/api/v1/off", "What does not work in this mode, or because of an internal error; mostly nothing", OffView),
    Read("/api/v1/documents", "Whether the documents in force are the latest", DocumentsView),
    Read("/api/v1/models", "All Models", tuple[ModelView, ...]),
    Read("/api/v1/models/{name}", "One Model", ModelView, named=True),
    Read("/api/v1/tenants", "All Tenants", tuple[TenantView, ...]),
    Read("/api/v1/devices", "All Devices, and who holds them", tuple[DeviceView, ...]),
    Read("/api/v1/nodes", "All nodes, and what their agents say", tuple[NodeView, ...]),
    Read("/api/v1/plan", "The latest Plan", Plan),
    Read("/api/v1/explain/model/{name}", "Why a Model runs, waits or is stopped", Explanation, named=True),
    Read("/api/v1/explain/fit/{name}", "How much memory a Model needs, and where it would fit", Fit, named=True),
    Read("/api/v1/explain/last", "The latest decisions, newest first", Sentences),
)


class Act(NamedTuple):
    """One order: where it is posted, and what it does."""

    path: str
    summary: str


ACTS = (
    Act("/api/v1/models/{name}/wake", "Start a Model now and keep it for an idle window"),
    Act("/api/v1/models/{name}/stop", "Drain all that runs of a Model; Calls wake it again"),
    Act("/api/v1/devices/{name}/cordon", "Put nothing new on a Device"),
    Act("/api/v1/devices/{name}/uncordon", "Open a Device again"),
    Act("/api/v1/devices/{name}/drain", "Put nothing new on a Device, and move what is there"),
    Act("/api/v1/nodes/{name}/cordon", "Put nothing new on a node"),
    Act("/api/v1/nodes/{name}/uncordon", "Open a node again"),
    Act("/api/v1/nodes/{name}/drain", "Put nothing new on a node, and move what is there"),
)
REFUSALS = {
    "400": "The body is not what it should be",
    "401": "An order needs a key of role operator",
    "403": "The key has another role, or a page of another origin asks",
    "404": "There is none of this name",
    "409": "It cannot be done as things are",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "500": "The order could not be kept, and is not in force",
    "503": "This autoscaler does not lead, or has just begun",
}

ASK_REFUSALS = {status: REFUSALS[status] for status in ("400", "403", "404", "413", "415", "503")} | {
    "401": "It needs a key of role operator, where orders do",
    "429": "Another such question is being worked out",
}


def render_openapi(version: str) -> bytes:
    """The description of READS and ACTS as JSON (https://spec.openapis.org/oas/v3.1.0). `version` is Pilotlight's."""
    kinds = [*(read.kind for read in READS), Question, Answer, Told, Wish, Problem]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: dict[str, object] = {}
    for read, schema in zip(READS, schemas, strict=False):
        answers = {"200": _answer("The answer", schema)}
        if read.named:
            answers["404"] = _answer("There is none of this name", schemas[-1])
        operation: dict[str, object] = {"summary": read.summary, "operationId": _id(read.path), "responses": answers}
        if read.named:
            operation["parameters"] = [NAMED]
        paths[read.path] = {"get": operation}
    for act in ACTS:
        paths[act.path] = {"post": _act(act, *schemas[-3:])}
    paths[WHAT_IF] = {"post": _ask(schemas[-5], schemas[-4], schemas[-1])}
    whole = {
        "openapi": VERSION,
        "info": {
            "title": "Pilotlight operations",
            "version": version,
            "description": "What decisions rest on, and an operator's orders. Times are seconds; sizes are bytes.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(whole)


NAMED: dict[str, object] = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _act(act: Act, told: object, wish: object, problem: object) -> dict[str, object]:
    answers = {"200": _answer("What will happen", told)}
    answers |= {status: _answer(why, problem) for status, why in REFUSALS.items()}
    return {
        "summary": act.summary,
        "operationId": _id(act.path),
        "parameters": [NAMED],
        "requestBody": {"required": True, "content": {JSON: {"schema": wish}}},
        "responses": answers,
    }


def _ask(question: object, answer: object, problem: object) -> dict[str, object]:
    answers = {"200": _answer("What would happen", answer)}
    answers |= {status: _answer(why, problem) for status, why in ASK_REFUSALS.items()}
    return {
        "summary": "What would be started where, if Models were called so; starts nothing",
        "operationId": _id(WHAT_IF),
        "requestBody": {"required": True, "content": {JSON: {"schema": question}}},
        "responses": answers,
    }


def _answer(description: str, schema: object) -> dict[str, object]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _id(path: str) -> str:
    """`explain-model` for /api/v1/explain/model/{name}; a collection and its one member differ by `one-`."""
    words = [word for word in path.removeprefix("/api/v1/").split("/") if word != "{name}"]
    return "-".join((["one"] if path == "/api/v1/models/{name}" else []) + words)
