"""Cold starts on a real API server: a pod of Pilotlight, an adopted Deployment, and the same engine by hand, in turn.

A round begins when nothing of the previous one is left, and ends at the first body byte. By hand is what a person would
script: create the pod, poll its address every 5 ms, then send the request. The audit log of the API server has the time
of the pod or the scale; the engine records its first 200. All times are of this machine's clock. Probes have the
shortest period that manifests allow (`periodSeconds: 1`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from autoscaler.drivers.probes import probe_engine
from autoscaler.kubernetes.api import Object
from bench import kit
from bench.clusterbed import Asked, Bed, bed
from bench.clusterhouse import house
from bench.documents import ROOT, Document, body, model, settings
from bench.kit import BenchError, Figures, quantile, say, spread
from bench.picture import Series, picture
from loadtest.client import Client
from loadtest.result import Ending, Shot

PORT = 8000
POLL_S = 0.005
SETTLE_S = 0.2
"""The pause after everything of a round has been removed."""
HOPELESS_S = 60.0


class Start(NamedTuple):
    """One cold start. Times are of the system clock."""

    sent_unix_s: float
    first_byte_unix_s: float

    @property
    def took_ms(self) -> float:
        """The duration that the client measured."""
        return (self.first_byte_unix_s - self.sent_unix_s) * 1e3


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return create_ms_p99, scale_ms_p99, first_byte_ms_p99, cold_s_mean, failed and requests_per_start."""
    rounds = 15 if quick else 50
    notes = {name: place / f"{name}.jsonl" for name in ("pod", "adopted", "hand")}
    kit.title(f"cold start on a real API server, {rounds} rounds in turn, periodSeconds: 1")
    async with bed(place) as one:
        document = ours(notes["pod"])
        await one.api.create(f"/apis/apps/v1/namespaces/{one.namespace}/deployments", deployment(notes["adopted"]))
        async with house(one, place / "house", [settings(devices=[], auth="none"), document]) as running:
            sides: dict[str, Callable[[], Awaitable[Start]]] = {
                "pod": lambda: called(running.url, "pod"),
                "adopted": lambda: called(running.url, "adopted"),
                "hand": lambda: by_hand(one, notes["hand"]),
            }
            starts = await series(one, sides, rounds)
        asked = list(one.asked())
    return report(starts, asked, notes)


async def series(
    one: Bed, sides: dict[str, Callable[[], Awaitable[Start]]], rounds: int
) -> dict[str, list[Start | None]]:
    """Run `rounds` of each side. None: the round failed."""
    starts: dict[str, list[Start | None]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first_at = number % len(names)
        for name in names[first_at:] + names[:first_at]:
            await zero(one)
            try:
                starts[name].append(await sides[name]())
            except BenchError as error:
                say(f"{name}: {error}")
                starts[name].append(None)
    await zero(one)
    return starts


def report(starts: dict[str, list[Start | None]], asked: list[Asked], notes: dict[str, Path]) -> Figures:
    """Print the table and return the figures."""
    say(f"{'side':<10} {'first byte ms: median [min-max]':<34} {'mean':>8} {'p99':>8} {'failed':>7}")
    means = dict[str, float]()
    for name, all_ in starts.items():
        took_ms = [one.took_ms for one in all_ if one is not None]
        if not took_ms:
            raise BenchError(f"{name}: no start completed")
        means[name] = sum(took_ms) / len(took_ms)
        failed = len(all_) - len(took_ms)
        say(f"{name:<10} {spread(took_ms):<34} {means[name]:8.1f} {quantile(took_ms, 0.99):8.1f} {failed:7}")
    create_ms = [first(asked, at, "create", "pods") for at in good(starts["pod"])]
    scale_ms = [first(asked, at, "patch", "deployments/scale") for at in good(starts["adopted"])]
    first_ms = [ms for name in ("pod", "adopted") for ms in after_ready(good(starts[name]), notes[name])]
    per_start = [requests(asked, at) for name in ("pod", "adopted") for at in good(starts[name])]
    for what, values, most in (
        ("request -> pod at the server", create_ms, 50),
        ("request -> scale at the server", scale_ms, 50),
        ("engine's 200 -> first byte", first_ms, 100),
    ):
        say(f"{what:<28} {spread(values):<24} p99 {quantile(values, 0.99):6.1f}   (at most {most})")
    say(f"{'requests per start':<28} {spread(per_start, 0):<24}              (at most 6)")
    drawn = [
        Series(name, [(float(i), one.took_ms) for i, one in enumerate(all_) if one is not None], number, dots=True)
        for number, (name, all_) in enumerate(starts.items())
    ]
    picture("cluster-start", "round", "first byte, ms (periodSeconds: 1)", drawn)
    return {
        "create_ms_p99": quantile(create_ms, 0.99),
        "scale_ms_p99": quantile(scale_ms, 0.99),
        "first_byte_ms_p99": quantile(first_ms, 0.99),
        "cold_s_mean": max(means["pod"], means["adopted"]) / 1e3,
        "failed": sum(one is None for name in ("pod", "adopted") for one in starts[name]),
        "requests_per_start": max(per_start),
    }


def good(starts: list[Start | None]) -> list[Start]:
    """Return the completed starts."""
    return [one for one in starts if one is not None]


def first(asked: list[Asked], start: Start, verb: str, what: str) -> float:
    """Return the milliseconds from the request to the end of the first matching API request."""
    ends = [
        one.done_unix_s
        for one in asked
        if (one.verb, one.what) == (verb, what) and one.received_unix_s >= start.sent_unix_s and one.code < 300
    ]
    return (min(ends) - start.sent_unix_s) * 1e3


def after_ready(starts: list[Start], notes: Path) -> list[float]:
    """Return the milliseconds from the engine's first 200 to the client's first byte."""
    ready = [json.loads(line)["ready_time"] for line in notes.read_text().splitlines()]
    return [(one.first_byte_unix_s - max(at for at in ready if at < one.first_byte_unix_s)) * 1e3 for one in starts]


def requests(asked: list[Asked], start: Start) -> float:
    """Return the number of API requests of the product during the start, without leader election and long watches."""
    return sum(
        one.agent.startswith("pilotlight") and one.verb != "watch" and one.what != "leases"
        for one in asked
        if start.sent_unix_s <= one.received_unix_s <= start.first_byte_unix_s
    )


# --- the sides ------------------------------------------------------------------------------------------------------


async def called(url: str, model: str) -> Start:
    """Send a request through the gateway, on an open connection."""
    client = Client(url)
    await client.open(1)
    await asyncio.sleep(SETTLE_S)
    return await sent(client, model)


async def sent(client: Client, model: str) -> Start:
    """Send one request. Raises BenchError if it fails."""
    sent_unix_s = time.time()
    result = await client.send(Shot(model=model, body=body(model), timeout_s=HOPELESS_S))
    if result.ending is not Ending.COMPLETED or result.first_byte_s is None:
        raise BenchError(f"a request did not complete: {result.status} {result.code}")
    return Start(sent_unix_s, sent_unix_s + result.first_byte_s)


async def by_hand(one: Bed, notes: Path) -> Start:
    """Create the pod, poll it, and send a request."""
    await asyncio.sleep(SETTLE_S)
    pods, begun_unix_s = f"/api/v1/namespaces/{one.namespace}/pods", time.time()
    template = deployment(notes)["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hand"}, "spec": template["spec"]}
    await one.api.create(pods, pod)
    ip = ""
    while not ip or not await probe_engine(ip, PORT, "/health"):
        if time.time() - begun_unix_s > HOPELESS_S:
            raise BenchError(f"the engine's pod without Pilotlight is not ready after {HOPELESS_S:.0f} s")
        await asyncio.sleep(POLL_S)
        ip = ip or (await one.api.get(f"{pods}/hand"))["status"].get("podIP", "")
    ended = await sent(Client(f"http://{ip}:{PORT}"), "adopted")
    await one.api.delete(f"{pods}/hand", grace_s=1)
    return Start(begun_unix_s, ended.first_byte_unix_s)


async def zero(one: Bed) -> None:
    """Wait until there is no pod."""
    deadline_s = time.monotonic() + HOPELESS_S
    while await one.pods():
        if time.monotonic() > deadline_s:
            raise BenchError("the pods of the previous round are not removed")
        await asyncio.sleep(0.02)


# --- what is started ------------------------------------------------------------------------------------------------


def ours(notes: Path) -> Document:
    """Return a Model whose replicas are pods of Pilotlight."""
    words = engine("{host}", "{port}", notes)
    return model(
        "pod", engine="command", command=words, gpu={"memory": "1Gi"}, idleSeconds=0.05, residencySeconds=0,
        image="instant-engine",
    )  # fmt: skip


def deployment(notes: Path) -> Object:
    """Return a Deployment of the same engine, with the annotations for adoption."""
    container: Object = {
        "name": "engine", "image": "instant-engine", "command": engine("$(POD_IP)", str(PORT), notes),
        "ports": [{"containerPort": PORT}],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
    }  # fmt: skip
    notes_ = {"pilotlight.dev/models": "adopted", "pilotlight.dev/idle-seconds": "0.05", "pilotlight.dev/slots": "4"}
    labels = {"app": "adopted"}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "adopted", "annotations": notes_},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
            },
        },
    }  # fmt: skip


def engine(host: str, port: str, notes: Path) -> list[str]:
    """Return the command line of the engine."""
    return [sys.executable, "-S", "-E", str(ROOT / "bench" / "instant.py"), host, port, str(notes)]
