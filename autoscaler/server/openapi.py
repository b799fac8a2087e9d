"""The OpenAPI description of the operations port (interfaces, section 4), generated from the types of the responses.
Pure.

Owns the lists of read paths and orders, and the possible responses of each path. Types come from the responses
themselves, so the two cannot differ. Does not depend on HTTP.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from autoscaler.explain.fit import Fit
from autoscaler.explain.model import Explanation
from autoscaler.planner.what_if import PATH as WHAT_IF
from autoscaler.planner.what_if import Answer, Question
from autoscaler.queries.response_types import (
    DeviceView,
    DocumentsView,
    ModelView,
    NodeView,
    OffView,
    OrderResult,
    Problem,
    Row,
    Sentences,
    TenantView,
)
from autoscaler.server.order_effects import Wish
from autoscaler.state.actions import Plan

VERSION = "3.1.0"
PATH = "/api/v1/openapi.json"
JSON = "application/json"
REF = "#/components/schemas/{name}"


class Read(NamedTuple):
    """One read path of the API: its summary and the type of its response."""

    path: str
    summary: str
    kind: object
    named: bool = False
    """Whether the path ends in {name}: a Model's name or alias, which may be unknown."""


READS = (
    Read("/api/v1/status", "List the state of each Model and the reason", tuple[Row, ...]),
    Read("/api/v1/off", "List features that the autoscaler's mode or an internal error disables", OffView),
    Read("/api/v1/documents", "Get whether the Models, Tenants and Settings in use are the latest", DocumentsView),
    Read("/api/v1/models", "List all Models", tuple[ModelView, ...]),
    Read("/api/v1/models/{name}", "Get one Model", ModelView, named=True),
    Read("/api/v1/tenants", "List all Tenants", tuple[TenantView, ...]),
    Read("/api/v1/devices", "List all devices and the replicas that hold them", tuple[DeviceView, ...]),
    Read("/api/v1/nodes", "List all nodes and the last reports of their agents", tuple[NodeView, ...]),
    Read("/api/v1/plan", "Get the latest Plan", Plan),
    Read("/api/v1/explain/model/{name}", "Explain why a Model runs, waits or is stopped", Explanation, named=True),
    Read("/api/v1/explain/fit/{name}", "Explain how much memory a Model needs and where it fits", Fit, named=True),
    Read("/api/v1/explain/last", "List the latest decisions, newest first", Sentences),
)


class Act(NamedTuple):
    """One order: its path and its summary."""

    path: str
    summary: str


ACTS = (
    Act("/api/v1/models/{name}/wake", "Start a Model now and keep it for its idle timeout"),
    Act("/api/v1/models/{name}/stop", "Drain all replicas of a Model; requests start it again"),
    Act("/api/v1/devices/{name}/cordon", "Place no new replicas on a device"),
    Act("/api/v1/devices/{name}/uncordon", "Allow new replicas on a device again"),
    Act("/api/v1/devices/{name}/drain", "Place no new replicas on a device and move its replicas away"),
    Act("/api/v1/nodes/{name}/cordon", "Place no new replicas on a node"),
    Act("/api/v1/nodes/{name}/uncordon", "Allow new replicas on a node again"),
    Act("/api/v1/nodes/{name}/drain", "Place no new replicas on a node and move its replicas away"),
)
REFUSALS = {
    "400": "The body is invalid",
    "401": "An order, such as drain, requires an API key with the role operator",
    "403": "The API key has another role, or a page of another origin sent the request",
    "404": "The name does not exist",
    "409": "The current state does not allow the order",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "500": "The order could not be stored and has no effect",
    "503": "This autoscaler does not lead, or has just started",
}

ASK_REFUSALS = {status: REFUSALS[status] for status in ("400", "403", "404", "413", "415", "503")} | {
    "401": "An API key with the role operator is missing; it is required if orders require one",
    "429": "Another simulation is running",
}


def render_openapi(version: str) -> bytes:
    """Render READS and ACTS as JSON (https://spec.openapis.org/oas/v3.1.0). `version` is that of Pilotlight."""
    kinds = [*(read.kind for read in READS), Question, Answer, OrderResult, Wish, Problem]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: dict[str, object] = {}
    for read, schema in zip(READS, schemas, strict=False):
        answers = {"200": _answer("The response", schema)}
        if read.named:
            answers["404"] = _answer("The name does not exist", schemas[-1])
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
            "description": "Reads the state from which the autoscaler decides, and accepts operator orders, such "
            "as drain. Times are in seconds, sizes in bytes.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(whole)


NAMED: dict[str, object] = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _act(act: Act, effect: object, wish: object, problem: object) -> dict[str, object]:
    answers = {"200": _answer("The effect of the order", effect)}
    answers |= {status: _answer(why, problem) for status, why in REFUSALS.items()}
    return {
        "summary": act.summary,
        "operationId": _id(act.path),
        "parameters": [NAMED],
        "requestBody": {"required": True, "content": {JSON: {"schema": wish}}},
        "responses": answers,
    }


def _ask(question: object, answer: object, problem: object) -> dict[str, object]:
    answers = {"200": _answer("The actions that would follow", answer)}
    answers |= {status: _answer(why, problem) for status, why in ASK_REFUSALS.items()}
    return {
        "summary": "Simulate which replicas would start where for an assumed demand; starts nothing",
        "operationId": _id(WHAT_IF),
        "requestBody": {"required": True, "content": {JSON: {"schema": question}}},
        "responses": answers,
    }


def _answer(description: str, schema: object) -> dict[str, object]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _id(path: str) -> str:
    """Return an operation ID: `explain-model` for /api/v1/explain/model/{name}.
    The IDs of a collection and of its member differ by `one-`.
    """
    words = [word for word in path.removeprefix("/api/v1/").split("/") if word != "{name}"]
    return "-".join((["one"] if path == "/api/v1/models/{name}" else []) + words)
