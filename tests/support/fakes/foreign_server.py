"""A foreign server on a port where a command expects Pilotlight's; its responses are given byte by byte."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def sized(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A response with a length."""
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body


BODIES = {
    "list": b"[]",
    "object": b"{}",
    "number": b"1",
    "string": b'"x"',
    "null": b"null",
    "rows": b'[{"a":1}]',
    "numbers": b"[1]",
    "deep": b"[" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "nan": b"NaN",
    "latin-1": b'"\xff"',
    "html": b"<html>",
    "wrong type": b'{"sentences":5}',
    "digits": b"9" * 5_000,
    "surrogate": b'{"sentences":["\\ud800"]}',
    "empty": b"",
}
FOREIGN = {
    **{name: sized(body) for name, body in BODIES.items()},
    "redirect": b"HTTP/1.1 302 Found\r\nlocation: /api/v1/off\r\ncontent-length: 0\r\n\r\n",
    "not found": sized(b"<html>", b"404 Not Found"),
    "error": sized(b"<html>", b"500 Internal Server Error"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "inference port": sized(b'{"error":{"message":"no such path"}}', b"404 Not Found"),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    "wrong chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
}


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serves with `answer`, which writes the response to every request; yields the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.raw_requestline = self.rfile.readline()
            if self.parse_request():
                self.rfile.read(int(self.headers.get("content-length", 0)))
                with contextlib.suppress(OSError):  # the client has disconnected
                    answer(self.connection)
                    self.connection.shutdown(socket.SHUT_WR)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()
