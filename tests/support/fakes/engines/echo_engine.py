"""An engine in a separate process that records its requests and repeats them in every way that an engine can.

`parrot.py PORT FILE` serves until killed; FILE gets one JSON line per request (`seen` reads them). The top-level member
`user` of a request names one of `MANNERS`, which determines how the engine repeats the request body; without it the
response is regular. It also prints every body, as an engine may do in its own log.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: makes this package importable
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DIE,
    DONE,
    END,
    HOLD,
    OK,
    RESET,
    STREAM_HEAD,
    USAGE_EVENT,
    Script,
    ScriptedEngine,
    chunk,
    delta,
    document,
)

ScriptOf = Callable[[bytes], Script]

FLOOD_BYTES, FLOOD_EVENTS = 64 << 10, 500
"""More than all buffers between an engine and a client that does not read."""
_turns = count()


def _comment(content: bytes) -> bytes:
    """One complete SSE event with the text in a comment."""
    return chunk(b": " + content.replace(b"\n", b" ") + b"\n\n")


def _busy(content: bytes) -> Script:
    """A response that the engine is overloaded."""
    return (document(content, "503 Service Unavailable"),)


def _line(content: bytes) -> str:
    """The text in a form that is valid in a header line."""
    return content.decode("latin-1").replace("\r", " ").replace("\n", " ")


MANNERS: dict[str, ScriptOf] = {
    "document": lambda said: (document(said),),
    "stream": lambda said: (STREAM_HEAD + _comment(said) + delta("a") + USAGE_EVENT + DONE + END,),
    "error": lambda said: (document(said, "500 Internal Server Error"),),
    "page": lambda said: (document(b"<h1>" + said, "500 Internal Server Error", kind="text/html"),),
    "refusal": lambda said: (document(said, "400 Bad Request"),),
    "redirect": lambda said: (document(said, "302 Found", f"Location: http://127.0.0.1:9/?{_line(said)}"),),
    "busy": _busy,
    "garbage": lambda said: (said + b"\r\n\r\n" + said, CLOSE),
    "headers": lambda said: (document(b"{}", f"200 {_line(said)}", f"X-Said: {_line(said)}"),),
    "bad-header": lambda said: (document(b"{}", "200 OK", f"X Said: {_line(said)}"),),
    "early": lambda said: ((f"HTTP/1.1 103 {_line(said)}\r\nLink: {_line(said)}\r\n\r\n").encode("latin-1") + OK,),
    "trailers": lambda said: (
        STREAM_HEAD + delta("a") + DONE + b"0\r\nX-Said: " + _line(said).encode("latin-1") + b"\r\n\r\n",
    ),
    "bad-chunk": lambda said: (STREAM_HEAD + delta("a"), said + b"\r\n", HOLD),
    "half": lambda said: (STREAM_HEAD + delta("a") + chunk(b"data: " + said), RESET),
    "short": lambda said: (document(said + b" " * 100)[:-100], CLOSE),
    "floods": lambda said: (STREAM_HEAD, *[_comment(said * (FLOOD_BYTES // len(said)))] * FLOOD_EVENTS, HOLD),
    "moody": lambda said: _busy(said) if next(_turns) % 2 else (document(said),),
    "silent": lambda said: (HOLD,),
    "stalls": lambda said: (STREAM_HEAD + delta("a"), HOLD),
    "dies": lambda said: (DIE,),
    "dies-mid-stream": lambda said: (STREAM_HEAD + delta("a"), DIE),
}
"""How the engine responds, given what it was sent."""


class Seen(NamedTuple):
    """One request as the engine received it."""

    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        """Path of the request."""
        return self.head.split(b" ", 2)[1].decode()


def command(file: Path) -> list[str]:
    """The command of a Model with engine `command`."""
    return [sys.executable, "-E", str(Path(__file__).resolve()), "{port}", str(file)]


def seen(file: Path) -> list[Seen]:
    """The requests so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [[base64.b64decode(part) for part in json.loads(line)] for line in lines]
    return [Seen(head, body) for head, body in rows]


class Parrot(ScriptedEngine):
    """The engine itself."""

    def __init__(self, port: int, file: Path) -> None:
        super().__init__(port=port)
        self._file = file

    def script(self, request: bytes) -> Script:
        """The script that the request's `user` selects."""
        if request.startswith(b"GET "):
            return (OK,)
        head, _, body = request.partition(b"\r\n\r\n")
        with self._file.open("a") as file:
            file.write(json.dumps([base64.b64encode(part).decode() for part in (head, body)]) + "\n")
        print(body.decode(errors="replace"), flush=True)
        named = re.search(rb'"user": ?"([a-z-]+)"', body)
        answer = MANNERS[named[1].decode()] if named else _plainly
        return answer(body)


def _plainly(content: bytes) -> Script:
    """The script of an engine that works correctly."""
    return MANNERS["stream" if b'"stream": true' in content or b'"stream":true' in content else "document"](content)


async def main(port: int, file: Path) -> None:
    """Serves until killed."""
    async with Parrot(port, file):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
