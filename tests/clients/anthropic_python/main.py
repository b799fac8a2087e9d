"""The `anthropic` client for Python."""

from __future__ import annotations

from typing import Any

import anthropic
from pydantic import BaseModel

from tests.clients import program
from tests.clients.program import Outcome, Target

MESSAGES: Any = [{"role": "user", "content": program.PROMPT}]
TOOLS: Any = [
    {"name": program.TOOL_NAME, "description": program.TOOL_TEXT, "input_schema": program.TOOL_SCHEMA},
]


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def client(target: Target) -> anthropic.Anthropic:
    """A client with its defaults."""
    return anthropic.Anthropic(base_url=target.url, api_key="none-needed")


def text_of(message: Any) -> str:
    """The text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def models(target: Target) -> Outcome:
    """List the models."""
    return {"models": [model.id for model in client(target).models.list()]}


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": text_of(client(target).messages.create(model=target.model, max_tokens=99, messages=MESSAGES))}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    with client(target).messages.stream(model=target.model, max_tokens=99, messages=MESSAGES) as events:
        return {"parts": list(events.text_stream)}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    create = client(target).messages.create
    message = create(model=target.model, max_tokens=99, messages=MESSAGES, tools=TOOLS)
    call: Any = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": program.TOOL_RESULT}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    last = create(model=target.model, max_tokens=99, messages=messages, tools=TOOLS)
    return {"tool": call.name, "arguments": call.input, "text": text_of(last)}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    answer = client(target).messages.parse(model=target.model, max_tokens=99, messages=MESSAGES, output_format=Person)
    parsed = answer.parsed_output
    return {"object": parsed.model_dump() if parsed else None}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    with client(target).messages.stream(model=target.model, max_tokens=9999, messages=MESSAGES) as events:
        return {"text": next(iter(events.text_stream))}


if __name__ == "__main__":
    program.run(list=models, chat=chat, stream=stream, tools=tools, structured=structured, cancel=cancel)
