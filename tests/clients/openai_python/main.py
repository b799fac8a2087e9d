"""The `openai` client for Python."""

from __future__ import annotations

from typing import Any

import openai
from pydantic import BaseModel

from tests.clients import program
from tests.clients.program import Outcome, Target

MESSAGES: Any = [{"role": "user", "content": program.PROMPT}]
TOOLS: Any = [program.TOOL]


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def client(target: Target) -> openai.OpenAI:
    """A client with its defaults."""
    return openai.OpenAI(base_url=f"{target.url}/v1", api_key="none-needed")


def models(target: Target) -> Outcome:
    """List the models."""
    return {"models": [model.id for model in client(target).models.list()]}


def chat(target: Target) -> Outcome:
    """Return one answer."""
    answer = client(target).chat.completions.create(model=target.model, messages=MESSAGES)
    return {"text": answer.choices[0].message.content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    events = client(target).chat.completions.create(model=target.model, messages=MESSAGES, stream=True)
    parts = [event.choices[0].delta.content for event in events if event.choices]
    return {"parts": [part for part in parts if part]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    create = client(target).chat.completions.create
    message: Any = create(model=target.model, messages=MESSAGES, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": program.TOOL_RESULT}
    last = create(model=target.model, messages=[*MESSAGES, message, result], tools=TOOLS)
    arguments = call.function.arguments
    return {"tool": call.function.name, "arguments": arguments, "text": last.choices[0].message.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    answer = client(target).chat.completions.parse(model=target.model, messages=MESSAGES, response_format=Person)
    parsed = answer.choices[0].message.parsed
    return {"object": parsed.model_dump() if parsed else None}


def embeddings(target: Target) -> Outcome:
    """Return two vectors."""
    answer = client(target).embeddings.create(model=target.model, input=program.INPUTS)
    return {"vectors": [row.embedding for row in answer.data]}


def upload(target: Target) -> Outcome:
    """Return the transcription of a file."""
    with target.file.open("rb") as file:
        return {"text": client(target).audio.transcriptions.create(model=target.model, file=file).text}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    with client(target).chat.completions.create(model=target.model, messages=MESSAGES, stream=True) as events:
        for event in events:
            if event.choices[0].delta.content:
                return {"text": event.choices[0].delta.content}
    return {}


if __name__ == "__main__":
    program.run(
        list=models, chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings,
        upload=upload, cancel=cancel,
    )  # fmt: skip
