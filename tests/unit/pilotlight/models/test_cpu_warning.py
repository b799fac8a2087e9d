"""The warning of `serve` about Models that hold a GPU but compute on the CPU, and how rarely it checks."""

from __future__ import annotations

import asyncio

from autoscaler.contract import ModelName
from autoscaler.engines import LLAMA_CPP
from autoscaler.spec.model import Gpu, Model, ModelSpec
from autoscaler.state.events import DocumentsSeen, Synced
from autoscaler.state.world import World
from pilotlight.models.cpu_warning import NAMED_MAX, NO_GPU, CpuBound
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.waiting import until

WHEEL = {"xllamacpp": "/bin/python"}
FIX = LLAMA_CPP.programs[0].for_gpus


def llama(name: str, count: int = 1) -> Model:
    spec = ModelSpec(engine="llama.cpp", artifact="file:///w", gpu=Gpu(count=count))
    return Model(name=ModelName(name), spec=spec)


class House:
    """A stepped loop whose leadership has just begun, with the recorded checks and warnings."""

    def __init__(self, available: dict[str, str], *, gpus: bool = True, cpu_only: bool = True) -> None:
        self.stepped = SteppedLoop(World(epoch=1))
        self.asked: list[str] = []
        self.messages: list[str] = []

        def ask(python: str) -> bool:
            self.asked.append(python)
            return cpu_only

        self.cpu_bound = CpuBound(lambda: gpus, available, ask, self.messages.append)
        self.stepped.loop.listeners.append(self.cpu_bound.on_step)

    def begin(self, *models: Model) -> None:
        """Observe the documents, then the devices."""
        self.stepped.step(DocumentsSeen(models=models))
        self.stepped.step(Synced())


async def test_cpu_bound_model_on_a_gpu_is_reported_once_with_fix() -> None:
    house = House(WHEEL)
    running = asyncio.create_task(house.cpu_bound.run())
    command = Model(name=ModelName("other"), spec=ModelSpec(engine="command", command=("x", "{port}")))
    house.begin(llama("ada"), llama("small", 0), command)
    await until("it is logged", lambda: bool(house.messages))
    assert house.messages == [f"Model ada holds a GPU and computes on the CPU: {NO_GPU}; {FIX}"]
    house.stepped.step(DocumentsSeen(models=(llama("ada"), llama("bob"), llama("eve"))))
    await until("the new ones are logged", lambda: len(house.messages) == 2)
    assert house.messages[1].startswith("Models bob, eve hold GPUs and compute on the CPU: ")
    assert house.asked == ["/bin/python"], "of a process, once"
    running.cancel()


async def test_many_cpu_bound_models_are_reported_in_one_truncated_line() -> None:
    house = House(WHEEL)
    running = asyncio.create_task(house.cpu_bound.run())
    house.begin(*(llama(f"m{number:03}") for number in range(NAMED_MAX + 90)))
    await until("it is logged", lambda: bool(house.messages))
    (line,) = house.messages
    assert line.startswith("Models m000, m001, ")
    assert "m009 and 90 more hold GPUs" in line
    running.cancel()


async def test_llama_wheel_is_probed_only_if_a_gpu_model_uses_it() -> None:
    houses = [House(WHEEL, gpus=False), House({}), House({**WHEEL, "llama-server": "/bin/llama-server"})]
    for house in houses:
        house.begin(llama("ada"))
        await asyncio.wait_for(house.cpu_bound.run(), 60)
    no_gpu = House(WHEEL)
    running = asyncio.create_task(no_gpu.cpu_bound.run())
    no_gpu.begin(llama("small", 0))
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    assert [(house.asked, house.messages) for house in (*houses, no_gpu)] == [([], [])] * 4


async def test_llama_wheel_with_gpu_support_causes_no_warning() -> None:
    house = House(WHEEL, cpu_only=False)
    house.begin(llama("ada"))
    await asyncio.wait_for(house.cpu_bound.run(), 60)
    assert (house.asked, house.messages) == (["/bin/python"], [])
