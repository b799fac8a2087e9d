"""docs/reference/http-api.md lists exactly the paths, headers and refused members of the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import cast

import pytest
from aiohttp import web

from autoscaler.explain.decision_log import Log
from autoscaler.server import openapi
from autoscaler.server.ops import OperationsServer
from autoscaler.server.order_handlers import BODY_BYTES_MAX
from autoscaler.state.world import World
from gateway.gateway import Gateway
from gateway.http.request_head import KEPT
from gateway.http.response_reader import PASSED
from gateway.ops import build_ops_application
from gateway.request import api_routes, headers
from gateway.request.forbidden_fields import PLACES, READ
from gateway.server import cors
from scripts.gates import ROOT
from tests.support.harness.manual_loop import SteppedLoop

Operation = tuple[str, str]
"""A method and a path; `NAME` stands for a name in it."""

PAGE = (ROOT / "docs" / "reference" / "http-api.md").read_text()
INFERENCE, OPERATIONS = PAGE.split("\n## Operations port\n")
WRITERS = [ROOT / "gateway" / "errors.py", *sorted((ROOT / "gateway").glob("http/*.py")),
           *sorted((ROOT / "gateway").glob("server/*.py"))]  # fmt: skip
"""Modules of the gateway that write response headers."""
READABLE = {"cache-control", "content-language", "content-length", "content-type"}
"""Response headers that every page can read (Fetch, CORS-safelisted response-header name)."""
UNREADABLE = {
    *("connection", "transfer-encoding", "vary"),
    *("content-security-policy", "x-accel-buffering", "x-content-type-options"),
}
"""Response headers that concern the connection, caches, proxies, and browsers that show the page at `/`."""
_ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_HEADER_LINE = re.compile(rb"(?:^|\n|%b)([a-z]+(?:-[a-z]+)*): [^\r]*(?=\r\n)")


def paths(cell: str) -> Iterator[str]:
    """The paths in a cell of a table: each of its own, or each root with each name after `followed by`."""
    roots, _, names = cell.partition("followed by")
    for root in _CODE.findall(roots):
        yield from (root + name for name in _CODE.findall(names) or [""])


def documented_operations(text: str) -> set[Operation]:
    """The operations in the table of methods and paths of a section."""
    rows = [(method, cell) for method, cell, _ in _ROW.findall(text) if method in ("GET", "POST")]
    return {(method, path.replace("MODEL", "NAME")) for method, cell in rows for path in paths(cell)}


def documented_headers() -> Iterator[tuple[str, str, str]]:
    """(lower-case name, direction, meaning) of each header in the table of headers."""
    for first, direction, meaning in _ROW.findall(INFERENCE):
        for name in _CODE.findall(first) if direction in ("request", "response", "both") else ():
            yield name.partition(":")[0].lower(), direction, meaning


def gateway_operations() -> set[Operation]:
    """The operations in the tables of the inference port."""
    posted = {path.decode() for path in api_routes._POST}
    posted |= {f"{api_routes.DEPLOYMENTS.decode()}NAME{suffix.decode()}" for suffix, _ in api_routes.DEPLOYED}
    got = {path.decode() for path in api_routes._GET} | {f"{root.decode()}NAME" for root in api_routes.GET_MODEL_ROOTS}
    return {("POST", path) for path in posted} | {("GET", path) for path in got}


def routes(application: web.Application) -> set[Operation]:
    """The routes of an application that have no name in the path, without those that only report an error."""
    found = {(route.method, route.resource.canonical) for route in application.router.routes() if route.resource}
    return {(method, path) for method, path in found if method in ("GET", "POST") and "{" not in path}


def written_headers() -> set[str]:
    """The response headers in the source: complete lines, and (name, value) pairs of `render_error_headers`."""
    found = set()
    for path in WRITERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                found |= {name.decode() for name in _HEADER_LINE.findall(node.value)}
            if isinstance(node, ast.FunctionDef) and node.name == "render_error_headers":
                pairs = [one for one in ast.walk(node) if isinstance(one, ast.Tuple)]
                names = [pair.elts[0] for pair in pairs]
                found |= {one.value.decode() for one in names if isinstance(one, ast.Constant)
                          and isinstance(one.value, bytes)}  # fmt: skip
    return found


def texts(names: object) -> set[str]:
    """Names as text."""
    return {name.decode() for name in cast("set[bytes]", names)}


def test_documented_paths_of_the_inference_port_equal_those_of_the_gateway() -> None:
    assert documented_operations(INFERENCE) == gateway_operations()
    for method, path in gateway_operations():
        found = api_routes.find_operation(method.encode(), path.encode())
        assert found is not None
        assert found.kind is not api_routes.Kind.NOT_ALLOWED
        preflight = api_routes.find_operation(b"OPTIONS", path.encode())
        assert preflight is not None
        assert preflight.kind is api_routes.Kind.PREFLIGHT


def test_documented_operations_paths_equal_those_of_the_autoscaler() -> None:
    described = json.loads(openapi.render_openapi("1"))["paths"]
    known = {(method.upper(), path.replace("{name}", "NAME")) for path, item in described.items() for method in item}
    application = OperationsServer(SteppedLoop(World(epoch=1)).loop, Log(), lambda: b"", lambda: ()).application()
    assert documented_operations(OPERATIONS) == known | routes(application)


def test_documented_paths_of_a_gateways_own_operations_port_match_the_code() -> None:
    (sentence,) = re.findall(r"^A gateway that is started separately .*$", OPERATIONS, re.MULTILINE)
    served = routes(build_ops_application(cast("Gateway", None)))
    assert {("GET", path) for path in _CODE.findall(sentence)} == served


def test_every_http_path_mentioned_on_the_api_page_is_in_its_tables() -> None:
    known = {path for _, path in documented_operations(INFERENCE) | documented_operations(OPERATIONS)}
    for word in _CODE.findall(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)):
        path = word.replace("MODEL", "NAME")
        if path.startswith("/"):
            assert path in known or any(one.startswith(path) for one in known if path.endswith("/")), word


def test_documented_request_headers_equal_those_that_the_gateway_reads() -> None:
    documented = [name for name, direction, _ in documented_headers() if direction != "response"]
    assert sorted(documented) == sorted(texts(KEPT))


def test_cors_exposes_exactly_the_documented_headers_meant_for_web_pages() -> None:
    exposed = {*cors._EXPOSED.decode().split(", ")}
    documented = {name for name, direction, _ in documented_headers() if direction != "request"}
    hidden = {name for name in documented if name.startswith("access-control-")} | READABLE | UNREADABLE
    assert exposed == documented - hidden


def test_documented_response_headers_equal_those_that_the_gateway_writes() -> None:
    documented = [name for name, direction, _ in documented_headers() if direction != "request"]
    assert sorted(documented) == sorted(written_headers() | texts(PASSED))


@pytest.mark.parametrize(
    ("words", "direction", "names"),
    [
        ("orwarded to the engine", "request", {*headers._FORWARDED, *headers._TRACE, b"content-type", b"x-request-id"}),
        ("From the engine", "response", PASSED - {b"retry-after"}),
    ],
)
def test_documented_forwarded_headers_equal_those_of_the_code(words: str, direction: str, names: set[bytes]) -> None:
    documented = {
        name for name, way, meaning in documented_headers() if words in meaning and way in (direction, "both")
    }
    assert documented == texts(names)


def test_documented_refused_body_members_equal_those_of_the_code() -> None:
    _, _, rest = INFERENCE.partition("**Refused members.**")
    places, cached, case, *_ = (set(_CODE.findall(item)) for item in rest.partition("\n\n### ")[0].split("\n* ")[1:])
    assert places | cached == PLACES | {"cache_salt"}
    assert case | {"cache_salt"} == READ | {"include_usage"}


def test_documented_body_limit_of_operator_requests_matches_the_code() -> None:
    assert f"at most {BODY_BYTES_MAX:,} bytes" in OPERATIONS
