"""instructor, around the `openai` client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel, create_model

from tests.clients import program
from tests.clients.program import Outcome, Target

MESSAGES: Any = [{"role": "user", "content": program.PROMPT}]


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def completions(target: Target, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    """A client with its defaults."""
    openai_client = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none-needed")
    client: Any = instructor.from_openai(openai_client, mode=mode)
    return client.chat.completions


def create(target: Target, messages: Any = MESSAGES, **more: object) -> Any:
    """Request a chat completion without a type."""
    return completions(target).create(model=target.model, messages=messages, response_model=None, **more)


def chat(target: Target) -> Outcome:
    """Return one answer."""
    answer = create(target)
    return {"text": answer.choices[0].message.content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    events = create(target, stream=True)
    return {"parts": [event.choices[0].delta.content for event in events if event.choices[0].delta.content]}


def tools(target: Target) -> Outcome:
    """Call a tool, whose arguments become an object, and return the answer to its result."""
    weather = create_model(program.TOOL_NAME, city=(str, ...))
    given: Any = {"model": target.model, "messages": MESSAGES, "response_model": weather}
    arguments, answer = completions(target).create_with_completion(**given)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": program.TOOL_RESULT}
    last = create(target, [*MESSAGES, message.model_dump(), result])
    name = message.tool_calls[0].function.name
    return {"tool": name, "arguments": arguments.model_dump(), "text": last.choices[0].message.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    api = completions(target, instructor.Mode.JSON_SCHEMA)
    return {"object": api.create(model=target.model, messages=MESSAGES, response_model=Person).model_dump()}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    with create(target, stream=True) as events:
        return {"text": next(event.choices[0].delta.content for event in events if event.choices[0].delta.content)}


if __name__ == "__main__":
    program.run(chat=chat, stream=stream, tools=tools, structured=structured, cancel=cancel)
