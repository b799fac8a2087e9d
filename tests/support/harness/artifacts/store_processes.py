"""Processes that share a store: `python -m tests.support.harness.artifacts.store_processes ROLE ROOT`. Each ends by
itself or is killed.

`crash`: for each step of a pull and of an eviction, forks a process that kills itself there; prints the number of
steps. `many COUNT`: that many concurrent processes, each of which prints its result. `hang`: starts a pull, prints
that, and never finishes. `hold`: holds a Copy, prints that, and stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from artifacts.disk.durable_writes import Disk
from artifacts.store.pull import Job
from artifacts.store.store import Store
from tests.support.harness.artifacts.weight_store import KIB, fetching, raw, wanted

ONE = wanted("a", raw("x"), raw("y", path="sub/y.gguf"))
TWO = wanted("b", raw("y", path="y.gguf"), raw("z"))
WAIT_S_MAX = 60.0


def crash(root: Path) -> None:
    """Repeats until a process ran to its end."""
    for number in range(1000):
        pid = os.fork()
        if not pid:
            _killed_at(root / str(number), number)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            print(number)
            return


def _killed_at(root: Path, number: int) -> None:
    steps = 0

    def step(_what: str, _path: Path) -> None:
        nonlocal steps
        if steps == number:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    async def both(store: Store) -> None:
        fetch = fetching(ONE, TWO)
        (await store.ensure(ONE, fetch, None)).close()
        (await store.ensure(TWO, fetch, None)).close()

    store = Store(root, spare_bytes=0, disk=Disk(step)).open()
    asyncio.run(both(store))
    store.pin(ONE.key.digest)
    store.unpin(ONE.key.digest)
    store.evict(ONE.key)
    os._exit(0)


def many(root: Path, count: int) -> None:
    """The fetch continues once all have started."""
    begun, fetched = root / "begun", root / "fetched"
    pids = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            asyncio.run(_one_of(root, begun, fetched, count))
            os._exit(0)
        pids.append(pid)
    print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids))


async def _one_of(root: Path, begun: Path, fetched: Path, count: int) -> None:
    store, fetch = Store(root / "store", spare_bytes=0).open(), fetching(ONE)

    async def once_all_began(job: Job) -> None:
        _append(fetched)
        end_s = time.monotonic() + WAIT_S_MAX
        while begun.stat().st_size < count and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        await fetch(job)

    _append(begun)
    with await store.ensure(ONE, once_all_began, None) as copy:
        assert (copy.folder / "sub/y.gguf").stat().st_size == KIB


def _append(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b".")
    os.close(fd)


async def hang(root: Path) -> None:
    """Stops in the middle of a pull that has its first file."""
    fetch = fetching(ONE)

    async def first(job: Job) -> None:
        fetch.fails = RuntimeError("enough")
        try:
            await fetch(job)
        except RuntimeError:
            print("ready", flush=True)
            await asyncio.sleep(WAIT_S_MAX)

    await Store(root, spare_bytes=0).open().ensure(ONE, first, None)


async def hold(root: Path) -> None:
    """Keeps holding a Copy."""
    with await Store(root, spare_bytes=0).open().ensure(ONE, fetching(ONE), None):
        print("ready", flush=True)
        await asyncio.sleep(WAIT_S_MAX)


if __name__ == "__main__":
    role, where = sys.argv[1], Path(sys.argv[2])
    if role == "crash":
        crash(where)
    elif role == "many":
        many(where, int(sys.argv[3]))
    else:
        asyncio.run({"hang": hang, "hold": hold}[role](where))
