"""A proxy to the API server that drops events: pod deletions, whole watches at intervals, or pod creations.

A plaintext proxy on 127.0.0.1 that forwards all requests and reads watches line by line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from autoscaler.kubernetes.kubeconfig import ApiAccess

NOT_PASSED_ON = frozenset(("host", "content-length", "transfer-encoding", "accept-encoding", "connection"))


ETCD = {
    "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "InternalError", "code": 500,
    "message": "etcdserver: leader changed",
}  # fmt: skip


class Lossy:
    """Use `running`. The faults can be changed at any time."""

    def __init__(self, way: ApiAccess) -> None:
        self._way = way
        self.loses_ends = False
        """If true, DELETED events of pods are not forwarded."""
        self.watch_s: float | None = None
        """A watch is closed after this many seconds."""
        self.fails = 0
        """Number of pod creations to fail with an etcd error, as after a change of the etcd leader."""
        self.lost = self.cuts = 0
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[Path]:
        """Runs the proxy and yields a kubeconfig that uses it."""
        connector = aiohttp.TCPConnector(ssl=self._way.tls(), limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            try:
                yield self._kubeconfig(folder / "lossy.kubeconfig", runner.addresses[0][1])
            finally:
                await runner.cleanup()

    @staticmethod
    def _kubeconfig(path: Path, port: int) -> Path:
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "lossy",
            "clusters": [{"name": "lossy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "lossy", "user": {}}],
            "contexts": [{"name": "lossy", "context": {"cluster": "lossy", "user": "lossy"}}],
        }))  # fmt: skip
        return path

    async def _pass(self, asked: web.Request) -> web.StreamResponse:
        if self.fails and asked.method == "POST" and asked.path.endswith("/pods"):
            self.fails -= 1
            return web.json_response(ETCD, status=500)
        headers = {name: value for name, value in asked.headers.items() if name.lower() not in NOT_PASSED_ON}
        async with self._session.request(
            asked.method, self._way.server + asked.path_qs, headers=headers | await self._way.headers(),
            data=await asked.read(), timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:  # fmt: skip
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
            if "watch" not in asked.query or answer.status != 200:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(headers=kept)
            await response.prepare(asked)
            try:
                async with asyncio.timeout(self.watch_s):
                    await self._watch(answer.content, response)
            except ConnectionError:
                pass  # the watching client disconnected
            except TimeoutError:
                self.cuts += 1
                if asked.transport is not None:
                    asked.transport.abort()
            return response

    async def _watch(self, content: aiohttp.StreamReader, response: web.StreamResponse) -> None:
        rest = b""
        async for piece in content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                event: dict[str, Any] = json.loads(line)
                if self.loses_ends and event["type"] == "DELETED" and event["object"]["kind"] == "Pod":
                    self.lost += 1
                else:
                    await response.write(line + b"\n")
