"""One store shared by processes: one fetch, no partial copies, and locks of a dead process are released."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.store.layout import HeldError
from artifacts.store.reservations import reserved_bytes
from artifacts.store.store import Store
from scripts.gates import ROOT
from tests.support.harness.artifacts.store_processes import ONE, TWO
from tests.support.harness.artifacts.weight_store import KIB, content, fetching, whole

BOTH = {
    ONE.reference: {"x.gguf": content("x", KIB), "sub/y.gguf": content("y", KIB)},
    TWO.reference: {"y.gguf": content("y", KIB), "z.gguf": content("z", KIB)},
}


def command(role: str, root: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.harness.artifacts.store_processes", role, str(root), *more]


def ran(role: str, root: Path, *more: str) -> str:
    done = subprocess.run(command(role, root, *more), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.strip()


@contextlib.contextmanager
def staying(role: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(role, root), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def opened(root: Path) -> Store:
    return Store(root, spare_bytes=0).open()


@pytest.mark.case("48")
@pytest.mark.parametrize("count", [2, 50])
@pytest.mark.standard
def test_digest_requested_by_many_processes_is_fetched_once(tmp_path: Path, count: int) -> None:
    assert ran("many", tmp_path, str(count)) == str(count)
    assert (tmp_path / "fetched").stat().st_size == 1
    assert whole(opened(tmp_path / "store")) == {ONE.reference: BOTH[ONE.reference]}


@pytest.mark.point("13")
def test_fetch_killed_at_any_step_leaves_a_complete_copy_or_none(tmp_path: Path) -> None:
    steps = int(ran("crash", tmp_path))
    assert steps > 60
    seen = set()
    for number in range(steps):
        before = Store(tmp_path / str(number))
        published = whole(before)  # as seen by a process that was running all the time
        assert published.items() <= BOTH.items(), number
        store = before.open()
        assert whole(store) == published, number
        assert not list(store.layout.trash.iterdir()), number
        assert not list(store.layout.locks.iterdir()), number
        seen.add(tuple(sorted(published)))
        asyncio.run(again(store))
        assert whole(store) == BOTH, number
        assert store.stored_bytes() == 3 * KIB, number
        assert not list(store.layout.partials.iterdir()), number
    assert seen == {(), (ONE.reference,), (ONE.reference, TWO.reference), (TWO.reference,)}


async def again(store: Store) -> None:
    for one in (ONE, TWO):
        (await store.ensure(one, fetching(one), None)).close()


@pytest.mark.point("13")
def test_killed_pull_frees_its_disk_reservation_and_the_next_resumes(tmp_path: Path) -> None:
    with staying("hang", tmp_path) as process:
        store = opened(tmp_path)
        reservation = store.layout.partial(ONE.key) / "reservation"
        assert reserved_bytes(reservation) > 2 * KIB
        process.kill()
        process.wait()
    assert reserved_bytes(reservation) == 0
    fetch = fetching(ONE)
    asyncio.run(store.ensure(ONE, fetch, None)).close()
    assert fetch.jobs == [("sub/y.gguf",)]


@pytest.mark.point("13")
@pytest.mark.standard
def test_copy_in_use_by_another_process_is_not_evicted_until_it_exits(tmp_path: Path) -> None:
    with staying("hold", tmp_path) as process:
        store = opened(tmp_path)
        assert store.rows()[0].in_use
        with pytest.raises(HeldError, match="in use"):
            store.evict(ONE.key)
        assert store.free(1).lacking_bytes == 1
        process.kill()
        process.wait()
    store.evict(ONE.key)
    assert store.rows() == []
