"""Cold starts while the API server has problems: a pod webhook that is slow or not available, and an error of etcd.

A start cannot be faster than the webhook, so the figure is the time in excess of the webhook's. A proxy in front of the
real API server returns the error of etcd for the first write of the pod. The part fails if a round
exceeds the limit of its figure.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median

import aiohttp

from autoscaler.kubernetes.kubeconfig import load_api_access
from bench import kit
from bench.clusterbed import bed
from bench.clusterhouse import house
from bench.clusterwake import HOPELESS_S, ours, zero
from bench.documents import body, settings
from bench.kit import BenchError, Figures, say, spread
from tests.integration.cluster.support.control_plane.admission_webhook import webhook
from tests.integration.cluster.support.control_plane.event_loss_proxy import Lossy

SLOW_S, AWAY_S = 20.0, 2.0
BEYOND_S_MAX, AWAY_S_MAX, ETCD_S_MAX = 2.0, 4.0, 1.0
"""Limits of all rounds: after the delay of a slow webhook, with an unavailable webhook, and with an error of etcd."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return webhook_slow_s, webhook_away_s and etcd_error_s."""
    slow_s, rounds = (3.0, 1) if quick else (SLOW_S, 5)
    kit.title(
        f"cold start with a webhook of {slow_s:.0f} s, one that is unavailable for {AWAY_S:.0f} s, and an error of etcd"
    )
    slow, away, usual, failed = list[float](), list[float](), list[float](), list[float]()
    async with bed(place) as one:
        document = ours(place / "pod.jsonl")
        lossy = Lossy(await load_api_access(one.plane.kubeconfig))
        documents = [settings(devices=[], auth="none"), document]
        async with (
            lossy.running(place) as path,
            house(one, place / "house", documents, words=("--kubeconfig", str(path))) as running,
        ):
            await answered_s(running.url)
            for _ in range(rounds):
                await zero(one)
                async with webhook(one.api, one.namespace, place, delay_s=slow_s):
                    slow.append(await answered_s(running.url) - slow_s)
                await zero(one)
                async with webhook(one.api, one.namespace, place, listens=False) as listen:
                    start = asyncio.create_task(answered_s(running.url))
                    await asyncio.sleep(AWAY_S)
                    await listen()
                    away.append(await start)
                for fails, answered in ((0, usual), (1, failed)):
                    await zero(one)
                    lossy.fails = fails
                    answered.append(await answered_s(running.url))
                    if lossy.fails:
                        raise BenchError("the proxy did not return the error of etcd")
    say(f"response after the webhook's delay of {slow_s:.0f} s and another {spread(slow, 2)} s "
        f"(at most {BEYOND_S_MAX:.0f})")  # fmt: skip
    say(f"webhook unavailable for {AWAY_S:.0f} s: response after {spread(away, 2)} s (at most {AWAY_S_MAX:.0f})")
    say(f"one error of etcd: response after {spread(failed, 2)} s (at most {ETCD_S_MAX:.0f}); "
        f"without it {spread(usual, 2)} s")  # fmt: skip
    require(slow, away, failed)
    return {"webhook_slow_s": median(slow), "webhook_away_s": median(away), "etcd_error_s": median(failed)}


def require(slow: list[float], away: list[float], failed: list[float]) -> None:
    """Raise BenchError that names each figure whose limit a round exceeded."""
    figures = (
        ("cold start without the delay of a slow webhook", slow, BEYOND_S_MAX),
        ("cold start while the webhook is unavailable at first", away, AWAY_S_MAX),
        ("cold start with one error of etcd", failed, ETCD_S_MAX),
    )  # fmt: skip
    missed = [f"{what}: {max(took):.2f} s, at most {most:.0f}" for what, took, most in figures if max(took) > most]
    if missed:
        raise BenchError(f"missed figures: {'; '.join(missed)}")


async def answered_s(url: str) -> float:
    """Measure one non-streaming request; a waiting stream sends bytes before its response. Raises BenchError."""
    started_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(HOPELESS_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers={"Content-Type": "application/json"}) as session,
        session.post(f"{url}/v1/chat/completions", data=body("pod", stream=False)) as answer,
    ):
        await answer.read()
        if answer.status != 200:
            raise BenchError(f"the request got status {answer.status}")
    return time.perf_counter() - started_s
