"""Case 44 with many clients: the key and the prompt pass through cases 35, 36, 37 and 42 and are not disclosed.

faults/test_clients.py and faults/test_overload.py test what each case promises. These tests only reproduce the cases,
on a `serve` with Python's most verbose logging, with clients that all send both words.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import httpx2
import openai
import psutil
import pytest

from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.client_load import Crowd, Stream, counted
from tests.support.harness.serve.output_capture import AT_ONCE, Heard, repeating, talk, tenant
from tests.support.harness.serve.serve import Document, serving, settings
from tests.support.net.secret_leaks import BODY_BYTES_MAX, CHAT, GOOD, KEY, MESSAGES, PROMPT, Fault, chat, post, prompt
from tests.support.waiting import until

OTHERS = ("127.0.0.2", "127.0.0.3")
PER_ADDRESS = 100
SURPLUS = 10
ROOM, FLOOD = 20, 90
"""Free file descriptors when the limit is set, and the number of clients that need one."""
CLIENTS = 24
ABANDONED = ("pilotlight_calls_total", 'outcome="abandoned"')
OK = b"HTTP/1.1 200 OK\r\n"
WELL = Fault("a Call beside", post(CHAT, chat("talks")), 200, engine=True)


@pytest.fixture
def talkative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_files: None) -> None:
    """Every Python process started from here on logs everything."""
    talk(tmp_path, monkeypatch)


def documents(folder: Path) -> list[Document]:
    """A Model that does what a request says, one with few slots, a Tenant with the valid key, and short timeouts."""
    # Clients that connected first must not be idle for too long if the test is paused until the last one has connected.
    limits = {"bodyBytesMax": BODY_BYTES_MAX, "headerSecondsMax": 4, "bodySecondsMax": 4, "idleSecondsMax": 30,
              "writeStallSecondsMax": 4, "connectionsPerAddressMax": PER_ADDRESS}  # fmt: skip
    few = repeating(folder, "few", slots=2, queue={"callsMax": CLIENTS // 4})
    return [repeating(folder, "talks"), few, tenant(), settings(limits=limits)]


@pytest.mark.case("44")
async def test_overload_writes_no_key_or_prompt_outside_the_logs_of_engines(tmp_path: Path, talkative: None) -> None:
    async with serving(tmp_path, *documents(tmp_path), options=("--grace", "20")) as one, Crowd(one) as crowd:
        heard = Heard(one)
        await heard.suffer(WELL)
        await they_do_not_read(heard, crowd)
        await they_are_slow(heard, crowd)
        await they_are_too_many(heard, crowd)
        await they_come_at_once(heard)
        await engines_are_busy(heard)
        await heard.suffer(WELL)
        await heard.look()
        assert await one.stop() == 0
        heard.assert_nothing_disclosed(talkers=3)


async def they_do_not_read(heard: Heard, crowd: Crowd) -> None:
    """Case 35: clients read nothing or a byte now and then of streams that repeat the prompt; all are disconnected."""
    asked = [post(path, chat("talks", "floods", stream=True)) for path in (CHAT, MESSAGES)] * 4
    stalled = [await crowd.connect(receive_bytes=4096) for _ in asked]
    for stream, ask in zip(stalled, asked, strict=True):
        stream.writer.write(ask)
    sipping = asyncio.gather(*(sip(stream) for stream in stalled[::2]))
    await until("all are cut", lambda: counted(heard.one, *ABANDONED) == len(asked), 90)
    sipping.cancel()
    await asyncio.gather(sipping, return_exceptions=True)
    await heard.suffer(WELL)


async def sip(stream: Stream) -> None:
    """Read a byte now and then."""
    while await stream.reader.read(1):
        await asyncio.sleep(0.1)


async def they_are_slow(heard: Heard, crowd: Crowd) -> None:
    """Case 36: trickling heads and bodies, connections idle after a response, and more than an address may have."""
    slow = [f"POST {path} HTTP/1.1\r\nHost: gw\r\n{GOOD}\r\nX-Prompt: {PROMPT}" for path in (CHAT, MESSAGES)]
    slow += [post(path, chat("talks", filler="-" * 500))[:-400].decode() for path in (CHAT, MESSAGES)]
    dribbles = [crowd.dribble(first.encode(), OTHERS[0]) for first in slow * 4]
    for number, got in enumerate(await asyncio.gather(*dribbles)):
        assert got.startswith(b"HTTP/1.1 408 "), got
        heard.outputs[f"slow {number}"] = got
    idle = [await crowd.connect(OTHERS[1]) for _ in range(PER_ADDRESS + SURPLUS)]
    for stream in idle:
        stream.writer.write(post("/v1/nowhere", chat("talks")).replace(b"Connection: close\r\n", b""))
    answers = await asyncio.gather(*(stream.rest() for stream in idle))
    assert [answer[:12] for answer in answers].count(b"HTTP/1.1 404") == PER_ADDRESS
    assert answers[PER_ADDRESS:] == [b""] * SURPLUS, "closed unanswered"
    heard.outputs["idle and surplus"] = b"".join(answers)


async def they_are_too_many(heard: Heard, crowd: Crowd) -> None:
    """Case 37: the descriptor limit is set on the running gateway; each client then sends a whole request."""
    gateway = heard.one.gateways()["gateway-1"]
    before = resource.prlimit(gateway, resource.RLIMIT_NOFILE)
    resource.prlimit(gateway, resource.RLIMIT_NOFILE, (psutil.Process(gateway).num_fds() + ROOM, before[1]))
    flood = [await crowd.connect() for _ in range(FLOOD)]
    for stream in flood:
        stream.writer.write(post(CHAT, chat("talks")))
    answers = await asyncio.gather(*(stream.rest() for stream in flood))
    resource.prlimit(gateway, resource.RLIMIT_NOFILE, before)
    assert answers.count(b"") > ROOM, "who finds no room is closed unanswered"
    served = [answer for answer in answers if answer.startswith(OK)]
    assert served
    heard.engines += b"".join(served)
    heard.outputs["no descriptors"] = b"".join(answer for answer in answers if not answer.startswith(OK))
    assert heard.one.gateways()["gateway-1"] == gateway


async def they_come_at_once(heard: Heard) -> None:
    """Case 37, second half: all clients connect and send requests while the gateway is stopped (SIGSTOP)."""
    gateway = heard.one.gateways()["gateway-1"]
    freeze(gateway)
    try:
        coming = [asyncio.create_task(heard.answer(post(CHAT, chat("talks")))) for _ in range(4 * AT_ONCE)]
        coming += [asyncio.create_task(heard.answer(post(CHAT, chat("nobody")))) for _ in range(AT_ONCE)]
        await asyncio.wait(coming, timeout=0.2)
    finally:
        os.kill(gateway, signal.SIGCONT)
    answers = await asyncio.gather(*coming)
    assert [answer.startswith(OK) for answer in answers] == [True] * 4 * AT_ONCE + [False] * AT_ONCE
    heard.engines += b"".join(answers[: 4 * AT_ONCE])
    heard.outputs["at once"] = b"".join(answers[4 * AT_ONCE :])


async def engines_are_busy(heard: Heard) -> None:
    """Case 42: every second engine response is a 503 that contains the prompt; official clients retry."""
    statuses = set[int]()

    async def note(response: httpx2.Response) -> None:
        """Record every response, also those that the official client hides from its caller."""
        content = str(response.headers).encode() + await response.aread()
        statuses.add(response.status_code)
        if response.status_code == 200:
            heard.engines += content
        else:
            heard.outputs[f"busy {len(heard.outputs)}"] = content

    async def ask(api: openai.AsyncOpenAI) -> None:
        try:
            await api.chat.completions.create(
                model="few", user="moody", messages=[{"role": "user", "content": prompt()}]
            )
        except openai.APIStatusError as error:
            heard.outputs[f"raised {len(heard.outputs)}"] = repr(error).encode()

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    engine = await few_is_ready(heard)
    # By default a client must connect within 5 s, which include the time in which this process does not run.
    api_url = f"{heard.one.url}/v1"
    async with openai.AsyncOpenAI(base_url=api_url, api_key=KEY, http_client=http, timeout=600) as api:
        freeze(engine)  # so that all wait at the same time, however slowly they arrive
        try:
            asking = asyncio.gather(*(ask(api) for _ in range(CLIENTS)))
            await until("the queue is full", lambda: 429 in statuses, 90)
        finally:
            os.kill(engine, signal.SIGCONT)
        await asking
    assert statuses == {200, 429, 503}


async def few_is_ready(heard: Heard) -> int:
    """Return the pid of its engine after it has answered a request."""
    await heard.suffer(Fault("the first of few", post(CHAT, chat("few")), 200, engine=True))
    (engine,) = heard.one.engines("few")
    return engine
