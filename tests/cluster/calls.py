"""Calls as clients of a cluster's gateways make them, and what they hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import aiohttp


class Answered(NamedTuple):
    """One Call as its client saw it."""

    status: int
    said: str
    retry_after: str = ""


async def chat(
    session: aiohttp.ClientSession, url: str, model: str, headers: Mapping[str, str] | None = None
) -> Answered:
    """One chat completion through the gateway at `url`. Raises aiohttp.ClientError when nobody takes it."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        return Answered(answer.status, await answer.text(), answer.headers.get("Retry-After", ""))


async def lists_models(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a gateway knows what there is."""
    try:
        async with session.get(f"{url}/v1/models") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def good(name: str, *answers: Answered) -> bool:
    """Whether there are any, and the fake engine of that name gave all of them."""
    return bool(answers) and all(one.status == 200 and f"I am {name}" in one.said for one in answers)
