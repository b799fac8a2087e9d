"""Lists are read in pages: 500 objects each, or fewer if the objects are large."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autoscaler.kubernetes import api as client
from autoscaler.kubernetes.api import PAGE, Api, ApiError
from autoscaler.kubernetes.kubeconfig import ApiAccess

pytestmark = pytest.mark.standard

KIB = 1 << 10


class Anonymous:
    """Access to a server without TLS and tokens."""

    def __init__(self, server: str) -> None:
        self.server = server.rstrip("/")

    def tls(self) -> bool:
        return False

    async def headers(self) -> dict[str, str]:
        return {}


class Lists:
    """Serves one list of objects of these sizes, with `limit` and `continue` as the API server does."""

    def __init__(self, *sizes_bytes: int) -> None:
        self.sizes_bytes = sizes_bytes
        self.limits: list[int] = []
        self.queries: list[dict[str, str]] = []
        self.compresses = False
        self.pages = True
        self.endless = False
        """Whether a response with several objects never ends."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", "0"))
        self.limits.append(limit)
        if self.endless and limit > 1:
            return await self._answer_without_end(request)
        end = min(begin + limit, len(self.sizes_bytes)) if self.pages else len(self.sizes_bytes)
        items = [
            {"metadata": {"name": str(number), "namespace": "n"}, "data": "x" * self.sizes_bytes[number]}
            for number in range(begin, end)
        ]
        token = str(end) if end < len(self.sizes_bytes) else ""
        metadata = {"resourceVersion": "7", "continue": token}
        found = web.Response(text=json.dumps({"kind": "ThingList", "metadata": metadata, "items": items}))
        if self.compresses:
            found.enable_compression(web.ContentCoding.gzip)
        return found

    async def _answer_without_end(self, request: web.Request) -> web.StreamResponse:
        found = web.StreamResponse()
        await found.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await found.write(b" " * KIB)
        return found


@contextlib.asynccontextmanager
async def serving(lists: Lists) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_get("/things", lists.answer)
    async with TestServer(app) as server, Api(cast("ApiAccess", Anonymous(str(server.make_url("/"))))) as api:
        yield api


async def names(lists: Lists) -> list[list[str]]:
    """Return the names of the objects on each page; all pages have the version of the list."""
    async with serving(lists) as api:
        pages = [page async for page in api.pages("/things", {"labelSelector": "a=b"})]
    assert {page.version for page in pages} == {"7"}
    assert all(query["labelSelector"] == "a=b" for query in lists.queries)
    return [[one["metadata"]["name"] for one in page.items] for page in pages]


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


async def test_list_of_small_objects_is_read_in_pages_of_500() -> None:
    lists = Lists(*[100] * 1_200)
    pages = await names(lists)
    assert [len(page) for page in pages] == [500, 500, 200]
    assert [name for page in pages for name in page] == numbers(1_200)
    assert lists.limits == [PAGE] * 3


@pytest.mark.parametrize("compresses", [False, True])
async def test_page_above_the_size_limit_is_requested_with_fewer_objects(
    compresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES_MAX", 64 * KIB)
    lists = Lists(*[100] * 10, *[10 * KIB] * 20, *[100] * 40)
    lists.compresses = compresses
    pages = await names(lists)
    assert [name for page in pages for name in page] == numbers(70), "each object is read once"
    assert lists.limits[:6] == [500, 250, 125, 62, 31, 15]
    assert max(len(page) for page in pages[2:6]) <= 7
    assert lists.limits[-1] > 15, "pages grow again after the large objects"


async def test_response_is_not_read_beyond_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES_MAX", 64 * KIB)
    lists = Lists(100)
    lists.endless = True
    assert await names(lists) == [["0"]]
    assert lists.limits == [500, 250, 125, 62, 31, 15, 7, 3, 1]


async def test_single_object_above_the_page_size_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES_MAX", 64 * KIB)
    pages = await names(Lists(100, 200 * KIB, 100))
    assert [name for page in pages for name in page] == numbers(3)


async def test_large_list_of_a_server_that_ignores_limits_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES_MAX", 64 * KIB)
    lists = Lists(*[10 * KIB] * 20)
    lists.pages = False
    assert await names(lists) == [numbers(20)]
    assert lists.limits[-1] == 1


async def test_error_in_the_middle_of_a_list_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    lists = Lists(100, 100, 100)
    answer = lists.answer

    async def expire(request: web.Request) -> web.StreamResponse:
        if "continue" in request.query:
            return web.json_response({"code": 410, "reason": "Expired", "message": "too old"}, status=410)
        return await answer(request)

    monkeypatch.setattr(lists, "answer", expire)
    with pytest.raises(ApiError, match="410 Expired: too old"):
        await names(lists)


async def test_response_with_metadata_of_a_wrong_type_is_rejected() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"name": 7} if request.path == "/wrong" else {"name": "a"}})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"major": "1"})

    app = web.Application()
    app.router.add_get("/version", version)
    app.router.add_get("/{name}", answer)
    async with TestServer(app) as server, Api(cast("ApiAccess", Anonymous(str(server.make_url("/"))))) as api:
        assert await api.get("/right") == {"metadata": {"name": "a"}}
        assert await api.get("/version") == {"major": "1"}
        with pytest.raises(ApiError, match="200 Unreadable: /wrong: its metadata: Expected `str`, got `int`"):
            await api.get("/wrong")


async def test_long_message_of_the_server_is_truncated() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Invalid", "message": "x" * 10_000}, status=422)

    app = web.Application()
    app.router.add_get("/a", answer)
    async with TestServer(app) as server, Api(cast("ApiAccess", Anonymous(str(server.make_url("/"))))) as api:
        with pytest.raises(ApiError) as raised:
            await api.get("/a")
    assert raised.value.message == "x" * client.MESSAGE_CHARS_MAX
