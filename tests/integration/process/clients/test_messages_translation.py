"""The unmodified official `anthropic` client with engines that have only OpenAI's API, as far as the gateway knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from loadtest import tiny_gguf
from tests.support.fakes.engines.fake_engine_process import FakeEngine, fake_engine
from tests.support.fakes.engines.scripted_engine import CLOSE, STREAM_HEAD, ScriptedEngine, delta
from tests.support.harness.gateway.gateway_rig import rig
from tests.support.real_services.llama_cpp import started

pytestmark = pytest.mark.standard

SENTENCE = "Hello, I am Ada, asleep until you called."
ASK: Any = {"role": "user", "content": "Who is there?"}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@asynccontextmanager
async def client_of(address: str, max_retries: int = 0) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The client of a gateway whose only engine is at the address."""
    async with (
        rig(address, dialects=("openai",)) as one,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{one.port}", api_key="none-needed", max_retries=max_retries
        ) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the real llama.cpp with a model that writes its sentence."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.make_model(folder / "ada.gguf", SENTENCE)
    with started(folder) as (_, port, statuses):
        assert 200 in statuses
        yield f"127.0.0.1:{port}"


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeEngine]:
    """A fake engine, which calls the first tool of a request."""
    with fake_engine(tmp_path, "--name", "served-m") as engine:
        yield engine


def address_of(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


async def test_llama_cpp_answers_messages_and_streams_with_its_sentence(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as client:
        whole = await client.messages.create(
            model="m", max_tokens=50, messages=[ASK], system="Be brief.", extra_body={"top_k": 1}
        )
        assert [block.type for block in whole.content] == ["text"]
        assert (getattr(whole.content[0], "text", ""), whole.stop_reason, whole.model) == (SENTENCE, "end_turn", "m")
        assert whole.usage.output_tokens > 0
        async with client.messages.stream(model="m", max_tokens=50, messages=[ASK]) as stream:
            assert "".join([text async for text in stream.text_stream]) == SENTENCE
            streamed = await stream.get_final_message()
        read = [(one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0)) for one in (streamed, whole)]
        assert streamed.stop_reason == "end_turn"
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert all(tokens > 0 for tokens in read), "the prompt with a system prompt is longer"
        short = await client.messages.create(model="m", max_tokens=3, messages=[ASK])
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
        history: Any = [ASK, {"role": "assistant", "content": whole.content}, ASK]
        again = await client.messages.create(model="m", max_tokens=50, messages=history)
        assert getattr(again.content[0], "text", "") == SENTENCE


async def test_llama_cpp_error_raises_the_error_of_the_client(llama_cpp: str) -> None:
    schema: Any = {"type": "json_schema", "schema": {"type": "no such type"}}
    async with client_of(llama_cpp) as client:
        with pytest.raises(anthropic.BadRequestError) as found:
            await client.messages.create(
                model="m", max_tokens=5, messages=[ASK], extra_body={"output_config": {"format": schema}}
            )
        assert found.value.body["type"] == "error"  # type: ignore[index] # the decoded body
        with pytest.raises(anthropic.BadRequestError, match="does not support this API endpoint"):
            await client.messages.count_tokens(model="m", messages=[ASK])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="none", max_tokens=5, messages=[ASK])


async def test_client_calls_a_tool_and_gets_the_answer_to_its_result(fake: FakeEngine) -> None:
    async with client_of(address_of(fake)) as client:
        arguments: Any = {"model": "m", "max_tokens": 50, "tools": [WEATHER]}
        for streams in (False, True):
            messages: list[Any] = [ASK]
            if streams:
                async with client.messages.stream(messages=messages, **arguments) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await client.messages.create(messages=messages, tool_choice={"type": "any"}, **arguments)
            assert message.stop_reason == "tool_use"
            (call,) = message.content
            assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "text"})
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": "18 degrees"}],
            }
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
            answer = await client.messages.create(messages=messages, **arguments)
            assert (answer.stop_reason, [block.type for block in answer.content]) == ("end_turn", ["text"])


async def test_broken_stream_raises_an_error_of_the_client() -> None:
    async with ScriptedEngine((STREAM_HEAD + delta("a"), CLOSE)) as engine, client_of(engine.address) as client:
        with pytest.raises(anthropic.APIError, match="the engine ended the response early"):
            async with client.messages.stream(model="m", max_tokens=50, messages=[ASK]) as stream:
                assert [text async for text in stream.text_stream] == ["a"]
