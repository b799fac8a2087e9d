"""A registry on loopback that keeps everything in memory and can return false data on request.

`registry.answers["GET", path]` are responses that precede the ordinary ones, one per request; `seen` records the
requests. With `over` it serves TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Self

from aiohttp import web

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Chain, Known
from artifacts.http.retry import Pace
from artifacts.oci.manifest import OCI_INDEX as INDEX
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Judge = Callable[[web.Request], web.StreamResponse | None]


PASSWORD = "pa55word-of-somebody"
"""A secret that must not appear anywhere."""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Seen(NamedTuple):
    """One recorded request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Keyed by lower-case name."""
    certificate: bool


class StillClock(Pace):
    """A clock that never waits, but records the delays."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits: list[float] = []
        self.tick_s = 0.0
        """How far the clock advances at each reading."""

    def monotonic_s(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def unix_s(self) -> float:
        return 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT

    def draw(self) -> float:
        return 0.0

    async def wait(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.now_s += wait_s


class FakeRegistry:
    """One server."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.answers: dict[tuple[str, str], deque[Answer]] = defaultdict(deque)
        self.always: dict[tuple[str, str], Answer] = {}
        self.judge: Judge = lambda request: None
        """Called before anything else: decides who is admitted."""
        self.seen: list[Seen] = []
        self.subjects = False
        """Whether it supports the referrers API."""
        self.port = 0
        self.scheme = "http"
        self._ended = asyncio.Event()
        self._begun = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    def blob(self, content: bytes) -> str:
        self.blobs[digest_of(content)] = content
        return digest_of(content)

    def manifest(self, repository: str, tag: str, body: bytes, media_type: str = MANIFEST) -> str:
        for name in (tag, digest_of(body)):
            self.manifests[repository, name] = (media_type, body)
        return digest_of(body)

    def asked(self, method: str, part: str) -> list[Seen]:
        return [one for one in self.seen if one.method == method and part in one.path]

    async def hang(self) -> None:
        """Waits until the test is over."""
        await self._ended.wait()

    @contextlib.asynccontextmanager
    async def serving(self, over: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=over)
        await site.start()
        self.port, self.scheme = runner.addresses[0][1], "http" if over is None else "https"
        try:
            yield self
        finally:
            self._ended.set()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        certificate = request.transport is not None and bool(request.transport.get_extra_info("peercert"))
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.method, request.path, request.raw_path.partition("?")[2], headers, certificate))
        key = (request.method, request.path)
        if self.answers[key]:
            return await self.answers[key].popleft()(request)
        if key in self.always:
            return await self.always[key](request)
        refusal = self.judge(request)
        return await self._ordinary(request) if refusal is None else refusal

    async def _ordinary(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v2/":
            return web.json_response({})
        found = re.fullmatch(r"/v2/(.+?)/(manifests|blobs|tags|referrers)/(.*)", request.path)
        if found is None:
            return web.Response(status=404)
        repository, kind, name = found.groups()
        if kind == "manifests":
            return await self._manifest(request, repository, name)
        if kind == "blobs" and name.startswith("uploads"):
            return await self._upload(request, repository, name.removeprefix("uploads/"))
        if kind == "blobs" and name in self.blobs:
            return part_of(request, self.blobs[name])
        return web.Response(status=404)

    async def _manifest(self, request: web.Request, repository: str, name: str) -> web.StreamResponse:
        if request.method == "PUT":
            body = await request.read()
            self.manifest(repository, name, body, request.headers["Content-Type"])
            extra = {"OCI-Subject": "yes"} if self.subjects else {}
            return web.Response(status=201, headers={"Docker-Content-Digest": digest_of(body), **extra})
        if (repository, name) not in self.manifests:
            return web.Response(status=404)
        media_type, body = self.manifests[repository, name]
        return web.Response(body=body, content_type=media_type)

    async def _upload(self, request: web.Request, repository: str, name: str) -> web.StreamResponse:
        if request.method == "POST":
            if request.query.get("mount") in self.blobs and request.query.get("from") == "shared":
                return web.Response(status=201)
            name = f"upload-{self._begun}"
            self._begun += 1
            self.uploads[name] = b""
        elif name not in self.uploads:
            return web.Response(status=404)
        place = {"Location": f"/v2/{repository}/blobs/uploads/{name}?_state=a%2Bb%3D"}
        if request.method == "PATCH":
            first = int(request.headers["Content-Range"].partition("-")[0])
            body = await request.read()
            if first != len(self.uploads[name]):
                return web.Response(status=416, headers=place)
            self.uploads[name] += body
        if request.method == "PUT":
            content = self.uploads.pop(name) + await request.read()
            if digest_of(content) != request.query["digest"]:
                return web.json_response({"errors": [{"code": "DIGEST_INVALID", "message": "s3cret"}]}, status=400)
            self.blobs[digest_of(content)] = content
            return web.Response(status=201)
        place["Range"] = f"0-{max(len(self.uploads[name]) - 1, 0)}"
        return web.Response(status=204 if request.method == "GET" else 202, headers=place)


def part_of(request: web.Request, content: bytes) -> web.Response:
    """Honors a closed range without advertising ranges, as registries do."""
    span = request.headers.get("Range")
    if span is None:
        return web.Response(body=content, content_type="application/octet-stream")
    first, last = (int(one) for one in span.removeprefix("bytes=").split("-"))
    if last >= len(content):
        return web.Response(status=416)
    headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
    return web.Response(status=206, body=content[first : last + 1], headers=headers)


def keychain(*hosts: str) -> Chain:
    """The same login for each host."""
    return Chain([Known(host, Login("me", PASSWORD)) for host in hosts])


def reply(status: int = 200, body: bytes = b"", **headers: str) -> Answer:
    """A response; `Retry_After` is the header Retry-After."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={n.replace("_", "-"): v for n, v in headers.items()})

    return answer


def raw(registry: FakeRegistry, text: bytes, end: str = "close") -> Answer:
    """Sends bytes as they are, then: `close`, `reset` or `hang`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.write(text)
            if end == "hang":
                await registry.hang()
            elif end == "reset":
                request.transport.abort()
            request.transport.close()
        return web.Response()

    return answer


def whole_head(size: int, *lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {size}", *lines, "", ""]).encode()


def index(*descriptors: dict[str, object]) -> dict[str, object]:
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(descriptors)}
