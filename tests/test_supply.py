"""Whose weights are brought when, which Copy is whose, and what of it an engine is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from artifacts import digests, reference
from artifacts.contents import RefusedError
from artifacts.layout import Key
from artifacts.meanings import Meanings
from artifacts.obtain import MirrorSite, Registries
from artifacts.refusals import RegistryError
from artifacts.store import Store
from autoscaler.actions import Plan
from autoscaler.contract import ModelName
from autoscaler.engines import EngineError
from autoscaler.fold import Observation, fold
from autoscaler.loop import Listener, Step
from autoscaler.model import Model, ModelSpec, ReplicaRange
from autoscaler.observations import CopiesSeen
from autoscaler.settings import Weights, WeightsMirror
from autoscaler.world import Copy, Load, NodeId, World
from pilotlight import supply
from pilotlight.supply import Supply, reached, wanting
from tests.kit import packed
from tests.kit.fake_hub import FakeHub
from tests.kit.fake_registry import StillClock
from tests.kit.fake_s3 import FakeS3
from tests.kit.worlds import T0, device, world


def model(artifact: str, **spec: object) -> Model:
    given = {"engine": "llama.cpp", "artifact": artifact, **spec}
    return Model(name=ModelName("m"), spec=ModelSpec(**given))  # type: ignore[arg-type]  # a test's own words


def at(tmp_path: Path, ways: Registries | None = None) -> Supply:
    return Supply(tmp_path / "weights", Weights(), ways)


@pytest.mark.parametrize(
    ("paths", "engine", "chosen"),
    [
        (["a.gguf", "LICENSE"], "llama.cpp", "a.gguf"),
        (["sub/a.gguf", "adapter-x.gguf", "mmproj-a.gguf"], "llama.cpp", "sub/a.gguf"),
        (["lora-only.gguf"], "llama.cpp", "lora-only.gguf"),
        (["b-00002-of-00002.gguf", "b-00001-of-00002.gguf"], "llama.cpp", "b-00001-of-00002.gguf"),
        (["model.safetensors", "config.json"], "vllm", ""),
        (["a.gguf", "config.json"], "vllm", "a.gguf"),
    ],
)
def test_an_engine_is_given_the_one_gguf_file_or_the_folder(paths: list[str], engine: str, chosen: str) -> None:
    folder = Path("/c/files")
    assert supply.chosen(folder, paths, model("oci://r/a:1", engine=engine)) == folder / chosen


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["b.gguf", "a.gguf"], "oci://r/a:1 holds 2 GGUF files: a.gguf, b.gguf; pack one"),
        (["model.safetensors"], "oci://r/a:1 holds no GGUF file, and llama.cpp loads no other"),
    ],
)
def test_what_llama_cpp_cannot_load_is_said(paths: list[str], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        supply.chosen(Path("/c"), paths, model("oci://r/a:1"))


def test_files_of_this_machine_are_no_matter_of_ours(tmp_path: Path) -> None:
    one, here = at(tmp_path), model("file:///models/a.gguf")
    assert one(here, lambda _: None) is None
    assert one.located(here) is here
    assert not (tmp_path / "weights").exists()


def test_settings_say_whom_to_ask_first_and_whom_to_believe() -> None:
    mirrors = (WeightsMirror(host="m:5000/hub", registry="docker.io"), WeightsMirror(host="near"))
    found = reached(Weights(mirrors=mirrors, ca_file="/ca.pem"))
    assert found.mirrors == {
        reference.DOCKER_HOST: [MirrorSite("m:5000", "hub/")],
        "": [MirrorSite("near")],
    }
    assert found.ca == Path("/ca.pem")


def test_copies_are_folded_as_a_whole() -> None:
    copies = frozenset({Copy(artifact="oci://r/a:1", node=NodeId("n1"))})
    before = world([], [device("g1", 80)], [])
    after, _ = fold(before, [CopiesSeen(copies=copies)], T0)
    assert after.copies == copies
    assert fold(after, [CopiesSeen(copies=copies)], T0)[0] is after
    assert fold(after, [CopiesSeen(copies=frozenset())], T0)[0].copies == frozenset()


def test_who_waits_and_who_is_always_wanted_has_weights_brought() -> None:
    called, idle, always = (
        replace(model(f"oci://r/{name}:1"), name=ModelName(name)) for name in ("called", "idle", "always")
    )
    always = replace(always, spec=replace(always.spec, replicas=ReplicaRange(min=1)))
    one = replace(world([called, idle, always], [device("g1", 80)], []), loads={called.name: Load(waiting=1)})
    assert wanting(one) == ["called", "always"]


class Listening:
    """A loop that decides nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: list[Listener] = []
        self.observed: list[Observation] = []

    def observe(self, batch: Sequence[Observation]) -> None:
        self.observed += batch


def step(after: World) -> Step:
    """From nothing to this."""
    return Step(World(epoch=1), after, Plan(), (), (), T0, T0, T0)


async def test_weights_come_while_calls_wait_for_room_and_are_told_with_their_memory(tmp_path: Path) -> None:
    source = packed.model(tmp_path / "model", {"a.gguf": b"GGUF"})
    packed.packed(source, tmp_path / "layout")
    with packed.served(tmp_path / "layout") as host:
        one = at(tmp_path, Registries())
        wants = model(f"oci://{host}/{packed.NAME}:v1")
        calls = replace(world([wants], [device("g1", 80, "n1")], []), loads={wants.name: Load(waiting=1)})
        loop, read = Listening(calls), asyncio.Event()

        async def read_again() -> None:
            read.set()

        running = asyncio.create_task(one.run(loop, read_again))
        await asyncio.sleep(0)
        one.on_step(step(calls))
        async with asyncio.timeout(20):
            await read.wait()
            while not loop.observed:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        here = Copy(artifact=wants.spec.artifact or "", node=NodeId("n1"))
        assert loop.observed[0] == CopiesSeen(copies=frozenset({here}))
        where = one.located(wants).spec.artifact or ""
        assert Path(where.removeprefix("file://")).read_bytes() == b"GGUF"
        held = await one(wants, lambda _: None)  # type: ignore[misc]  # it is in a registry
        assert held.artifact == where
        assert Store(tmp_path / "weights").rows()[0].in_use
        held.close()
        assert not Store(tmp_path / "weights").rows()[0].in_use


async def test_a_copy_that_does_not_fit_the_engine_is_let_go(tmp_path: Path) -> None:
    packed.packed(packed.model(tmp_path / "model", {"a.gguf": b"1", "b.gguf": b"2"}), tmp_path / "layout")
    with packed.served(tmp_path / "layout") as host:
        one, wants = at(tmp_path, Registries()), model(f"oci://{host}/{packed.NAME}:v1")
        with pytest.raises(EngineError, match="holds 2 GGUF files"):
            await one(wants, lambda _: None)  # type: ignore[misc]  # it is in a registry
        assert not Store(tmp_path / "weights").rows()[0].in_use
        assert one.located(wants) is wants
        missing = model(f"oci://{host}/{packed.NAME}:none")
        with pytest.raises(RegistryError, match="there is no manifest none"):
            await one(missing, lambda _: None)  # type: ignore[misc]  # it is in a registry


def test_a_meaning_without_its_copy_locates_nothing(tmp_path: Path) -> None:
    one, of = at(tmp_path), reference.parse("oci://r.example/a:1")
    store = Store(tmp_path / "weights").open()
    Meanings(store).remember(of, Key(of.host, digests.of(b"x")))
    wants = model("oci://r.example/a:1")
    assert one.located(wants) is wants


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_weights_of_the_hub_and_of_buckets_come_for_a_start_and_stay(tmp_path: Path, scheme: str) -> None:
    async with (
        FakeHub({"README.md": b"#"}, {"a.gguf": b"GGUF"}).both() as hub,
        FakeS3({"a.gguf": b"GGUF"}).serving() as s3,
    ):
        assert isinstance(s3, FakeS3)
        ways = Registries(pace=StillClock())
        one = Supply(tmp_path / "weights", Weights(), ways, {**hub.env(), **s3.env(), "HF_HOME": str(tmp_path)})
        wants = model("hf://acme/tiny@main" if scheme == "hf" else "s3://models/a.gguf")
        assert one.located(wants) is wants
        for _ in range(2):
            held = await one(wants, lambda _: None)  # type: ignore[misc]  # the store brings it
            assert Path(held.artifact.removeprefix("file://")).read_bytes() == b"GGUF"
            held.close()
        assert one.located(wants).spec.artifact == held.artifact
        assert len(hub.cdn.seen) == (scheme == "hf")
        several = model("hf://acme/tiny?include=*.md")
        with pytest.raises(RefusedError, match="no weights"):
            await one(several, lambda _: None)  # type: ignore[misc]  # the store brings it
