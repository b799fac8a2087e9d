"""Serves a node's blobs to peers over HTTP; the counterpart of `artifacts.peers.client`. I/O.

Uses a registry's paths, with the registry's folder name (room) before the repository, and supports ranges. Requests
above the limit of concurrent streams are rejected at once (429), and the peer uses the registry. The middlewares
authenticate callers. Files go from the page cache to the connection (sendfile) where the event loop supports it; slow
readers are disconnected; request content is never returned or logged.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from artifacts.archives import archive_recipe
from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.http.ranges import Part
from artifacts.oci.manifest import MANIFEST_BYTES_MAX, OCI_INDEX, OCI_MANIFEST
from artifacts.peers.client import BUSY, COMING
from artifacts.peers.servable_blobs import BlobOffers, CompleteBlob, PartialBlob, RebuiltArchive
from artifacts.registry.manifests import ACCEPTED

STREAMS_MAX = 16
"""Maximum concurrent streams: more would only share the same bandwidth."""
RETRY_AFTER_S = 1
STEP_BYTES = 4 << 20
STEP_S_MAX = 15.0
"""A peer that takes longer for `STEP_BYTES` is disconnected."""
PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")
Found = CompleteBlob | PartialBlob | RebuiltArchive
_PLACE = "/v2/{room}/{repository:.+}"


class _Typed(msgspec.Struct, frozen=True):
    media_type: str | None = msgspec.field(name="mediaType", default=None)
    manifests: list[msgspec.Raw] = []


class BlobServer:
    """Serves the blobs of one store."""

    def __init__(self, offers: BlobOffers, streams_max: int = STREAMS_MAX) -> None:
        self._offers = offers
        self._streams_max = streams_max
        self._streams = 0

    def application(self, middlewares: Sequence[Middleware] = ()) -> web.Application:
        """Create the application that serves GET and HEAD of blobs and manifests by digest."""
        app = web.Application(middlewares=middlewares, client_max_size=0)
        app.add_routes(
            [
                web.get(f"{_PLACE}/blobs/{{digest}}", self._blob),
                web.get(f"{_PLACE}/manifests/{{digest}}", self._manifest),
            ]
        )
        return app

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        found, digest = await self._found(request), request.match_info["digest"]
        if found is None:
            return web.Response(status=404)
        try:
            part = _asked(request.headers.get("Range"), found.size)
            if part is None:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{found.size}"})
            if isinstance(found, PartialBlob) and not found.has(part.first, part.end):
                return _later(COMING) if found.fetching else web.Response(status=404)
            headers = {
                "ETag": f'"{digest}"',
                "Docker-Content-Digest": digest,
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
                "Content-Length": str(part.end - part.first),
            }
            status = 200 if "Range" not in request.headers else 206
            if status == 206:
                headers["Content-Range"] = f"bytes {part.first}-{part.end - 1}/{part.size}"
            answer = web.StreamResponse(status=status, headers=headers)
            return await self._sent(request, answer, found, part)
        finally:
            _close(found)

    async def _sent(
        self, request: web.Request, answer: web.StreamResponse, found: Found, part: Part
    ) -> web.StreamResponse:
        if request.method == "HEAD":
            await answer.prepare(request)
            return answer
        if self._streams >= self._streams_max:
            return _later(BUSY)
        self._streams += 1
        try:
            await asyncio.wait_for(answer.prepare(request), STEP_S_MAX)
            if not isinstance(found, RebuiltArchive):
                await _stepwise(request, answer, found.number, part.first, part.end)
            else:
                await _rebuild(request, answer, found, part)
            async with asyncio.timeout(STEP_S_MAX):
                await answer.write_eof()
        except (TimeoutError, OSError, RuntimeError):  # the peer left or does not read; the file itself is unchanged
            answer.force_close()
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return answer

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        """Serve manifests of public Copies only: for others the registry itself must check access."""
        room, digest = request.match_info["room"], _digest(request)
        if digest is None or not await asyncio.to_thread(self._offers.public, room, digest):
            return web.Response(status=404)
        found = await self._found(request)
        if not isinstance(found, CompleteBlob):
            _close(found)
            return web.Response(status=404)
        try:
            body = os.pread(found.number, found.size, 0) if found.size <= MANIFEST_BYTES_MAX else b""
        finally:
            _close(found)
        media_type = _media_type(body)
        if media_type is None:
            return web.Response(status=404)
        headers = {"ETag": f'"{digest}"', "Docker-Content-Digest": digest}
        return web.Response(body=body, content_type=media_type, headers=headers)

    async def _found(self, request: web.Request) -> Found | None:
        digest = _digest(request)
        if digest is None:
            return None
        return await asyncio.to_thread(self._offers.blob, request.match_info["room"], digest)


async def _stepwise(request: web.Request, answer: web.StreamResponse, number: int, at: int, end: int) -> None:
    """Send the bytes from `at` up to `end` of a file, with a timeout per step."""
    while at < end:
        step = min(STEP_BYTES, end - at)
        async with asyncio.timeout(STEP_S_MAX):
            await _send(request, answer, number, at, step)
        at += step


async def _rebuild(request: web.Request, answer: web.StreamResponse, found: RebuiltArchive, part: Part) -> None:
    """Send the bytes of an archive. Raises OSError also if its Copy has been removed meanwhile."""
    for piece in archive_recipe.iter_archive_range(found.recipe, part.first, part.end):
        if isinstance(piece, bytes):
            async with asyncio.timeout(STEP_S_MAX):
                await answer.write(piece)
            continue
        number = os.open(found.files / piece.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            await _stepwise(request, answer, number, piece.first, piece.end)
        finally:
            os.close(number)


def _close(found: Found | None) -> None:
    if isinstance(found, CompleteBlob | PartialBlob):
        os.close(found.number)


async def _send(request: web.Request, answer: web.StreamResponse, number: int, at: int, count: int) -> None:
    """Send `count` bytes of the file. Raises OSError if the connection broke."""
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError
    loop = asyncio.get_running_loop()
    with os.fdopen(number, "rb", buffering=0, closefd=False) as file:
        try:
            if await loop.sendfile(request.transport, file, at, count) < count:
                raise ConnectionResetError
        except NotImplementedError:  # uvloop does not implement sendfile
            while count:
                piece = await asyncio.to_thread(os.pread, number, min(PIECE_BYTES, count), at)
                if not piece:
                    raise ConnectionResetError from None
                await answer.write(piece)
                at, count = at + len(piece), count - len(piece)


def _asked(header: str | None, size: int) -> Part | None:
    """Parse the Range header: the whole blob or one closed range; None if it cannot be satisfied."""
    if header is None:
        return Part(0, size, size)
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        return None
    first, last = int(found[1]), int(found[2])
    return Part(first, last + 1, size) if first <= last < size else None


def _digest(request: web.Request) -> Digest | None:
    try:
        return parse_digest(request.match_info["digest"])
    except BadDigestError:
        return None


def _media_type(body: bytes) -> str | None:
    """Return the media type of a manifest; None if it is not one."""
    try:
        said = msgspec.json.decode(body, type=_Typed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inside = said.media_type or (OCI_INDEX if said.manifests else OCI_MANIFEST)
    return inside if inside in ACCEPTED else None


def _later(status: int) -> web.Response:
    return web.Response(status=status, headers={"Retry-After": str(RETRY_AFTER_S)})
