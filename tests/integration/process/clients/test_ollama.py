"""The unmodified `ollama` client for Python, through `serve`, with the real llama.cpp engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from loadtest import tiny_gguf
from tests.support.harness.serve.serve import Document, Serving, fake, model, serving, settings

pytestmark = pytest.mark.xdist_group("real engine")

SENTENCE = "Hello, I am Ada, asleep until you called."
MESSAGES: Any = [{"role": "user", "content": "Who is there?"}]


def real(folder: Path, name: str, *args: str, **spec: object) -> Document:
    """Return a Model of the real engine that generates the sentence."""
    tiny_gguf.make_model(folder / f"{name}.gguf", SENTENCE)
    artifact = f"file://{folder}/{name}.gguf"
    return model(
        name, engine="llama.cpp", artifact=artifact, args=["--threads=1", *args], gpu={"memory": "30Mi"}, **spec
    )


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Serving]:
    documents = [real(tmp_path, "ada", aliases=["ada:8b"]), real(tmp_path, "emb", "--embeddings")]
    async with serving(tmp_path, *documents) as serve:
        yield serve


@pytest.fixture
async def client(one: Serving) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=one.url) as made:
        yield made


async def read_stream(client: ollama.AsyncClient, name: str) -> list[ollama.ChatResponse]:
    return [part async for part in await client.chat(model=name, messages=MESSAGES, stream=True)]


@pytest.mark.standard
async def test_ollama_client_chat_generate_embed_and_list_calls_succeed(
    one: Serving, client: ollama.AsyncClient
) -> None:
    assert [row.model for row in (await client.list()).models] == ["ada:latest", "emb:latest"]
    assert (await client.ps()).models == []
    assert (await client.show("ada:latest")).capabilities == ["completion", "tools"]
    assert one.starts("ada") == 0, "lists start no replica"

    whole = await client.chat(model="ada", messages=MESSAGES, keep_alive="10m")
    assert (whole.message.content, whole.done, whole.done_reason) == (SENTENCE, True, "stop")
    assert whole.eval_count == 9
    assert whole.load_duration is not None
    assert 0 < whole.load_duration < (whole.total_duration or 0), "it was a cold start"
    for name in ("ada", "ada:latest", "ada:8b"):
        parts = await read_stream(client, name)
        assert "".join(part.message.content or "" for part in parts) == SENTENCE
        assert ([part.done for part in parts[-2:]], parts[-1].model) == ([False, True], name)
        assert parts[-1].eval_count == 9
    assert [row.model for row in (await client.ps()).models] == ["ada:latest"]

    limited = await client.generate(model="ada", prompt="Who?", options={"num_predict": 3, "temperature": 0})
    assert (limited.done_reason, limited.eval_count) == ("length", 3)
    streamed = [part.response async for part in await client.generate(model="ada", prompt="Who?", stream=True)]
    assert "".join(filter(None, streamed)) == SENTENCE
    assert (await client.generate(model="ada", prompt="Once", raw=True, options={"num_predict": 2})).response
    embedded = await client.embed(model="emb", input=["one", "two words"])
    assert [len(vector) > 100 for vector in embedded.embeddings] == [True, True]
    assert len((await client.embeddings(model="emb", prompt="one")).embedding) > 100
    assert (one.starts("ada"), one.starts("emb")) == (1, 1)


async def test_unknown_model_or_unsupported_call_raises_ollama_response_error(
    one: Serving, client: ollama.AsyncClient
) -> None:
    for request in (read_stream(client, "unknown"), client.chat(model="unknown", messages=MESSAGES)):
        with pytest.raises(ollama.ResponseError) as missing:
            await request
        assert (missing.value.status_code, "no such model" in missing.value.error) == (404, True)
    with pytest.raises(ollama.ResponseError, match="pilotlight weights pull"):
        await client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match=r"spec\.aliases"):
        await client.copy("ada", "bob")
    with pytest.raises(ollama.ResponseError, match="kubectl delete"):
        await client.delete("ada")
    loaded = await client.generate(model="ada")
    assert (loaded.done_reason, one.starts("ada")) == ("load", 1)
    assert (await client.generate(model="ada", keep_alive=0)).done_reason == "unload"
    assert (await client.chat(model="ada", messages=MESSAGES)).message.content == SENTENCE
    assert one.starts("ada") == 1, "keep_alive stops nothing"


def test_synchronous_ollama_client_ignores_keep_alives_of_a_cold_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = fake(tmp_path, "slow", "--start-delay=1.5")
        async with serving(tmp_path, slow, settings(stream={"keepaliveSeconds": 0.2})) as one:

            def read() -> list[ollama.ChatResponse]:
                with ollama.Client(host=one.url) as client:
                    return list(client.chat(model="slow", messages=MESSAGES, stream=True))

            parts = await asyncio.to_thread(read)
            assert "".join(part.message.content or "" for part in parts)
            assert parts[-1].done

    asyncio.run(scenario())
