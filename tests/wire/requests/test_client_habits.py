"""Requests as common clients and proxies send them, each made from a public bug report, and their variants."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, KeyEntry, ModelEntry, TenantEntry, TenantName
from gateway.http.body_buffers import LARGE_BYTES
from tests.support.fakes.engines.scripted_engine import DONE, END, OK, STREAM_HEAD, ScriptedEngine, delta, event
from tests.support.harness.gateway.gateway_rig import MODEL, Rig, rig

CHAT = "/v1/chat/completions"
FORM = "/v1/audio/transcriptions"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
JSON = "Content-Type: application/json"
APP = "app://notes.example"
TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def send(
    one: Rig, target: str, body: bytes, *lines: str, method: str = "POST"
) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a new connection and return the response."""
    client = await one.client()
    head = [f"{method} {target} HTTP/1.1", "Host: gateway.example:8080", *lines, f"Content-Length: {len(body)}"]
    client.send("\r\n".join([*head, "Connection: close", "", ""]).encode() + body)
    return await client.answer()


async def forwarded(target: str, body: bytes, *lines: str) -> tuple[str, bytes]:
    """Send one request, which must be served, and return the head and the body that the engine received."""
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        status, _, answer = await send(one, target, body, *lines)
        assert (status, answer) == (200, b'{"ok":true}')
        head, _, sent = engine.requests[0].partition(b"\r\n\r\n")
        return head.decode(), sent


def form(*parts: str, boundary: str = "5f2c") -> bytes:
    """Return a form; each part is given by its head and its value."""
    return "".join([*(f"--{boundary}\r\n{part}\r\n" for part in parts), f"--{boundary}--\r\n"]).encode()


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boundary", "parts"),
    [
        (
            'boundary="5f2c"',
            (
                "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model\r\n\r\nm",
                "Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav\r\n\r\nRIFF$\0\0\0",
            ),
        ),
        (
            "charset=utf-8; boundary=5f2c",
            (
                'Content-Disposition: form-data; name="model"\r\n\r\nm',
                'Content-Disposition: form-data; filename="a.wav"; name="file"\r\n\r\nRIFF$\0\0\0',
            ),
        ),
        ("boundary=5f2c;", ('content-disposition:form-data;name="model";\r\n\r\nm\r\n',)),
    ],
    ids=["unquoted names", "file name first", "trailing semicolons and a line end"],
)
async def test_form_with_unusual_but_valid_header_syntax_is_forwarded(boundary: str, parts: tuple[str, ...]) -> None:
    body = form(*parts)
    head, sent = await forwarded(FORM, body, f"Content-Type: multipart/form-data; {boundary}")
    assert "content-type: multipart/form-data; boundary=" in head
    assert sent == body.replace(b"\r\n\r\nm\r\n\r\n", b"\r\n\r\nm\r\n").replace(
        b"\r\n\r\nm\r\n", b"\r\n\r\nserved-m\r\n"
    )


async def test_line_ends_around_a_form_are_not_forwarded() -> None:
    body = form('Content-Disposition: form-data; name="model"\r\n\r\nm')
    kind = 'Content-Type: multipart/form-data; boundary="--=_a b"'
    body = body.replace(b"5f2c", b"--=_a b")
    head, sent = await forwarded(FORM, b"\r\n" + body + b"\r\n", kind)
    assert sent == body.replace(b"\r\n\r\nm\r\n", b"\r\n\r\nserved-m\r\n")
    assert 'content-type: multipart/form-data; boundary="--=_a b"' in head


async def test_large_form_with_unusual_but_valid_syntax_is_forwarded() -> None:
    file = "x" * (2 * LARGE_BYTES)
    body = b"\r\n" + form(
        "Content-Disposition: form-data; name=model\r\n\r\nm",
        f"Content-Disposition: form-data; filename=a.wav; name=file\r\n\r\n{file}",
        'Content-Disposition: form-data; filename="a;b.wav"; name="my field"\r\n\r\n',
    )
    _, sent = await forwarded(FORM, body, "Content-Type: multipart/form-data; boundary=5f2c")
    assert sent == body[2:].replace(b"\r\n\r\nm\r\n", b"\r\n\r\nserved-m\r\n")


# --- content types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Type: application/json; charset=utf-8;",), ('Content-Type: application/json; a=b; c="d;e"',), (),
        ("Content-Type: text/plain;charset=UTF-8",), ("Content-Type: application/x-www-form-urlencoded",),
        ("Content-Type: text/plain", "Sec-Fetch-Site: same-origin", "Origin: http://gateway.example:8080"),
        ("Content-Type: text/plain", "Sec-Fetch-Site: none"),
        ("Content-Type: text/plain", "Origin: http://gateway.example:8080"),
    ],
)  # fmt: skip
async def test_json_object_with_unusual_or_no_content_type_is_forwarded_as_json(lines: tuple[str, ...]) -> None:
    head, sent = await forwarded(CHAT, BODY, *lines)
    assert head.count("content-type: application/json") == 1
    assert json.loads(sent)["messages"] == json.loads(BODY)["messages"]


@pytest.mark.parametrize("path", [CHAT, "/openai/deployments/m/chat/completions"])
@pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES])
async def test_page_of_a_foreign_origin_cannot_send_json_without_a_preflight(size: int, path: str) -> None:
    body = BODY + b" " * size
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, settings=FrontSettings(cors_origins=(APP,))) as one:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            for page in ("Origin: https://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site",
                         "Origin: http://gateway.example", "Origin: http://evil.gateway.example:8080",
                         "Sec-Fetch-Site: same-site", f"Origin: {APP}\r\nOrigin: https://evil.example"):  # fmt: skip
                assert (await send(one, path, body, f"Content-Type: {kind}", page))[0] == 415
        assert engine.requests == []
        assert (await send(one, path, body, "Content-Type: text/plain", f"Origin: {APP}"))[0] == 200
        assert (await send(one, path, body, JSON, "Origin: https://evil.example"))[0] == 200, "after a preflight"


@pytest.mark.parametrize(
    ("keys_needed", "page", "status"),
    [
        (False, "Origin: https://evil.example", 403),
        (False, "Origin: null", 403),
        (False, "Sec-Fetch-Site: cross-site", 403),
        (False, "Accept: */*", 200),
        (False, f"Origin: {APP}", 200),
        (False, "Origin: http://gateway.example:8080", 200),
        (False, "Sec-Fetch-Site: same-origin", 200),
        (True, "Origin: https://evil.example", 200),
    ],
)
async def test_form_of_a_foreign_page_gets_403_on_a_port_without_keys(
    keys_needed: bool, page: str, status: int
) -> None:
    body = form('Content-Disposition: form-data; name="model"\r\n\r\nm')
    key = KeyEntry(sha256=sha256(b"secret").hexdigest())
    tenant = TenantEntry(name=TenantName("team"), keys=(key,))
    settings = FrontSettings(cors_origins=(APP,), keys_needed=keys_needed)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        one.front.catalogue(CatalogueDelta(epoch=1, version=2, tenants=(tenant,), settings=settings))
        lines = ("Content-Type: multipart/form-data; boundary=5f2c", "Authorization: Bearer secret", page)
        found, _, answer = await send(one, FORM, body, *lines)
        assert (found, b"cors.origins" in answer) == (status, status == 403)
        assert len(engine.requests) == (status == 200)


async def test_non_json_body_gets_400_if_labeled_json_and_415_otherwise() -> None:
    async with rig() as one:
        assert (await send(one, CHAT, b"model=m", "Content-Type: application/x-www-form-urlencoded"))[0] == 415
        assert (await send(one, CHAT, b"model=m", JSON))[0] == 400
        assert (await send(one, CHAT, BODY, "Content-Type: multipart/form-data; boundary=b"))[0] == 415


# --- targets and hosts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
async def test_request_target_in_absolute_form_is_served(scheme: str) -> None:
    head, _ = await forwarded(f"{scheme}://gateway.example:8080{CHAT}", BODY, JSON)
    assert head.startswith(f"POST {CHAT} HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        ("GET http://localhost/health", "evil.example", 200), ("GET http://evil.example/health", "localhost", 421),
        ("GET http://evil.example/health", "evil.example", 421), ("OPTIONS *", "localhost", 204),
        ("OPTIONS *", "evil.example", 421), ("OPTIONS http://localhost", "localhost", 204),
        ("GET *", "localhost", 400), ("OPTIONS localhost:80", "localhost", 400), ("CONNECT gw:80", "localhost", 400),
    ],
)  # fmt: skip
async def test_host_check_uses_the_authority_of_the_target(line: str, host: str, status: int) -> None:
    async with rig(host_check=True) as one:
        client = await one.client()
        client.send(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (await client.answer())[0] == status


# --- repeated headers ------------------------------------------------------------------------------------------------


async def test_repeated_trace_user_agent_and_baggage_headers_are_dropped() -> None:
    head, _ = await forwarded(CHAT, BODY, JSON, TRACE, TRACE, "tracestate: a=1", "User-Agent: a", "User-Agent: b",
                              "baggage: a=b", "baggage: c=d")  # fmt: skip
    assert [line.partition(":")[0] for line in head.split("\r\n")[1:]] == [
        "host", "content-length", "x-request-id", "content-type"
    ]  # fmt: skip


async def test_two_different_origin_headers_are_treated_as_a_foreign_origin() -> None:
    settings = FrontSettings(cors_origins=(APP,))
    lines = (JSON, f"Origin: {APP}", "Origin: https://evil.example")
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, settings=settings) as one:
        status, fields, _ = await send(one, CHAT, BODY, *lines)
        assert (status, fields.get("access-control-allow-origin")) == (200, None)
        assert (await send(one, CHAT, BODY, JSON, f"Origin: {APP}", f"Origin: {APP}"))[1][
            "access-control-allow-origin"
        ] == APP
    async with rig(settings=settings, host_check=True) as one:
        client = await one.client()
        client.send(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{lines[1]}\r\n{lines[2]}\r\n\r\n".encode())
        assert (await client.answer())[0] == 403


# --- credentials -----------------------------------------------------------------------------------------------------


async def test_request_with_two_keys_is_served_if_no_key_is_required() -> None:
    head, _ = await forwarded(CHAT, BODY, JSON, "Authorization: Bearer token-for-the-gateway",
                              "x-api-key: key-of-another-service")  # fmt: skip
    assert "key" not in head
    assert "token" not in head


@pytest.mark.parametrize(
    ("lines", "status", "text"),
    [
        (("Authorization: Bearer acme-1", "x-api-key: other"), 200, b"ok"),
        (("Authorization: Bearer other", "x-api-key: acme-1"), 200, b"ok"),
        (("Authorization: Bearer acme-1", "api-key: acme-2"), 200, b"ok"),
        (("Authorization: Bearer acme-1", "Authorization: Bearer acme-1"), 200, b"ok"),
        (("Authorization: Bearer acme-1", "x-api-key: lab-1"), 401, b"two valid API keys of different tenants"),
        (("Authorization: Bearer other", "x-api-key: another"), 401, b"requires a valid API key"),
        (
            ("Authorization: Bearer acme-1", "Authorization: Bearer acme-2"),
            400,
            b"authorization is sent more than once",
        ),
    ],
)
async def test_request_with_two_keys_needs_a_valid_key_of_exactly_one_tenant(
    lines: tuple[str, ...], status: int, text: bytes
) -> None:
    keys = {"acme": ("acme-1", "acme-2"), "lab": ("lab-1",)}
    tenants = tuple(
        TenantEntry(
            name=TenantName(name), keys=tuple(KeyEntry(sha256=sha256(key.encode()).hexdigest()) for key in theirs)
        )
        for name, theirs in keys.items()
    )
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        settings = FrontSettings(keys_needed=True)
        one.front.catalogue(CatalogueDelta(epoch=1, version=2, tenants=tenants, settings=settings))
        got, _, body = await send(one, CHAT, BODY, JSON, *lines)
        assert (got, text in body) == (status, True), body


# --- CORS ------------------------------------------------------------------------------------------------------------


async def test_preflight_allows_the_requested_headers() -> None:
    requested = "authorization,content-type,x-stainless-os,x-stainless-lang,X-Stainless-Timeout, traceparent,,b@d"
    lines = ("Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {requested}")
    async with rig(settings=FrontSettings(cors_origins=(APP,))) as one:
        status, fields, _ = await send(one, CHAT, b"", f"Origin: {APP}", *lines, method="OPTIONS")
        allowed = fields["access-control-allow-headers"].split(", ")
        assert (status, fields["access-control-allow-origin"]) == (204, APP)
        assert {*requested.lower().replace(" ", "").split(","), "x-priority", "x-model"} - {*allowed} == {"", "b@d"}
        assert len(allowed) == len({*allowed})
        assert fields["access-control-max-age"] == "600"
        assert fields["vary"] == "origin, access-control-request-headers"
        foreign = (await send(one, CHAT, b"", "Origin: https://evil.example", *lines, method="OPTIONS"))[1]
        assert [name for name in foreign if name.startswith("access-control")] == []


@pytest.mark.parametrize("requested", ["x" * 5000, ",".join(f"x{number}" for number in range(200))])
async def test_preflight_with_too_many_headers_allows_only_default_headers(requested: str) -> None:
    async with rig(settings=FrontSettings(cors_origins=("*",))) as one:
        line = f"Access-Control-Request-Headers: {requested}"
        fields = (await send(one, CHAT, b"", "Origin: a://b", line, method="OPTIONS"))[1]
        assert "x1" not in fields["access-control-allow-headers"].split(", ")
        assert "authorization" in fields["access-control-allow-headers"]


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES])
async def test_body_with_a_byte_order_mark_and_lone_surrogates_is_forwarded(size: int) -> None:
    body = rb'{"model":"m","input":["\ud800","%b"]}' % (b"x" * size)
    _, sent = await forwarded("/v1/embeddings", b"\xef\xbb\xbf" + body, JSON)
    assert sent == body.replace(b'"m"', b'"served-m"')
    async with rig() as one:
        assert (await send(one, "/v1/embeddings", body.replace(b'"input"', rb'"\ud800"'), JSON))[0] == 400
        assert (await send(one, "/v1/embeddings", b"\xef\xbb" + body, JSON))[0] == 400


@pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES])
async def test_id_slot_of_minus_one_is_forwarded_and_minus_eleven_gets_400(size: int) -> None:
    body = b'{"model":"m","id_slot":-1,"messages":[],"user":"%b"}' % (b"x" * size)
    assert json.loads((await forwarded(CHAT, body, JSON))[1])["id_slot"] == -1
    async with rig() as one:
        assert (await send(one, CHAT, body.replace(b"-1", b"-11"), JSON))[0] == 400


# --- streams ---------------------------------------------------------------------------------------------------------

STREAMED = b'{"model":"m","stream":true,"messages":[]}'
LAST = '"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = '"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}'
TIMINGS = '"timings":{"predicted_per_second":9.5}'


@pytest.mark.parametrize("split", [1, 100_000])
async def test_timings_of_the_removed_usage_chunk_move_to_the_last_chunk(split: int) -> None:
    whole = delta("a") + event("{" + LAST) + event("{" + f"{USAGE},{TIMINGS}" + "}") + DONE + END
    script = (STREAM_HEAD, *(whole[at : at + split] for at in range(0, len(whole), split)))
    async with ScriptedEngine(script) as engine, rig(engine.address) as one:
        status, _, body = await send(one, CHAT, STREAMED, JSON)
        await one.settled()
        assert (status, one.totals()) == (200, (1, 7, 2))
    data = [line[6:] for line in body.decode().splitlines() if line]
    assert data[-2:] == ["{" + LAST[:-1] + f",{TIMINGS}" + "}", "[DONE]"]
    assert len(data) == 3, "every chunk has a choice"


async def test_timings_of_a_usage_chunk_are_kept_if_no_finish_chunk_precedes() -> None:
    script = (STREAM_HEAD + delta("a") + event("{" + f"{USAGE},{TIMINGS}" + "}") + DONE + END,)
    async with ScriptedEngine(script) as engine, rig(engine.address) as one:
        body = (await send(one, CHAT, STREAMED, JSON))[2]
    assert b'data: {"choices":[],' + TIMINGS.encode() + b"}\n\n" in body
    assert b'"usage"' not in body


async def test_stream_options_are_not_sent_to_an_engine_without_support() -> None:
    script = (STREAM_HEAD + delta("a") + delta("b") + event("{" + LAST) + DONE + END,)
    async with ScriptedEngine(script) as engine, rig(engine.address) as one:
        entry = ModelEntry(name=MODEL, served_name="m", slots=4, takes_stream_options=False)
        one.front.catalogue(CatalogueDelta(epoch=1, version=2, models=(entry,)))
        status, _, body = await send(one, CHAT, STREAMED, JSON)
        assert (status, body.count(b"data: ")) == (200, 4)
        assert b"stream_options" not in engine.requests[0]
        await one.settled()
        assert one.totals() == (1, 0, 2), "one token for each piece of output"
