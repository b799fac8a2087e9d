"""Unmodified official `openai` and `anthropic` clients, through `serve`, with the real engine and two real models.

The device holds only one model at a time, so each switch is a cold start that is transparent to the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from loadtest import tiny_gguf
from tests.support.harness.serve.serve import API, Document, Serving, fake, model, serving
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("real engine")

SENTENCES = {
    "ada": "Hello, I am Ada, asleep until you called.",
    "bob": "Bob here, I wake whenever somebody asks for me.",
}
ASK: Any = {"role": "user", "content": "Who is there?"}
"""A message; each of the two clients has its own type for it."""
KEYS = {"acme": "pl-acme-key", "lab": "pl-lab-key"}


def real(folder: Path, name: str, *args: str, memory: str = "64Mi", **spec: object) -> Document:
    """Return a Model of the real engine that generates its sentence."""
    tiny_gguf.make_model(folder / f"{name}.gguf", SENTENCES.get(name, f"Only {name} writes this."))
    artifact = f"file://{folder}/{name}.gguf"
    return model(
        name, engine="llama.cpp", artifact=artifact, args=["--threads=1", *args], gpu={"memory": memory}, **spec
    )


class Clients(NamedTuple):
    """Both clients of one `serve`, with their own defaults except for the key."""

    one: Serving
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients_of(one: Serving, key: str = "none-needed", max_retries: int = 2) -> AsyncIterator[Clients]:
    """Create both clients and close them at the end; 2 is their own default."""
    async with (
        openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=key, max_retries=max_retries) as first,
        anthropic.AsyncAnthropic(base_url=one.url, api_key=key, max_retries=max_retries) as second,
    ):
        yield Clients(one, first, second)


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    """Serve two Models that cannot run together, and one for embeddings."""
    documents = [
        real(tmp_path, "ada", aliases=["gpt-4o-mini", "lab/ada:v1"]),
        real(tmp_path, "bob"),
        real(tmp_path, "emb", "--embeddings", memory="30Mi"),
    ]
    async with serving(tmp_path, *documents, options=("--gateways", "2")) as one, clients_of(one) as both:
        yield both


@pytest.mark.standard
async def test_openai_client_gets_chat_answers_across_cold_starts(clients: Clients) -> None:
    api = clients.openai.chat.completions
    for name in ("ada", "bob", "ada"):
        whole = await api.create(model=name, messages=[ASK])
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SENTENCES[name], "stop")
        assert whole.model == name
        assert whole.usage is not None
        stream = await api.create(model=name, messages=[ASK], stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SENTENCES[name]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"
    assert clients.one.starts("ada") + clients.one.starts("bob") == 3


async def test_openai_concurrent_requests_for_two_models_all_complete(clients: Clients) -> None:
    async def ask(name: str) -> str | None:
        answer = await clients.openai.chat.completions.create(model=name, messages=[ASK])
        return answer.choices[0].message.content

    names = ["ada", "bob"] * 6
    assert await asyncio.gather(*map(ask, names)) == [SENTENCES[name] for name in names]


async def test_openai_client_gets_answers_from_models_embeddings_and_responses(clients: Clients) -> None:
    api = clients.openai
    listed = await api.models.list()
    assert [entry.id for entry in listed.data] == ["ada", "bob", "emb"]
    retrieved = await api.models.retrieve("ada")
    assert (retrieved.id, retrieved.object) == ("ada", "model")
    assert (await api.models.retrieve("lab/ada:v1")).id == "ada", "which the client sends percent-encoded"
    assert clients.one.starts("ada") == 0, "listing models starts no replica"
    embedded = await api.embeddings.create(model="emb", input=["one", "two words"])
    assert len(embedded.data) == 2
    assert len(embedded.data[0].embedding) > 100
    completed = await api.completions.create(model="ada", prompt="Once", max_tokens=5)
    assert completed.choices[0].finish_reason == "length"
    by_alias = await api.chat.completions.create(model="gpt-4o-mini", messages=[ASK])
    assert by_alias.choices[0].message.content == SENTENCES["ada"]
    response = await api.responses.create(model="ada", input="Who is there?")
    assert response.output_text == SENTENCES["ada"]
    stream = await api.chat.completions.create(
        model="ada", messages=[ASK], stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage async for chunk in stream]
    assert usage[-1] is not None
    assert usage[-1].completion_tokens == 9, "asked for, so it is passed on"


async def test_azure_client_with_the_model_in_the_path_gets_its_answer(clients: Clients) -> None:
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=clients.one.url, api_key="none-needed", api_version="2024-10-21"
    ) as api:
        for name in ("ada", "lab/ada:v1"):
            answer = await api.chat.completions.create(model=name, messages=[ASK])
            assert answer.choices[0].message.content == SENTENCES["ada"]


def test_request_of_the_synchronous_openai_client_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, real(tmp_path, "ada")) as one:
            with openai.OpenAI(base_url=f"{one.url}/v1", api_key="x") as client:
                answer = await asyncio.to_thread(client.chat.completions.create, model="ada", messages=[ASK])
            assert answer.choices[0].message.content == SENTENCES["ada"]

    asyncio.run(scenario())


@pytest.mark.standard
async def test_anthropic_client_gets_messages_streams_and_token_counts(clients: Clients) -> None:
    api = clients.anthropic.messages
    for name in ("ada", "bob"):
        whole = await api.create(model=name, max_tokens=50, messages=[ASK])
        assert (whole.content[0].type, whole.stop_reason, whole.model) == ("text", "end_turn", name)
        assert getattr(whole.content[0], "text", "") == SENTENCES[name]
        async with api.stream(model=name, max_tokens=50, messages=[ASK]) as stream:
            assert "".join([text async for text in stream.text_stream]) == SENTENCES[name]
            assert (await stream.get_final_message()).stop_reason == "end_turn"
    counted = await api.count_tokens(model="bob", messages=[ASK])
    assert counted.input_tokens > 0


async def test_http_errors_raise_the_matching_exception_of_each_client(clients: Clients) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await clients.openai.chat.completions.create(model="nobody", messages=[ASK])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.NotFoundError):
        await clients.openai.models.retrieve("nobody")
    with pytest.raises(anthropic.NotFoundError):
        await clients.anthropic.messages.create(model="nobody", max_tokens=5, messages=[ASK])
    with pytest.raises(openai.NotFoundError):
        await clients.openai.post("/nowhere", body={"model": "ada"}, cast_to=object)
    with pytest.raises(openai.BadRequestError):
        await clients.openai.post("/chat/completions", body={"messages": []}, cast_to=object)


def tenant(name: str, **spec: object) -> Document:
    """Return a Tenant document with its key."""
    keys = [{"name": "only", "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest()}]
    return {"apiVersion": API, "kind": "Tenant", "metadata": {"name": name}, "spec": {"keys": keys, **spec}}


async def test_tenant_key_hides_models_that_are_reserved_for_other_tenants(tmp_path: Path) -> None:
    documents = [
        real(tmp_path, "ada", tenants=["acme"]),
        real(tmp_path, "bob", memory="30Mi"),
        tenant("acme"),
        tenant("lab"),
    ]
    async with serving(tmp_path, *documents, options=("--gateways", "2")) as one:
        for key in ("wrong", KEYS["lab"] + "x"):
            async with clients_of(one, key) as unauthorized:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await unauthorized.openai.chat.completions.create(model="bob", messages=[ASK])
                assert refused.value.code == "invalid_api_key"
                with pytest.raises(openai.AuthenticationError):
                    await unauthorized.openai.models.list()
                with pytest.raises(anthropic.AuthenticationError):
                    await unauthorized.anthropic.messages.create(model="bob", max_tokens=9, messages=[ASK])
        async with clients_of(one, KEYS["acme"]) as acme, clients_of(one, KEYS["lab"]) as lab:
            await permitted(acme, lab)
        for path in one.state.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, which has its final name now
                kept = path.read_bytes() if path.is_file() else b""
                assert not any(key.encode() in kept for key in KEYS.values()), path
        assert not any(key in one.output() for key in KEYS.values())


async def permitted(acme: Clients, lab: Clients) -> None:
    """Assert that each Tenant sees and calls what it may."""
    assert [entry.id for entry in (await acme.openai.models.list()).data] == ["ada", "bob"]
    assert [entry.id for entry in (await lab.openai.models.list()).data] == ["bob"]
    with pytest.raises(openai.NotFoundError) as hidden:
        await lab.openai.chat.completions.create(model="ada", messages=[ASK])
    assert hidden.value.code == "model_not_found", "not 403: it does not exist for them"
    mine = await acme.openai.chat.completions.create(model="ada", messages=[ASK])
    assert mine.choices[0].message.content == SENTENCES["ada"]
    foreign = await lab.anthropic.messages.create(model="bob", max_tokens=50, messages=[ASK])
    assert getattr(foreign.content[0], "text", "") == SENTENCES["bob"]


async def test_failed_start_and_full_queue_raise_the_matching_client_errors(tmp_path: Path) -> None:
    removed = model("gone", engine="llama.cpp", artifact=f"file://{tmp_path}/gone.gguf")
    full = fake(tmp_path, "full", "--start-delay", "3600", queue={"callsMax": 0})
    async with serving(tmp_path, removed, full) as one, clients_of(one, max_retries=0) as strict:
        with pytest.raises(openai.InternalServerError) as failed:
            await strict.openai.chat.completions.create(model="gone", messages=[ASK])
        assert (failed.value.status_code, failed.value.code) == (503, "model_start_failed")
        with pytest.raises(openai.RateLimitError) as limited:
            await strict.openai.chat.completions.create(model="full", messages=[ASK])
        assert limited.value.code == "queue_full"
        with pytest.raises(anthropic.InternalServerError):
            await strict.anthropic.messages.create(model="gone", max_tokens=5, messages=[ASK])


async def test_engine_killed_mid_stream_raises_one_api_error(tmp_path: Path) -> None:
    """Uses the fake engine, since the real one finishes its sentence before it can be killed.

    The stream is so long that it has not ended after a pause of this process.
    """
    slow = fake(tmp_path, "slow", "--tokens-per-s", "1", "--tokens", "100")
    async with serving(tmp_path, slow) as one, clients_of(one) as clients:
        stream = await clients.openai.chat.completions.create(model="slow", messages=[ASK], stream=True)
        seen = [await anext(stream) for _ in range(3)]
        os.kill(one.engines()[0], signal.SIGKILL)
        with pytest.raises(openai.APIError) as broken:
            seen += [chunk async for chunk in stream]
        assert broken.value.code == "upstream_error"
        assert len(seen) < 100
        await until("it is at zero", lambda: not one.engines())
