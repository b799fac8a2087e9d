"""Raw requests that test whether a key or a prompt leaks when something goes wrong (case 44).

A Fault is one request and the response that it must get. `REQUESTS` need no engine, `MANNERS` one that misbehaves. The
prompt of each Fault has its own number, which identifies the Fault that a leak came from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple
from urllib.parse import quote

from tests.support.net.canary import request

KEY, WRONG = "zqkeycanary7d1e9b", "zqkeycanary5f2a6c"
"""A valid key and an invalid one."""
PROMPT = "zqpromptcanary4c8e"
BODY_BYTES_MAX = 64 << 10
"""The maximum body size of the gateways under test."""
CHAT, MESSAGES, FORMS = "/v1/chat/completions", "/v1/messages", "/v1/audio/transcriptions"
GOOD = f"Authorization: Bearer {KEY}"

_numbers = count(1)


class Fault(NamedTuple):
    """A request, and what its response must start with and contain."""

    name: str
    data: bytes
    status: int
    """0: it depends on how the engine's bytes are split whether its first byte was forwarded."""
    code: str = ""
    engine: bool = False
    """The response is the engine's own, which may repeat its input, so it is not searched."""


def prompt() -> str:
    """A unique prompt that contains every character that encodings change."""
    return f'{PROMPT}{next(_numbers):04d} "\\u00e4" <b> & \u00e9\n'


def chat(model: str, manner: str = "", *, stream: bool = False, **members: object) -> bytes:
    """A body that is valid in both dialects."""
    fields: dict[str, object] = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": prompt()}]}
    fields |= {"user": manner} if manner else {}
    fields |= {"stream": True} if stream else {}
    return json.dumps(fields | members).encode()


def post(path: str, body: bytes, *lines: str, key: str | None = GOOD, kind: str = "application/json") -> bytes:
    """The last request on its connection."""
    return request(path, body, *([key] if key else []), *lines, "Connection: close", kind=kind)


def heads() -> Iterator[Fault]:
    """Heads that cannot be parsed or are invalid, with the key in every part."""
    bearer = f"Authorization: Bearer {KEY}".encode()
    lines = {
        "space before the colon": b"Authorization : Bearer " + KEY.encode(),
        "folded": b"X-A: b\r\n " + bearer,
        "NUL": bearer + b"\0",
        "bare CR": b"Authorization: Bearer\r" + KEY.encode(),
        "bare LF": bearer + b"\nX-A: b",
        "no colon": bearer.replace(b":", b""),
        "no name": b": " + KEY.encode(),
        "a name that is none": KEY.encode() + b"\x7f: x",
        "DEL in the value": bearer + b"\x7f",
        "twice": bearer + b"\r\n" + bearer,
        "two that differ": bearer + b"\r\nX-Api-Key: " + WRONG.encode(),
        "as a host": b"Host: " + KEY.encode(),
        "as a length": b"Content-Length: " + KEY.encode(),
        "as a coding": b"Transfer-Encoding: " + KEY.encode(),
        "as an expectation": b"Expect: " + KEY.encode(),
        "as an encoding": b"Content-Encoding: " + KEY.encode(),
        "after a transfer coding": b"Transfer-Encoding: chunked\r\n" + bearer,
    }
    for name, line in lines.items():
        data = post(CHAT, b"{}", key=None).replace(b"Connection:", line + b"\r\nConnection:")
        yield Fault(f"key in a head: {name}", data, 415 if "encoding" in name else 400)
    many = "\r\n".join(f"X-{number}: {KEY}" for number in range(120))
    yield Fault("key in too many lines", post(CHAT, b"{}", many), 431)
    yield Fault("key in a huge line", post(CHAT, b"{}", "X-A: " + KEY * 5000), 431)
    yield Fault("prompt in a head too long for engines", post(CHAT, chat("talks"), f"User-Agent: {PROMPT * 500}"), 431)
    for name, start in {
        "method": f"{KEY} {CHAT} HTTP/1.1", "version": f"GET /health HTTP/{KEY}", "target": f"GET {KEY} HTTP/1.1",
        "absolute target": f"GET http://{KEY}/nowhere HTTP/1.1", "HTTP/0.9": f"GET /{KEY}", "nothing else": KEY,
    }.items():  # fmt: skip
        code = {"method": 405, "absolute target": 404}.get(name, 400)
        yield Fault(f"key as {name}", f"{start}\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), code)


def keys() -> Iterator[Fault]:
    """The key where keys are not accepted, and invalid keys, in both dialects."""
    body = chat("talks")
    coded = "".join(f"%{ord(letter):02X}" for letter in KEY)
    for spelt in (KEY, coded):
        for query in (f"api_key={spelt}", f"key={spelt}&x=1", f"Authorization=Bearer%20{spelt}"):
            code = "invalid_api_key"
            yield Fault("key in the query", post(f"{CHAT}?{query}", body, key=None), 401, code)
            listing = request(f"/v1/models?{query}", method="GET").replace(b"Host", b"Connection: close\r\nHost")
            yield Fault("key in the query of a list", listing, 401, code)
        for path in (f"/v1/{spelt}", f"/{spelt}/v1/chat/completions", f"{CHAT}/{spelt}"):
            yield Fault("key in the path", post(path, body), 404, "not_found")
        deployed = f"/openai/deployments/{spelt}/chat/completions?api-version={spelt}"
        yield Fault("key as a deployment", post(deployed, body), 404, "model_not_found")
    basic = base64.b64encode(f"user:{KEY}".encode()).decode()
    for line in (
        f"Authorization: Bearer {WRONG}", f"X-Api-Key: {WRONG}", f"Api-Key: {WRONG}", f"Authorization: Basic {basic}",
        f"Authorization: Bearer {coded}", f"Authorization: {KEY}", f"X-Api-Key: {KEY}x", f"Cookie: key={KEY}",
    ):  # fmt: skip
        for path in (CHAT, MESSAGES):
            yield Fault(f"not a good key: {line[:20]}", post(path, body, key=line), 401, "invalid_api_key")


def bodies() -> Iterator[Fault]:
    """Bodies that are not valid requests, with the prompt in every part."""
    text = json.dumps(prompt()).encode()
    broken = {
        "cut": chat("talks")[:-3], "not JSON": prompt().encode(), "a list": b"[%b]" % text, "a string": text,
        "twice": b'{"model":%b,"model":%b}' % (text, text), "NaN": b'{"model":"talks","a":%b,"b":NaN}' % text,
        "not UTF-8": b'{"model":"talks","a":%b,"b":"\xff"}' % text, "stream": b'{"model":"talks","stream":%b}' % text,
        "options": b'{"model":"talks","stream":true,"stream_options":%b}' % text, "no model": b'{"a":%b}' % text,
        "a model that is a list": b'{"model":[%b]}' % text, "deep": b'{"a":%b,"b":%b' % (text, b"[" * 30_000),
        "a place": b'{"model":"talks","api_base":%b}' % text, "usage": b'{"model":"talks","stream":true,'
        b'"stream_options":{"include_usage":%b}}' % text,
        "broad": json.dumps({f"{PROMPT}{number}": 1 for number in range(1200)}).encode(),
    }  # fmt: skip
    for name, body in broken.items():
        for path in (CHAT, MESSAGES):
            yield Fault(f"prompt in a body: {name}", post(path, body), 400, "invalid_request")
    named = json.dumps({"model": PROMPT, "messages": [prompt()]}).encode()
    for path in (CHAT, MESSAGES, "/v1/embeddings"):
        yield Fault("prompt as a model", post(path, named), 404, "model_not_found")
    yield Fault("prompt as a model in the head", post(CHAT, b"{}", f"X-Model: {PROMPT}"), 404, "model_not_found")
    yield Fault("prompt as another model", post(CHAT, chat("talks"), f"X-Model: {PROMPT}"), 404, "model_not_found")
    path = f"/v1/models/{quote(prompt(), safe='')}"
    yield Fault("prompt as a model's path", request(path, b"", GOOD, "Connection: close", method="GET"), 404)
    yield Fault("prompt as a priority", post(CHAT, chat("talks"), f"X-Priority: {PROMPT}"), 400, "invalid_request")
    yield Fault("prompt as a type", post(CHAT, prompt().encode(), kind=f"text/{PROMPT}"), 415)
    large = chat("talks", filler=PROMPT * (BODY_BYTES_MAX // len(PROMPT)))
    yield Fault("a body too large", post(CHAT, large), 413, "too_large")
    chunked = post(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    whole = b"%x\r\n%b\r\n" % (len(large), large)
    yield Fault("a chunked body too large", chunked + whole, 413, "too_large")
    yield Fault("prompt as a chunk's size", chunked + PROMPT.encode() + b"\r\n", 400)
    yield Fault("prompt as a chunk's extension", chunked + b"5;" + PROMPT.encode() + b"\r\n{}   \r\n", 400)
    yield Fault("prompt after a chunk", chunked + b"2\r\n{}" + PROMPT.encode() + b"\r\n", 400)
    yield Fault("prompt in a trailer", chunked + b"2\r\n{}\r\n0\r\n" + PROMPT.encode() + b"\r\n\r\n", 400)


def forms() -> Iterator[Fault]:
    """The same bodies as multipart forms."""

    def form(name: bytes, value: bytes, head: bytes = b"") -> bytes:
        return b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, head, value)

    text, kind = prompt().replace("\n", "").encode(), "multipart/form-data; boundary=b"
    model, end = form(b"model", b"talks"), b"--b--\r\n"
    broken = {
        "no end": model + form(b"prompt", text), "a line end": form(b"model", text + b"\r\nx") + end,
        "two models": model + form(b"model", text) + end,
        "a flag": model + form(b"stream", text) + end, "a name": model + form(text, b"x") + end,
        "a coding": model + form(b"file", text, b"\r\nContent-Transfer-Encoding: base64") + end,
        "a place": model + form(b"base_url", text) + end, "a long model": form(b"model", text * 500) + end,
    }  # fmt: skip
    for name, body in broken.items():
        yield Fault(f"prompt in a form: {name}", post(FORMS, body, kind=kind), 400, "invalid_request")
    yield Fault("prompt as a form's model", post(FORMS, form(b"model", text) + end, kind=kind), 404, "model_not_found")
    bounded = f"multipart/form-data; boundary={PROMPT}; {PROMPT}"
    yield Fault("prompt as a boundary", post(FORMS, model + end, kind=bounded), 400, "invalid_request")
    passed = model + form(b"prompt", text) + form(b"file", text, b'; filename="%b"' % PROMPT.encode()) + end
    yield Fault("a form that is well", post(FORMS, passed, kind=kind), 200, engine=True)


REQUESTS = (heads, keys, bodies, forms)

_WHOLE: dict[str, tuple[int, str, bool]] = {
    "document": (200, "", True), "error": (500, "", True), "page": (500, "", True), "refusal": (400, "", True),
    "redirect": (502, "upstream_error", False), "busy": (503, "overloaded", False),
    "garbage": (502, "upstream_error", False), "headers": (200, "", False),
    "bad-header": (502, "upstream_error", False), "early": (200, "", False), "short": (200, "", True),
    "silent": (504, "upstream_timeout", False),
}  # fmt: skip
_STREAMS: dict[str, tuple[int, str, bool]] = {
    "stream": (200, "", True), "error": (500, "", True), "refusal": (400, "", True),
    "redirect": (502, "upstream_error", False), "busy": (503, "overloaded", False),
    "garbage": (502, "upstream_error", False), "trailers": (200, "", False),
    "bad-chunk": (0, "upstream_error", False), "half": (0, "upstream_error", False),
    "stalls": (200, "upstream_timeout", False), "silent": (504, "upstream_timeout", False),
}  # fmt: skip


def misbehaving(model: str) -> Iterator[Fault]:
    """A valid request for every manner of `tests.support.fakes.engines.echo_engine`, in both dialects; the model's
    timeouts must be short.
    """
    for stream, manners in ((False, _WHOLE), (True, _STREAMS)):
        for manner, (status, code, own) in manners.items():
            for path, key in ((CHAT, GOOD), (MESSAGES, f"X-Api-Key: {KEY}")):
                data = post(path, chat(model, manner, stream=stream), key=key)
                yield Fault(f"an engine's {manner}, stream={stream}, {path}", data, status, code, own)
