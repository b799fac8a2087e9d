"""LangChain with its package `langchain-openai`."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.clients import program
from tests.clients.program import Outcome, Target

KEY = SecretStr("none-needed")


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def model(target: Target) -> Any:
    """A chat model with its defaults."""
    return ChatOpenAI(base_url=f"{target.url}/v1", api_key=KEY, model=target.model)


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": model(target).invoke(program.PROMPT).content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    return {"parts": [part.content for part in model(target).stream(program.PROMPT) if part.content]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    bound = model(target).bind_tools([program.TOOL])
    message = bound.invoke(program.PROMPT)
    (call,) = message.tool_calls
    result = ToolMessage(program.TOOL_RESULT, tool_call_id=call["id"])
    last = bound.invoke([("user", program.PROMPT), message, result])
    return {"tool": call["name"], "arguments": call["args"], "text": last.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    return {"object": model(target).with_structured_output(Person).invoke(program.PROMPT).model_dump()}


def embeddings(target: Target) -> Outcome:
    """Return two vectors. The check of the length is for OpenAI's own models only: it would send tokens of tiktoken."""
    api: Any = OpenAIEmbeddings(
        base_url=f"{target.url}/v1", api_key=KEY, model=target.model, check_embedding_ctx_length=False
    )
    return {"vectors": api.embed_documents(program.INPUTS)}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    parts = model(target).stream(program.PROMPT)
    first = next(part.content for part in parts if part.content)
    parts.close()
    return {"text": first}


if __name__ == "__main__":
    program.run(chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings, cancel=cancel)
