"""Requests that clients send to a cluster's gateways, and the responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import aiohttp


class Answered(NamedTuple):
    """The response to one request as its client saw it."""

    status: int
    text: str
    retry_after: str = ""


async def chat(
    session: aiohttp.ClientSession, url: str, model: str, headers: Mapping[str, str] | None = None
) -> Answered:
    """Sends one chat completion through the gateway at `url`. Raises aiohttp.ClientError if the connection fails."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        return Answered(answer.status, await answer.text(), answer.headers.get("Retry-After", ""))


async def lists_models(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a gateway has received the list of models."""
    try:
        async with session.get(f"{url}/v1/models") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def good(name: str, *answers: Answered) -> bool:
    """Whether there are responses and all of them came from the fake engine with that name."""
    return bool(answers) and all(one.status == 200 and f"I am {name}" in one.text for one in answers)
