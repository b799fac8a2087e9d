"""Fuzz target for reading and editing bodies, compared with independent readers: json and aiohttp's multipart."""

from __future__ import annotations

import asyncio
import json
import warnings
from functools import cache

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError

from autoscaler.contract import PolicyEntry
from gateway.errors import CallError
from gateway.http.body_buffers import ChunkedBody
from gateway.policy.request_policy import Policy
from gateway.request import body_members
from gateway.request.api_routes import Operation, find_operation
from gateway.request.json_scanner import NESTING_MAX
from gateway.request.multipart import edit_multipart, read_multipart
from tests.support.net.request_mutations import FORM, JSON
from tests.support.net.upstream_requests import SERVED, in_one

OPERATIONS = tuple(
    operation
    for path in (b"/v1/chat/completions", b"/v1/messages", b"/v1/embeddings", b"/openai/deployments/m/completions")
    if (operation := find_operation(b"POST", path)) is not None
)
POLICY = Policy(
    PolicyEntry(
        defaults={"seed": "1"},
        forced={"temperature": "0"},
        caps={"n": 2, "max_tokens": 9},
        removed=("tools",),
    ),
    PolicyEntry(),
    "",
)
FOLDED = frozenset(name.casefold() for name in POLICY.members)
JSON_SEEDS = tuple(
    bytes((number,)) + body
    for number in range(len(OPERATIONS))
    for body in (
        JSON,
        b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}',
        b'{"model":"m","stream":true,"stream_options":{"include_usage":false,"a":[1,{}]}}',
        b' {"model" : "served-m" , "cache_salt" : "x" , "stream" : null , "a\\u0062" : 1e5 } ',
        b'{"model":"m","model":"n"}',
        b'{"model":"m","mod\\u0065l":"n","user":"\xc3\xa9\\ud83d\\ude00"}',
        b'{"model":"m","input":[{"a":1,"a":2}],"logit_bias":{"1":-100}}',
        b'{"model":"m","a":' + b"[" * 1200 + b"]" * 1200 + b"}",
        b'{"model":"m","stream_options":null,"stream":true}',
        b'{"model":"m","stream_options":{"a":01}}',
        b'{"model":"m","stream_options":{"a" 1}}',
        b'{"model":"m","stream_options":{"\\ud800":1}}',
        b'{"model":"m","stream_options":tru}',
        b'{"n":8,"tools":[{}],"model":"m","max_tokens":null,"temperature":2,"n_predict":-1,"seed":1}',
        b'{"tools":1,"functions":2,"tool_choice":3,"model":"m","best_of":1e9,"a":{"n":9}}',
        b'{"model":"m","N":8,"Tools":[],"\\u006e":9}',
    )
)
JSON_WORDS = (
    b'"model"', b'"stream"', b'"stream_options"', b'"include_usage"', b'"cache_salt"', b"true", b"false", b"null",
    b"{}", b"[]",
    b'"m":1,', b"\\u0065", b"\\ud800", b'\\"', b"\\\\", b" ", b"\t", b"\r\n", b"\x0b", b"1e999", b"-0", b"NaN",
    b"\xff", b"\xef\xbb\xbf",
    b",", b":", b"{", b"}", b"[", b"]", b'"', b"\0",
)  # fmt: skip
_TYPE = b"multipart/form-data; boundary=b"
_PART = b"--b\r\nContent-Disposition: form-data; name="
FORM_SEEDS = tuple(
    content_type + b"\n" + body
    for content_type in (_TYPE, b'Multipart/Form-Data;boundary="b";charset=utf-8')
    for body in (
        FORM,
        FORM.replace(b"--\r\n", b"--"),
        _PART + b'"stream"\r\n\r\ntrue\r\n' + FORM,
        _PART + b'"temperature"\r\n\r\n2\r\n' + _PART + b'"tools"\r\n\r\n2\r\n' + _PART + b'"n"\r\n\r\n9\r\n' + FORM,
        _PART + b"\"model\"; filename*=utf-8''x\r\nContent-Type: text/plain\r\n\r\nm\r\n--b--",
        _PART + b'"file"\r\n\r\n' + _PART.replace(b"\r\n", b"\n") + b'"model"\n\nx\r\n' + FORM,
    )
)
FORM_WORDS = (
    b"\r\n--b", b"\n--b", b"\r--b", b"--b--", b"--b\r\n", b"\r\n\r\n", b"\n\n", b'name="model"', b'name="stream"',
    b"name=model", b"filename=",
    b"filename*=utf-8''a", b"Content-Disposition: form-data; ", b"Content-Transfer-Encoding: base64\r\n",
    b"Content-Type: a/b\r\n", b'\\"',
    b'"', b";", b" ", b"\t", b"boundary=", b"\0", b"\xff",
)  # fmt: skip


class Pairs(list[tuple[str, object]]):
    """A JSON object with all of its members, including repeated ones."""


def decoded(text: str) -> object:
    """Decode with the standard library: objects as Pairs, numbers as text."""
    return json.loads(text, object_pairs_hook=Pairs, parse_int=str, parse_float=str)


def documents(data: bytes) -> None:
    """One byte that selects the operation, and a JSON body."""
    if not data:
        return
    operation, body = OPERATIONS[data[0] % len(OPERATIONS)], data[1:]
    large = as_large(operation, body)
    try:
        peek = body_members.read_body(operation, body, b"application/json")
        edited = body_members.edit_body(operation, peek, SERVED)
    except CallError:
        return
    assert isinstance(peek, body_members.Peek)
    assert isinstance(edited, bytes)
    if large is not None:  # it has tighter bounds for names, numbers, nesting and values
        assert dict(members(large)) == dict(members(edited)), "read otherwise as a large body"
    else:
        assert max(len(body), body.count(b"[") + body.count(b"{")) > NESTING_MAX, "refused as a large body"
    try:
        before, after = decoded(body.decode("utf-8-sig")), decoded(edited.decode())
    except RecursionError:
        return
    assert isinstance(before, Pairs)
    assert isinstance(after, Pairs)
    wanted, got = dict(before), dict(after)
    assert (len(wanted), len(got)) == (len(before), len(after)), "a member twice"
    assert peek.model == (operation.model or wanted["model"])
    assert peek.stream == (wanted.get("stream") is True)
    assert (operation.model is None and wanted["model"] == SERVED) or got["model"] == SERVED
    wanted["model"] = SERVED
    wanted.pop("cache_salt", None)
    if operation.usage and peek.stream:
        options = wanted.get("stream_options") or Pairs()
        assert isinstance(options, Pairs)
        asked = dict(options)
        assert peek.wants_usage == (asked.get("include_usage") is True)
        stream_options = got["stream_options"]
        assert isinstance(stream_options, Pairs)
        assert len(dict(stream_options)) == len(stream_options)
        assert dict(stream_options) == asked | {"include_usage": True}
        wanted["stream_options"] = stream_options
    assert got == wanted
    check_policy(operation, body)


def check_policy(operation: Operation, body: bytes) -> None:
    """Apply a policy to the body as a small and as a large one."""
    found = []
    for one in (body, in_pieces(operation, body, 7, POLICY.members)):
        try:
            peek = body_members.read_body(operation, one, b"application/json", watched=POLICY.members)
            found.append(in_one(body_members.edit_body(operation, peek, SERVED, policy=POLICY)))
        except CallError:
            found.append(b"")
    small, large = found
    if small and large:
        assert dict(members(small)) == dict(members(large)), "another policy for a large body"
    if not small:
        return
    try:
        read = decoded(small.decode())
    except RecursionError:
        return
    assert isinstance(read, Pairs)
    got = dict(read)
    assert len(got) == len(read), "a member twice"
    assert got["temperature"] == "0"
    assert "seed" in got
    folded = [name.casefold() for name in got]
    assert {name for name in folded if name in FOLDED} == {name for name in got if name in FOLDED}, "in another case"
    assert not set(folded) & {"tools", "functions", "tool_choice"}
    for name in ("n", "best_of", "n_cmpl", "max_tokens", "n_predict"):
        value = got.get(name)
        assert value is None or (isinstance(value, str) and float(value) <= 9), f"{name} above its cap"
    assert not any(str(got.get(name, "0")).startswith("-") for name in ("max_tokens", "n_predict"))


def as_large(operation: Operation, body: bytes) -> bytes | None:
    """The result of reading it as a large body in pieces; the same however it is split."""
    found: list[bytes | None] = []
    for size in (len(body) + 1, 7):
        pieces = in_pieces(operation, body, size)
        try:
            edited = body_members.edit_body(
                operation, body_members.read_body(operation, pieces, b"application/json"), SERVED
            )
        except CallError:
            found.append(None)
        else:
            found.append(in_one(edited))
    assert found[0] == found[1], "another cut, another reading"
    return found[0]


def in_pieces(operation: Operation, body: bytes, size: int, watched: frozenset[str] = frozenset()) -> ChunkedBody:
    """The body as it arrives in pieces of this size."""
    pieces = ChunkedBody()
    body_members.start_scan(operation, pieces, b"application/json", watched)
    for at in range(0, len(body), size):
        pieces.add(body[at : at + size])
        if pieces.scan is not None:
            pieces.scan.step(len(pieces))
    return pieces


def members(body: bytes) -> list[tuple[str, str]]:
    """Top-level members, with values as the standard library writes them."""
    try:
        read = decoded(body.decode())
    except RecursionError:
        return []
    assert isinstance(read, Pairs)
    return [(name, repr(value)) for name, value in read]


def forms(data: bytes) -> None:
    """A Content-Type up to the first line feed, and a body."""
    content_type, _, body = data.partition(b"\n")
    try:
        form = read_multipart(body, content_type, path_model=None)
        edited = edit_multipart(form, model=SERVED)
    except CallError:
        return
    before, after = parts(body, content_type), parts(in_one(edited), content_type)
    if before is None:
        return
    assert after is not None, "the edit broke it"
    models = [trimmed(value) for name, value in before if name == "model"]
    assert models == [form.model.encode()], "aiohttp reads another model"
    assert after == [(name, SERVED.encode() if name == "model" else value) for name, value in before]
    try:
        policed = in_one(edit_multipart(form, model=SERVED, policy=POLICY))
    except CallError:
        return
    after = parts(policed, content_type)
    assert after is not None, "the policy broke it"
    changed = [(name, value) for name, value in after if name in POLICY.members]
    assert [value for name, value in changed if name == "temperature"] == [b"0"]
    assert not {"tools", "functions", "tool_choice"} & {name for name, _ in changed}
    kept = [pair for pair in after if pair[0] not in POLICY.members and pair[0] != "model"]
    assert kept == [pair for pair in before if pair[0] not in POLICY.members and pair[0] != "model"]


def trimmed(value: bytes) -> bytes:
    """A value without a line end after it."""
    for line_end in (b"\r\n", b"\n", b"\r"):
        if value.endswith(line_end):
            return value.removesuffix(line_end)
    return value


@cache
def loop() -> asyncio.AbstractEventLoop:
    """An event loop, which aiohttp's readers need; they never wait."""
    return asyncio.new_event_loop()


def parts(body: bytes, content_type: bytes) -> list[tuple[str | None, bytes]] | None:
    """Name and value of every part as aiohttp reads them; None if it rejects the body."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about file names that it cannot parse
        return loop().run_until_complete(_parts(body, content_type))


async def _parts(body: bytes, content_type: bytes) -> list[tuple[str | None, bytes]] | None:
    stream = aiohttp.StreamReader(BaseProtocol(loop()), 1 << 20, loop=loop())
    stream.feed_data(body)
    stream.feed_eof()
    found: list[tuple[str | None, bytes]] = []
    try:
        reader = aiohttp.MultipartReader({"Content-Type": content_type.decode("latin-1")}, stream)
        while (part := await reader.next()) is not None:
            if not isinstance(part, aiohttp.BodyPartReader):
                return None
            found.append((part.name, bytes(await part.read())))
    except (ValueError, RuntimeError, AssertionError, HttpProcessingError):
        return None
    return found
