"""Reads local weights into the page cache when a Model's first request is queued, in parallel with the start.

Decides when and how much; on cluster nodes `pilotlight.agent.weights.keeper` does. Only Models without a ready replica
are read, once for each time that requests start to wait, and at most a share of the available memory, so that running
engines keep theirs. `artifacts.disk.page_cache_warmup` does the reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from artifacts.disk.durable_writes import walk_folder
from artifacts.disk.page_cache_warmup import warm_page_cache
from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.exception_handling import describe_error, reraise_memory_error
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import World
from pilotlight.models.model_parts import local_path

FREE_SHARE = 0.75
"""Share of the memory available without swapping."""

log = logging.getLogger("pilotlight.models.page_cache")
Warms = Callable[[Sequence[Path], int], Awaitable[int]]
"""(files, maximum bytes) -> bytes requested."""


async def read_ahead(name: str, files: Callable[[], Sequence[Path]], warms: Warms | None = None) -> None:
    """Read the files of `name` ahead; `files` may block. Errors are only logged, since this is an optimization."""
    warms = warms or (lambda found, bytes_max: warm_page_cache(found, bytes_max=bytes_max))
    try:
        found = await asyncio.to_thread(files)
        asked = await warms(found, int(psutil.virtual_memory().available * FREE_SHARE)) if found else 0
    except OSError as error:
        log.info("event=warming_failed model=%s reason=%r", name, error.strerror)
    except Exception as error:  # noqa: BLE001 - the weights of other Models are read
        reraise_memory_error(error)
        log.warning("event=warming_failed model=%s reason=%r", name, describe_error(error))
    else:
        log.info("event=warming model=%s bytes=%d", name, asked)


class Warming:
    """A listener of the loop. `located` returns a Model with the local path of its weights, if any; may block."""

    def __init__(self, located: Callable[[Model], Model], warms: Warms | None = None) -> None:
        self._located = located
        self._warms = warms
        self._due: dict[ModelName, Model] = {}
        """Models to read, each once, in the order of their requests."""
        self._called = asyncio.Event()

    def on_step(self, step: LoopStep) -> None:
        """Schedule the Models whose requests have started to wait."""
        if step.after.loads is not step.before.loads:
            for model in list_parked_models(step.before, step.after):
                self._due[model.name] = model
                self._called.set()

    async def run(self) -> None:
        """Read one Model after another, in the order of their requests, until cancelled."""
        while True:
            while not self._due:
                self._called.clear()
                await self._called.wait()
            model = self._due.pop(next(iter(self._due)))
            await read_ahead(model.name, partial(self._files, model), self._warms)

    def _files(self, model: Model) -> list[Path]:
        return list_weight_files(self._located(model))


def list_parked_models(before: World, after: World) -> list[Model]:
    """Return Models whose first request waits while no replica is ready."""
    found = []
    for name, load in after.loads.items():
        was, model = before.loads.get(name), after.models.get(name)
        if not load.waiting or (was is not None and was.waiting) or model is None:
            continue
        if not any(after.replicas[one].state is ReplicaState.READY for one in after.by_model.get(name, ())):
            found.append(model)
    return found


def list_weight_files(model: Model) -> list[Path]:
    """Return the Model's local files. Blocks on disk access."""
    path = local_path(model)
    return [] if path is None else list_files(path)


def list_files(path: Path) -> list[Path]:
    """Return the file itself, or all files in the folder. Blocks on disk access."""
    if path.is_dir():
        return [Path(one.path) for one in walk_folder(path) if one.is_file(follow_symlinks=True)]
    return [path]
