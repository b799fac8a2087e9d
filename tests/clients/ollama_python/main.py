"""The `ollama` client for Python."""

from __future__ import annotations

from typing import Any

import ollama

from tests.clients import program
from tests.clients.program import Outcome, Target

MESSAGES: Any = [{"role": "user", "content": program.PROMPT}]
TOOLS: Any = [program.TOOL]
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def client(target: Target) -> ollama.Client:
    """A client with its defaults."""
    return ollama.Client(host=target.url)


def models(target: Target) -> Outcome:
    """List the models."""
    return {"models": [model.model for model in client(target).list().models]}


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": client(target).chat(model=target.model, messages=MESSAGES).message.content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    parts = client(target).chat(model=target.model, messages=MESSAGES, stream=True)
    return {"parts": [part.message.content for part in parts if part.message.content]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    one = client(target)
    message = one.chat(model=target.model, messages=MESSAGES, tools=TOOLS).message
    call = (message.tool_calls or [])[0].function
    result = {"role": "tool", "tool_name": call.name, "content": program.TOOL_RESULT}
    last = one.chat(model=target.model, messages=[*MESSAGES, message, result], tools=TOOLS)
    return {"tool": call.name, "arguments": dict(call.arguments), "text": last.message.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    return {"object": client(target).chat(model=target.model, messages=MESSAGES, format=PERSON).message.content}


def embeddings(target: Target) -> Outcome:
    """Return two vectors."""
    answer = client(target).embed(model=target.model, input=program.INPUTS)
    return {"vectors": [list(vector) for vector in answer.embeddings]}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    parts: Any = client(target).chat(model=target.model, messages=MESSAGES, stream=True)
    first = next(part.message.content for part in parts if part.message.content)
    parts.close()
    return {"text": first}


if __name__ == "__main__":
    program.run(
        list=models, chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings, cancel=cancel
    )
