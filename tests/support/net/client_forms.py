"""Forms as ten HTTP clients write them: boundaries, order of headers, quoting and escapes of each client."""

from __future__ import annotations

import base64
import random
import string
import uuid
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote


class Field(NamedTuple):
    """One part to be written. `kind` is the media type of a file."""

    name: str
    value: bytes
    file: str | None = None
    kind: str = "audio/wav"


class Written(NamedTuple):
    """A form as a client sends it."""

    client: str
    content_type: str
    body: bytes
    fields: list[Field]


NAMES = ("language", "prompt", "response_format", "timestamp_granularities[]", "my field", "x-y.z", "metadata[user id]",
         "na\u00efve", 'a"b', "100%", "a=b", "a;b")  # fmt: skip
FILES = ("a.wav", "my voice.wav", "a;b.wav", "na\u00efve.wav", "\u65e5\u672c.mp3", 'a"b.wav', "a\\b.wav",
         "it's (1).wav", "100%.wav", "a=b.wav", "model", "x, y.wav")  # fmt: skip
_PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"--",
    b"\r\n--",
    b"\0",
    b"RIFF$",
    b"\xff\xfe",
    b"abc",
    b" ",
    b"name=model",
    b'"',
    b";",
)
_TOKEN = frozenset("!#$%&'*+-.^_`|~" + string.ascii_letters + string.digits)
_HTML = {10: "%0A", 13: "%0D", 34: "%22"}
"""Escapes of browsers (WHATWG HTML, 4.10.21.8)."""

Writer = Callable[[random.Random, list[Field]], tuple[str, bytes]]


def fields(draw: random.Random) -> list[Field]:
    """Return a model, a file and other fields, in any order."""
    binary = b"".join(draw.choices(_PIECES, k=draw.randint(0, 12)))
    found = [Field("model", b"whisper-1"), Field("file", binary, draw.choice(FILES))]
    for name in draw.sample(NAMES, draw.randint(0, 4)):
        text = draw.choice(("en", "", "verbose_json", "\u65e5\u672c\u8a9e", "two\r\nlines", "a--b", "0.5"))
        found.append(Field(name, text.encode()))
    draw.shuffle(found)
    return found


def _joined(boundary: str, parts: list[tuple[str, bytes]], end: str = "\r\n") -> bytes:
    """Return a body of parts, each given by its head (lines with their ends) and its value."""
    written = [f"--{boundary}\r\n{head}\r\n".encode() + value + b"\r\n" for head, value in parts]
    return b"".join(written) + f"--{boundary}--{end}".encode()


def _disposition(one: Field, quoted: Callable[[str], str], label: str = "Content-Disposition") -> str:
    file = "" if one.file is None else f'; filename="{quoted(one.file)}"'
    return f'{label}: form-data; name="{quoted(one.name)}"{file}\r\n'


def _dotnet_text(text: str) -> str:
    if not text.isascii():
        return f'"=?utf-8?B?{base64.b64encode(text.encode()).decode()}?="'
    return text if text and _TOKEN.issuperset(text) else f'"{text}"'


def dotnet(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """MultipartFormDataContent of .NET, which rejects quotes in names."""
    boundary = str(uuid.UUID(int=draw.getrandbits(128)))
    parts = []
    for one in given:
        name, file = one.name.replace('"', ""), (one.file or "").replace('"', "")
        line = f"Content-Disposition: form-data; name={_dotnet_text(name)}"
        kind = f"Content-Type: {one.kind}\r\n" if draw.random() < 0.5 else ""
        if one.file is None:
            kind = "Content-Type: text/plain; charset=utf-8\r\n"
        else:
            line += f"; filename={_dotnet_text(file)}; filename*=utf-8''{quote(file, safe='!#$&+-.^_`|~')}"
        parts.append((f"{kind}{line}\r\n", one.value))
    return f'multipart/form-data; boundary="{boundary}"', _joined(boundary, parts)


def okhttp(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """MultipartBody of OkHttp 4, and of 5, which does not write the length of a part."""
    boundary, has_length = str(uuid.UUID(int=draw.getrandbits(128))), draw.random() < 0.5
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.translate(_HTML))
        head += "" if one.file is None else f"Content-Type: {one.kind}\r\n"
        parts.append((head + f"Content-Length: {len(one.value)}\r\n" * has_length, one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def retrofit(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """@Multipart of Retrofit with string and file parts."""
    boundary = str(uuid.UUID(int=draw.getrandbits(128)))
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.translate(_HTML)) + "Content-Transfer-Encoding: binary\r\n"
        kind = "text/plain; charset=UTF-8" if one.file is None else one.kind
        parts.append((f"{head}Content-Type: {kind}\r\nContent-Length: {len(one.value)}\r\n", one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def apache(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """MultipartEntityBuilder of Apache HttpClient, whose charset may come first."""
    letters = "-_1234567890" + string.ascii_letters
    boundary = "".join(draw.choices(letters, k=draw.randint(30, 40)))
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.replace("\\", "\\\\").replace('"', '\\"'))
        kind = ("text/plain; charset=UTF-8", "8bit") if one.file is None else (one.kind, "binary")
        parts.append((f"{head}Content-Type: {kind[0]}\r\nContent-Transfer-Encoding: {kind[1]}\r\n", one.value))
    parameters = draw.choice(("boundary={}", "charset=UTF-8; boundary={}", "boundary={}; charset=UTF-8"))
    return f"multipart/form-data; {parameters.format(boundary)}", _joined(boundary, parts)


def curl(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """`curl -F`, whose escapes changed with version 7.81."""
    boundary = "-" * 24 + "".join(draw.choices(string.ascii_letters + string.digits, k=draw.choice((16, 22))))
    is_new = draw.random() < 0.5

    def quoted(text: str) -> str:
        return text.translate(_HTML) if is_new else text.replace("\\", "\\\\").replace('"', '\\"')

    kinds = ["" if one.file is None else f"Content-Type: {one.kind}\r\n" for one in given]
    parts = [(_disposition(one, quoted) + kind, one.value) for one, kind in zip(given, kinds, strict=True)]
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def requests(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """Requests with urllib3 2; it writes no type that it does not know."""
    boundary = f"{draw.getrandbits(128):032x}"
    parts = []
    for one in given:
        kind = f"Content-Type: {one.kind}\r\n" if one.file is not None and draw.random() < 0.5 else ""
        parts.append((_disposition(one, lambda text: text.translate(_HTML)) + kind, one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def httpx(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """httpx, which doubles backslashes."""
    boundary = f"{draw.getrandbits(128):032x}"
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.replace("\\", "\\\\").translate(_HTML))
        parts.append((head + ("" if one.file is None else f"Content-Type: {one.kind}\r\n"), one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def aiohttp(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """FormData of aiohttp: the type comes first, and names that are not ASCII are extended parameters."""
    boundary = f"{draw.getrandbits(128):032x}"
    parts = []
    for one in given:
        kind = "text/plain; charset=utf-8" if one.file is None else one.kind
        name = one.name.replace("\\", "\\\\").replace('"', '\\"')
        line = f'name="{name}"' if name.isascii() else f"name*=utf-8''{quote(one.name, safe='')}"
        line += "" if one.file is None else f'; filename="{quote(one.file, safe="")}"'
        parts.append((f"Content-Type: {kind}\r\nContent-Disposition: form-data; {line}\r\n", one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


def undici(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """FormData of Node; older versions write no line end at the end."""
    boundary = f"----formdata-undici-0{draw.randrange(10**11):011d}"
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.translate(_HTML))
        parts.append((head + ("" if one.file is None else f"Content-Type: {one.kind}\r\n"), one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts, draw.choice(("", "\r\n")))


def dart(draw: random.Random, given: list[Field]) -> tuple[str, bytes]:
    """MultipartRequest of Dart's package http: lower-case names, and the type of a file comes first."""
    letters = "+_-." + string.digits + string.ascii_letters
    boundary = "dart-http-boundary-" + "".join(draw.choices(letters, k=50)) + draw.choice(string.digits)
    parts = []
    for one in given:
        head = _disposition(one, lambda text: text.translate(_HTML), "content-disposition")
        if one.file is not None:
            head = f"content-type: {one.kind}\r\n{head}"
        elif not one.value.isascii():
            head += "content-type: text/plain; charset=utf-8\r\ncontent-transfer-encoding: binary\r\n"
        parts.append((head, one.value))
    return f"multipart/form-data; boundary={boundary}", _joined(boundary, parts)


CLIENTS: dict[str, Writer] = {
    "dotnet": dotnet, "okhttp": okhttp, "retrofit": retrofit, "apache": apache, "curl": curl, "requests": requests,
    "httpx": httpx, "aiohttp": aiohttp, "undici": undici, "dart": dart,
}  # fmt: skip


def written(client: str, seed: int) -> Written:
    """Return one form of a client; the same for the same seed."""
    draw = random.Random(f"{client} {seed}")
    given = fields(draw)
    content_type, body = CLIENTS[client](draw, given)
    return Written(client, content_type, body, given)
