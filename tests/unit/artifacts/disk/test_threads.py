"""Waiting for work in a thread, through every cancelling."""

from __future__ import annotations

import asyncio
import gc

import pytest

from artifacts.disk.threads import wait_until_done


async def begun(work: asyncio.Future[object]) -> asyncio.Task[None]:
    task = asyncio.create_task(wait_until_done(work))
    await asyncio.sleep(0)
    return task


async def test_what_fails_is_over_and_its_error_looked_at() -> None:
    loop, told = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: told.append(context))
    work: asyncio.Future[object] = loop.create_future()
    task = await begun(work)
    work.set_exception(OSError("full"))
    await task
    del work, task
    gc.collect()
    assert told == []


async def test_who_is_cancelled_twice_still_waits_and_is_cancelled_then() -> None:
    work: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    task = await begun(work)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    work.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_was_cancelled_is_over() -> None:
    work: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    task = await begun(work)
    work.cancel()
    await task
