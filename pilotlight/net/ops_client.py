"""Client of the operations port: sends one request and decodes the response as a type of the API
(`autoscaler.queries.response_types`).

Another server may listen at that address, so time and size are limited, redirects are not followed, and a response of
another type is reported as a one-line error that names `--ops`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import click
import msgspec

from autoscaler.queries.response_types import Problem

TIMEOUT_S = 5.0
"""Total time, from connecting to the last byte."""
BYTES_MAX = 64 << 20
"""Maximum size of a response: more than 100,000 rows."""
NOT_OURS = "--ops: no operations port of this version of Pilotlight answers there"
INFERENCE = "--ops: this is the inference port; use the address of the operations port"

T = TypeVar("T")


class NotOursError(click.UsageError):
    """The response comes from another server or another version."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{NOT_OURS} ({why}); use the address of the operations port of a running `pilotlight serve`")


class _InferenceProblem(msgspec.Struct):
    """Error body of the inference port."""

    error: dict[str, object]


class _Response(NamedTuple):
    status: int
    body: bytes


def fetch(
    ops: str, path: str, kind: type[T], *, order: Mapping[str, object] | None = None, key: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> T:  # fmt: skip
    """GET `path`, or POST an order, and return the response as a `kind`. Environment proxies are not used.

    Raises click.ClickException (exit status 1) if the port is unreachable or reports an error, UsageError (2) if `ops`
    is invalid, NotOursError (2) if the response is not from an operations port.
    """
    ops = ops if ops.startswith(("http://", "https://")) else f"http://{ops}"
    try:
        response = _exchange(ops, path, None if order is None else json.dumps(order).encode(), key, timeout_s)
    except ValueError as error:
        raise click.UsageError(f"--ops {ops}: {error}: expected http://HOST:PORT") from None
    except socket.gaierror as error:
        raise click.UsageError(f"--ops {ops}: the host name cannot be resolved: {error.strerror}") from None
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(
            f"no response from --ops {ops} ({reason}): start `pilotlight serve`, or correct --ops"
        ) from None
    except http.client.HTTPException as error:
        raise NotOursError(f"its response is not HTTP/1.1: {type(error).__name__}") from None
    if response.status == HTTPStatus.OK:
        return _decoded(response.body, kind)
    if response.status < HTTPStatus.BAD_REQUEST:
        raise NotOursError(f"status {response.status}")
    with contextlib.suppress(NotOursError):
        raise click.ClickException(_decoded(response.body, Problem).error)
    with contextlib.suppress(NotOursError):
        _decoded(response.body, _InferenceProblem)
        raise click.UsageError(INFERENCE)
    raise NotOursError(f"status {response.status}")


def _decoded(body: bytes, kind: type[T]) -> T:
    """Decode a response. Raises NotOursError."""
    if len(body) > BYTES_MAX:
        raise NotOursError(f"a response of more than {BYTES_MAX >> 20} MiB")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotOursError("nested too deeply" if isinstance(error, RecursionError) else str(error)) from None


def _exchange(ops: str, path: str, body: bytes | None, key: str | None, timeout_s: float) -> _Response:
    """Send a request and return the response. Raises OSError, ValueError, HTTPException."""
    url = urlsplit(ops)
    if not url.hostname:
        raise ValueError("it contains no host")
    made = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"content-type": "application/json", "connection": "close"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    connection = made(url.hostname, url.port, timeout=timeout_s)
    try:
        connection.connect()
        with _deadline(connection.sock, timeout_s):
            target = url.path.rstrip("/") + quote(path, errors="surrogateescape")
            connection.request("GET" if body is None else "POST", target, body, headers)
            with contextlib.closing(connection.getresponse()) as response:
                return _Response(response.status, response.read(BYTES_MAX + 1))
    finally:
        connection.close()


@contextlib.contextmanager
def _deadline(link: socket.socket, timeout_s: float) -> Iterator[None]:
    """Close the connection after `timeout_s`, even if data still arrives slowly. Raises TimeoutError."""
    expired = threading.Event()

    def end() -> None:
        expired.set()
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException):
        if not expired.is_set():
            raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError(f"no complete response within {timeout_s:g} s")
