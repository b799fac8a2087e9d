"""Weights of a Model with queued requests are read ahead: once, only without a ready replica, within free memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import ModelLoad, World
from pilotlight.models.page_cache import Warming, list_parked_models, list_weight_files
from tests.support.builders.worlds import T0, device, model, replica, world
from tests.unit.pilotlight.models.test_weights_fetch import step as first

NAME = ModelName("m")


def at(artifact: str) -> Model:
    one = model("m", 10)
    return replace(one, spec=replace(one.spec, artifact=artifact))


def called(of: Model, waiting: int = 1, state: ReplicaState | None = None) -> World:
    replicas = [] if state is None else [replica(of, "r1", ("g1",), state)]
    return replace(world([of], [device("g1", 80)], replicas), loads={of.name: ModelLoad(waiting=waiting)})


def test_only_the_first_waiting_request_triggers_read_ahead() -> None:
    one = at("file:///a.gguf")
    idle, waits, waits_more = called(one, 0), called(one, 1), called(one, 7)
    assert list_parked_models(idle, waits) == [one]
    assert list_parked_models(World(epoch=1), waits) == [one]
    assert list_parked_models(waits, waits_more) == []
    assert list_parked_models(waits, idle) == []


def test_starting_replica_triggers_read_ahead_and_ready_one_does_not() -> None:
    one = at("file:///a.gguf")
    assert list_parked_models(World(epoch=1), called(one, state=ReplicaState.STARTING)) == [one]
    assert list_parked_models(World(epoch=1), called(one, state=ReplicaState.READY)) == []


def test_weight_files_are_listed_only_for_a_local_artifact(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_weight_files(at(f"file://{tmp_path}")) == [tmp_path / "a/config.json", tmp_path / "b.safetensors"]
    assert list_weight_files(at(f"file://{tmp_path}/b.safetensors")) == [tmp_path / "b.safetensors"]
    assert list_weight_files(at("oci://r.example/a:1")) == []


async def test_page_cache_read_ahead_is_limited_to_75_percent_of_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    (tmp_path / "a.gguf").touch()
    done, read = asyncio.Event(), list[tuple[Sequence[Path], int]]()

    async def warms(files: Sequence[Path], bytes_max: int) -> int:
        read.append((files, bytes_max))
        done.set()
        return 0

    here = at(f"file://{tmp_path}/a.gguf")
    one = Warming(lambda _: here, warms)
    running = asyncio.create_task(one.run())
    waits = called(at("oci://r.example/a:1"))
    one.on_step(first(waits))
    one.on_step(
        LoopStep(waits, replace(waits, loads={NAME: ModelLoad(waiting=3)}), first(waits).plan, (), (), T0, T0, T0)
    )
    async with asyncio.timeout(90):
        await done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert read == [([tmp_path / "a.gguf"], 750)]


async def test_exception_for_one_model_does_not_delay_the_read_ahead_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    names, done, read = ("bad1", "bad2", "bad3", "good"), asyncio.Event(), list[Sequence[Path]]()
    ones = [replace(at(f"file://{tmp_path}/a.gguf"), name=ModelName(name)) for name in names]
    waits = replace(world(ones, [device("g1", 80)], []), loads={one.name: ModelLoad(waiting=1) for one in ones})

    def located(one: Model) -> Model:
        if one.name.startswith("bad"):
            raise LookupError(one.name)
        return one

    async def warms(files: Sequence[Path], bytes_max: int) -> int:
        read.append(files)
        done.set()
        return bytes_max

    warming = Warming(located, warms)
    warming.on_step(first(waits))
    running = asyncio.create_task(warming.run())
    async with asyncio.timeout(90):
        await done.wait()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert read == [[tmp_path / "a.gguf"]]
