"""The unmodified official `openai` client uses the Responses API of engines that have only chat completions, as far as
the gateway knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from autoscaler.spec.engines import ENGINES
from loadtest import tiny_gguf
from tests.support.fakes.engines.fake_engine_process import FakeEngine, fake_engine
from tests.support.fakes.engines.scripted_engine import CLOSE, STREAM_HEAD, ScriptedEngine, delta
from tests.support.harness.gateway.gateway_rig import rig
from tests.support.real_services.llama_cpp import started

pytestmark = pytest.mark.standard

SENTENCE = "Hello, I am Ada, asleep until you called."
CHAT_ONLY = ("openai",)
NATIVE = ("openai", "responses")
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


class City(BaseModel):
    """A structured answer."""

    name: str
    inhabitants: int


@asynccontextmanager
async def client_of(address: str, dialects: tuple[str, ...] = CHAT_ONLY) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a gateway whose only engine is at the address."""
    async with (
        rig(address, dialects=dialects) as one,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none-needed", max_retries=0) as client,
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
    """A fake engine, which calls the first tool of a request, and writes a value of its schema."""
    with fake_engine(tmp_path, "--name", "served-m") as engine:
        yield engine


def address_of(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


async def test_llama_cpp_responds_and_streams_with_its_sentence(llama_cpp: str) -> None:
    assert "responses" not in ENGINES["llama.cpp"].dialects
    async with client_of(llama_cpp) as client:
        whole = await client.responses.create(model="m", input="Who is there?", instructions="Be brief.", store=False)
        assert (whole.output_text, whole.status, whole.error) == (SENTENCE, "completed", None)
        assert whole.usage is not None
        assert whole.usage.input_tokens > 0
        async with client.responses.stream(model="m", input="Who is there?") as stream:
            assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == SENTENCE
            streamed = await stream.get_final_response()
        assert streamed.output_text == SENTENCE
        assert streamed.usage is not None
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        history: Any = [{"role": "user", "content": "Who?"}, *whole.output, {"role": "user", "content": "And now?"}]
        again = await client.responses.create(model="m", input=history)
        assert again.output_text == SENTENCE


async def test_own_streams_of_llama_cpp_lack_members_that_clients_need(llama_cpp: str) -> None:
    """If this fails, llama.cpp supports the API, and its requests need no translation any more."""
    async with client_of(llama_cpp, NATIVE) as client:
        whole = await client.responses.create(model="m", input="Who is there?", max_output_tokens=3)
        assert whole.status == "completed"
        stream = await client.responses.create(model="m", input="Who is there?", stream=True)
        deltas: list[Any] = [event async for event in stream if event.type == "response.output_text.delta"]
        assert [(one.content_index, one.output_index, one.sequence_number) for one in deltas[:1]] == [
            (None, None, None)
        ]


async def test_llama_cpp_response_that_reaches_the_token_limit_is_incomplete(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as client:
        short = await client.responses.create(model="m", input="Who?", max_output_tokens=3)
        assert (short.status, short.incomplete_details and short.incomplete_details.reason) == (
            "incomplete", "max_output_tokens",
        )  # fmt: skip
        events = [
            e async for e in await client.responses.create(model="m", input="Who?", max_output_tokens=3, stream=True)
        ]
        assert events[-1].type == "response.incomplete"


async def test_llama_cpp_error_raises_the_error_of_the_client(llama_cpp: str) -> None:
    schema: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no such type"}}}
    async with client_of(llama_cpp) as client:
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="a", text=schema)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="none", input="a")


@pytest.mark.parametrize("dialects", [CHAT_ONLY, NATIVE], ids=["translated", "native"])
async def test_stored_responses_are_rejected_by_name(llama_cpp: str, dialects: tuple[str, ...]) -> None:
    members: list[dict[str, Any]] = [
        {"previous_response_id": "resp_1"}, {"store": True}, {"background": True}, {"conversation": "conv_1"},
    ]  # fmt: skip
    async with client_of(llama_cpp, dialects) as client:
        for one in members:
            with pytest.raises(openai.BadRequestError, match="not stored") as found:
                await client.responses.create(model="m", input="a", **one)
            assert found.value.param == next(iter(one))


async def test_client_calls_a_function_and_gets_the_answer_to_its_result(fake: FakeEngine) -> None:
    async with client_of(address_of(fake)) as client:
        for streams in (False, True):
            items: list[Any] = [{"role": "user", "content": "What is the weather?"}]
            arguments: Any = {"model": "m", "tools": [WEATHER], "tool_choice": "auto"}
            if streams:
                async with client.responses.stream(input=items, **arguments) as stream:
                    done = [e async for e in stream if e.type == "response.function_call_arguments.done"]
                    response: Any = await stream.get_final_response()
                assert [event.arguments for event in done] == [response.output[0].arguments]
            else:
                response = await client.responses.create(input=items, **arguments)
            (call,) = response.output
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "text"}')
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
            items += [call, result]
            answer = await client.responses.create(input=items, **arguments)
            assert [item.type for item in answer.output] == ["message"]


async def test_structured_output_is_parsed(fake: FakeEngine) -> None:
    async with client_of(address_of(fake)) as client:
        parsed = await client.responses.parse(model="m", input="Name a city", text_format=City)
        assert isinstance(parsed.output_parsed, City)
        async with client.responses.stream(model="m", input="Name a city", text_format=City) as stream:
            streamed = await stream.get_final_response()
        assert streamed.output_parsed == parsed.output_parsed


async def test_broken_stream_raises_an_error_of_the_client() -> None:
    async with ScriptedEngine((STREAM_HEAD + delta("a"), CLOSE)) as engine, client_of(engine.address) as client:
        with pytest.raises(openai.APIError, match="the engine ended the response early"):
            _ = [event async for event in await client.responses.create(model="m", input="a", stream=True)]
