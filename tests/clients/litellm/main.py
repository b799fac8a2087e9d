"""The SDK of LiteLLM, with its provider `openai`."""

from __future__ import annotations

from typing import Any

import litellm
from pydantic import BaseModel

from tests.clients import program
from tests.clients.program import Outcome, Target

MESSAGES: Any = [{"role": "user", "content": program.PROMPT}]


class Person(BaseModel):
    """The structured output."""

    name: str
    age: int


def place(target: Target) -> dict[str, Any]:
    """The arguments of each call."""
    return {"model": f"openai/{target.model}", "api_base": f"{target.url}/v1", "api_key": "none-needed"}


def complete(target: Target, **more: object) -> Any:
    """Request a chat completion."""
    return litellm.completion(**{**place(target), "messages": MESSAGES, **more})


def models(target: Target) -> Outcome:
    """List the models."""
    given: Any = {"custom_llm_provider": "openai", "api_key": "none-needed", "api_base": target.url}
    return {"models": litellm.get_valid_models(check_provider_endpoint=True, **given)}


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": complete(target).choices[0].message.content}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    parts = [event.choices[0].delta.content for event in complete(target, stream=True)]
    return {"parts": [part for part in parts if part]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    message = complete(target, tools=[program.TOOL]).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": program.TOOL_RESULT}
    last = complete(target, tools=[program.TOOL], messages=[*MESSAGES, message, result])
    arguments = call.function.arguments
    return {"tool": call.function.name, "arguments": arguments, "text": last.choices[0].message.content}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    return {"object": complete(target, response_format=Person).choices[0].message.content}


def embeddings(target: Target) -> Outcome:
    """Return two vectors."""
    return {"vectors": [row["embedding"] for row in litellm.embedding(**place(target), input=program.INPUTS).data]}


def upload(target: Target) -> Outcome:
    """Return the transcription of a file."""
    with target.file.open("rb") as file:
        return {"text": litellm.transcription(**place(target), file=file).text}


def cancel(target: Target) -> Outcome:
    """Close a stream after its first words."""
    events = complete(target, stream=True)
    first = next(event.choices[0].delta.content for event in events if event.choices[0].delta.content)
    events.completion_stream.close()
    return {"text": first}


if __name__ == "__main__":
    program.run(
        list=models, chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings,
        upload=upload, cancel=cancel,
    )  # fmt: skip
