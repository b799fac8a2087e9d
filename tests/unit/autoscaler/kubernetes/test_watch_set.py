"""Collections of kinds that a cluster may not have yet: when their content is reported, and only once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.unreadable_objects import UnreadableObjects
from autoscaler.kubernetes.watch import INITIAL_END
from autoscaler.kubernetes.watch_set import TOGETHER_S, Kinds
from tests.simulation.environment.virtual_loop import run
from tests.support.harness.async_tests import run_with

ALL: Object = {"metadata": {"resourceVersion": "2", "annotations": {INITIAL_END: "true"}}}
ONE: Object = {"metadata": {"name": "a", "namespace": "n", "resourceVersion": "1"}}


class DelayedServer:
    """A fake API server that has listed all of a collection after a delay, and then reports no changes."""

    def __init__(self, after_s: dict[str, float]) -> None:
        self._after_s = after_s
        self.unreadable = UnreadableObjects()

    async def check(self, path: str) -> None:
        """Like `Api.check`: the collection can be listed."""

    async def watch(
        self, path: str, version: str | None, *_: object, **__: object
    ) -> AsyncIterator[tuple[str, Object]]:  # fmt: skip
        if version is None:
            yield "ADDED", ONE
            await asyncio.sleep(self._after_s[path])
            yield "BOOKMARK", ALL
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("late_s", [0.0, TOGETHER_S / 2, TOGETHER_S, 2 * TOGETHER_S])
@run_with(run)
async def test_kinds_listed_at_different_times_are_reported_in_one_callback(late_s: float) -> None:
    """Even if a kind is listed at the very moment at which all kinds are found to exist."""
    puts_s: list[float] = []
    clock = asyncio.get_running_loop().time
    kinds = Kinds(cast("Api", DelayedServer({"/first": 0.0, "/second": late_s})), lambda: puts_s.append(clock()))
    read: Any = dict
    for path in ("/first", "/second"):
        kinds.add(path, read)
    task = asyncio.create_task(kinds.run())
    await asyncio.sleep(10 * TOGETHER_S)
    assert len(puts_s) == 1
    task.cancel()
