"""A Copy on the node does not bypass the registry: a caller that did not fetch it is checked before it gets it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.disk.durable_writes import list_entries
from artifacts.registry_errors import UnreachableError
from artifacts.store.layout import ForbiddenError, StoreError
from artifacts.store.permission_cache import Asked, Permits
from artifacts.store.store import Caller, Store
from tests.support.harness.artifacts.weight_store import fetching, wanted

ONE = wanted("a")
D = ONE.key.digest


class Clock:
    """The clock of `Permits` in a store."""

    now_s = 1000.0


class Registry:
    """A fake registry that allows some logins and records its requests."""

    def __init__(self, *yes: str) -> None:
        self.yes = set(yes)
        self.asked: list[str] = []
        self.away = False

    def caller(self, name: str) -> Caller:
        async def permitted() -> bool:
            self.asked.append(name)
            if self.away:
                raise UnreachableError("registry.example: does not answer")
            return name in self.yes

        return Caller(name, permitted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    with monkeypatch.context() as patched:
        patched.setattr("artifacts.store.store.unix_s", lambda: clock.now_s)
        yield clock


def opened(root: Path, *, while_away: bool = True) -> Store:
    permits = Permits(root / "permits", fresh_s=60.0, away_s=3600.0)
    return Store(root, spare_bytes=0, while_away=while_away, permits=permits).open()


@pytest.mark.point("14")
@pytest.mark.usefixtures("clock")
async def test_caller_without_pull_access_is_denied_the_stored_copy(tmp_path: Path) -> None:
    store, there = opened(tmp_path), Registry("owner")
    (await store.ensure(ONE, fetching(ONE), there.caller("owner"))).close()
    with pytest.raises(ForbiddenError, match="denies"):
        await store.ensure(ONE, fetching(ONE), there.caller("stranger"))
    with pytest.raises(ForbiddenError, match="this caller has none"):
        await store.ensure(ONE, fetching(ONE), None)
    assert there.asked == ["stranger"]
    assert not store.rows()[0].in_use  # a rejected caller holds nothing
    store.evict(ONE.key)


@pytest.mark.point("14")
async def test_cached_permission_is_per_caller_and_ends_with_a_denial(tmp_path: Path, clock: Clock) -> None:
    store, there = opened(tmp_path), Registry("owner", "friend")
    (await store.ensure(ONE, fetching(ONE), there.caller("owner"))).close()
    (await store.ensure(ONE, fetching(ONE), there.caller("friend"))).close()
    (await store.ensure(ONE, fetching(ONE), there.caller("friend"))).close()
    assert there.asked == ["friend"]  # asked once, then cached
    there.yes.clear()
    clock.now_s += 61.0
    with pytest.raises(ForbiddenError):
        await store.ensure(ONE, fetching(ONE), there.caller("friend"))
    there.away = True
    with pytest.raises(UnreachableError):  # not even during a registry outage
        await store.ensure(ONE, fetching(ONE), there.caller("friend"))


@pytest.mark.point("14")
async def test_only_permitted_callers_get_a_copy_during_a_registry_outage(tmp_path: Path, clock: Clock) -> None:
    there, fetch = Registry("owner"), fetching(ONE)
    lenient, strict = opened(tmp_path), opened(tmp_path, while_away=False)
    for store in (lenient, strict):
        (await store.ensure(ONE, fetch, there.caller("owner"))).close()
    there.away = True
    clock.now_s += 300.0
    (await lenient.ensure(ONE, fetch, there.caller("owner"))).close()
    for store, name in ((strict, "owner"), (lenient, "stranger")):
        with pytest.raises(UnreachableError):
            await store.ensure(ONE, fetch, there.caller(name))
    clock.now_s += 3600.0
    with pytest.raises(UnreachableError):
        await lenient.ensure(ONE, fetch, there.caller("owner"))
    assert len(fetch.jobs) == 1


@pytest.mark.point("14")
@pytest.mark.usefixtures("clock")
async def test_copies_of_one_digest_from_two_registries_share_no_files(tmp_path: Path) -> None:
    """It allows the request itself, but files that it does not serve must not come from this store."""
    store, evil = opened(tmp_path), Registry("thief")
    (await store.ensure(ONE, fetching(ONE), Registry().caller("owner"))).close()
    foreign = ONE._replace(key=ONE.key._replace(origin="evil.example"))
    fetch = fetching()  # serves no files
    with pytest.raises(KeyError):
        await store.ensure(foreign, fetch, evil.caller("thief"))
    assert fetch.jobs == [("a.gguf",)]


@pytest.mark.usefixtures("clock")
async def test_copy_pulled_without_a_login_is_available_to_every_caller(tmp_path: Path) -> None:
    store, there = opened(tmp_path), Registry()
    (await store.ensure(ONE, fetching(ONE), None)).close()
    (await store.ensure(ONE, fetching(ONE), there.caller("anybody"))).close()
    assert there.asked == []


@pytest.mark.usefixtures("clock")
async def test_denial_ends_a_cached_permission_in_all_open_stores(tmp_path: Path, clock: Clock) -> None:
    there, first = Registry("owner"), opened(tmp_path)
    (await first.ensure(ONE, fetching(ONE), there.caller("owner"))).close()
    there.away = True
    clock.now_s += 300.0
    second = opened(tmp_path)
    (await second.ensure(ONE, fetching(ONE), there.caller("owner"))).close()
    there.away, there.yes = False, set()
    with pytest.raises(ForbiddenError):
        await second.ensure(ONE, fetching(ONE), there.caller("owner"))
    there.away = True
    for store in (first, opened(tmp_path)):
        with pytest.raises(UnreachableError):
            await store.ensure(ONE, fetching(ONE), there.caller("owner"))


@pytest.mark.usefixtures("clock")
async def test_permitted_caller_gets_the_copy_if_the_registry_does_not_respond(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.store.store.AWAY_WAIT_S", 0.01)
    store, there = opened(tmp_path), Registry("owner")
    (await store.ensure(ONE, fetching(ONE), there.caller("owner"))).close()
    clock.now_s += 300.0

    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    async with asyncio.timeout(90):
        (await store.ensure(ONE, fetching(ONE), Caller("owner", hangs))).close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):  # a caller that was never allowed is not admitted
            await store.ensure(ONE, fetching(ONE), Caller("stranger", hangs))


def test_cached_permissions_expire_and_are_limited_in_number(tmp_path: Path) -> None:
    permits = Permits(tmp_path, fresh_s=10.0, away_s=20.0, most=2)
    for number, who in enumerate("abc"):
        permits.answered((who, "r", D), 1000.0 + number, yes=True)
    assert len(permits) == 2
    assert not permits.fresh(("a", "r", D), 1002.0)
    assert permits.fresh(("c", "r", D), 1011.9)
    assert not permits.fresh(("c", "r", D), 1012.0)
    assert permits.while_away(("c", "r", D), 1021.9)
    assert not permits.while_away(("c", "r", D), 1022.0)
    assert not permits.fresh(("c", "other", D), 1002.0)
    assert not permits.while_away(("c", "r", D), 900.0)  # with a clock that was set back
    permits.answered(("c", "r", D), 1003.0, yes=False)
    assert not permits.while_away(("c", "r", D), 1003.0)
    permits.answered(("d", "r", D), 1030.0, yes=True)
    assert len(permits) == 1  # expired entries are removed


def test_created_key_file_of_permission_records_has_mode_600(tmp_path: Path) -> None:
    one, two = Permits(tmp_path), Permits(tmp_path)
    assert one.key() == two.key() == (tmp_path / ".key").read_bytes()
    assert (tmp_path / ".key").stat().st_mode & 0o777 == 0o600
    assert len(one) == 0


def test_permission_removed_by_another_process_causes_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permits = Permits(tmp_path, fresh_s=10.0, away_s=20.0)
    permits.answered(("a", "r", D), 1000.0, yes=True)

    def listed(folder: Path) -> list[os.DirEntry[str]]:
        found = list_entries(folder)
        Path(found[0].path).unlink()
        return found

    monkeypatch.setattr("artifacts.store.permission_cache.list_entries", listed)
    permits.answered(("b", "r", D), 1001.0, yes=True)


class Broken(Permits):
    """A permission cache on a failing disk."""

    def answered(self, asked: Asked, now_s: float, *, yes: bool) -> None:
        raise OSError(errno.EIO, "Input/output error")


async def test_failure_to_record_a_permission_leaves_no_copy_in_use(tmp_path: Path) -> None:
    there = Registry("owner")
    store = Store(tmp_path, spare_bytes=0, permits=Broken(tmp_path / "permits")).open()
    with pytest.raises(StoreError, match="the disk failed"):
        await store.ensure(ONE, fetching(ONE), there.caller("owner"))
    (row,) = store.rows()
    assert not row.in_use
    with pytest.raises(StoreError, match="the disk failed"):
        await store.admit(ONE.key, there.caller("owner"))
    (row,) = store.rows()
    assert not row.in_use
