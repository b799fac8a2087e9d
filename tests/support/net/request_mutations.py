"""Nearly valid requests: valid ones, mutated in one to three places by a seeded random generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

JSON = b'{"model":"alias-m","messages":[{"role":"user","content":"a\\r\\n\\r\\nGET / HTTP/1.1"}],"stream":true}'
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\r\n0\r\n\r\n'
    b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nalias-m\r\n--b--\r\n'
)
_TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def post(path: bytes, body: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """A request with a length."""
    head = [b"POST %b %b" % (path, version), b"Host: gw:8080", *lines, b"Content-Length: %d" % len(body), b"", b""]
    return b"\r\n".join(head) + body


def chunked(path: bytes, body: bytes, *lines: bytes) -> bytes:
    """A request in two chunks, with a trailer."""
    head = [b"POST %b HTTP/1.1" % path, b"Host: gw", *lines, b"Transfer-Encoding: chunked", b"", b""]
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:17], body[17:])]
    return b"\r\n".join(head) + b"".join(parts) + b"0\r\nX-Sum: 1\r\n\r\n"


_TYPE = b"Content-Type: application/json"
_CHAT = b"/v1/chat/completions"
_HEALTH = b"GET /health?a=b HTTP/1.1\r\nHost: gw\r\nAccept: */*\r\n\r\n"
SEEDS = (
    post(_CHAT, JSON, _TYPE, b"Accept: text/event-stream", b"User-Agent: OpenAI/Python 1.0", b"X-Request-Id: id-7"),
    post(
        _CHAT,
        JSON,
        _TYPE,
        b"Authorization: Bearer sk-1",
        b"Connection: keep-alive, x-a",
        b"X-A: b",
        b"X-Model: alias-m",
    ),
    post(
        b"/openai/deployments/m/chat/completions?api-version=1", JSON, _TYPE, b"api-key: sk-1", b"Expect: 100-continue"
    ),
    post(b"/v1/messages", JSON, _TYPE, b"anthropic-version: 2023-06-01", b"anthropic-beta: a", b"Anthropic-Beta: b"),
    post(b"/v1/embeddings", b'{"model":"m","input":"a"}', _TYPE, b"traceparent: " + _TRACE, b"tracestate: a=1"),
    post(b"/v1/audio/transcriptions", FORM, b"Content-Type: multipart/form-data; boundary=b"),
    post(b"/v1/completions", b'{"model":"m","prompt":""}', _TYPE, version=b"HTTP/1.0"),
    chunked(_CHAT, JSON, _TYPE, b"Accept-Language: de", b"Prefer: wait=10"),
    chunked(b"/v1/responses", b'{"model":"m","input":"0\\r\\n"}', _TYPE) + _HEALTH,
    post(_CHAT, _HEALTH, _TYPE) + _HEALTH,
    _HEALTH + post(b"/tokenize", b'{"model":"m","prompt":"a"}', _TYPE) + _HEALTH,
    b"HEAD /v1/models HTTP/1.1\r\nHost: [::1]:80\r\nUser-Agent: a\xff\tb\r\n\r\n" + _HEALTH,
)
LINES = (
    b"Content-Length: 0", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity",
    b"Host: evil",
    b"Connection: close", b"Connection: content-length, transfer-encoding, host", b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAAQAAP__", b"Expect: 100-continue",
    b"TE: trailers, chunked",
    b"Trailer: Content-Length", b"Content_Length: 3", b"Transfer_Encoding: chunked", b"X-Forwarded-For: 1.2.3.4",
    b"X-HTTP-Method-Override: GET", b"X-Original-URL: /metrics", b"Content-Encoding: identity",
    b"Keep-Alive: timeout=5",
    b"Proxy-Connection: close", b"Content-Length : 5", b" Content-Length: 5", b"X: a\r\n b", b"Range: bytes=0-1",
    b"Cookie: a",
)  # fmt: skip
ODD = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b"\x0b", b"\x0c", b"\x7f", b"\x85", b"\xa0", b"\xff",
    b",", b";", b":", b"=",
    b'"', b"/", b"//", b"..", b"?", b"#", b"%", b"%2f", b"%00", b"%0d%0a", b"\\", b"@", b"[", b"0", b"1", b"9", b"f",
    b"0x", b"+", b"-", b"_",
    b"chunked", b"\r\n ", b"GET / HTTP/1.1\r\n", b"HTTP/1.1",
)  # fmt: skip

Change = Callable[[random.Random, bytes], bytes]


def _flip(die: random.Random, data: bytes) -> bytes:
    at = die.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << die.randrange(8),)) + data[at + 1 :]


def _insert(die: random.Random, data: bytes) -> bytes:
    at = die.randrange(len(data))
    return data[:at] + die.choice(ODD) + data[at:]


def _replace(die: random.Random, data: bytes) -> bytes:
    at = die.randrange(len(data))
    return data[:at] + die.choice(ODD) + data[at + 1 :]


def _cut(die: random.Random, data: bytes) -> bytes:
    at = die.randrange(len(data))
    return data[:at] + data[at + die.choice((1, 1, 2, 5)) :]


def _case(die: random.Random, data: bytes) -> bytes:
    at = die.randrange(len(data))
    end = at + die.choice((1, 4, 30))
    return data[:at] + data[at:end].swapcase() + data[end:]


def _lines(die: random.Random, data: bytes) -> bytes:
    """Repeats, moves, removes or inserts a line."""
    lines = data.split(b"\r\n")
    at, to = die.randrange(len(lines)), die.randrange(1, len(lines) + 1)
    how = die.randrange(4)
    line = die.choice(LINES) if how == 3 else lines[at] if how == 0 else lines.pop(at)
    if how != 2:
        lines.insert(to, line)
    return b"\r\n".join(lines)


def _head_line(die: random.Random, data: bytes) -> bytes:
    """Inserts a line into the first head."""
    lines = data.split(b"\r\n")
    lines.insert(die.randrange(1, lines.index(b"") + 1 if b"" in lines else 2), die.choice(LINES))
    return b"\r\n".join(lines)


def _follow(die: random.Random, data: bytes) -> bytes:
    """Appends another request."""
    return data + die.choice(SEEDS)


CHANGES: tuple[Change, ...] = (_flip, _insert, _replace, _cut, _case, _lines, _lines, _head_line, _head_line, _follow)


def mutated(seed: int, count: int) -> Iterator[bytes]:
    """Generates `count` inputs; the same for the same seed."""
    die = random.Random(seed)
    for number in range(count):
        data = SEEDS[number % len(SEEDS)]
        for _ in range(die.randint(1, 3)):
            data = die.choice(CHANGES)(die, data) if data else data
        yield data
