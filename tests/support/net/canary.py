"""Canaries: a server that must never be contacted, words that must never be leaked, and raw requests that contain them.

`spellings` lists the encodings in which a word can leak although a search for the word itself does not find it.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.harness.gateway.gateway_rig import Client


class CanaryServer:
    """Counts its connections, and answers each with a page of its own."""

    PAGE = b"<p>what only the canary says</p>"

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Counts one more connection."""
        del reader
        self.connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(self.PAGE), self.PAGE))
        writer.close()


@asynccontextmanager
async def canary_server(host: str = "127.0.0.1") -> AsyncIterator[CanaryServer]:
    """Runs the server within the context; at the end it verifies that connections are counted."""
    one = CanaryServer()
    server = await asyncio.start_server(one.connected, host, 0)
    one.port = server.sockets[0].getsockname()[1]
    async with server:
        yield one
        before = one.connections
        reader, writer = await asyncio.open_connection(host, one.port)
        assert (await reader.read()).endswith(CanaryServer.PAGE)
        writer.close()
        assert one.connections == before + 1, "a canary that does not count proves nothing"


def request(
    path: str, body: bytes = b"", *lines: str, method: str = "POST", kind: str = "application/json", host: str = "gw"
) -> bytes:
    """The bytes of one request."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *lines, "", ""]).encode() + body


async def connected(url: str) -> Client:
    """Opens a raw connection to the inference port."""
    host, _, port = url.removeprefix("http://").partition(":")
    return Client(*await asyncio.open_connection(host, int(port)))


def spellings(word: str) -> set[bytes]:
    """The word in every encoding that still reveals it."""
    raw = word.encode()
    found = {raw, raw.hex().encode(), raw[::-1]}
    found |= {"".join(form.format(byte) for byte in raw).encode() for form in ("%{:02x}", "%{:02X}", "\\x{:02x}")}
    found |= {"".join(form.format(ord(c)) for c in word).encode() for form in ("\\u{:04x}", "\\u{:04X}", "&#{};")}
    found.add(json.dumps(word)[1:-1].encode())
    for shift in range(3):  # where in a longer text it may begin; characters that depend on adjacent bytes are omitted
        padded = b"\0" * shift + raw
        coded = base64.b64encode(padded)[(8 * shift + 5) // 6 : 8 * len(padded) // 6]
        found |= {coded, coded.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


def occurrences(text: bytes, *words: str) -> list[bytes]:
    """Every occurrence of one of the words, in any spelling, with the surrounding text."""
    folded, found = text.lower(), list[bytes]()
    for spelling in {spelling for word in words for spelling in spellings(word)}:
        for where, wanted in ((text, spelling), (folded, spelling.lower())):
            at = where.find(wanted)
            if at >= 0:
                found.append(text[max(0, at - 60) : at + len(wanted) + 60])
                break
    return found
