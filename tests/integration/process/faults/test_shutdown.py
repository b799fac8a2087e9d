"""SIGTERM at the worst moments: no autoscaler runs, engines are being adopted, or clients keep connecting."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from loadtest.result import Ending
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.serve import Serving, fake, running, serving, shot
from tests.support.waiting import until

ANSWERED_S = 45.0
"""During a drain, which takes up to 90 s, a new connection is refused or answered within this time. A busy machine may
pause a process for 20 s."""
CONNECTIONS = 12
STARTS_MAX = 5
"""How often a start is begun to stop it while it adopts engines. A test that is paused may be too late."""


def died(one: Serving, times: int) -> bool:
    return one.output().count("event=process_exited process=autoscaler ") == times


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not yet noticed"])
async def test_sigterm_stops_all_engines_when_the_autoscaler_is_dead(tmp_path: Path, noticed: bool) -> None:
    """`serve` starts one more autoscaler, because only an autoscaler can stop the engines."""
    # No engine becomes idle while the test is paused.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "leaves-child:60", idleSeconds=600)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0", idleSeconds=600)
    async with serving(tmp_path, ada, bob) as one:
        for name in ("ada", "bob"):
            assert (await one.call(name)).ending is Ending.COMPLETED
        engines = one.marked()
        assert len(engines) == 3
        assert one.process is not None
        if noticed:  # the second pause is 0.4 s
            for deaths in (1, 2):
                os.kill(await until("there is one", one.autoscaler), signal.SIGKILL)
                await until("its exit is logged", partial(died, one, deaths))
            assert await one.stop() == 0
        else:
            freeze(one.process.pid)
            os.kill(one.autoscaler(), signal.SIGKILL)
            one.process.send_signal(signal.SIGTERM)
            one.process.send_signal(signal.SIGCONT)
            assert await one.ended() == 0
        assert not [pid for pid in engines if running(pid)]
        assert one.marked() == []
        assert one.records() == []


async def test_sigterm_during_adoption_stops_the_engines(tmp_path: Path) -> None:
    """If the autoscaler does not know yet which engines run, the signal waits until it does."""
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0", "--fail", "leaves-child:60", idleSeconds=600)
    bob = fake(tmp_path, "bob", "--start-delay", "3600")
    async with serving(tmp_path, ada, bob) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        waiting = one.begin(shot("bob"))
        await until("bob starts", lambda: one.engines("bob"))
        await one.kill()
        assert (await waiting)[0].ending is Ending.LOST
        engines = one.marked()
        assert len(engines) == 3, "engines live on"
        count = one.output().count("ready on")
        contract = one.state / "run" / "autoscaler.sock"
        for _ in range(STARTS_MAX):
            contract.unlink(missing_ok=True)
            one.begin_start()
            autoscaler = await until("an autoscaler is being started", one.autoscaler)
            freeze(autoscaler)
            if not contract.exists():  # else gateways can know already what runs
                break
            await one.kill()
            count = one.output().count("ready on")
        assert not contract.exists()
        assert one.process is not None
        one.process.send_signal(signal.SIGTERM)
        await until("its stop is ordered", lambda: is_stopping(autoscaler))
        os.kill(autoscaler, signal.SIGCONT)
        assert await one.ended() == 0
        assert one.output().count("ready on") == count, "that was before it was ready"
        assert not [pid for pid in engines if running(pid)]
        assert one.marked() == []
        assert one.records() == []


def is_stopping(pid: int) -> bool:
    """Return whether SIGTERM is pending for this process (proc_pid_status(5): a mask, bit 0 is signal 1)."""
    pending = re.findall(r"^S\w{2}Pnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in pending)


async def knock(url: str) -> bytes:
    """Return what a new connection receives until it is closed; nothing if refused. TimeoutError if it hangs."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(ANSWERED_S):
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            return b""
        try:
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_new_connections_are_refused_or_closed_unanswered_during_a_drain(tmp_path: Path) -> None:
    """The sockets of `serve` itself are closed, too: else the kernel would accept clients that are never served."""
    # The streams last 100 s and the grace 90 s, so that the drain goes on while a process is paused.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "1", "--tokens", "100")
    async with serving(tmp_path, ada, options=("--gateways", "2", "--grace", "90")) as one:
        streams = one.begin(*(shot("ada") for _ in range(4)))
        await until("all run", lambda: one.busy("ada") == 4)
        assert one.process is not None
        one.process.send_signal(signal.SIGTERM)
        await until("it is stopping", lambda: "stopping: " in one.output())
        async with asyncio.timeout(ANSWERED_S):
            while await knock(one.url):
                pass  # a gateway was still listening
        assert [await knock(one.url) for _ in range(CONNECTIONS)] == [b""] * CONNECTIONS
        assert one.busy("ada") == 4, "all that was during the drain"
        streams.cancel()
        assert await one.ended() == 0
