"""Waiting for work in a thread to finish, despite any cancellation."""

from __future__ import annotations

import asyncio
import gc

import pytest

from artifacts.disk.thread_wait import wait_until_done


async def begun(work: asyncio.Future[object]) -> asyncio.Task[None]:
    task = asyncio.create_task(wait_until_done(work))
    await asyncio.sleep(0)
    return task


async def test_wait_for_failing_background_work_ends_without_a_loop_error() -> None:
    loop, errors = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    work: asyncio.Future[object] = loop.create_future()
    task = await begun(work)
    work.set_exception(OSError("full"))
    await task
    del work, task
    gc.collect()
    assert errors == []


async def test_cancelled_wait_ends_only_after_its_background_work_ends() -> None:
    work: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    task = await begun(work)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    work.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_background_work_ends_the_wait() -> None:
    work: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    task = await begun(work)
    work.cancel()
    await task
