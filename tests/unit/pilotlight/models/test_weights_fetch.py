"""Which weights are downloaded and when, which Model uses a copy, and what the engine gets of it."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from artifacts import digest, reference
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.fetch.registry import Came, MirrorSite, Registries
from artifacts.file_policy import ALLOW
from artifacts.http.transport import Site
from artifacts.pack import oci_layout
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry.client import Client
from artifacts.registry_errors import RegistryError
from artifacts.store.copies import Copy as Copy_
from artifacts.store.file_names import CopyKey
from artifacts.store.store import Store
from artifacts.store.tag_cache import Meanings
from autoscaler.contract import ModelName
from autoscaler.controller.loop import Listener, LoopStep
from autoscaler.engines import EngineError
from autoscaler.fold.fold import Observation, fold
from autoscaler.spec.model import Adapter, Model, ModelSpec, ReplicaRange
from autoscaler.spec.settings import Weights, WeightsMirror
from autoscaler.state.actions import Plan
from autoscaler.state.events import CopiesSeen
from autoscaler.state.world import Copy, ModelLoad, NodeId, World
from loadtest import tiny_gguf
from pilotlight.cli.weights.pack import plan_artifact
from pilotlight.models import model_parts
from pilotlight.models.model_parts import Part
from pilotlight.models.registry_access import build_registries
from pilotlight.models.retry_tasks import FIRST_S
from pilotlight.models.weights_fetch import (
    PROGRESS_EVERY_S,
    AdapterError,
    PullProgress,
    Supply,
    gather_copies,
    list_wanted_models,
)
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.weight_file_headers import as_safetensors
from tests.support.builders.worlds import T0, device, world
from tests.support.fakes.hub import TOKEN, FakeHub
from tests.support.fakes.registry import StillClock
from tests.support.fakes.s3 import FakeS3
from tests.support.harness.faults.fault_injection import InjectedError, concerns, inject

pytestmark = pytest.mark.standard


def model(artifact: str, **spec: object) -> Model:
    given = {"engine": "llama.cpp", "artifact": artifact, **spec}
    return Model(name=ModelName("m"), spec=ModelSpec(**given))  # type: ignore[arg-type]  # fields of each test


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
def test_load_path_of_weights_is_their_only_gguf_file_or_directory(paths: list[str], engine: str, chosen: str) -> None:
    folder = Path("/c/files")
    assert model_parts.select_load_path(folder, paths, model("oci://r.io/a:1", engine=engine)) == folder / chosen


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["b.gguf", "a.gguf"], "oci://r.io/a:1 contains 2 GGUF files: a.gguf, b.gguf; package only one"),
        (["model.safetensors"], "oci://r.io/a:1 contains no GGUF file, which llama.cpp requires"),
    ],
)
def test_llama_cpp_weights_with_none_or_two_gguf_files_are_an_error(paths: list[str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        model_parts.select_load_path(Path("/c"), paths, model("oci://r.io/a:1"))


def test_local_model_file_is_used_without_creating_a_store(tmp_path: Path) -> None:
    one, here = at(tmp_path), model("file:///models/a.gguf")
    assert one(here, lambda _: None) is None
    assert one.located(here) is here
    assert not (tmp_path / "weights").exists()


def test_mirrors_and_ca_file_of_settings_apply_to_registry_connections() -> None:
    mirrors = (WeightsMirror(host="m:5000/hub", registry="docker.io"), WeightsMirror(host="near"))
    found = build_registries(Weights(mirrors=mirrors, ca_file="/ca.pem"))
    assert found.mirrors == {reference.DOCKER_HOST: [MirrorSite("m:5000", "hub/")], "": [MirrorSite("near")]}
    assert found.ca == Path("/ca.pem")


def test_newly_observed_stored_copies_replace_the_previous_set() -> None:
    copies = frozenset({Copy(artifact="oci://r.io/a:1", node=NodeId("n1"))})
    before = world([], [device("g1", 80)], [])
    after, _ = fold(before, [CopiesSeen(copies=copies)], T0)
    assert after.nodes.copies == copies
    assert fold(after, [CopiesSeen(copies=copies)], T0)[0] is after
    assert fold(after, [CopiesSeen(copies=frozenset())], T0)[0].nodes.copies == frozenset()


def test_weights_are_wanted_only_with_waiting_requests_or_min_replicas() -> None:
    called, idle, always = (
        replace(model(f"oci://r.io/{name}:1"), name=ModelName(name)) for name in ("called", "idle", "always")
    )
    always = replace(always, spec=replace(always.spec, replicas=ReplicaRange(min=1)))
    one = replace(world([called, idle, always], [device("g1", 80)], []), loads={called.name: ModelLoad(waiting=1)})
    assert list_wanted_models(one) == ["called", "always"]


class Listening:
    """A loop that takes no decisions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: list[Listener] = []
        self.observed: list[Observation] = []
        self.faults: set[tuple[ModelName, str]] = set()

    def fault(self, name: ModelName, what: str, error: Exception) -> None:
        assert isinstance(error, InjectedError)
        self.faults.add((name, what))

    def observe(self, batch: Sequence[Observation]) -> None:
        self.observed += batch
        self.world, _ = fold(self.world, list(batch), T0)


def step(after: World) -> LoopStep:
    """A step from an empty `World` to this one."""
    return LoopStep(World(epoch=1), after, Plan(), (), (), T0, T0, T0)


async def test_weights_are_pulled_and_reported_while_requests_wait(tmp_path: Path) -> None:
    source = packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF"})
    packed_models.packed(source, tmp_path / "layout")
    with packed_models.served(tmp_path / "layout") as host:
        one = at(tmp_path, Registries())
        wanted = model(f"oci://{host}/{packed_models.NAME}:v1")
        calls = replace(world([wanted], [device("g1", 80, "n1")], []), loads={wanted.name: ModelLoad(waiting=1)})
        loop, read = Listening(calls), asyncio.Event()

        async def read_again() -> None:
            read.set()

        running = asyncio.create_task(one.run(loop, read_again))
        await asyncio.sleep(0)
        one.on_step(step(calls))
        async with asyncio.timeout(90):
            await read.wait()
            here = frozenset({Copy(artifact=wanted.spec.artifact or "", node=NodeId("n1"))})
            while not any(isinstance(one, CopiesSeen) and one.copies == here for one in loop.observed):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        where = one.located(wanted).spec.artifact or ""
        assert Path(where.removeprefix("file://")).read_bytes() == b"GGUF"
        held = await one(wanted, lambda _: None)  # type: ignore[misc]  # it is in a registry
        assert held.model.spec.artifact == where
        assert Store(tmp_path / "weights").rows()[0].in_use
        held.close()
        assert not Store(tmp_path / "weights").rows()[0].in_use


@pytest.mark.parametrize("point", ["list_parts", "list_unsized_parts"])
async def test_exception_for_one_model_does_not_stop_prefetching_for_the_others(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF"})
    packed_models.packed(source, tmp_path / "layout")
    inject(monkeypatch, f"pilotlight.models.weights_fetch:{point}", concerns("faulty"))
    with packed_models.served(tmp_path / "layout") as host:
        one = at(tmp_path, Registries())
        wanted = model(f"oci://{host}/{packed_models.NAME}:v1")
        faulty = replace(wanted, name=ModelName("faulty"))
        loads = {name: ModelLoad(waiting=1) for name in (faulty.name, wanted.name)}
        loop = Listening(replace(world([faulty, wanted], [device("g1", 80, "n1")], []), loads=loads))
        one.on_step(step(loop.world))
        read = asyncio.Event()

        async def read_again() -> None:
            read.set()

        running = asyncio.create_task(one.run(loop, read_again))
        async with asyncio.timeout(90):
            await read.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert loop.faults == {(faulty.name, "weights")}
    assert (one.located(wanted).spec.artifact or "").startswith("file://")


async def test_exception_for_one_artifact_is_reported_for_its_models_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF"})
    packed_models.packed(source, tmp_path / "layout")
    inject(monkeypatch, "pilotlight.models.weights_fetch:Supply._record", lambda _, part: "faulty" in part.artifact)
    with packed_models.served(tmp_path / "layout") as host:
        one = at(tmp_path, Registries())
        wanted = model(f"oci://{host}/{packed_models.NAME}:v1")
        faulty = replace(model(f"oci://{host}/faulty:v1"), name=ModelName("faulty"))
        loads = {name: ModelLoad(waiting=1) for name in (faulty.name, wanted.name)}
        loop = Listening(replace(world([faulty, wanted], [device("g1", 80, "n1")], []), loads=loads))
        one.on_step(step(loop.world))
        read = asyncio.Event()

        async def read_again() -> None:
            read.set()

        running = asyncio.create_task(one.run(loop, read_again))
        async with asyncio.timeout(90):
            await read.wait()
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert loop.faults == {(faulty.name, "weights")}
    assert (one.located(wanted).spec.artifact or "").startswith("file://")


async def test_start_that_fails_on_unusable_weights_releases_the_stored_copy(tmp_path: Path) -> None:
    packed_models.packed(
        packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF 1", "b.gguf": b"GGUF 2"}), tmp_path / "layout"
    )
    with packed_models.served(tmp_path / "layout") as host:
        one, requests = at(tmp_path, Registries()), model(f"oci://{host}/{packed_models.NAME}:v1")
        with pytest.raises(EngineError, match="contains 2 GGUF files"):
            await one(requests, lambda _: None)  # type: ignore[misc]  # it is in a registry
        assert not Store(tmp_path / "weights").rows()[0].in_use
        assert one.located(requests) is requests
        missing = model(f"oci://{host}/{packed_models.NAME}:none")
        with pytest.raises(RegistryError, match="there is no manifest none"):
            await one(missing, lambda _: None)  # type: ignore[misc]  # it is in a registry


def test_cached_tag_whose_copy_is_gone_resolves_to_no_local_path(tmp_path: Path) -> None:
    one, of = at(tmp_path), reference.parse_reference("oci://r.example/a:1")
    store = Store(tmp_path / "weights").open()
    Meanings(store).remember(of, CopyKey(of.host, digest.compute_digest(b"x")))
    wanted = model("oci://r.example/a:1")
    assert one.located(wanted) is wanted


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_hub_or_bucket_weights_are_fetched_once_for_two_starts(tmp_path: Path, scheme: str) -> None:
    async with (
        FakeHub({"README.md": b"#"}, {"a.gguf": b"GGUF"}).both() as hub,
        FakeS3({"a.gguf": b"GGUF"}).serving() as s3,
    ):
        assert isinstance(s3, FakeS3)
        ways = Registries(pace=StillClock())
        one = Supply(tmp_path / "weights", Weights(), ways, {**hub.env(), **s3.env(), "HF_HOME": str(tmp_path)})
        wanted = model("hf://acme/tiny@main" if scheme == "hf" else "s3://models/a.gguf")
        assert one.located(wanted) is wanted
        for _ in range(2):
            held = await one(wanted, lambda _: None)  # type: ignore[misc]  # the store brings it
            assert Path(held.model.spec.artifact.removeprefix("file://")).read_bytes() == b"GGUF"
            held.close()
        assert one.located(wanted).spec.artifact == held.model.spec.artifact
        assert len(hub.cdn.seen) == (scheme == "hf")
        several = model("hf://acme/tiny?include=*.md")
        with pytest.raises(RefusedError, match="no weights"):
            await one(several, lambda _: None)  # type: ignore[misc]  # the store brings it


def adapted(model_at: str, *adapters: str, **spec: object) -> Model:
    """A Model with adapters a0, a1, ..."""
    return model(
        model_at, adapters=tuple(Adapter(name=f"a{at}", artifact=one) for at, one in enumerate(adapters)), **spec
    )


async def test_adapters_are_fetched_and_locked_together_with_their_model(tmp_path: Path) -> None:
    for name, files in (("m", {"a.gguf": b"GGUF", "adapter-x.gguf": b"GGUF MINE"}), ("l", {"lora.gguf": b"GGUF LORA"})):
        packed_models.packed(packed_models.model(tmp_path / name, files), tmp_path / f"{name}.layout")
    with packed_models.served(tmp_path / "m.layout") as host, packed_models.served(tmp_path / "l.layout") as other:
        one = at(tmp_path, Registries())
        own, lora = f"oci://{host}/{packed_models.NAME}:v1", f"oci://{other}/{packed_models.NAME}:v1"
        wanted = adapted(own, lora, own, "file:///here.gguf")
        held = await one(wanted, lambda _: None)  # type: ignore[misc]  # the store brings it
        spec = held.model.spec
        found = [spec.artifact or "", *(each.artifact for each in spec.adapters[:2])]
        assert [Path(each.removeprefix("file://")).read_bytes() for each in found] == [
            b"GGUF",
            b"GGUF LORA",
            b"GGUF MINE",
        ]
        assert spec.adapters[2] == wanted.spec.adapters[2]
        assert one.located(wanted) == held.model
        assert (held.model.name, len(held.lease_fds)) == (wanted.name, 2), "two Copies, though one is asked for twice"
        assert [row.in_use for row in Store(tmp_path / "weights").rows()] == [True, True]
        held.close()
        assert not any(row.in_use for row in Store(tmp_path / "weights").rows())
        only = adapted("file:///a.gguf", lora)
        beside = await one(only, lambda _: None)  # type: ignore[misc]  # the store brings its adapter
        assert beside.model.spec.artifact == "file:///a.gguf"
        beside.close()


async def test_missing_adapter_fails_the_start_and_releases_the_copies(tmp_path: Path) -> None:
    packed_models.packed(packed_models.model(tmp_path / "m", {"a.gguf": b"GGUF"}), tmp_path / "layout")
    with packed_models.served(tmp_path / "layout") as host:
        one, own = at(tmp_path, Registries()), f"oci://{host}/{packed_models.NAME}:v1"
        wanted = adapted(own, own, f"oci://{host}/{packed_models.NAME}:none")
        with pytest.raises(AdapterError, match=rf"^adapter a1: {host}: there is no manifest none of"):
            await one(wanted, lambda _: None)  # type: ignore[misc]  # the store brings it
        assert not any(row.in_use for row in Store(tmp_path / "weights").rows())
        assert one.located(wanted).spec.adapters[1] == wanted.spec.adapters[1]


async def test_failed_fetch_of_one_copy_releases_and_cancels_the_others() -> None:
    closed, removed, began = list[str](), list[str](), asyncio.Event()

    class Came:
        def close(self) -> None:
            closed.append("came")

    async def comes() -> Copy_:
        return cast("Copy_", Came())

    async def waits() -> Copy_:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            removed.append("waits")
        raise AssertionError

    async def fails() -> Copy_:
        await began.wait()
        raise RegistryError("away")

    with pytest.raises(RegistryError, match="away"):
        await gather_copies([comes(), waits(), fails()])
    assert (closed, removed) == (["came"], ["waits"])


def test_progress_of_several_pulls_for_one_start_is_summed() -> None:
    messages, now_s = list[str](), [0.0]
    telling = PullProgress(messages.append, lambda: now_s[0])
    telling.of(Part("a"))(Came(1 << 20, 4 << 20, 1 << 20))
    telling.of(Part("b"))(Came(1 << 20, 8 << 20, 1 << 20))
    now_s[0] = PROGRESS_EVERY_S
    telling.of(Part("b"))(Came(2 << 20, 8 << 20, 1 << 20))
    assert messages == ["1Mi of 4Mi, 1Mi a second", "3Mi of 12Mi, 2Mi a second"]


UNSAFE = {"model.safetensors": as_safetensors(b""), "config.json": b"{}", "modeling.py": b"print()"}


async def test_unsafe_weights_are_used_only_by_models_that_allow_them(tmp_path: Path) -> None:
    folder = packed_models.model(tmp_path / "m", UNSAFE)
    oci_layout.write_layout(tmp_path / "layout", plan_artifact(folder, allow_unsafe=True), "modelpack", "v1")
    with packed_models.served(tmp_path / "layout") as host:
        one, of = at(tmp_path, Registries()), f"oci://{host}/{packed_models.NAME}:v1"
        strict = model(of, engine="vllm")
        allows = model(of, engine="vllm", allow_unsafe=True)
        with pytest.raises(RefusedError, match=f"code is not accepted.*{re.escape(ALLOW)}"):
            await one(strict, lambda _: None)  # type: ignore[misc]  # the store brings it
        for _ in range(2):
            held = await one(allows, lambda _: None)  # type: ignore[misc]  # the store brings it
            assert (Path((held.model.spec.artifact or "").removeprefix("file://")) / "modeling.py").exists()
            held.close()
        assert one.located(allows) == held.model
        assert one.located(strict) is strict
        with pytest.raises(RefusedError, match=f"^{re.escape(of)} contains code or pickled.*{re.escape(ALLOW)}$"):
            await one(strict, lambda _: None)  # type: ignore[misc]  # the store brings it
        assert strict.spec_hash() != allows.spec_hash()


async def test_hub_code_is_fetched_only_for_models_that_allow_unsafe(tmp_path: Path) -> None:
    async with FakeHub(UNSAFE, {}).both() as hub:
        ways = Registries(pace=StillClock())
        one = Supply(tmp_path / "weights", Weights(), ways, {**hub.env(), "HF_HOME": str(tmp_path)})
        for allow, names in (
            (False, {*UNSAFE} - {"modeling.py"}),
            (True, {*UNSAFE}),
            (False, {*UNSAFE} - {"modeling.py"}),
        ):
            wanted = model("hf://acme/tiny@main", engine="vllm", allow_unsafe=allow)
            held = await one(wanted, lambda _: None)  # type: ignore[misc]  # the store brings it
            assert {path.name for path in Path((held.model.spec.artifact or "")[7:]).iterdir()} == names
            held.close()


async def test_failed_header_read_is_retried_until_the_registry_has_the_tag(tmp_path: Path) -> None:
    """At first the tag does not exist: the reason is reported, and the memory is known once it exists."""
    (tmp_path / "m").mkdir()
    tiny_gguf.make_model(tmp_path / "m" / "a.gguf", "one two")
    packed_models.packed(tmp_path / "m", tmp_path / "layout")
    now_s, read = [0.0], asyncio.Event()
    with packed_models.served(tmp_path / "layout") as host:
        wanted = model(f"oci://{host}/{packed_models.NAME}:v2")
        one = Supply(tmp_path / "weights", Weights(), Registries(), clock=lambda: now_s[0])
        loop = Listening(world([wanted], [device("g1", 80, "n1")], []))

        async def read_again() -> None:
            read.set()

        running = asyncio.create_task(one.run(loop, read_again))
        async with asyncio.timeout(90):
            while not loop.observed:
                await asyncio.sleep(0.01)
            reported = loop.observed[-1]
            assert isinstance(reported, CopiesSeen)
            assert reported.failed == {wanted.spec.artifact: f"{host}: there is no manifest v2 of {packed_models.NAME}"}
            async with Client(Site(host)) as client:
                await packed_models.push(client, OciLayout(tmp_path / "layout"), tag="v2")
            now_s[0] = FIRST_S
            one._changed.set()
            await read.wait()
            while loop.observed[-1] != CopiesSeen(copies=frozenset()):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (one.located(wanted).spec.artifact or "").startswith("file://")


async def test_weights_replaced_at_the_source_are_fetched_again(tmp_path: Path) -> None:
    async with FakeHub({}, {"a.gguf": b"GGUF"}).both() as hub:
        hub.gated = "auto"
        env = {**hub.env(TOKEN), "HF_HOME": str(tmp_path)}
        one, requests = (
            Supply(tmp_path / "weights", Weights(), Registries(pace=StillClock()), env),
            model("hf://acme/tiny"),
        )
        (await one(requests, lambda _: None)).close()  # type: ignore[misc]  # the store brings it
        hub.large = {"b.gguf": b"GGUF anew"}
        shutil.rmtree(tmp_path / "weights" / "permits")  # each start is checked again
        held = await one(requests, lambda _: None)  # type: ignore[misc]  # the store brings it
        assert Path((held.model.spec.artifact or "").removeprefix("file://")).name == "b.gguf"
        held.close()
