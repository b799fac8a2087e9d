"""wrk, the load of the throughput benchmarks: the maximum request rate of one proxy on one core, and its CPU time.

Has its script, its command and the parser of its output. Closed loop, 64 connections, one thread. If it is not
installed, `bench.closedloop` is used; the tables name the load.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import closedloop, kit
from bench.documents import key
from bench.usage import ran_us

CONNECTIONS = closedloop.CONNECTIONS
MISSING = "wrk is not on the PATH (Debian: apt install wrk)"


class Load(NamedTuple):
    """One run. `us_per_call`: CPU time of the measured processes; `core`: their share of a core."""

    per_s: float
    us_per_call: float
    us_others: float
    core: float
    bad: int
    calls: int
    """Completed requests, successful or not."""


def there() -> bool:
    """Return whether wrk is installed."""
    return shutil.which("wrk") is not None


def name() -> str:
    """Return the name of the load, for tables."""
    return "wrk" if there() else "our own client"


def script(path: Path, body: bytes) -> Path:
    """Write the requests for either load: POSTs of `body` to the chat path, with the key of tenant `a`."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {key('a')}"
    path.with_suffix(".http").write_bytes(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    path.write_text(
        f'wrk.method = "POST"\nwrk.path = "/v1/chat/completions"\nwrk.body = [==[{body.decode()}]==]\n'
        f'wrk.headers["Content-Type"] = "application/json"\nwrk.headers["Authorization"] = "Bearer {key("a")}"\n'
    )
    return path


async def load(
    sends: Path, url: str, span_s: int, processes: Sequence[psutil.Process], others: Sequence[psutil.Process] = ()
) -> Load:
    """Run the load. CPU time per request is that of `processes`; that of `others` is reported separately."""
    command = [*kit.on_core(kit.LOAD_CORE), "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{span_s}s", "-s", str(sends), url]
    if not there():
        own = [sys.executable, "-m", "bench.closedloop", url, str(span_s), str(sends.with_suffix(".http"))]
        command = [*kit.on_core(kit.LOAD_CORE), *own]
    before_us, others_us = ran_us(processes), ran_us(others)
    made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output = (await made.communicate())[0].decode()
    used_us, others_us = ran_us(processes) - before_us, ran_us(others) - others_us
    calls, per_s = re.search(r"(\d+) requests in", output), re.search(r"Requests/sec:\s+([\d.]+)", output)
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    if calls is None or per_s is None or not int(calls[1]):
        raise kit.BenchError(f"{name()} got no responses from {url}: {output.strip()}")
    count = int(calls[1])
    core = used_us / span_s / 1e6
    return Load(float(per_s[1]), used_us / count, others_us / count, core, int(bad[1]) if bad else 0, count)
