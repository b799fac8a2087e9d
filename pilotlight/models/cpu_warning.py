"""Says which Models hold a GPU and compute on the CPU all the same: the common wheel of llama.cpp knows no CUDA.

Owns that look, made where Devices are GPUs, once they are known and when documents change. Whether the wheel finds a
GPU is asked at most once, and only if a Model would be started with it. It changes nothing: the Model is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.engines import LLAMA_CPP, select_program
from autoscaler.engines.installed import computes_on_cpu_only
from autoscaler.spec.model import Model
from pilotlight.output import write_stderr

NO_GPU = "the xllamacpp that is installed finds no GPU"
NAMED_MAX = 10
"""Models that one line names."""


class CpuBound:
    """A listener of the loop. `gpus`: whether Devices are GPUs, asked once they are known; `available`: as `launch` has
    it; `cpu_only` says of a Python whether its wheel finds no GPU, and may take its time.
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
        """Notes that there is something to look at."""
        before, after = step.before, step.after
        if after.synced and (not before.synced or before.models is not after.models):
            self._models = tuple(after.models.values())
            self._changed.set()

    async def run(self) -> None:
        """Looks until cancelled, or until it is known that there will be nothing to say."""
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
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        if len(names) == 1:
            self._say(f"Model {names[0]} holds a GPU and computes on the CPU: {NO_GPU}; {fix}")
        elif names:
            self._say(f"Models {', '.join(names[:NAMED_MAX])}{more} hold GPUs and compute on the CPU: {NO_GPU}; {fix}")
