"""The client against the real API server: field ownership, deletion by UID, and watches.

A watch misses no change, regardless of interruptions.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from autoscaler.kubernetes import api as client
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.kubeconfig import ApiAccessError, load_api_access
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from tests.integration.cluster.support.control_plane.components import Plane

pytestmark = pytest.mark.standard

WAIT_S_MAX = 90.0


def note(name: str, text: str = "") -> Object:
    """Builds a ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"text": text}}


def text_of(found: Object) -> str | None:
    """Returns the text of a ConfigMap; ignores those that belong to the cluster."""
    data: dict[str, str] = found.get("data", {})
    return data.get("text")


class Notes:
    """A watched collection and all reported changes."""

    def __init__(self, api: Api, path: str) -> None:
        self.received: list[Change[str]] = []
        self._news = asyncio.Event()
        self.watched = Watched(api, path, text_of, self._changed)

    def _changed(self, changes: list[Change[str]]) -> None:
        self.received += changes
        self._news.set()

    async def until(self, **wanted: str) -> None:
        """Waits until exactly these are known."""
        async with asyncio.timeout(WAIT_S_MAX):
            while {key.name: text for key, text in self.watched.items.items()} != wanted:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watching(api: Api, path: str) -> AsyncIterator[Notes]:
    """Watches the collection while the context is open."""
    notes = Notes(api, path)
    run = asyncio.create_task(notes.watched.run())
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            await notes.watched.synced.wait()
        yield notes
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.fixture
def notes(namespace: str) -> str:
    """The path of the collection."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


async def test_missing_kubeconfig_raises_an_access_error_with_its_path(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.raises(ApiAccessError, match="nowhere"):
        await load_api_access(tmp_path_factory.mktemp("x") / "nowhere")


async def test_failed_api_request_raises_an_error_with_status_and_reason(api: Api, notes: str) -> None:
    with pytest.raises(ApiError, match="not found") as missing:
        await api.get(f"{notes}/nothing")
    assert (missing.value.status, missing.value.reason) == (404, "NotFound")
    made = await api.create(notes, note("a", "1"))
    with pytest.raises(ApiError) as again:
        await api.create(notes, note("a"))
    assert (again.value.status, again.value.reason) == (409, "AlreadyExists")
    await api.patch(f"{notes}/a", {"data": {"text": "2"}}, MERGE)
    with pytest.raises(ApiError) as stale:
        await api.replace(f"{notes}/a", made)
    assert (stale.value.status, stale.value.reason) == (409, "Conflict")


async def test_delete_is_rejected_if_uid_or_version_differs(api: Api, notes: str) -> None:
    first = await api.create(notes, note("a"))
    await api.delete(f"{notes}/a")
    second = await api.create(notes, note("a"))
    with pytest.raises(ApiError) as other:
        await api.delete(f"{notes}/a", uid=first["metadata"]["uid"])
    assert other.value.status == 409
    await api.patch(f"{notes}/a", {"data": {"text": "2"}}, MERGE)
    with pytest.raises(ApiError) as changed:
        await api.delete(f"{notes}/a", version=second["metadata"]["resourceVersion"])
    assert changed.value.status == 409
    await api.delete(f"{notes}/a", uid=second["metadata"]["uid"])


async def test_unforced_apply_of_another_managers_field_fails_with_a_conflict(api: Api, notes: str) -> None:
    await api.apply(f"{notes}/a", note("a", "ours"), "pilotlight")
    with pytest.raises(ApiError, match='conflict with "pilotlight"') as conflict:
        await api.apply(f"{notes}/a", note("a", "theirs"), "helm", force=False)
    assert conflict.value.status == 409


async def test_list_longer_than_the_page_size_is_read_in_pages(
    api: Api, notes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 3)
    for number in range(7):
        await api.create(notes, note(f"n{number}", str(number)))
    pages = [[item["metadata"]["name"] for item in page.items] async for page in api.pages(notes)]
    assert [len(page) for page in pages[:-1]] == [3, 3], (
        "the last may hold the cluster's certificate, too, which comes in its own time"
    )
    assert sorted(name for page in pages for name in page if name != "kube-root-ca.crt") == [f"n{n}" for n in range(7)]


async def test_list_of_large_objects_is_read_in_smaller_pages(
    api: Api, notes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 8)
    monkeypatch.setattr(client, "PAGE_BYTES_MAX", 300_000)
    made = [f"n{number:02}" for number in range(20)]
    for name in made:
        await api.create(notes, note(name, "x" * (100_000 if "n05" < name < "n12" else 10)))
    pages = [[item["metadata"]["name"] for item in page.items] async for page in api.pages(notes)]
    assert [name for page in pages for name in page if name != "kube-root-ca.crt"] == made
    assert max(len(page) for page in pages if "n08" in page) <= 2


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in pages"])
async def test_watch_reports_existing_objects_and_each_change_once(api: Api, notes: str, streams: bool) -> None:
    await api.create(notes, note("before", "0"))
    one = Notes(api, notes)
    one.watched._streams = streams
    run = asyncio.create_task(one.watched.run())
    try:
        await one.until(before="0")
        await api.create(notes, note("a", "1"))
        await one.until(before="0", a="1")
        await api.patch(f"{notes}/a", {"data": {"text": "2"}}, MERGE)
        await api.patch(f"{notes}/a", {"metadata": {"labels": {"x": "y"}}}, MERGE)
        await api.delete(f"{notes}/before")
        await one.until(a="2")
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    reported = [(change.key.name, change.old, change.new) for change in one.received]
    assert reported == [("before", None, "0"), ("a", None, "1"), ("a", "1", "2"), ("before", "0", None)]


async def test_watch_resumes_after_the_server_ends_the_connection(
    api: Api, notes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscaler.kubernetes.watch.WATCH_S", (1.0, 1.2))
    async with watching(api, notes) as one:
        asked = api.requests
        for number in range(6):
            await api.apply(f"{notes}/a", note("a", str(number)), "t")
            await one.until(a=str(number))
            await asyncio.sleep(0.5)
        assert api.requests - asked >= 6 + 2, "it was ended and opened again"
        assert [change.new for change in one.received] == list("012345")


async def test_watch_reports_missed_changes_after_a_server_restart(api: Api, notes: str, plane: Plane) -> None:
    """A version from before a restart is too old for the server (410), so everything is listed again."""
    await api.create(notes, note("goes", "1"))
    await api.create(notes, note("stays", "1"))
    async with watching(api, notes) as one:
        await one.until(goes="1", stays="1")
        plane.kill_part("kube-apiserver")
        with pytest.raises(UnreachableError):
            await api.get(notes)
        plane.start_part("kube-apiserver")
        await asyncio.to_thread(plane.until_ready)
        await api.delete(f"{notes}/goes")
        await api.create(notes, note("comes", "2"))
        await one.until(stays="1", comes="2")
        assert Change(ObjectKey(one.received[0].key.namespace, "goes"), "1", None) in one.received


async def test_request_to_a_hanging_server_times_out(
    api: Api, notes: str, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watching(api, notes) as one:
        plane.signal_part("kube-apiserver", signal.SIGSTOP)
        try:
            async with asyncio.timeout(WAIT_S_MAX):  # detects a hang: this process may be paused for longer than 0.5 s
                with pytest.raises(UnreachableError, match="TimeoutError"):
                    await api.get(notes, within_s=0.5)
        finally:
            plane.signal_part("kube-apiserver", signal.SIGCONT)
        await api.create(notes, note("a", "1"))
        await one.until(a="1")
        assert not one.watched.trouble
