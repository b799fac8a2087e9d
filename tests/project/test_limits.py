"""The tables of limits (docs/reference/limits*.md) match the code: every row, every value, every error.

A gateway bound that is missing in the table fails here: add a row, or explain below why it needs none.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from gateway.limits import Limits
from scripts.gates import ROOT, SOURCES, name
from tests.support import limits_table as others

GATEWAY = [path for path in SOURCES if name(path).startswith("gateway/")]
PAGE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("limits*.md")))
_ROW = re.compile(r"^\| (?!limit |---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_ERROR = re.compile(r"\b(4\d\d|5\d\d)(?: `(\w+)`(?: or `(\w+)`)?)?")
_BOUND = re.compile(r"_?(?:[A-Z]+_)*MAX(?:_[A-Z]+)*")

ROWS: dict[str, tuple[str, ...]] = {
    **others.ROWS,
    "request head": ("gateway.http.request_head.HEAD_BYTES_MAX", "gateway.http.request_head.HEADERS_MAX"),
    "request head that is sent to the engine": ("gateway.request.headers.UPSTREAM_HEAD_BYTES_MAX",),
    "request body": ("gateway.limits.Limits.body_bytes_max",),
    "request body of the [Ollama API](ollama-api.md), or of a translated request of the "
    "[Anthropic](anthropic-api.md), [Responses](responses-api.md) or [rerank](rerank-api.md) API or for "
    "[Triton](triton-api.md)": ("gateway.dialects.translated_request.BODY_BYTES_MAX",),
    "text and items of a response of the Responses API, which is kept until its end; member of a request that it "
    "repeats": (
        "gateway.dialects.responses_responses.KEPT_BYTES_MAX",
        "gateway.dialects.responses_requests.ECHO_BYTES_MAX",
    ),
    "messages, images, tools and tool calls of such a request; its members and items together (in "
    "responses of engines, too)": (
        *(
            f"gateway.dialects.translated_request.{what}_MAX"
            for what in ("MESSAGES", "IMAGES", "TOOLS", "CALLS", "ITEMS")
        ),
    ),
    "response without streaming to such a request": ("gateway.server.translated_call.DOCUMENT_BYTES_MAX",),
    "event of an engine for such a request; for the Ollama API also the arguments of all tool calls of a response": (
        "gateway.dialects.chat_responses.EVENT_BYTES_MAX",
    ),
    "texts of a request for embeddings of Triton; numbers of the response": (
        "gateway.dialects.triton_requests.INPUTS_MAX",
        "gateway.dialects.triton_responses.NUMBERS_MAX",
    ),
    "trailers of a request": ("gateway.http.request_body.TRAILER_BYTES_MAX",),
    "chunks of a body": ("gateway.http.request_body.CHUNKS_MAX", "gateway.http.request_body.CHUNK_BYTES_MEAN"),
    "top-level members of a JSON body; members at all levels": (
        "gateway.request.json_scanner.MEMBERS_MAX",
        "gateway.request.body_members._COLONS_MAX",
    ),
    "largest body that is buffered and parsed as a whole": ("gateway.http.body_buffers.LARGE_BYTES",),
    "body over 256 KiB: top-level name or number; value that the gateway reads; nesting inside a member": (
        "gateway.request.json_scanner.TOKEN_BYTES_MAX",
        "gateway.request.json_scanner.VALUE_BYTES_MAX",
        "gateway.request.json_scanner.NESTING_MAX",
    ),
    "large body, per event loop iteration: bytes sent to the engine; memory released": (
        "gateway.upstream.connection.TURN_BYTES",
        "gateway.gateway.GIVE_BACK_BYTES",
    ),
    "headers that a CORS preflight requests": (
        "gateway.server.cors._REQUESTED_MAX",
        "gateway.server.cors._REQUESTED_BYTES_MAX",
    ),
    "parts of a form; head of a part, and text before the first boundary; value that the gateway reads": (
        "gateway.request.multipart.PARTS_MAX",
        "gateway.request.multipart.PART_HEAD_BYTES_MAX",
        "gateway.request.multipart.PREAMBLE_BYTES_MAX",
        "gateway.request.multipart.VALUE_BYTES_MAX",
    ),
    "request or answer of an external check; its response": (
        "gateway.policy.external_checks.CONTENT_BYTES_MAX",
        "gateway.policy.external_checks.RESPONSE_BYTES_MAX",
    ),
    "concurrent external checks of a gateway; size of their messages; of answers that arrive for a check": (
        "gateway.upstream.external_check_client.CHECKS_MAX",
        "gateway.upstream.external_check_client.CONTENT_BYTES_MAX",
        "gateway.upstream.external_check_client.HELD_BYTES_MAX",
    ),
    "model name in a path": ("gateway.request.api_routes._NAME_BYTES_MAX",),
    "path with a variant, such as a slash at the end": ("gateway.request.api_routes._VARIANT_BYTES_MAX",),
    "`X-Priority`": ("gateway.request.headers.PRIORITY_ABSOLUTE_MAX",),
    "time to receive a head; time without a byte of a body; average rate of a body after this time": (
        "gateway.limits.Limits.header_seconds_max",
        "gateway.limits.Limits.body_seconds_max",
        "gateway.limits.Limits.body_bytes_per_second_min",
    ),
    "time for a TLS handshake": ("gateway.limits.Limits.header_seconds_max",),
    "TLS close of the client": ("gateway.server.client_transport.LINGER_S",),
    "bytes sent before the previous response is complete": ("gateway.http.request_reader.AHEAD_BYTES_MAX",),
    "responses to pipelined requests per event loop iteration": ("gateway.server.connection.ANSWERS_A_TURN",),
    "data that arrives after an error response": ("gateway.server.client_transport.LINGER_S",),
    "body of a request that is rejected by its head (path, key, media type, model in path or `X-Model`)": (
        "gateway.server.precheck.DROP_BYTES_MAX",
    ),
    "body sent to a path without a body": ("gateway.server.precheck.DROP_BYTES_MAX",),
    "bodies in a gateway, from the first byte until an engine responds": ("gateway.http.body_buffers.LARGE_BYTES",),
    "rate of a body while others wait for the body budget or were rejected by it": (
        "gateway.server.body_intake.PACE_BYTES_PER_S",
        "gateway.server.body_intake.PACE_GRACE_S",
    ),
    "form that is forwarded while it arrives: expected time until it is complete; actual time until it is complete": (
        "gateway.server.body_intake.REST_S_MAX",
        "gateway.server.proxied_call.GROWING_S_MAX",
    ),
    "small bodies of queued requests in a gateway": (),
    "connections of one client address": ("gateway.limits.Limits.connections_per_address_max",),
    "open files of a gateway": ("gateway.gateway.DESCRIPTORS_RESERVED",),
    "memory of a gateway": (),
    "idle client connection": ("gateway.limits.Limits.idle_seconds_max",),
    "client that does not read its response": (
        "gateway.server.client_writer.WRITE_BUFFER_BYTES",
        "gateway.limits.Limits.write_stall_seconds_max",
    ),
    "kernel buffers: for a client that does not read; for an engine response that is not read": (
        "pilotlight.net.listen.UNSENT_BYTES",
        "gateway.upstream.connection.RECEIVE_BYTES",
    ),
    "retries of a request on another replica": (),
    "retries on another replica after a busy engine": ("gateway.dispatch.model_dispatcher.RETRIES_MAX",),
    "`Retry-After`": ("gateway.errors.MAX_RETRY_AFTER_S", "gateway.dispatch.model_dispatcher.RETRY_AFTER_S"),
    "connection to an engine, TLS included": ("gateway.upstream.pool.CONNECT_S_MAX",),
    "invalid certificate of an engine": (),
    "concurrent connection attempts to one engine": ("gateway.upstream.pool.CONNECTING_MAX",),
    "idle connections to one engine": ("gateway.upstream.pool.IDLE_MAX", "gateway.upstream.pool.IDLE_SWEEPS_MAX"),
    "data kept about an engine to which the gateway has no connection": ("gateway.upstream.pool.UNUSED_SWEEPS_MAX",),
    "cache of parsed heads": (
        "gateway.http.request_head.KNOWN_MAX",
        "gateway.http.request_head.KNOWN_BYTES_MAX",
        "gateway.http.response_reader.KNOWN_MAX",
        "gateway.http.response_reader.KNOWN_BYTES_MAX",
    ),
    "head, interim heads and trailers of an engine response": (
        "gateway.http.response_reader.HEAD_BYTES_MAX",
        "gateway.http.response_reader.INTERIM_MAX",
        "gateway.http.response_reader.TRAILER_BYTES_MAX",
    ),
    "engine chunks or events per event loop iteration": (
        "gateway.http.response_reader.STEP_BYTES",
        "gateway.http.sse_relay.RUNS_MAX",
    ),
    "beginning of a chunk that is held back until the rest of the chunk arrives": (
        "gateway.http.sse_relay.PART_BYTES_MAX",
    ),
    "one incomplete event of a stream": ("gateway.http.sse_relay.EVENT_BYTES_MAX",),
    "engine error that is forwarded as an event": ("gateway.server.response_relay.ERROR_BODY_BYTES_MAX",),
    "event lines that wait to be written": ("gateway.telemetry.EVENTS_MAX",),
    "metric series of a gateway": ("gateway.telemetry.SERIES_MAX",),
    "cache of permissions; of combined request policies": (
        "gateway.request.model_names.RESOLVED_MAX",
        "gateway.policy.request_policy.FOUND_MAX",
    ),
    "deltas not yet written to disk": ("gateway.control.sync.UNFOLDED_MAX",),
    "aliases and tenants of a Model together": ("autoscaler.documents.document_rules.NAMES_BYTES_MAX",),
    "names `model:adapter` of a Model: (aliases + 1) x adapters": (
        "autoscaler.documents.document_rules.ADAPTED_NAMES_MAX",
    ),
    "message of the contract": (
        "gateway.control.client.LINE_BYTES_MAX",
        "autoscaler.server.gateways.REPORT_BYTES_MAX",
        "gateway.control.client.ANSWER_BYTES_MAX",
    ),
    "interval between reconnections to an autoscaler; added after a message that cannot be read": (
        "gateway.control.sync.RETRY_S_MAX",
        "gateway.control.sync.UNREADABLE_S_MAX",
    ),
    "concurrent starts on a device": (),
    "registry: connection, head, pause between reads; rate of a blob": (),
}
"""Each row's first cell, and the bounds that it documents; none for a rule or a number of the machine."""

NOT_TOLD = {
    "gateway.control.fault_containment.PAUSE_S_MAX": "retry after an internal error, which no input should cause",
    "gateway.exception_handling.REASON_MAX": "characters of an exception's message in the log",
    "gateway.control.discovery.ADDRESSES_MAX": "autoscalers behind one name: an installation has few",
    "gateway.request.auth.SALTS_MAX": "salts remembered: 1 MiB",
    "gateway.policy.external_checks._REASON_CHARS_MAX": "characters of a reason in the error of a client",
    "gateway.upstream.external_check_client.IDLE_S_MAX": "how long an idle connection to a check is kept: no bound",
    "gateway.upstream.pool.PORT_MAX": "of TCP: grammar",
    "gateway.http.sse_relay.LAST_BYTES_MAX": "where a chunk with the last choice is recognized: others are forwarded",
    "gateway.request.multipart._PADDING_BYTES_MAX": "white space after a boundary: grammar",
    "gateway.http.sse_relay.SIZES_MAX": "chunk sizes remembered as read: a few KiB",
    "gateway.http.sse_relay._SIZE_BYTES_MAX": "8 digits and their CRLF: grammar",
    "gateway.limits.Limits.memory_bytes": "0 means the limit of the cgroup: the row states it in words",
    "gateway.telemetry.WRITES_PER_FLUSH_MAX": "the pace of writing: what is left waits as an event line",
    "gateway.upstream.pool.LEARN_SWEEPS_MAX": "when an engine is taken to close after streams: no bound",
    "gateway.upstream.connection.JOIN_BYTES_MAX": "up to where head and body go out in one call: no bound",
    "gateway.http.request_head.LENGTH_DIGITS_MAX": "of a length in a head that is remembered: others are parsed again",
    "gateway.http.request_head._LENGTH_DIGITS_MAX": "more digits than 2^63 has are no number: grammar",
    "gateway.http.response_reader._LENGTH_DIGITS_MAX": "the same of an engine",
}


class Row(NamedTuple):
    """One bound as the page documents it."""

    value: str
    reached: str


def documented() -> dict[str, Row]:
    """The table by the first cell of its rows."""
    return {first: Row(value, reached) for first, value, reached in _ROW.findall(PAGE)}


def value_of(path: str) -> float:
    """The value of a bound: a module constant, or the default of a Struct's field."""
    module, _, last = path.rpartition(".")
    owner = module.rpartition(".")[2]
    if owner[:1].isupper():
        struct = getattr(importlib.import_module(module.rpartition(".")[0]), owner)
        return float(next(field.default for field in msgspec.structs.fields(struct) if field.name == last))
    return float(getattr(importlib.import_module(module), last))


def spellings(path: str, value: float) -> set[str]:
    """Spellings of a value that a page may use: `64 KiB`, `15 s`, `1,000`, `16 million`."""
    number = int(value)
    if "BYTES" in path.upper():
        units = ((0, "B"), (10, "KiB"), (20, "MiB"), (40, "TiB"))
        return {f"{number >> shift} {unit}" for shift, unit in units if number >> shift}
    if re.search(r"_S\b|_S_|SECONDS|SWEEPS", path.upper()):  # upstreams are swept once per second
        return {f"{value:g} s", f"{value:g} to ", f"{value:g} a second"}
    millions = {f"{number / 1e6:g} million", f"{number >> 20} million", "a million"} if number >= 1_000_000 else set()
    return {f"{number:,}", *millions}


def bounds(path: Path) -> Iterator[str]:
    """The bounds of a module, recognised by their names."""
    module = name(path).replace("/", ".").removesuffix(".__init__")
    for node in ast.parse(path.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and _BOUND.fullmatch(each.id):
                    yield f"{module}.{each.id}"


def errors_of_gateways() -> set[tuple[str, str]]:
    """(status, code) of every error that a gateway raises; 503 also has the codes of an autoscaler."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / "gateway" / "errors.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "CallError":
            status, code = node.args[:2]
            if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                found.add((str(status.value), str(code.value)))
    published = (ROOT / "autoscaler" / "routing" / "routes.py").read_text()
    return found | {("503", code) for code in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', published)}


def test_documented_limits_table_has_exactly_the_expected_rows() -> None:
    listed = [first for first, _, _ in _ROW.findall(PAGE)]
    assert sorted(listed) == sorted(ROWS)


@pytest.mark.parametrize("row", [row for row, paths in ROWS.items() if paths])
def test_documented_limit_matches_the_value_in_the_code(row: str) -> None:
    text = documented()[row].value
    for path in ROWS[row]:
        wanted = spellings(path, value_of(path))
        assert any(re.search(rf"(?<![\d,.]){re.escape(each)}", text) for each in wanted), (
            f"{path}: {wanted} in {text!r}"
        )


def test_errors_in_the_limits_table_exist_in_the_code() -> None:
    known = errors_of_gateways()
    statuses = {status for status, _ in known}
    for row, (_, reached) in documented().items():
        for status, *codes in _ERROR.findall(reached):
            assert status in statuses, f"{row}: {status}"
            for code in filter(None, codes):
                assert (status, code) in known, f"{row}: {status} {code}"


def test_every_gateway_limit_is_listed_in_the_table() -> None:
    listed = {path for paths in ROWS.values() for path in paths} | NOT_TOLD.keys()
    limits = {f"gateway.limits.Limits.{field}" for field in Limits.__struct_fields__}
    assert {each for path in GATEWAY for each in bounds(path)} | limits <= listed
    for path in NOT_TOLD:
        value_of(path)
