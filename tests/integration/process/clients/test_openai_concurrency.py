"""The official `openai` client in bulk: a thousand concurrent streams through two gateways, each complete and exact.

The client has its defaults, retries and connection pool (1,000 connections) included; only its 5 s connect timeout is
raised, since it opens all connections in one thread on shared cores. No setting of Pilotlight needs to change:
`limits.connectionsPerAddressMax` is 2,000 per gateway, and a queue holds 1,000 requests in each.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.harness.serve.serve import fake, serving, settings, transcript

STREAMS = 1000
SENTENCE = [f"word{number}" for number in range(10)]
TIMEOUT_S = 600.0
"""Timeout of a response; it is the client's default."""
FILES = 8192
"""Descriptors that this process, and an engine that serves all streams at once, may need; shells allow 1,024."""


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Set the limit that a service manager would set; `serve` and its engines inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"only {hard} descriptors may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("slots", "tokens_per_s"), [(STREAMS, 4), (64, 100)], ids=["slots for all", "most wait"])
async def test_thousand_concurrent_openai_streams_complete_with_exact_text(
    tmp_path: Path, slots: int, tokens_per_s: int
) -> None:
    """No stream is read before all have started. Neighbouring requests ask for different lengths.
    Waiting requests have early response heads, and comments before their first event.
    """
    ada = fake(tmp_path, "ada", "--sentence", " ".join(SENTENCE), "--tokens-per-s", str(tokens_per_s), slots=slots)
    documents = (ada, settings(stream={"keepaliveSeconds": 0.2}))
    async with (
        serving(tmp_path, *documents, options=("--gateways", "2")) as one,
        openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none-needed", timeout=TIMEOUT_S) as client,
    ):
        begun = asyncio.Barrier(STREAMS)

        async def read(number: int) -> tuple[str, str | None]:
            """Return the text of one stream, and how it ended."""
            stream = await client.chat.completions.create(
                model="ada", stream=True, max_tokens=1 + number % len(SENTENCE),
                messages=[{"role": "user", "content": f"call {number}"}],
            )  # fmt: skip
            await begun.wait()
            choices = [choice async for chunk in stream for choice in chunk.choices]
            return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

        answers = await asyncio.gather(*map(read, range(STREAMS)))
    for number, answer in enumerate(answers):
        words = 1 + number % len(SENTENCE)
        assert answer == (" ".join(SENTENCE[:words]), "stop" if words == len(SENTENCE) else "length")
    calls = transcript(tmp_path, "ada")
    assert Counter(call.finished for call in calls) == {True: STREAMS}, "and none was tried twice"
    through = Counter("-".join(call.id.split("-")[:2]) for call in calls)
    assert set(through) == {"gateway-1", "gateway-2"}
