"""The official `openai` client in bulk: a thousand streams at once through two gateways, each whole and word for word.

The client is as it comes, retries and connection pool included (it holds 1,000 connections); only its 5 s for a
connection are more, since it opens all of them in one thread, on cores that others use, too. No setting of ours is
needed for so many: `limits.connectionsPerAddressMax` is 2,000 for each gateway, a queue takes 1,000 Calls in each.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.kit.serving import fake, serving, settings, transcript

STREAMS = 1000
SENTENCE = [f"word{number}" for number in range(10)]
TIMEOUT_S = 600.0
"""For an answer that is the client's own."""
FILES = 8192
"""Descriptors that this process, and an engine that has all streams at once, may need; 1,024 is what shells give."""


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """What a service manager would give; `serve` and its engines inherit it from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"only {hard} descriptors may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("slots", "tokens_per_s"), [(STREAMS, 4), (64, 100)], ids=["slots for all", "most wait"])
async def test_thousand_concurrent_official_streams_complete_with_exact_text(
    tmp_path: Path, slots: int, tokens_per_s: int
) -> None:
    """None is read before all have begun; each asks for a length of its own, so that no two neighbours are alike.

    Those who wait have their head early, and comments before their first event.
    """
    ada = fake(tmp_path, "ada", "--sentence", " ".join(SENTENCE), "--tokens-per-s", str(tokens_per_s), slots=slots)
    documents = (ada, settings(stream={"keepaliveSeconds": 0.2}))
    async with (
        serving(tmp_path, *documents, options=("--gateways", "2")) as one,
        openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none-needed", timeout=TIMEOUT_S) as client,
    ):
        begun = asyncio.Barrier(STREAMS)

        async def read(number: int) -> tuple[str, str | None]:
            """The text of one stream, and how it ended."""
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
