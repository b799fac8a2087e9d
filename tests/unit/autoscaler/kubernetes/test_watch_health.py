"""Parts of a cluster that cannot be read are logged once, with the recovery; optional kinds block nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from autoscaler.contract import TenantName
from autoscaler.kubernetes import watch as watching
from autoscaler.kubernetes import watch_set
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, Installation
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher
from autoscaler.kubernetes.watch import BREAKS, Watched
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from autoscaler.state.events import DocumentsSeen
from pilotlight.processes.cluster import Cluster, ClusterOptions
from tests.support.fakes.kubernetes.api_server import Server

SECRET = "at 10.0.0.7, says a proxy, with token abc"
FORBIDDEN = ApiError(403, "Forbidden", SECRET)
DOCTOR = "`pilotlight doctor` reports the missing permission"


class Refusing(Server):
    """A server that raises these errors first."""

    def __init__(self, *errors: ApiError | UnreachableError) -> None:
        super().__init__()
        self.errors = list(errors)
        self.rounds = 0

    async def watch(self, path: str, *of: object, **more: object) -> AsyncGenerator[tuple[str, Object], None]:
        self.rounds += 1
        if self.errors:
            raise self.errors.pop(0)
        async for event in super().watch(path, *of, **more):  # type: ignore[arg-type]  # arguments are passed on
            yield event


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the retry delay."""
    monkeypatch.setattr(watching, "RETRY_S", 0.0)


@asynccontextmanager
async def following(server: Server, *, optional: bool) -> AsyncIterator[Watched[str]]:
    watched = Watched(cast("Api", server), "/things", lambda _: "", lambda _: None, optional=optional)
    run = asyncio.create_task(watched.run())
    try:
        async with asyncio.timeout(60):
            yield watched
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize(
    ("optional", "errors", "line"),
    [
        (False, [FORBIDDEN] * 5, f"403 Forbidden: nothing starts before it can be read; {DOCTOR}"),
        (True, [FORBIDDEN] * 5, f"403 Forbidden: it counts as empty; {DOCTOR}"),
        (False, [ApiError(500, "Internal", SECRET)] * 2, "500 Internal"),
        (False, [UnreachableError(SECRET)] * (BREAKS + 3), "the API server does not answer"),
    ],
    ids=["forbidden", "optional", "ill", "silent"],
)
async def test_watch_problem_and_recovery_are_logged_once(
    optional: bool, errors: list[ApiError | UnreachableError], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Refusing(*errors)
    async with following(server, optional=optional):
        await server.idle.wait()
    assert [record.getMessage() for record in caplog.records] == [
        f"event=watch_failed path=/things error={line}", "event=watch_recovered path=/things",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("optional", "errors"),
    [
        (False, [UnreachableError(SECRET)] * (BREAKS - 1)),
        (True, [ApiError(404, "NotFound", SECRET)] * 3),
        (False, [ApiError(410, "Expired", SECRET)] * 3),
    ],
    ids=["short-outage", "absent-optional-kind", "expired-version"],
)
async def test_short_outage_absent_kind_or_expired_watch_is_not_logged(
    optional: bool, errors: list[ApiError | UnreachableError], caplog: pytest.LogCaptureFixture
) -> None:
    server = Refusing(*errors)
    async with following(server, optional=optional):
        await server.idle.wait()
    assert not server.errors
    assert not caplog.records


@pytest.mark.parametrize("status", [403, 404])
async def test_forbidden_or_missing_optional_kind_counts_as_synced_and_recovers(status: int) -> None:
    server = Refusing(*[ApiError(status, "", "")] * 3)
    async with following(server, optional=True) as watched:
        await watched.synced.wait()
        assert server.errors
        await server.idle.wait()


async def test_forbidden_required_watch_is_not_synced() -> None:
    server = Refusing(*[FORBIDDEN] * 4)
    async with following(server, optional=False) as watched:
        while server.errors:
            assert not watched.synced.is_set()
            await asyncio.sleep(0)


class Partly(Server):
    """A server that denies access to these collections."""

    def __init__(self, *closed: str) -> None:
        super().__init__()
        self.closed = closed
        self.asked: list[str] = []

    async def check(self, path: str) -> None:
        plural = path.rpartition("/")[2]
        self.asked.append(plural)
        if plural in self.closed:
            raise FORBIDDEN


@pytest.mark.parametrize(("closed", "applied"), [("tenants", True), ("models", False)])
async def test_documents_apply_without_access_to_tenants_but_not_to_models(
    closed: str, applied: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_set, "RETRY_S", 0.0)
    monkeypatch.setattr(watch_set, "ABSENT_S", 0.0)
    monkeypatch.setattr(watch_set, "TOGETHER_S", 0.0)
    seen: list[DocumentsSeen] = []
    server = Partly(closed)
    installation = Installation(lambda documents, _: seen.append(documents), (CUSTOMS,))
    parsed = Model(name="x", spec=ModelSpec(engine="vllm"))  # type: ignore[arg-type]  # a plain str as name
    run = asyncio.create_task(DocumentWatcher(cast("Api", server), lambda _: parsed, installation).run())
    try:
        async with asyncio.timeout(60):
            while server.asked.count(closed) < 5 or len(seen) < applied:
                await asyncio.sleep(0)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert bool(seen) == applied
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if closed in line and DOCTOR in line]) == 1
    assert SECRET not in " ".join(messages)


async def test_duplicate_tenant_key_is_reported_again_only_if_it_reappears(caplog: pytest.LogCaptureFixture) -> None:
    api = cast("Api", Server())
    elector = cast("Elector", SimpleNamespace(writes_s=lambda: 0.0, in_touch=lambda: True))
    cluster = Cluster(ClusterOptions(namespace="n"), (api, api), elector, "a1", lambda: 0.0)
    cluster.loop()
    old, young = (
        Tenant(name=TenantName(name), spec=TenantSpec(keys=(Key(sha256="ab" * 32),))) for name in ("old", "new")
    )
    installation = cluster._resources._installation
    installation.put_files(DocumentsSeen())
    installation.put("adopted", {})
    for tenants in ([old, young], [old, young], [old], [old, young]):
        installation.put(CUSTOMS, {}, tenants)
    line = "event=tenant_conflict tenant=new reason=API key abababab... already belongs to Tenant old"
    assert caplog.messages == [line] * 2
