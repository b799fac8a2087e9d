"""Responses of an API server and of a gateway that are far above the limits: a separate process reads each one.

The peak memory is measured in addition to the idle process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.builders.worst_case_inputs import MIB_MAX

pytestmark = pytest.mark.standard

MIB = 1 << 20
SIZE_MIB = 160
READ = """
import asyncio, json, re, sys
from pathlib import Path
from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.server import ops
kind, server = sys.argv[1:]
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
class Access:
    server = server.rstrip("/")
    def tls(self):
        return False
    async def headers(self):
        return {}
async def read():
    if kind == "metrics":
        ops.SCRAPE_TIMEOUT_S = 60.0
        return [str(await ops.scrape_gateway(Path(server)))]
    async with Api(Access()) as api:
        try:
            if kind == "list":
                return [one["metadata"]["name"] async for page in api.pages("/list") for one in page.items]
            if kind == "watch":
                found = []
                async for event, one in api.watch("/watch", "1", {}):
                    name = one["metadata"]["name"] if isinstance(one, dict) else f"{one.kind} {one.name}: {one.reason}"
                    found.append(f"{event} {name}")
                    if len(found) == 2:
                        return found
            await api.get("/" + kind)
            return ["read"]
        except ApiError as error:
            return [str(error)]
idle = peak()
print(json.dumps({"found": asyncio.run(read()), "mib": peak() - idle}))
"""
BEGIN = {
    "object": '{"metadata":{"name":"a"},"data":"',
    "error": '{"code":403,"reason":"Forbidden","message":"',
    "list": '{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"a"},"data":"',
    "watch": '{"type":"ADDED","object":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"n"},'
    '"data":"',
    "metrics": "# HELP a ",
}
END = {"list": '"}]}', "watch": '"}}\n{"type":"ADDED","object":{"metadata":{"name":"healthy"}}}\n', "metrics": "\n"}


def build_app(size_mib: int = SIZE_MIB) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        kind = request.path.removeprefix("/")
        response = web.StreamResponse(status=403 if kind == "error" else 200)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client stops at its limit
            await response.write(BEGIN[kind].encode())
            for _ in range(size_mib):
                await response.write(b"x" * MIB)
            await response.write(END.get(kind, '"}').encode())
        return response

    app = web.Application()
    app.router.add_get("/{kind}", answer)
    return app


@contextlib.asynccontextmanager
async def serving(kind: str, folder: Path) -> AsyncIterator[str]:
    if kind == "metrics":
        runner, path = web.AppRunner(build_app()), folder / "g.sock"
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
            yield str(path)
        finally:
            await runner.cleanup()
    else:
        async with TestServer(build_app()) as server:
            yield str(server.make_url("/"))


@pytest.mark.parametrize(
    ("kind", "expected", "mib_max"),
    [
        ("object", ["200 Unreadable: the response has more than 16777216 bytes"], 64),
        ("error", ["403 Forbidden: " + BEGIN["error"] + "x" * (200 - len(BEGIN["error"]))], 32),
        ("list", ["200 Unreadable: the response has more than 67108864 bytes"], MIB_MAX),
        ("watch", ["ADDED ConfigMap a: it has {size} bytes, more than 16777216", "ADDED healthy"], 64),
        ("metrics", ["None"], 100),
    ],
)
async def test_response_far_above_its_limit_is_not_read_into_memory(
    kind: str, expected: list[str], mib_max: int, tmp_path: Path
) -> None:
    async with serving(kind, tmp_path) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READ, kind, server, stdout=asyncio.subprocess.PIPE
        )
        text, _ = await child.communicate()
    result = json.loads(text)
    line_bytes = len(BEGIN["watch"]) + SIZE_MIB * MIB + len('"}}')
    assert result["found"] == [line.replace("{size}", str(line_bytes)) for line in expected]
    assert result["mib"] < mib_max
