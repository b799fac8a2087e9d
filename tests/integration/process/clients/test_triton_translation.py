"""The unmodified clients of OpenAI, Anthropic and Ollama with the real Triton, which has none of these APIs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import ollama
import openai
import pytest

from autoscaler.contract import CatalogueDelta, ModelName
from autoscaler.routing.catalogue import model_entry
from autoscaler.signals.metric_responses import read_queue_seconds
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Model, ModelSpec, Triton
from tests.support.harness.gateway.gateway_rig import MODEL, Rig, rig
from tests.support.python_environments import InstallError
from tests.support.real_services import triton

pytestmark = pytest.mark.standard

SENTENCE = "Hello, I am Ada, asleep until you called."
ASK: Any = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Triton with the models `text`, `embed` and `inputs`."""
    try:
        triton.program()
    except InstallError as error:
        pytest.skip(f"{error} ({triton.INSTALL})")
    with triton.serving(tmp_path_factory.mktemp("triton"), "text", "embed", "inputs") as running:
        yield running.url.removeprefix("http://")


@asynccontextmanager
async def gateway_of(address: str, served: str, settings: Triton | None = None) -> AsyncIterator[Rig]:
    """A gateway with a Model of engine `triton`, whose model at the address is `served`."""
    spec = ModelSpec(engine="triton", artifact="file:///models", triton=settings)
    entry = model_entry(Model(name=ModelName(MODEL), spec=spec, slots=4, served_name=served))
    async with rig(address) as one:
        one.front.catalogue(CatalogueDelta(epoch=1, version=9, models=(entry,)))
        yield one


@asynccontextmanager
async def client_of(address: str, served: str, settings: Triton | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of OpenAI for such a gateway."""
    async with (
        gateway_of(address, served, settings) as one,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none-needed", max_retries=0) as client,
    ):
        yield client


async def test_chat_and_its_stream_have_the_text_of_the_model(server: str) -> None:
    async with client_of(server, "text", Triton(chat_template="plain")) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASK)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SENTENCE, "stop")
        assert whole.usage is not None
        words = ["User:", "Who", "is", "there?", "Assistant:"]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(words), 8)
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ]
        assert ("".join(pieces), len(pieces)) == (SENTENCE, 8)
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].choices[0].finish_reason == "stop"


async def test_completion_ends_at_the_maximum_of_tokens(server: str) -> None:
    async with client_of(server, "text") as client:
        arguments: Any = {"model": MODEL, "prompt": "a b", "max_tokens": 3, "stop": ["never"], "temperature": 0}
        whole = await client.completions.create(**arguments)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello, I am", "length")
        stream = await client.completions.create(**arguments, stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["Hello,", " I", " am", ""]


@pytest.mark.parametrize("encoding", ["base64", "float"])
async def test_embeddings_are_the_vectors_of_the_model(server: str, encoding: Any) -> None:
    async with client_of(server, "embed") as client:
        found = await client.embeddings.create(model=MODEL, input=["a", "bcd"], encoding_format=encoding)
        vectors = [one.embedding for one in found.data]
        expected = [[1.0, 0.5, 0.25, 0.125], [3.0, 0.5, 0.25, 0.125]]
        if encoding == "float":  # with an explicit base64 the client does not decode
            assert vectors == expected
        default = await client.embeddings.create(model=MODEL, input=["a", "bcd"])
        assert [one.embedding for one in default.data] == expected
        with pytest.raises(openai.BadRequestError, match="batch-size must be <= 8"):
            await client.embeddings.create(model=MODEL, input=["a"] * 9)


async def test_scaling_signal_is_read_from_the_time_in_the_queue(server: str) -> None:
    metrics = ENGINES["triton"].behavior.metrics
    assert metrics is not None
    path = metrics.queue_time_path.replace("{name}", "embed")

    def read() -> float:
        with urllib.request.urlopen(f"http://{server}{path}", timeout=60) as response:
            reading = read_queue_seconds(response.read())
        assert reading.value is not None, reading.problem
        return reading.value

    before = read()
    async with client_of(server, "embed") as client:
        await client.embeddings.create(model=MODEL, input=["a"])
    assert read() > before


async def test_inputs_of_tensorrt_llm_have_their_types_and_shapes(server: str) -> None:
    async with client_of(server, "inputs", Triton(backend="tensorrt-llm")) as client:
        answer = await client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=3, stop=["a", "b"], temperature=1, seed=7, extra_body={"top_k": 5}
        )
        found = json.loads(answer.choices[0].text)
        assert found["inputs"] == {
            "text_input": [["Hi"]], "max_tokens": [["3"]], "stop_words": [["a", "b"]], "temperature": [["1.0"]],
            "seed": [["7"]], "top_k": [["5"]], "stream": [["False"]], "exclude_input_in_output": [["True"]],
        }  # fmt: skip
        assert all(name.startswith("return_") for name in found["parameters"])


@pytest.mark.parametrize("served", ["inputs", "text"])
async def test_inputs_of_an_unknown_backend_suit_each_model(server: str, served: str) -> None:
    async with client_of(server, served) as client:
        answer = await client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=2, stop="b", temperature=0.5, presence_penalty=0.5, top_p=1, seed=1
        )
        text = answer.choices[0].text
        assert text == "Hello, I" if served == "text" else json.loads(text)["inputs"]["stop_words"] == [["b"]]


async def test_errors_of_triton_raise_the_errors_of_the_client(server: str) -> None:
    async with client_of(server, "text", Triton(backend="tensorrt-llm")) as client:
        with pytest.raises(openai.BadRequestError, match="parameter 'stop_words' has invalid type"):
            await client.completions.create(model=MODEL, prompt="a", stop=["a", "b"])
    async with client_of(server, "missing") as client:
        for streams in (False, True):
            with pytest.raises(openai.NotFoundError, match="unknown model"):
                await client.completions.create(model=MODEL, prompt="a", stream=streams)


async def test_client_of_anthropic_gets_a_message_and_a_stream(server: str) -> None:
    async with (
        gateway_of(server, "text") as one,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{one.port}", api_key="none", max_retries=0) as client,
    ):
        whole = await client.messages.create(model=MODEL, max_tokens=50, messages=ASK, system="Be brief.")
        assert (getattr(whole.content[0], "text", ""), whole.stop_reason) == (SENTENCE, "end_turn")
        async with client.messages.stream(model=MODEL, max_tokens=3, messages=ASK) as stream:
            streamed = await stream.get_final_message()
        assert (getattr(streamed.content[0], "text", ""), streamed.stop_reason) == ("Hello, I am", "max_tokens")
        assert (whole.usage.output_tokens, streamed.usage.output_tokens) == (8, 3)


async def test_client_of_ollama_gets_lines_and_embeddings(server: str) -> None:
    async with (
        gateway_of(server, "text") as one,
        ollama.AsyncClient(host=f"http://127.0.0.1:{one.port}") as client,
    ):
        lines = [line async for line in await client.chat(model=MODEL, messages=ASK, stream=True)]
        assert "".join(line.message.content or "" for line in lines) == SENTENCE
        assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", 8)
    async with (
        gateway_of(server, "embed") as one,
        ollama.AsyncClient(host=f"http://127.0.0.1:{one.port}") as client,
    ):
        found = await client.embed(model=MODEL, input=["a"])
        assert found.embeddings == [[1.0, 0.5, 0.25, 0.125]]
