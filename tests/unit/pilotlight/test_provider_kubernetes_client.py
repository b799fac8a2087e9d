"""The API server as seen by providers: watched objects come from the cache, only while their watch is up to date."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from autoscaler.kubernetes.api import Api, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import Unreadable, UnreadableObjects
from autoscaler.kubernetes.watch import INITIAL_END, RETRY_S_MAX
from autoscaler.providers.kubernetes_access import AT_HAND, Object
from pilotlight.provider_kubernetes_client import KEPT_S, Objects
from tests.simulation.environment.virtual_loop import in_virtual_time

PATH = "/apis/test/things"
END: Object = {"metadata": {"resourceVersion": "1", "annotations": {INITIAL_END: "true"}}}


def thing(name: str, version: int, **spec: object) -> Object:
    return {"metadata": {"name": name, "namespace": "", "resourceVersion": str(version)}, "spec": spec}


class WatchedApi:
    """A fake API server whose watch returns what the test enqueues, and ends with an exception."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Object] | Exception] = asyncio.Queue()
        self.asked = 0
        self.unreadable = UnreadableObjects()
        self.odd: list[Unreadable] = []

    async def pages(self, path: str, query: object) -> AsyncIterator[ListPage]:
        del path, query
        self.asked += 1
        yield ListPage("9", "", [thing("newest", 9)], self.odd)

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        while True:
            one = await self.events.get()
            if isinstance(one, Exception):
                raise one
            yield one


@in_virtual_time
async def test_watched_list_is_served_from_the_cache_after_the_initial_sync() -> None:
    api, heard = WatchedApi(), list[int]()
    server = Objects(cast("Api", api), cast("Api", api))
    task = asyncio.create_task(server.follow(PATH, lambda one: one["spec"].get("n"), lambda: heard.append(1)))

    async def at_hand(**query: str) -> list[str]:
        await asyncio.sleep(1.0)
        return [one["metadata"]["name"] for one in await server.items(PATH, **(query or AT_HAND))]

    api.events.put_nowait(("ADDED", thing("a", 1)))
    assert await at_hand() == ["newest"], "the watch has not reported all objects yet"
    api.events.put_nowait(("BOOKMARK", END))
    assert (await at_hand(), api.asked, heard) == (["a"], 1, []), "nothing of it matters to who follows"
    assert (await at_hand(labelSelector="x"), api.asked) == (["newest"], 2), "another list causes another request"
    api.events.put_nowait(("ADDED", thing("b", 2, n=1)))
    assert (await at_hand(), heard) == (["a", "b"], [1])
    api.events.put_nowait(("MODIFIED", thing("b", 3, n=1, m=2)))
    assert await at_hand() == ["a", "b"]
    assert [one["spec"] for one in await server.items(PATH, **AT_HAND)] == [{}, {"n": 1, "m": 2}], "it is the newest"
    assert heard == [1]
    api.events.put_nowait(("DELETED", thing("b", 4, n=1, m=2)))
    assert (await at_hand(), heard) == (["a"], [1, 1])
    api.events.put_nowait(("DELETED", thing("a", 5)))
    assert (await at_hand(), heard, api.asked) == ([], [1, 1], 2)
    task.cancel()
    assert await at_hand() == ["newest"], "no watch is open any more"


@in_virtual_time
async def test_disconnected_watch_falls_back_to_a_list_request() -> None:
    api = WatchedApi()
    server = Objects(cast("Api", api), cast("Api", api))
    task = asyncio.create_task(server.follow(PATH, dict, lambda: None))
    for one in (("ADDED", thing("a", 1)), ("BOOKMARK", END)):
        api.events.put_nowait(one)
    await asyncio.sleep(1.0)
    assert [one["metadata"]["name"] for one in await server.items(PATH, **AT_HAND)] == ["a"]
    api.events.put_nowait(UnreachableError("away"))
    await asyncio.sleep(0.0)
    for _ in range(3):
        await asyncio.sleep(0.0)
    assert [one["metadata"]["name"] for one in await server.items(PATH, **AT_HAND)] == ["newest"]
    await asyncio.sleep(RETRY_S_MAX)
    assert [one["metadata"]["name"] for one in await server.items(PATH, **AT_HAND)] == ["a"], "it watches again"
    task.cancel()


@in_virtual_time
async def test_undecodable_object_in_a_list_is_skipped_and_counted() -> None:
    api = WatchedApi()
    server = Objects(cast("Api", api), cast("Api", api))
    api.odd = [Unreadable("NodeClaim", "", "odd", "3", "nested")]
    assert [one["metadata"]["name"] for one in await server.items(PATH)] == ["newest"]
    assert api.unreadable.counts() == {"NodeClaim": 1}
    api.odd = []
    await server.items(PATH)
    assert api.unreadable.counts() == {}
    api.odd = [Unreadable("NodeClaim", "", "odd", "3", "nested")]
    await server.items(PATH)
    await asyncio.sleep(KEPT_S - 1.0)
    assert api.unreadable.counts() == {"NodeClaim": 1}
    await asyncio.sleep(2.0)
    assert api.unreadable.counts() == {}, "it is not known whether the object still exists"
