"""Warns about Models that hold a GPU but compute on the CPU: the common wheel of llama.cpp has no CUDA support.

Checked if devices are GPUs, once they are known and when documents change. The wheel is probed at most once, and only
if a Model would be started with it. The Model is served nevertheless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.engines import LLAMA_CPP, select_program
from autoscaler.engines.programs.installed import computes_on_cpu_only
from autoscaler.spec.model import Model
from pilotlight.safe_output import list_names, write_stderr

NO_GPU = "the installed xllamacpp finds no GPU"
NAMED_MAX = 10
"""Maximum number of Models named in one line."""


class CpuBound:
    """A listener of the loop. `gpus` returns whether devices are GPUs and is called once they are known; `available`
    maps programs as for a launch; `cpu_only` probes whether a Python's wheel finds no GPU, and may block.
    """

    def __init__(
        self,
        gpus: Callable[[], bool],
        available: Mapping[str, str],
        cpu_only: Callable[[str], bool] = computes_on_cpu_only,
        say: Callable[[str], None] = write_stderr,
    ) -> None:
        self._gpus = gpus
        self._program = select_program(LLAMA_CPP, available, gpus=True)
        self._available = available
        self._cpu_only = cpu_only
        self._say = say
        self._models: tuple[Model, ...] = ()
        self._changed = asyncio.Event()
        self._said: set[ModelName] = set()

    def on_step(self, step: LoopStep) -> None:
        """Schedule a check when the Models have changed."""
        before, after = step.before, step.after
        if after.leadership.synced and (not before.leadership.synced or before.models is not after.models):
            self._models = tuple(after.models.values())
            self._changed.set()

    async def run(self) -> None:
        """Check until cancelled, or until no further warning is possible."""
        program, asked = self._program, False
        while program is not None and program.for_gpus:
            await self._changed.wait()
            self._changed.clear()
            if not self._gpus():
                return
            names = [m.name for m in self._models if m.spec.engine == LLAMA_CPP.name and m.spec.gpu.count]
            news = [name for name in names if name not in self._said]
            if news and not asked:
                asked = True
                if not await asyncio.to_thread(self._cpu_only, self._available[program.found]):
                    return
            self._said = set(names)
            self._tell(news, program.for_gpus)

    def _tell(self, names: Sequence[ModelName], fix: str) -> None:
        if len(names) == 1:
            self._say(f"Model {names[0]} holds a GPU and computes on the CPU: {NO_GPU}; {fix}")
        elif names:
            self._say(f"Models {list_names(names, NAMED_MAX)} hold GPUs and compute on the CPU: {NO_GPU}; {fix}")
