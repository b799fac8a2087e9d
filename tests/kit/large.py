"""Large bodies for tests: how they are made and sent, and such as are made to be slow to read."""

from __future__ import annotations

import asyncio
import json

from tests.kit.rig import Client

MIB = 1 << 20


def address(server: asyncio.Server) -> str:
    """Where it listens."""
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def body(size: int, **members: object) -> bytes:
    """A chat completion of so many bytes (or a few more)."""
    fixed = {"model": "alias-m", **members}
    text = "wake up, das Städtchen schläft \\ \n" * (size // 38 + 1)
    made = json.dumps({**fixed, "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    return made[:-4] + b" " * max(0, size - len(made)) + made[-4:]


def post(
    client: Client, data: bytes, *lines: str, kind: str = "application/json", path: str = "chat/completions"
) -> None:
    """Sends it with its length."""
    head = [f"POST /v1/{path} HTTP/1.1", "host: x", f"content-type: {kind}", f"content-length: {len(data)}", *lines]
    client.send("\r\n".join([*head, "", ""]).encode())
    client.send(data)


def post_in_chunks(client: Client, data: bytes, size: int, path: str = "chat/completions") -> None:
    """Sends it in chunks of so many bytes."""
    head = ["host: x", "content-type: application/json", "transfer-encoding: chunked", "", ""]
    client.send(f"POST /v1/{path} HTTP/1.1\r\n".encode() + "\r\n".join(head).encode())
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    client.send(b"0\r\n\r\n")


HOSTILE = {
    "text": body(8 * MIB),
    "messages": json.dumps({"model": "alias-m", "messages": [{"role": "user", "content": "hi"}] * 200_000}).encode(),
    "numbers": json.dumps({"model": "alias-m", "input": list(range(MIB))}).encode(),
    "brackets": b'{"model":"alias-m","a":[' + b"[]," * MIB + b"1]}",
    "deep": b'{"model":"alias-m","a":[' + (b"[" * 190 + b"]" * 190 + b",") * 8000 + b"1]}",
    "tiny strings": b'{"model":"alias-m","a":[' + b'"",' * MIB + b"1]}",
    "escapes": b'{"model":"alias-m","a":["' + b'\\n\\"' * MIB + b'"]}',
    "names": b'{"model":"alias-m",' + b",".join(b'"%d":1' % number for number in range(MIB // 2)) + b"}",
    "white space": b'{"model":"alias-m"' + b" " * 4 * MIB + b"}",
}
"""Most are a nuisance; all but `names` are taken."""
