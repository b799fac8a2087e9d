"""Measures which limits of our own clients obstore also enforces, against hostile object stores on loopback.

    python3 -m venv build/obstore && build/obstore/bin/pip install obstore trustme psutil
    build/obstore/bin/python bench/libraries.py

Each case runs in a process of its own. Requests have a read timeout of 2 s, listings 6 s in all, and no retry. A line
has the case, the result, the seconds, the growth of the resident memory in MiB, and the requests that servers received.
docs/decisions/0028-object-stores.md has the results.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil
import trustme

WAIT_S, MEMORY_MIB = 15.0, 512.0
AUTHORITY, TLS = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
KEYS = {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_SESSION_TOKEN": "t0ken"}
OK, LIST = "HTTP/1.1 200 OK", "<ListBucketResult><IsTruncated>false</IsTruncated>"
FIELDS = 'Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: "e"'
Send = Callable[[str], None]


class Case(NamedTuple):
    """The answer of a server, and the request to it. OTHER in a text is the address of another server."""

    answer: Callable[[Send, str], None]
    request: str = "list"
    own_ca: bool = False
    range: tuple[int, int] | None = None
    env: Mapping[str, str | None] = {}
    tls: bool = False


def endless(start: str, piece: str, pause_s: float = 0.0) -> Callable[[Send, str], None]:
    def answer(send: Send, _: str) -> None:
        send(start)
        while True:
            send(piece)
            time.sleep(pause_s)

    return answer


def fixed(text: str) -> Callable[[Send, str], None]:
    return lambda send, other: send(text.replace("OTHER", other))


def body(text: str, status: str = OK, fields: str = FIELDS) -> Callable[[Send, str], None]:
    return fixed(f"{status}\r\n{fields}\r\nContent-Length: {len(text)}\r\n\r\n{text}")


MOVED = "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://OTHER/models/m\r\nContent-Length: 0\r\n\r\n"
EMPTY = body(f"{LIST}</ListBucketResult>")
CASES = {
    "listing that never ends": Case(endless(f"{OK}\r\n\r\n{LIST}<Contents><Key>", "x" * (1 << 20))),
    "error body that never ends": Case(endless("HTTP/1.1 403 Forbidden\r\n\r\n<Error>", "x" * (1 << 20))),
    "headers that never end": Case(endless(f"{OK}\r\n", f"X-A: {'x' * 1000}\r\n"), "head"),
    "listing sent at one byte every 0.5 s": Case(endless(f"{OK}\r\n\r\n{LIST}", " ", 0.5)),
    "object sent at one byte every 0.5 s": Case(
        endless(f"{OK}\r\n{FIELDS}\r\nContent-Length: 9999\r\n\r\n", "x", 0.5), "get"
    ),
    "redirect of a listing": Case(fixed(MOVED)),
    "redirect of an object": Case(fixed(MOVED), "get"),
    "object with another ETag": Case(body("other", fields=FIELDS.replace('"e"', '"z"')), "get"),
    "range answered with 200": Case(body("x" * 10), "get", range=(2, 4)),
    "bucket in another region": Case(body("", "HTTP/1.1 301 Moved", "x-amz-bucket-region: eu-test-2")),
    "certificate of an unknown authority": Case(EMPTY, tls=True),
    "certificate of a private authority that the client trusts": Case(EMPTY, own_ca=True, tls=True),
    "environment: HTTP_PROXY": Case(EMPTY, env={"HTTP_PROXY": "http://OTHER", "http_proxy": "http://OTHER"}),
    "no keys: metadata service": Case(EMPTY, env={**dict.fromkeys(KEYS), "AWS_METADATA_ENDPOINT": "http://OTHER"}),
}  # fmt: skip


def serve(at: str, seen: list[str], answer: Callable[[Send], None], tls: ssl.SSLContext | None) -> int:
    """Serves on a free port until the process ends; `seen` gets the requests."""
    door = socket.create_server((at, 0))

    def one(link: socket.socket) -> None:
        try:
            link = link if tls is None else tls.wrap_socket(link, server_side=True)
            text = link.recv(65536).decode("latin-1")
            secrets = [name for name in ("authorization", "x-amz-security-token") if f"\n{name}:" in text.lower()]
            seen.append(f"{at} {text.split(' ', 1)[0]}{' with ' if secrets else ''}{' and '.join(secrets)}")
            answer(lambda piece: link.sendall(piece.encode()))
            link.close()
        except OSError:
            pass  # the client has closed the connection

    def accept() -> None:
        while True:
            threading.Thread(target=one, args=(door.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(door.getsockname()[1])


def client(name: str, url: str, env: dict[str, str], ca: str, to: Any) -> None:
    """Sends the request of a case, and reports the result."""
    os.environ.update(env)
    import obstore  # type: ignore[import-not-found, unused-ignore]  # an environment of its own has it
    from obstore.store import S3Store  # type: ignore[import-not-found, unused-ignore]

    case = CASES[name]
    whole_s = "6s" if case.request == "list" else "1h"  # the time for an object depends on its size
    options = {"allow_http": True, "timeout": whole_s, "read_timeout": "2s", "connect_timeout": "2s"}
    options |= {"root_certificate": ca} if case.own_ca else {}
    store = S3Store("models", endpoint=url, region="eu-test-1", client_options=options, retry_config={"max_retries": 0})
    get = {"if_match": '"e"'} | ({"range": case.range} if case.range else {})
    to.send("ready")
    ways: dict[str, Callable[[], Any]] = {
        "list": lambda: [len(page) for page in obstore.list(store, "m")],
        "head": lambda: obstore.head(store, "m"),
        "get": lambda: bytes(obstore.get(store, "m", options=get).bytes())[:20],
    }
    try:
        found = ways[case.request]()
        to.send(f"accepted: {found}")
    except BaseException as error:  # noqa: BLE001 -- any error is a result, and a panic is no Exception
        to.send(f"{type(error).__name__}: {str(error)[:200]!r}")


def measure(name: str) -> str:
    """Run one case and return its line."""
    case, seen, context = CASES[name], list[str](), multiprocessing.get_context("spawn")
    other = f"127.0.0.2:{serve('127.0.0.2', seen, lambda send: EMPTY(send, ''), None)}"
    port = serve("127.0.0.1", seen, lambda send: case.answer(send, other), TLS if case.tls else None)
    env = {key: value.replace("OTHER", other) for key, value in {**KEYS, **case.env}.items() if value is not None}
    url, (ours, theirs) = f"http{'s' * case.tls}://127.0.0.1:{port}", context.Pipe()
    run = context.Process(target=client, args=(name, url, env, AUTHORITY.cert_pem.bytes().decode(), theirs))
    run.start()
    ours.recv()
    memory, began_s, peak, result = psutil.Process(run.pid).memory_info, time.monotonic(), 0, ""
    before = memory().rss
    while not result and time.monotonic() - began_s < WAIT_S and peak < MEMORY_MIB:
        result = ours.recv() if ours.poll(0.02) else ""
        peak = max(peak, memory().rss - before >> 20)
    run.kill()
    return f"{name}: {result or 'no end'}; {time.monotonic() - began_s:.1f} s; {peak} MiB; {', '.join(seen)}"


if __name__ == "__main__":
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(TLS)
    for one in CASES:
        print(measure(one), flush=True)
