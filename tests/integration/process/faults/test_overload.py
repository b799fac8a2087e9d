"""More requests than fit, on real processes: cases 3 and 42 of reliability, A and F.

bench/ measures how fast rejections are and how much of the peak remains; these tests check which requests are rejected,
with which error, and how often engines are called.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import openai
import pytest

from gateway.dispatch.model_dispatcher import RETRIES_MAX
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.serve.client_load import SLACK_BYTES, Crowd, chat, counted, resident_bytes
from tests.support.harness.serve.serve import Serving, fake, model, most_at_once, serving, settings, shot, transcript
from tests.support.waiting import until

BURST = pytest.mark.xdist_group("burst")
"""Tests with many concurrent requests run one at a time."""


def codes(results: Sequence[Result]) -> set[tuple[int, str]]:
    return {(result.status, result.code) for result in results}


def came(result: Result) -> int:
    """Return its number at the gateway: two requests sent at the same time may arrive in either order."""
    return int(result.headers["x-request-id"].rpartition("-")[2], 16)


# --- case 3: capacity + 500 requests ----------------------------------------------------------------------------------

QUEUE, SURPLUS = 50, 500
REFUSED = ("pilotlight_calls_total", 'code="queue_full"')
HELD = 'until test -e "$0"; do sleep 0.1; done; exec "$@"'
"""A shell script that runs a command once a file exists."""


@asynccontextmanager
async def nothing_moves(one: Serving, begin: Path, *, warm: bool) -> AsyncIterator[None]:
    """Until the context ends, the Model starts but is not ready, or is ready with its one slot in use.

    Its engine begins to start once the file `begin` exists.
    """
    async with Crowd(one) as crowd:
        holder = await crowd.connect()
        holder.writer.write(chat("ada", stream=True))
        if warm:
            begin.touch()
            await until("the Slot is taken", lambda: one.busy("ada") == 1)
            yield
        else:
            await until("its process is there", lambda: one.engines("ada"))
            holder.leave()
            await until("no request waits", lambda: one.demand("ada") == {"waiting": 0, "running": 0})
            try:
                yield
            finally:
                begin.touch()


@pytest.mark.case("3")
@BURST
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.standard
async def test_full_queue_rejects_only_the_surplus_requests_with_429(tmp_path: Path, warm: bool) -> None:
    """The capacity is that of the queue: the Model starts, or its one slot is busy.

    Exactly the surplus is rejected, while all others still wait, with one clear error; earlier requests keep their
    turn; memory use stays constant.
    """
    options = ("--name", "ada", "--port", "{port}", "--slots", "1", "--transcript", str(tmp_path / "ada.jsonl"))
    words = command(*options, "--tokens-per-s", "20", "--tokens", "2000")
    begin = tmp_path / "begin"
    held = ["/bin/sh", "-c", HELD, str(begin), *words]
    ada = model("ada", engine="command", command=held, slots=1, queue={"callsMax": QUEUE})
    async with serving(tmp_path, ada) as one:
        gateway = one.gateways()["gateway-1"]
        async with nothing_moves(one, begin, warm=warm):
            before_bytes = resident_bytes(gateway)
            sending = one.begin(*(shot("ada", at_s=i * 0.002, tokens=1) for i in range(QUEUE + SURPLUS)))
            await until("the surplus is refused", lambda: counted(one, *REFUSED) == SURPLUS, 90)
            await until("all others wait", lambda: one.demand("ada")["waiting"] == QUEUE)
            assert resident_bytes(gateway) - before_bytes < SLACK_BYTES
        results = sorted(await sending, key=came)
        assert judge_run(QUEUE + SURPLUS, results).holds
        assert all(result.ending is Ending.COMPLETED for result in results[:QUEUE]), "who came first waits"
        assert codes(results[QUEUE:]) == {(429, "queue_full")}
        assert all(result.errors == 1 and result.clear for result in results[QUEUE:])
        assert all(0 < int(result.headers["retry-after"]) <= 120 for result in results[QUEUE:])
        assert one.starts("ada") == 1
    ids = [result.headers["x-request-id"] for result in results[:QUEUE]]
    done = [call.id for call in transcript(tmp_path, "ada") if call.finished]
    assert done == ids, "admitted Calls keep their order"


# --- case 42: busy engines, and clients that retry --------------------------------------------------------------------

CLIENTS = 400
SLOTS, WAITING_MAX = 4, 36
"""Together a tenth of the clients that connect at the same time."""


class Answers:
    """Records every HTTP response, also those that the official client retries and hides from its caller."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.without_retry_after = 0

    async def note(self, response: httpx2.Response) -> None:
        """Record one response."""
        self.statuses[response.status_code] += 1
        if response.status_code != 200:
            await response.aread()
            self.codes[response.json()["error"]["code"]] += 1
            retry_after = response.headers.get("retry-after", "")
            self.without_retry_after += not (retry_after.isdigit() and 0 < int(retry_after) <= 120)


def attempts(one: Serving, name: str) -> int:
    """Return how many requests the Model's engine received, rejected ones included, by its own count."""
    (record,) = [record for record in one.records() if record.model == name]
    with urllib.request.urlopen(f"http://127.0.0.1:{record.port}/metrics", timeout=60) as response:
        text = response.read().decode()
    return int(text.rpartition("requests_total ")[2].split()[0])


@pytest.mark.case("42")
@BURST
@pytest.mark.standard
async def test_retries_to_a_busy_engine_stay_within_the_retry_budget(tmp_path: Path) -> None:
    """400 official clients with two retries each call 4 slots and a queue of 36 at once.

    Every second response of the engine is `busy`. Retries by the gateway at a busy engine add at most a tenth, plus the
    ten saved up. The clients' own retries are separate requests; each waits as long as its response requested.
    """
    # A response takes 0.25 s: the queue fills up even if the clients share a busy core and arrive slowly.
    knobs = ("--tokens-per-s", "20", "--tokens", "5", "--fail", "busy-503:2")
    ada = fake(tmp_path, "ada", *knobs, slots=SLOTS, queue={"callsMax": WAITING_MAX}, idleSeconds=600)
    # The 400 clients run in one process, which a busy machine may starve. By default the gateway closes a connection
    # without a response if no request arrives within 75 s (idleSecondsMax) after the kernel has connected the client.
    patient = dict.fromkeys(("headerSecondsMax", "bodySecondsMax", "idleSecondsMax"), 600)
    answers = Answers()

    async def ask(api: openai.AsyncOpenAI) -> int:
        try:
            await api.chat.completions.create(model="ada", messages=[{"role": "user", "content": "Who?"}])
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    async with serving(tmp_path, ada, settings(limits=patient)) as one:
        assert (await one.call("ada")).ending in {Ending.COMPLETED, Ending.FAILED}
        first = attempts(one, "ada")
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [answers.note]})
        # By default a client must connect within 5 s, which include the time in which this process does not run.
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", http_client=http, timeout=600) as api:
            assert api.max_retries == 2
            ends = Counter(await asyncio.gather(*(ask(api) for _ in range(CLIENTS))))
        assert ends.keys() <= {200, 429, 503}
        assert answers.statuses.keys() == {200, 429, 503}
        assert answers.codes.keys() == {"queue_full", "overloaded"}
        assert answers.without_retry_after == 0
        calls = answers.statuses.total()
        admitted = calls - answers.codes["queue_full"]
        tried = attempts(one, "ada") - first
        assert ends[200] == answers.statuses[200] > 0
        assert tried <= 1.1 * calls
        assert tried <= 1.1 * admitted + RETRIES_MAX, "of those that were not refused at the door"
        moved = counted(one, "pilotlight_upstream_retries_total") - answers.codes["overloaded"]
        assert moved >= RETRIES_MAX / 2, "the budget is used"
        await until("the last is over", lambda: one.demand("ada") == {"waiting": 0, "running": 0})
    done = transcript(tmp_path, "ada")
    assert sum(call.finished for call in done) >= ends[200]
    assert most_at_once(done) <= SLOTS
