"""Both ends of a start: from the request to the engine's process, and from the engine's 200 to its first request.

Two figures from one series of cold starts of a fake engine, started by a two-line script. `spawn`: from just before the
request is written to the first action of the new process (bash prints the time and then becomes the engine). It is an
upper bound that includes the request's path, the decision, fork, exec and the start of bash. `first send`: from the
engine's first 200 to a probe to the arrival of the first queued request, both as the engine records them.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from bench import kit
from bench.documents import body, fake, settings
from bench.kit import Figures, quantile, say, spread
from loadtest.client import Client
from loadtest.result import Ending, Shot

STAMP = 'echo "$EPOCHREALTIME" >>"$0"; exec "$@"'


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return spawn_ms_p99 and first_send_ms_p99."""
    rounds = 60 if quick else 120
    stamps, transcript = place / "spawned", place / "transcript.jsonl"
    document = fake("w", "--tokens-per-s", "0", "--transcript", str(transcript), idleSeconds=0.05, residencySeconds=0)
    spec = document["spec"]
    assert isinstance(spec, dict)
    spec["command"] = ["/bin/bash", "--norc", "--noprofile", "-c", STAMP, str(stamps), *spec["command"]]
    kit.title(f"the two ends of a start, ms, {rounds} cold starts of a fake engine")
    sent_unix_s: list[float] = []
    async with kit.serving(place / "wake", [settings(), document]) as one:
        for _ in range(rounds):
            await one.zero()
            client = Client(one.url)
            await client.open(1)
            await asyncio.sleep(0.05)
            sent_unix_s.append(time.time())
            result = await client.send(Shot(model="w", body=body("w")))
            if result.ending is not Ending.COMPLETED:
                raise kit.BenchError(f"a request did not complete: {result}")
    spawned = [float(line) for line in stamps.read_text().split()]
    calls = [json.loads(line) for line in transcript.read_text().splitlines()]
    spawn_ms = [(at - sent) * 1e3 for sent, at in zip(sent_unix_s, spawned, strict=True)]
    first_ms = [(call["time"] - call["ready_time"]) * 1e3 for call in calls]
    for name, values, most in (("request -> process runs", spawn_ms, 10), ("200 -> first request", first_ms, 15)):
        say(f"{name:<26} {spread(values):<22} p99 {quantile(values, 0.99):6.1f}   (at most {most})")
    return {"spawn_ms_p99": quantile(spawn_ms, 0.99), "first_send_ms_p99": quantile(first_ms, 0.99)}
