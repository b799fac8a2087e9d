"""Weights that lie here into the page cache when a Model's first Call is parked: beside the start, not after it.

Owns when (of a cluster's nodes `pilotlight.agent.weights.keeper` does) and how much. Promises: only Models without a
Replica that answers; once for each time that they begin to be waited for; at most a share of the memory that is free,
so that no engine that runs loses its own. What is read, and how fast, is `artifacts.disk.page_cache`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from artifacts.disk.disk import walk_folder
from artifacts.disk.page_cache import warm_page_cache
from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import World

FREE_SHARE = 0.75
"""Of the memory that could be had without swapping."""
FILE = "file://"

log = logging.getLogger("pilotlight.models.page_cache")
Warms = Callable[[Sequence[Path], int], Awaitable[int]]
"""The files, and how many bytes of them at most -> how many were asked for."""


async def read_ahead(name: str, files: Callable[[], Sequence[Path]], warms: Warms | None = None) -> None:
    """Those files of `name`; `files` may block. What cannot be read is told in the log: this is only about time."""
    warms = warms or (lambda found, bytes_max: warm_page_cache(found, bytes_max=bytes_max))
    try:
        found = await asyncio.to_thread(files)
        asked = await warms(found, int(psutil.virtual_memory().available * FREE_SHARE)) if found else 0
    except OSError as error:
        log.info("event=warming_failed model=%s reason=%r", name, error.strerror)
    else:
        log.info("event=warming model=%s bytes=%d", name, asked)


class Warming:
    """A listener of the loop. `located`: a Model with its weights where they lie, if they are here; may block."""

    def __init__(self, located: Callable[[Model], Model], warms: Warms | None = None) -> None:
        self._located = located
        self._warms = warms
        self._due: dict[ModelName, Model] = {}
        """In the order in which they were called, each once."""
        self._called = asyncio.Event()

    def on_step(self, step: LoopStep) -> None:
        """Which Models somebody waits for, who did not before."""
        if step.after.loads is not step.before.loads:
            for model in list_parked_models(step.before, step.after):
                self._due[model.name] = model
                self._called.set()

    async def run(self) -> None:
        """Until cancelled; one Model after another, in the order of their Calls."""
        while True:
            while not self._due:
                self._called.clear()
                await self._called.wait()
            model = self._due.pop(next(iter(self._due)))
            await read_ahead(model.name, partial(self._files, model), self._warms)

    def _files(self, model: Model) -> list[Path]:
        return list_weight_files(self._located(model))


def list_parked_models(before: World, after: World) -> list[Model]:
    """Models whose first Call waits, with no Replica that answers."""
    found = []
    for name, load in after.loads.items():
        was, model = before.loads.get(name), after.models.get(name)
        if not load.waiting or (was is not None and was.waiting) or model is None:
            continue
        if not any(after.replicas[one].state is ReplicaState.READY for one in after.by_model.get(name, ())):
            found.append(model)
    return found


def list_weight_files(model: Model) -> list[Path]:
    """The files that lie on this machine. Blocks for a look at the disk."""
    artifact = model.spec.artifact or ""
    if not artifact.startswith(FILE):
        return []
    return list_files(Path(artifact.removeprefix(FILE)))


def list_files(path: Path) -> list[Path]:
    """It, or all that is in it. Blocks for a look at the disk."""
    if path.is_dir():
        return [Path(one.path) for one in walk_folder(path) if one.is_file(follow_symlinks=True)]
    return [path]
