"""Adapters through a real `serve`: `model:adapter` generates another sentence than its model, for permitted callers.

The engine is the real llama.cpp server with real LoRA adapters; a parrot records what a custom engine receives.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from artifacts.store.store import Store
from autoscaler.contract import ModelName
from autoscaler.engines import build_launch_command
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.spec.model import Adapter, Model, ModelSpec
from loadtest import tiny_gguf
from tests.support.builders.artifacts import packed_models
from tests.support.builders.tiny_adapter import make_adapter
from tests.support.fakes.engines.echo_engine import command, seen
from tests.support.harness.serve.client_load import Crowd, chat, counted
from tests.support.harness.serve.serve import API, Document, Serving, model, serving, settings
from tests.support.net.origin_client import listens
from tests.support.net.ports import free_port

pytestmark = pytest.mark.xdist_group("real engine")

SENTENCE = "Hello, I am Ada, asleep until you called."
ADAPTED = {"polite": "Hello, you called. I am Ada,", "curt": "Hello, until called."}
SAID = {"ada": SENTENCE, **{f"ada:{name}": sentence for name, sentence in ADAPTED.items()}}
KEYS = {"acme": "pl-acme-key", "lab": "pl-lab-key"}
ASK: Any = {"role": "user", "content": "Who is there?"}
"""A message; the client has its own type for it."""


def files(folder: Path) -> list[dict[str, str]]:
    """Write the model and its adapters; return the adapters as a document lists them."""
    folder.mkdir(exist_ok=True)
    tiny_gguf.make_model(folder / "ada.gguf", SENTENCE)
    for name, sentence in ADAPTED.items():
        make_adapter(folder / f"{name}.gguf", SENTENCE, sentence)
    return [{"name": name, "artifact": f"file://{folder}/{name}.gguf"} for name in ADAPTED]


def ada(folder: Path, elsewhere: Mapping[str, str] | None = None, **spec: object) -> Document:
    """Return the Model with both adapters. `elsewhere`: the locations of adapters that are not files."""
    adapters = [one | {"artifact": (elsewhere or {}).get(one["name"], one["artifact"])} for one in files(folder)]
    weights = {"artifact": f"file://{folder}/ada.gguf", "args": ["--threads=1"], "adapters": adapters}
    return model("ada", engine="llama.cpp", **weights, **spec)


def tenant(name: str, **spec: object) -> Document:
    """Return a Tenant document with its key."""
    keys = [{"name": "only", "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest()}]
    return {"apiVersion": API, "kind": "Tenant", "metadata": {"name": name}, "spec": {"keys": keys, **spec}}


@asynccontextmanager
async def client(one: Serving, key: str = "none-needed") -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    url = f"{one.url}/v1"
    # By default a connect may take 5 s. A busy machine may pause this process for longer.
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600) as api:
        yield api


async def response_text(api: openai.AsyncOpenAI, name: str, **extra: object) -> str | None:
    """Return the text that a Model, or one of its adapters, generates."""
    answer = await api.chat.completions.create(model=name, messages=[ASK], extra_body=extra)
    return answer.choices[0].message.content


async def test_request_for_an_adapter_is_answered_by_that_adapter(tmp_path: Path) -> None:
    """By the Model's name and an alias, complete and streamed, small and large, one after the other in one slot."""
    async with serving(tmp_path, ada(tmp_path, aliases=["gpt"], slots=1)) as one, client(one) as api:
        for name, sentence in [*SAID.items(), *SAID.items()]:
            assert await response_text(api, name) == sentence
            assert await response_text(api, name.replace("ada", "gpt")) == sentence
            stream = await api.chat.completions.create(model=name, messages=[ASK], stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == sentence
        assert await response_text(api, "ada:curt", x_note="x" * 300_000) == ADAPTED["curt"]
        answer = await api.responses.create(model="ada:polite", input="Who is there?")
        assert answer.output_text == ADAPTED["polite"]
        assert one.starts("ada") == 1
        assert counted(one, "pilotlight_calls_total", 'model="ada"') == counted(one, "pilotlight_calls_total")
        for path in ("embeddings", "images/generations"):
            with pytest.raises(openai.BadRequestError, match="adapters"):
                await api.post(f"/{path}", body={"model": "ada:curt", "input": "x"}, cast_to=object)


@pytest.mark.case("45")
@pytest.mark.standard
async def test_adapter_of_a_forbidden_model_is_rejected_with_404(tmp_path: Path) -> None:
    """For B, A's Model does not exist: not by name, not in the list, not by an engine's own adapter selection."""
    bob = model("bob", engine="command", command=command(tmp_path / "seen.jsonl"))
    documents = (ada(tmp_path), bob, tenant("acme", models=["ada"]), tenant("lab", models=["bob"]))
    async with serving(tmp_path, *documents, options=("--gateways", "2")) as one, Crowd(one) as crowd:
        async with client(one, KEYS["acme"]) as acme, client(one, KEYS["lab"]) as lab:
            assert [entry.id for entry in (await acme.models.list()).data] == ["ada", "ada:polite", "ada:curt"]
            assert (await acme.models.retrieve("ada:curt")).id == "ada:curt"
            assert [entry.id for entry in (await lab.models.list()).data] == ["bob"]
            with pytest.raises(openai.NotFoundError):
                await lab.models.retrieve("ada:curt")
            assert await response_text(acme, "ada:curt") == ADAPTED["curt"]
        answers = []
        for name in ("ada:curt", "ada:none", "nobody:curt", "bob:curt"):
            head, _, body = (await crowd.ask(chat(name, key=KEYS["lab"], close=True))).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 404 ")
            answers.append(body)
        assert len({*answers}) == 1, "the same for what it may not call and for what there is not"
        assert b"curt" not in answers[0]
        for key, name in (("acme", "ada"), ("lab", "bob")):
            chosen = chat(name, key=KEYS[key], close=True, lora=[{"id": 1, "scale": 1.0}])
            assert (await crowd.ask(chosen)).startswith(b"HTTP/1.1 400 ")
        for path in (b"/v1/load_lora_adapter", b"/lora-adapters"):
            request = chat("ada", key=KEYS["acme"], close=True).replace(b"/v1/chat/completions", path)
            assert (await crowd.ask(request)).startswith(b"HTTP/1.1 404 ")
    assert not seen(tmp_path / "seen.jsonl")


async def test_command_engine_receives_the_adapter_name_in_the_model_field(tmp_path: Path) -> None:
    own = {"engine": "command", "command": command(tmp_path / "seen.jsonl"), "aliases": ["gpt"]}
    eve = model("eve", adapters=[{"name": "support", "artifact": "file:///not/looked/at"}], **own)
    async with serving(tmp_path, eve) as one, Crowd(one) as crowd:
        for name in ("eve", "eve:support", "gpt:support"):
            assert (await crowd.ask(chat(name, close=True))).startswith(b"HTTP/1.1 200 ")
        rows = one.get("/api/v1/status")
        assert isinstance(rows, list)
        assert rows[0]["adapters"] == ["support"]
        found = one.get("/api/v1/models/gpt:support")
        assert isinstance(found, dict)
        assert (found["name"], found["adapters"]) == ("eve", ["support"])
        shown = [sys.executable, "-m", "pilotlight", "status", "eve:support", "--ops", one.ops]
        table = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60).stdout
        assert "eve (+support)" in table
    sent = [json.loads(call.body) for call in seen(tmp_path / "seen.jsonl")]
    assert [body["model"] for body in sent] == ["eve", "support", "support"]
    assert not any("lora" in body for body in sent)


def pushed(folder: Path, file: Path) -> Path:
    """Create the layout of an artifact that contains only this file."""
    source = packed_models.model(folder / f"{file.stem}.model", {f"lora-{file.name}": file.read_bytes()})
    packed_models.packed(source, folder / f"{file.stem}.layout")
    return folder / f"{file.stem}.layout"


async def test_pulled_adapter_is_in_use_until_its_engine_stops(tmp_path: Path) -> None:
    """One adapter is a local file, as before; only the other one is pulled.
    The second start sends no request to the registry.
    """
    seen_there = list[str]()
    files(tmp_path)
    with packed_models.served(pushed(tmp_path, tmp_path / "curt.gguf"), seen_there) as host:
        # The idle time is longer than a pause of this process, during which the engine must not stop.
        document = ada(tmp_path, {"curt": f"oci://{host}/{packed_models.NAME}:v1"}, idleSeconds=25)
        async with serving(tmp_path, settings("4Gi"), document) as one, client(one) as api:
            store = Store(one.state / "weights")
            assert await response_text(api, "ada:curt") == ADAPTED["curt"]
            assert [row.in_use for row in store.rows()] == [True]
            for name, sentence in SAID.items():
                assert await response_text(api, name) == sentence
            await one.zero("ada")
            assert [row.in_use for row in store.rows()] == [False]
            assert seen_there
            seen_there.clear()
            assert await response_text(api, "ada:curt") == ADAPTED["curt"]
            assert one.starts("ada") == 2
            assert not seen_there


async def test_failed_adapter_pull_fails_the_start_with_the_adapter_name(tmp_path: Path) -> None:
    files(tmp_path)
    with packed_models.served(pushed(tmp_path, tmp_path / "curt.gguf")) as host:
        document = ada(tmp_path, {"curt": f"oci://{host}/{packed_models.NAME}:none"}, start={"retries": 0})
        async with serving(tmp_path, settings("4Gi"), document) as one, client(one) as api:
            with pytest.raises(openai.InternalServerError):
                await response_text(api, "ada")
            failed = [move.reason for move in one.moves("ada") if move.state == "failed"]
            assert failed == [f"its weights: adapter curt: {host}: there is no manifest none of {packed_models.NAME}"]


async def test_missing_adapter_file_fails_the_start_with_its_path(tmp_path: Path) -> None:
    document = ada(tmp_path)
    (tmp_path / "curt.gguf").unlink()
    async with serving(tmp_path, document) as one, client(one) as api:
        with pytest.raises(openai.InternalServerError) as failed:
            await response_text(api, "ada")
        assert failed.value.code == "model_start_failed"
        assert f"Model ada cannot start: adapter {tmp_path}/curt.gguf does not exist" in one.output()


# --- the engine alone: why every request selects its adapter ---------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """Start the real server with one slot and without a gateway."""
    adapters = tuple(Adapter(**adapter) for adapter in files(tmp_path))
    spec = ModelSpec(
        engine="llama.cpp", artifact=f"file://{tmp_path}/ada.gguf", args=("--threads=1",), adapters=adapters
    )
    port, installed = free_port(), {"xllamacpp": find_installed_programs()["xllamacpp"]}
    start = build_launch_command(Model(name=ModelName("ada"), spec=spec, slots=1), None, "127.0.0.1", port, installed)
    with subprocess.Popen(start.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            listens(port, process, start.readiness_path)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as api:
                yield api
        finally:
            process.kill()


def prompted(engine: openai.OpenAI, content: str, lora: object) -> tuple[str | None, int]:
    """Return the generated text, and how many prompt tokens were reused from the cache."""
    extra = {} if lora is None else {"lora": lora}
    messages: Any = [{"role": "user", "content": content}]
    answer = engine.chat.completions.create(model="ada", messages=messages, extra_body=extra)
    timings = (answer.model_extra or {})["timings"]
    return answer.choices[0].message.content, timings["cache_n"]


def choice(position: int, scale: int) -> object:
    return [{"id": position, "scale": scale}]


def test_prompt_cache_is_not_shared_between_adapters(engine: openai.OpenAI) -> None:
    """The options are those of `model_entry` for gateways, with the host memory prompt cache off.
    Responses are exact, since the prompt of another adapter is recomputed and one of the same adapter is reused.
    """
    first, second = "one " * 40, "two " * 40
    for lora, sentence in (
        (choice(0, 0), SENTENCE),
        (choice(0, 1), ADAPTED["polite"]),
        (choice(1, 1), ADAPTED["curt"]),
        (choice(0, 0), SENTENCE),
    ):
        assert prompted(engine, first, lora) == (sentence, 0)
        text, cached = prompted(engine, first, lora)
        assert text == sentence
        assert cached > 100
    assert prompted(engine, second, choice(0, 1)) == (ADAPTED["polite"], 0)
    assert prompted(engine, first, choice(0, 1)) == (ADAPTED["polite"], 0), "nothing kept it for the Model's own"


def test_request_without_an_adapter_choice_reuses_an_adapter_prompt_cache(engine: openai.OpenAI) -> None:
    """It is why every request selects its adapter. If this test fails, `ModelEntry.lora` may be unnecessary."""
    content = "one " * 40
    assert prompted(engine, content, choice(0, 1))[1] == 0
    assert prompted(engine, content, None)[1] > 100
