"""Case 44: a key and a prompt pass through every fault and never appear in a log, metric, page, file or error.

One real `serve`, with Python's most verbose logging, is driven through the faults. Then everything readable is searched
for both words in every spelling (`tests.support.harness.serve.output_capture`). The cases with many clients are in
test_secret_disclosure_under_load.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness.serve.output_capture import CLOCKS, Heard, repeating, talk, tenant
from tests.support.harness.serve.serve import Document, fake, serving, settings
from tests.support.net.canary import connected
from tests.support.net.secret_leaks import (
    BODY_BYTES_MAX,
    CHAT,
    GOOD,
    KEY,
    MESSAGES,
    PROMPT,
    REQUESTS,
    Fault,
    chat,
    misbehaving,
    post,
)
from tests.support.waiting import until

TIMED = {"silent": "mute", "stalls": "halting"}
"""How an engine fails by a timeout -> the Model for which this timeout is short.
A response of another Model may be late: a busy machine may pause its engine or the gateway."""


def documents(folder: Path) -> list[Document]:
    """Return Models for every kind of fault, and a Tenant with the valid key."""
    small: Document = {"gpu": {"memory": "10Mi"}}
    limits = {"bodyBytesMax": BODY_BYTES_MAX, "headerSecondsMax": 5, "bodySecondsMax": 5}
    # One per Model, since a device runs one start at a time.
    devices = [{"name": f"gpu{number}", "memory": "10Mi"} for number in range(8)]
    begins = {key: CLOCKS[key] for key in ("firstByteSecondsMax", "responseSecondsMax")}
    stalls = {"stallSecondsMax": CLOCKS["stallSecondsMax"]}
    return [
        repeating(folder, "talks"), repeating(folder, "mortal"), repeating(folder, "patient"),
        repeating(folder, "mute", **begins), repeating(folder, "halting", **stalls),
        fake(folder, "slow", "--start-delay", "3600", **small),
        fake(folder, "full", "--start-delay", "3600", **small, queue={"callsMax": 0}),
        fake(folder, "broken", "--fail", "dies-on-start", **small, start={"retries": 0}),
        tenant(), settings(devices=devices, limits=limits, stream={"keepaliveSeconds": 0.2}),
    ]  # fmt: skip


def engine_faults() -> Iterator[Fault]:
    """Yield the faults of engines, those that end by a timeout for a Model of TIMED."""
    for model in ("talks", *TIMED.values()):
        for fault in misbehaving(model):
            manner = fault.name.partition("'s ")[2].partition(",")[0]
            if TIMED.get(manner, "talks") == model:
                yield fault


@pytest.fixture
def talkative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process started from here on logs everything, with asyncio in debug mode."""
    talk(tmp_path, monkeypatch)


@pytest.mark.case("44")
@pytest.mark.standard
async def test_faults_write_no_key_or_prompt_outside_the_logs_of_engines(tmp_path: Path, talkative: None) -> None:
    options = ("--gateways", "2", "--grace", "1")
    async with serving(tmp_path, *documents(tmp_path), options=options) as one:
        heard = Heard(one)
        await heard.suffer(Fault("nothing wrong", post(CHAT, chat("talks")), 200, engine=True))
        for model in TIMED.values():
            await heard.answer(post(CHAT, chat(model)))  # it starts: a queued stream gets its head early
        faults = [fault for family in REQUESTS for fault in family()]
        await asyncio.gather(*map(heard.suffer, [*faults, *engine_faults()]))
        await refused_in_time(heard)
        await to_the_operations_port(heard)
        await engines_die(heard)
        await clients_leave(heard)
        await processes_die(heard)
        await heard.look()
        await ends(heard)
        heard.assert_nothing_disclosed(talkers=4)


async def refused_in_time(heard: Heard) -> None:
    """Timeouts, a full queue, a failed start and half a request."""
    body, wait = chat("slow"), "Prefer: wait=1"
    late = "Prefer: wait=25"  # the head is sent before that, also if the gateway is paused for 20 s
    await asyncio.gather(
        heard.suffer(Fault("a full queue", post(CHAT, chat("full")), 429, "queue_full")),
        heard.suffer(Fault("a start that fails", post(CHAT, chat("broken")), 503, "model_start_failed")),
        heard.suffer(Fault("a deadline", post(CHAT, body, wait), 503, "model_starting")),
        heard.suffer(Fault("a deadline, Anthropic", post(MESSAGES, body, wait), 503, "model_starting")),
        heard.suffer(Fault("no time", post(CHAT, body, "Prefer: wait=0"), 503, "model_starting")),
        heard.suffer(Fault("a stream's deadline", post(CHAT, chat("slow", stream=True), late), 200, "model_starting")),
        heard.suffer(Fault("half a head", f"POST {CHAT} HTTP/1.1\r\n{GOOD}\r\n".encode(), 408, "request_timeout")),
        heard.suffer(Fault("half a body", post(CHAT, chat("talks"))[:-4], 408, "request_timeout")),
    )


async def to_the_operations_port(heard: Heard) -> None:
    """A client uses the wrong port: what it sends there is not disclosed either."""
    port = int(heard.one.ops.rpartition(":")[2])
    good = f"Host: 127.0.0.1\r\n{GOOD}\r\nConnection: close\r\n"
    body = chat("talks")
    for data in (
        f"GET /{KEY}?key={KEY} HTTP/1.1\r\n{good}\r\n", f"GET /api/v1/models/{PROMPT} HTTP/1.1\r\n{good}\r\n",
        f"GET /api/v1/explain/model/{PROMPT} HTTP/1.1\r\n{good}\r\n", f"{KEY} / HTTP/1.1\r\n{good}\r\n",
        f"GET /metrics HTTP/1.1\r\nHost: {KEY}\r\nConnection: close\r\n\r\n",
        f"GET / HTTP/1.1\r\nAuthorization : Bearer {KEY}\r\n{good}\r\n", f"GET / HTTP/1.1\r\n{KEY}\0: x\r\n{good}\r\n",
        f"GET / HTTP/{KEY}\r\n{good}\r\n", f"{KEY}\r\n\r\n", f"GET / HTTP/1.1\r\nContent-Length: {KEY}\r\n{good}\r\n",
        f"GET / HTTP/1.1\r\nX-A: {KEY * 2000}\r\n{good}\r\n", f"GET /{KEY * 2000} HTTP/1.1\r\n{good}\r\n",
        post(CHAT, body).decode(), post(CHAT, body).decode().replace("Content-Length", "X-Length"),
    ):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data.encode())
        async with asyncio.timeout(60):
            got = await reader.read()
        writer.transport.abort()
        assert got.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (data[:40], got)
        heard.outputs[f"operations: {data[:20]!r} {len(heard.outputs)}"] = got


async def engines_die(heard: Heard) -> None:
    """Engines of the request die: mid-stream, and twice before the first byte."""
    broke = "upstream_error"
    stream, whole = chat("mortal", "dies-mid-stream", stream=True), chat("mortal", "dies")
    await heard.suffer(Fault("an engine dies mid-stream", post(CHAT, stream), 200, broke))
    await heard.suffer(Fault("an engine dies", post(MESSAGES, whole), 502, broke))


async def clients_leave(heard: Heard) -> None:
    """Clients disconnect while queued, and before and during a response."""
    parked = await connected(heard.one.url)
    parked.send(post(CHAT, chat("slow", stream=True)))
    assert (await parked.head())[0] == 200, "with its early head"
    clients = [await heard.running("patient", stream=True, manner=manner) for manner in ("silent", "stalls")]
    for client in (parked, *clients):
        client.leave()
    await until("nothing runs", lambda: heard.one.demand("patient")["running"] == 0)


async def processes_die(heard: Heard) -> None:
    """The autoscaler and a gateway die, each during a request; then another request fails."""
    one = heard.one
    client = await heard.running("patient", stream=True)
    (first, victim), *_ = one.gateways().items()
    os.kill(one.autoscaler(), signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    await until("both are back", lambda: one.answers() and one.gateways().get(first, victim) != victim)
    client.leave()
    for _ in range(4):  # with both gateways
        await heard.suffer(Fault("after a crash", post(CHAT, chat("talks", "garbage")), 502, "upstream_error"))


async def ends(heard: Heard) -> None:
    """SIGTERM while requests run, wait and arrive."""
    running = [await heard.running("patient", stream=stream, manner="stalls") for stream in (True, True)]
    running.append(await heard.running("patient", stream=False))
    waiting = await connected(heard.one.url)
    waiting.send(post(CHAT, chat("slow")))
    await until("it waits", lambda: heard.one.demand("slow")["waiting"])
    assert await heard.one.stop() == 0
    for number, client in enumerate((*running, waiting)):
        got = await client.rest()
        assert b'"shutting_down"' in got, number
        heard.outputs[f"at the end {number}"] = got
        client.leave()
