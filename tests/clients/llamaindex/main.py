"""LlamaIndex with its packages `llama-index-llms-openai-like` and `llama-index-embeddings-openai-like`."""

from __future__ import annotations

import gc
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients import program
from tests.clients.program import Outcome, Target


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{program.TOOL_RESULT} in {city}"


def model(target: Target) -> Any:
    """A chat model with its defaults."""
    return OpenAILike(
        api_base=f"{target.url}/v1", api_key="none-needed", model=target.model, is_chat_model=True,
        is_function_calling_model=True, should_use_structured_outputs=True,
    )  # fmt: skip


def messages() -> list[Any]:
    """The chat."""
    return [ChatMessage(role="user", content=program.PROMPT)]


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": model(target).chat(messages()).message.content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    return {"parts": [part.delta for part in model(target).stream_chat(messages()) if part.delta]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    llm, given = model(target), [FunctionTool.from_defaults(weather)]
    answer = llm.chat_with_tools(given, chat_history=messages())
    (call,) = llm.get_tool_calls_from_response(answer)
    result = ChatMessage(role="tool", content=program.TOOL_RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    last = llm.chat_with_tools(given, chat_history=[*messages(), answer.message, result])
    return {"tool": call.tool_name, "arguments": call.tool_kwargs, "text": last.message.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    return {"object": model(target).structured_predict(Person, PromptTemplate(program.PROMPT)).model_dump()}


def embeddings(target: Target) -> Outcome:
    """Return two vectors."""
    api: Any = OpenAILikeEmbedding(api_base=f"{target.url}/v1", api_key="none-needed", model_name=target.model)
    return {"vectors": api.get_text_embedding_batch(program.INPUTS)}


def cancel(target: Target) -> Outcome:
    """Drop a stream after its first words: its method `close` does not close the connection."""
    parts = model(target).stream_chat(messages())
    first = next(part.delta for part in parts if part.delta)
    del parts
    gc.collect()
    return {"text": first}


if __name__ == "__main__":
    program.run(chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings, cancel=cancel)
