"""A GPU that a DRA driver allocates in parts, in virtual time: its parts are drained for a replica of the whole GPU."""

from __future__ import annotations

import asyncio

from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import Slice
from tests.simulation.case_harness import Stage, model, play
from tests.simulation.environment.machine import Machine, Manners
from tests.simulation.installations.installation import Town
from tests.support.builders.resource_slices import cut_name, partitionable
from tests.support.builders.slices import NODE
from tests.unit.autoscaler.placement.test_partitionable_gpus import there

SERVE_S = 5.0
MANNERS = Manners(start_s=(0.5, 0.5), serve_s=(SERVE_S, SERVE_S))
TOLD_S = 1.0
"""Delay from an added or deleted claim until the ResourceSlices are read again."""


class PartTown(Town):
    """A node with one GPU, part of which another workload holds at first."""

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """Its Slices are the parts of the GPU that the claims of engines leave free."""
        del slices
        self.shown: tuple[str, ...] = (cut_name("1g.10gb", 0),)
        self.task(self._tell())
        return super().make_machine(_offered(self.shown), manners)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            held = {one.replica.resources.slices[0] for one in self.machine.engines.values()}
            names = tuple(sorted(id.rpartition("/")[2] for id in held))
            if names != self.shown and self.machine.started:
                self.shown = names
                self.machine.slices = _offered(names)
                for observe in self.machine.watching:
                    observe((SlicesSeen(slices=self.machine.slices),))


def _offered(kept: tuple[str, ...]) -> tuple[Slice, ...]:
    return tuple(there(partitionable(NODE), *kept))


def test_model_needing_a_whole_gpu_starts_before_later_smaller_models() -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        assert await stage.answered([town.call("small")]) == {"completed": 1}
        running = town.call("mid")
        await stage.until(lambda: stage.replicas("mid") == 1)
        await asyncio.sleep(1.0)
        whole = town.call("whole")
        await stage.until(lambda: stage.replicas("small") == 0, within_s=SERVE_S)
        assert not running.ended, "the idle one goes, the busy one drains"
        late = town.call("late")
        assert await stage.answered([running, whole], within_s=2 * SERVE_S + 2 * TOLD_S + 3.0) == {"completed": 2}
        assert stage.starts("late") == 0 or not late.ended, "it has not had the rest of the GPU meanwhile"
        assert await stage.answered([late], within_s=2 * SERVE_S + 2 * TOLD_S + 3.0) == {"completed": 1}
        order = [id.partition("-")[0] for id in town.machine.started]
        assert order == ["small", "mid", "whole", "late"]

    models = [model(name, memory_gib=gib, idle_s=60.0) for name, gib in (("small", 5), ("mid", 30), ("whole", 70))]
    play(act, *models, model("late", memory_gib=20, idle_s=60.0), manners=MANNERS, kind=PartTown)
