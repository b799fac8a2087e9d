"""The time until the next autoscaler acts: after the leader is killed, and after it is stopped.

Two autoscalers and one gateway run; the holder of the Lease leads. Right after the signal, a request for a cold Model
is sent. The measured time ends when the API server has its pod, which includes the new leader's first action. The
Lease has the default duration.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from bench import kit
from bench.clusterbed import Bed, bed
from bench.clusterhouse import LEASE, House, Scaler, house, ready
from bench.clusterwake import called, first, ours, zero
from bench.documents import settings
from bench.kit import BenchError, Figures, say, spread

LEASE_S = 15.0
LED_S_MAX = 60.0


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return failover_s and clean_stop_s."""
    rounds = 2 if quick else 5
    kit.title(
        f"failover: seconds from the signal to the pod of the next cold request, {rounds} rounds, Lease {LEASE_S:.0f} s"
    )
    taken: dict[int, list[float]] = {signal.SIGKILL: [], signal.SIGTERM: []}
    async with (
        bed(place) as one,
        house(
            one, place / "house", [settings(devices=[], auth="none"), ours(place / "notes.jsonl")], scalers=2
        ) as running,
    ):
        for _ in range(rounds):
            for number, values in taken.items():
                values.append(await change(one, running, signal.Signals(number)))
    for name, number, most in (("killed", signal.SIGKILL, LEASE_S + 2), ("stopped", signal.SIGTERM, 1)):
        say(f"{name:<12} {spread(taken[number], 2):<28} (at most {most:.0f})")
    return {"failover_s": max(taken[signal.SIGKILL]), "clean_stop_s": max(taken[signal.SIGTERM])}


async def change(one: Bed, running: House, number: signal.Signals) -> float:
    """Measure one change of leadership, then restart the process that ended."""
    await ready(running)  # also the other one, which may have just been started
    await called(running.url, "pod")
    await zero(one)
    leader = await held(one, running)
    begun_unix_s = time.time()
    leader.process.send_signal(number)
    start = await called(running.url, "pod")
    seconds = first(list(one.asked()), start._replace(sent_unix_s=begun_unix_s), "create", "pods") / 1e3
    leader.stop()
    leader.start()
    await zero(one)
    return seconds


async def held(one: Bed, running: House) -> Scaler:
    """Return the process that leads."""
    deadline_s = time.monotonic() + LED_S_MAX
    path = f"/apis/coordination.k8s.io/v1/namespaces/{one.namespace}/leases/{LEASE}"
    while time.monotonic() < deadline_s:
        holder = (await one.api.get(path))["spec"].get("holderIdentity")
        for scaler in running.scalers:
            if holder and holder.startswith(f"{scaler.name}_"):
                return scaler
        await asyncio.sleep(0.05)
    raise BenchError("no autoscaler leads")
