"""An exception while an object is decoded: what is contained, what is not, and what stays in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import cast

import pytest

from autoscaler.documents.parse import read_document
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, Installation
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher
from autoscaler.kubernetes.resources.kubeai_watcher import KUBEAI, KubeaiModels
from autoscaler.kubernetes.resources.undecoded_models import describe_unconverted, describe_undecoded
from autoscaler.kubernetes.watch import ObjectKey
from autoscaler.routing.catalogue import model_entry
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model, ModelSpec, Queue
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.tenant import Tenant
from tests.support.fakes.kubernetes.api_server import Server

KEY, ORIGIN = ObjectKey("n", "b"), Origin(CUSTOMS, "n", "b")


def found(name: str, generation: int = 1, **spec: object) -> Object:
    """A Model object."""
    metadata = {
        "name": name, "namespace": "n", "uid": f"uid-{name}", "generation": generation,
        "resourceVersion": str(generation), "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"engine": "vllm", "artifact": "hf://o/n", **spec}, "status": {}}


class Parser:
    """Decodes documents; raises `error` for the Model `b`."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, document: object) -> Model | Tenant:
        assert isinstance(document, dict)
        self.calls += 1
        if self.error is not None and document["metadata"]["name"] == "b":
            raise self.error
        return read_document(document)

    def convert(self, document: object) -> tuple[Model | None, str, tuple[str, ...]]:
        """As a converter of KubeAI's Models."""
        assert isinstance(document, dict)
        head = {"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": "b", "namespace": "n"}}
        made = self({**head, "spec": document["spec"]})
        assert isinstance(made, Model)
        return made, "", ()


async def read(server: Server, parser: Parser) -> tuple[DocumentWatcher, Installation]:
    """Read all objects of the server, and then its stream."""
    installation = Installation(lambda *_: None, (CUSTOMS,))
    watcher = DocumentWatcher(cast("Api", server), parser, installation, ["n"], tenants=False)
    await run(server, watcher.run, lambda: len(watcher.models) == len(server.truth))
    return watcher, installation


async def run(
    server: Server, watch: Callable[[], Coroutine[object, object, None]], holds: Callable[[], bool]
) -> None:  # fmt: skip
    """Watch until the stream has ended and `holds` is true, or until an exception ends the watch."""
    task = asyncio.create_task(watch())
    async with asyncio.timeout(60):
        while not (task.done() or (holds() and server.idle.is_set())):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
        raise ended


async def test_model_that_raises_when_decoded_is_faulty_until_a_retry() -> None:
    server, parser = Server(), Parser(KeyError("odd"))
    server.truth = {name: found(name) for name in ("a", "b")}
    server.stream = [("MODIFIED", found("b") | {"status": {"observedGeneration": 1}})]
    watcher, installation = await read(server, parser)
    assert parser.calls == 2, "a changed status is not a changed document"
    assert not [*server.unreadable]
    assert not watcher.wrong
    assert [*installation.faults] == ["b"]
    assert "KeyError" in installation.faults[next(iter(installation.faults))].reason
    assert {one.name for one in installation.settled.models} == {"a", "b"}
    parser.error = None
    watcher.retry({Origin(CUSTOMS, "n", "a")})
    assert (parser.calls, [*installation.faults]) == (2, ["b"]), "the quarantine of another Model ended"
    watcher.retry({ORIGIN})
    assert (parser.calls, installation.faults) == (3, {})
    kept = watcher.models[KEY]
    assert (kept.undecoded, kept.model is not None, kept.in_force) == (None, True, kept.model)


async def test_last_valid_model_version_stays_active_if_the_next_one_raises() -> None:
    server, parser = Server(), Parser(None)
    server.truth = {"b": found("b", slots=3)}
    watcher, installation = await read(server, parser)
    parser.error = KeyError("odd")
    server.idle.clear()
    server.stream = [("MODIFIED", found("b", 2, slots=4))]
    await run(server, watcher.run, lambda: watcher.models[KEY].generation == 2)
    (model,) = installation.settled.models
    assert (model.slots, [*installation.faults]) == (3, ["b"])


async def test_memory_error_while_decoding_a_model_ends_the_watch() -> None:
    server = Server()
    server.truth = {"b": found("b")}
    with pytest.raises(ExceptionGroup) as caught:
        await read(server, Parser(cast("Exception", MemoryError())))
    assert caught.value.subgroup(MemoryError) is not None


async def test_object_without_valid_metadata_is_unreadable(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    odd = found("b")
    odd["metadata"]["creationTimestamp"] = "soon"
    server.truth = {"a": found("a"), "b": odd}
    installation = Installation(lambda *_: None, (CUSTOMS,))
    watcher = DocumentWatcher(cast("Api", server), Parser(KeyError("odd")), installation, ["n"], tenants=False)
    await run(server, watcher.run, lambda: bool(watcher.models))
    (line,) = [line for line in caplog.messages if line.startswith("event=unreadable_object")]
    assert "namespace=n name=b " in line
    assert "Invalid isoformat" in line
    assert [one.name for one in installation.settled.models] == ["a"]


async def test_kubeai_model_whose_conversion_raises_is_faulty_until_a_retry() -> None:
    server, parser = Server(), Parser(KeyError("odd"))
    server.truth = {"b": found("b")}
    installation = Installation(lambda *_: None, (KUBEAI,))
    models = KubeaiModels(cast("Api", server), parser.convert, installation, ["n"])
    await run(server, models.run, lambda: bool(models.found))
    assert ([*installation.faults], [one.name for one in installation.settled.models]) == (["b"], ["b"])
    parser.error = None
    models.retry({Origin(KUBEAI, "n", "b")})
    assert installation.faults == {}
    assert models.found[KEY].model is not None


@pytest.mark.parametrize(
    ("spec", "tenants", "installation"),
    [
        ({}, None, None),
        ({"tenants": ["acme"], "installation": "n/l"}, ("acme",), "n/l"),
        ({"tenants": "acme", "installation": 7}, (), None),
        ({"tenants": ["acme", 7]}, ("acme",), None),
        ("text", None, None),
    ],
)
def test_undecodable_model_keeps_its_valid_tenants_and_installation(
    spec: object, tenants: object, installation: object
) -> None:
    stand_in = describe_undecoded({**found("b"), "spec": spec}, KeyError("odd")).stand_in
    assert (stand_in.name, stand_in.namespace, stand_in.uid) == ("b", "n", "uid-b")
    assert (stand_in.spec.tenants, stand_in.spec.installation) == (tenants, installation)
    assert not stand_in.spec.paused, "its ready replicas serve requests"


NAMED = {"name": "x", "artifact": "hf://o/x"}


@pytest.mark.parametrize(
    ("queue", "calls_max"), [({"callsMax": 5}, 5), ({"callsMax": -1}, 1000), ("broken", 1000), (None, 1000)]
)
def test_undecodable_model_keeps_a_valid_queue_limit_or_gets_the_default(queue: object, calls_max: int) -> None:
    stand_in = describe_undecoded({**found("b"), "spec": {"queue": queue}}, KeyError("odd")).stand_in
    assert stand_in.spec.queue == Queue(calls_max=calls_max)


@pytest.mark.parametrize(
    ("spec", "engine", "names"),
    [
        ({"engine": "vllm", "aliases": ["c"], "adapters": [NAMED]}, "vllm", ["b", "c", "b:x", "c:x"]),
        ({"engine": "quantum", "aliases": ["c"]}, "command", ["b", "c"]),
        ({"engine": ["vllm"], "aliases": "c", "adapters": {"x": 1}}, "command", ["b"]),
        ({"engine": "vllm", "aliases": ["c", "a<b"], "adapters": [NAMED, {"name": 7}]}, "vllm", ["b"]),
        ({"engine": "vllm", "aliases": ["b"], "adapters": [NAMED]}, "vllm", ["b"]),
        ({"engine": "vllm", "aliases": ["c"], "adapters": [NAMED, NAMED]}, "vllm", ["b", "c"]),
        ({"engine": "vllm", "adapters": [{"name": "x/y"}]}, "vllm", ["b"]),
        ({"engine": "ollama", "adapters": [NAMED]}, "ollama", ["b"]),
    ],
)
def test_undecodable_model_keeps_a_known_engine_and_its_valid_names(
    spec: object, engine: str, names: list[str]
) -> None:
    stand_in = describe_undecoded({**found("b"), "spec": spec}, KeyError("odd")).stand_in
    assert stand_in.spec.engine == engine
    assert [*stand_in.names(), *stand_in.adapter_names()] == names
    assert model_entry(stand_in).takes_cache_salt == (engine == "vllm")


def test_unconvertible_kubeai_model_keeps_only_its_name_and_namespace() -> None:
    spec = {"engine": "VLLM", "tenants": ["acme"], "installation": "n/l", "aliases": ["c"]}
    stand_in = describe_unconverted({**found("b"), "spec": spec}, KeyError("odd")).stand_in
    assert (stand_in.name, stand_in.namespace, stand_in.uid) == ("b", "n", ""), "KubeAI's objects own no pods of ours"
    assert stand_in.spec == ModelSpec(engine="command")
