"""Independent HTTP servers parse accepted input as the gateway does; forwarded requests have only one interpretation.

Inputs are the corpus and seeded mutations of valid requests. `tests.support.net.origin_servers` are the servers; nginx
and HAProxy are placed in front of one of them if installed.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import h11
import pytest

from autoscaler.engines.programs.installed import find_installed_programs
from gateway.http.request_head import Request
from tests.support.net.origin_client import (
    ANSWERS_S_MAX,
    PROXIES,
    SILENT_S,
    Heard,
    Reading,
    Step,
    ask,
    llama,
    origins,
    program,
    proxy,
)
from tests.support.net.request_mutations import mutated
from tests.support.net.request_splits import read
from tests.support.net.upstream_requests import forwarded, in_one

pytestmark = pytest.mark.xdist_group("differential")  # the servers are started once

CORPUS = Path(__file__).parents[1] / "corpus"
SEED, MUTATIONS = 4, 1200
AT_ONCE = 8
"""Maximum concurrent connections to one server."""
SENTINEL = b"GET /sentinel HTTP/1.1\r\nHost: gw\r\nConnection: close\r\n\r\n"
LAST = ("GET", "/sentinel", "")
DIRECT = ("aiohttp", "uvicorn-h11", "uvicorn-httptools", "hypercorn", "waitress")
SERVERS = (*DIRECT, "aiohttp-python", *PROXIES)


class Quirk(NamedTuple):
    """Servers that parse other requests than we do, and why this is harmless: `about` never matches what we forward."""

    servers: tuple[str, ...]
    about: re.Pattern[bytes]
    why: str


QUIRKS = (
    Quirk(("aiohttp", "uvicorn-httptools"), re.compile(rb"(?i)\r\nupgrade:"),
          "what follows an offer to upgrade is no HTTP/1.1 to them; we offer nothing"),
    Quirk(("hypercorn", "aiohttp-python"), re.compile(rb"(?:\A|\r\n)[^ \r\n]*[a-z][^ \r\n]* /"),
          "they write methods in upper case; we find no such method, and forward POST alone"),
    Quirk(("waitress",), re.compile(rb"(?is)\r\nconnection:(?:[^\r]*,|.*\r\nconnection:)"),
          "it recognizes `close` only as the sole option; we close, and forward no Connection header"),
    Quirk(("waitress",), re.compile(rb"(?i)\r\nexpect:"),
          "it loses a request after an expectation without a body; we answer it ourselves"),
    Quirk(("uvicorn-httptools",), re.compile(rb"(?i)\r\n0+\r\nconnection:"),
          "it obeys Connection in a trailer; we send no trailers"),
)  # fmt: skip


class Accepted(NamedTuple):
    """Input from which we parse at least one request."""

    name: str
    data: bytes
    requests: list[Request]
    whole: bool
    """Whether all of the input was parsed as requests."""

    @property
    def readings(self) -> list[tuple[str, str, str]]:
        """Return the requests, as a Reading's `bare`."""
        return [
            Reading(head.method.decode(), (head.path + b"?" + head.query).decode(), in_one(body).decode("latin-1")).bare
            for head, body in ((request.head, request.body) for request in self.requests)
        ]


@cache
def accepted() -> list[Accepted]:
    """Return all inputs that we accept."""
    inputs = [(path.name, path.read_bytes()) for path in sorted(CORPUS.glob("*.http"))]
    inputs += [(f"mutation {number}", data) for number, data in enumerate(mutated(SEED, MUTATIONS))]
    found = []
    for name, data in inputs:
        seen = read([data])
        requests = [item for item in seen if isinstance(item, Request)]
        if requests:
            found.append(Accepted(name, data, requests, len(requests) == len(seen)))
    return found


@cache
def sent() -> list[tuple[bytes, bytes]]:
    """Return everything that engines receive for these inputs: distinct pairs of head and body."""
    every = (forwarded(request) for item in accepted() for request in item.requests)
    return list(dict.fromkeys(one for one in every if one is not None))


@pytest.fixture(scope="module")
def direct() -> Iterator[dict[str, int]]:
    with origins(*DIRECT) as ports, origins("aiohttp-python", python_parsers=True) as more:
        yield ports | more


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, direct: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    """Return the name and port of one server."""
    name = request.param
    if name not in PROXIES:
        yield name, direct[name]
    elif program(name) is None:
        pytest.skip(f"{name} is not installed")
    else:
        with proxy(name, tmp_path_factory.mktemp(name), direct["uvicorn-h11"]) as port:
            yield name, port


def test_differential_corpus_has_over_600_accepted_requests() -> None:
    assert len(accepted()) > 600
    assert len(sent()) > 200
    assert sum(item.whole for item in accepted()) > 400


def test_forwarded_request_heads_contain_no_known_parser_quirk() -> None:
    for head, _ in sent():
        assert not any(quirk.about.search(head) for quirk in QUIRKS), head


@pytest.mark.case("39")
async def test_other_http_servers_parse_forwarded_requests_like_the_gateway(server: tuple[str, int]) -> None:
    """Requests are sent in sequence on one connection, as to an engine, so that no byte of one may reach the next."""
    name, port = server
    steps = [Step(head + body, 1, ANSWERS_S_MAX) for head, body in sent()]
    heard = await ask(port, *steps, Step(SENTINEL, 2, ANSWERS_S_MAX))
    wanted = [meant(head, body) for head, body in sent()]
    for reading, expected in zip(heard.readings, wanted, strict=False):
        assert reading.bare == expected.bare
        if name in PROXIES:
            assert set(expected.headers) <= set(reading.headers)
        else:
            assert reading.headers == expected.headers
    assert [reading.bare for reading in heard.readings[len(wanted) :]] == [LAST]
    assert heard.end == "closed", "nothing else was read"


def meant(head: bytes, body: bytes) -> Reading:
    """Return the meaning of one of our heads and bodies."""
    line, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = line.split(" ")
    pairs = sorted((name, value) for name, _, value in (field.partition(": ") for field in fields))
    return Reading(method, target, body.decode("latin-1"), tuple(pairs))


@pytest.mark.case("39")
async def test_other_http_servers_parse_raw_client_input_like_the_gateway(server: tuple[str, int]) -> None:
    name, port = server
    gate = asyncio.Semaphore(AT_ONCE)
    excused: Counter[Quirk] = Counter()

    async def same(item: Accepted) -> bool:
        quirks = [quirk for quirk in QUIRKS if name in quirk.servers and quirk.about.search(item.data)]
        async with gate:
            heard, wanted = await asked(port, item, SILENT_S if quirks else ANSWERS_S_MAX)
        foreign = [in_origin_form(reading.bare) for reading in heard.readings]
        if foreign == wanted:
            return True
        if heard.end in ("refused", "closed") and foreign == wanted[: len(foreign)]:
            return False
        assert quirks, f"{item.name}: {item.data!r}\nwe read {wanted}\n{name} reads {foreign}, then {heard.end}"
        excused.update(quirks)
        return False

    agreed = await asyncio.gather(*map(same, accepted()))
    assert sum(agreed) > len(agreed) / 2, "else nothing is compared"
    assert set(excused) == {quirk for quirk in QUIRKS if name in quirk.servers}, "else it is no quirk any more"


def in_origin_form(bare: tuple[str, str, str]) -> tuple[str, str, str]:
    """Return a request with the path of its target; some servers report a target in absolute-form as it is."""
    method, target, body = bare
    return method, re.sub(r"(?i)\Ahttps?://[^/?]*(?=/)", "", target), body


async def asked(port: int, item: Accepted, silent_s: float) -> tuple[Heard, list[tuple[str, str, str]]]:
    """Return what the server parses from the raw bytes, and what it should parse (`silent_s`: within this time).

    If we parse all of the input, another request follows it, so that leftover or smuggled bytes become visible. Other
    servers may keep an HTTP/1.0 connection alive; the gateway closes it.
    """
    own, last = item.readings, item.requests[-1].head
    if not item.whole or last.minor == 0:
        return await ask(port, Step(item.data, len(own), silent_s)), own
    wanted = [*own, LAST] if last.keep_alive else own
    heard = await ask(port, Step(item.data + SENTINEL, len(wanted), silent_s), Step(b"", 1))
    return (heard._replace(end="more") if heard.end == "enough" else heard), wanted


@pytest.mark.skipif(
    "xllamacpp" not in find_installed_programs(), reason="the llama.cpp server is not installed (extra llama)"
)
def test_llama_cpp_gives_one_response_per_forwarded_request(tmp_path: Path) -> None:
    """It closes after errors and streams. If it does not, the next response belongs to the next request."""
    kept = 0
    with llama(tmp_path) as port:
        for head, body in sent():
            bodies = answers(port, head + body + SENTINEL.replace(b"/sentinel", b"/health"))
            assert 1 <= len(bodies) <= 2, head + body
            assert [answer for answer in bodies if answer == b'{"status":"ok"}'] == bodies[1:]
            kept += len(bodies) == 2
    assert kept > 20


def answers(port: int, data: bytes) -> list[bytes]:
    """Return the bodies of all responses, as h11 parses them."""
    received, bodies = b"", list[bytes]()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        while piece := connection.recv(65536):
            received += piece
    while received:
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="GET", target="/", headers=[("host", "gw")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(received)
        bodies.append(b"")
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Response | h11.Data), (event, received)
            bodies[-1] += bytes(event.data) if isinstance(event, h11.Data) else b""
        received = reader.trailing_data[0]
    return bodies
