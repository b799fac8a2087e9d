"""Two installations that read the same Models, in combinations of scope, namespaces and names, on a real control plane.

For each combination both installations get requests for a while, and then none. The pods are checked continuously: a
Model with pods of both installations is served twice. If a pod disappears while its Model may not stop, the other
installation deleted it. Writes of statuses are counted in the audit log while there are no requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import aiohttp

from autoscaler.kubernetes.api import ApiError, Object
from autoscaler.spec.installation_ownership import INSTALLATION
from bench import kit
from bench.clusterbed import Bed, bed
from bench.clusterhouse import House, house
from bench.documents import API, body, fake, settings
from bench.kit import BenchError, Figures, say
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane import custom_resources

MODELS = ("ada", "bob", "cat")
CALLED_S, REST_S = 60.0, 120.0
OTHER = "other"
"""A second namespace: of engines, or of a Lease."""
EVERY_S = 0.25
WRITES_PER_MIN_MAX = 1.0
JSON = {"Content-Type": "application/json"}


class Pair(NamedTuple):
    """The differences of the second installation from the first, which is cluster-wide unless `words` override that."""

    title: str
    first: tuple[str, ...]
    second: tuple[str, ...]


SCOPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cluster-wide, cluster-wide": ((), ()),
    "cluster-wide, namespaced": ((), ("--scope", "namespace")),
    "namespaced, cluster-wide": (("--scope", "namespace"), ()),
    "namespaced, namespaced": (("--scope", "namespace"), ("--scope", "namespace")),
}
SECOND: dict[str, tuple[str, ...]] = {
    "one engines namespace; two names": ("--lease", "two"),
    "one engines namespace; one name, two release namespaces": ("--home", OTHER),
    "two engines namespaces; one name": ("--namespace", OTHER),
    "two engines namespaces; two names": ("--namespace", OTHER, "--lease", "two"),
}
PAIRS = [
    Pair(f"{scopes}; {names}", first, (*words, *second))
    for scopes, (first, second) in SCOPES.items()
    for names, words in SECOND.items()
]


class Seen:
    """Observations of the pods."""

    def __init__(self) -> None:
        self.twice = 0
        self.gone = 0
        self.unlabelled = 0
        """Pods of no installation, counted at each look, as in `twice`."""
        self._owners: dict[str, str] = {}
        """Pod -> installation."""

    def look(self, pods: list[Object]) -> None:
        """Compare the current pods of engines with the previous ones."""
        owners, models = dict[str, str](), dict[str, set[str]]()
        for pod in pods:
            labels: dict[str, str] = pod["metadata"].get("labels") or {}
            name = str(pod["metadata"]["name"])
            model = labels.get("pilotlight.dev/model", name)
            owners[name] = labels.get(INSTALLATION, "")
            models.setdefault(model, set()).add(owners[name])
        self.twice += sum(len(of) > 1 for of in models.values())
        self.gone += len(self._owners.keys() - owners.keys())
        self.unlabelled += sum(not owner for owner in owners.values())
        self._owners = owners


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return installations_deleted, installations_twice and installations_writes. Raises BenchError."""
    called_s, rest_s = (6.0, 4.0) if quick else (CALLED_S, REST_S)
    kit.title(f"two installations, {len(PAIRS)} combinations of {called_s + rest_s:.0f} s")
    deleted = twice = unlabelled = unanswered = writes = 0
    async with bed(place) as one:
        await make_namespace(one.api, OTHER)
        await custom_resources.install(one.api)
        for number, pair in enumerate(PAIRS):
            seen, statuses, served = await _pair(one, place / f"pair-{number}", pair, called_s, rest_s)
            written = max(statuses.values(), default=0)
            say(f"{pair.title}: {served[200]} requests served, {served[404]} got 404 from the other; "
                f"{seen.gone} pods deleted, {seen.twice} Models twice, {seen.unlabelled} pods without an installation, "
                f"{written} idle writes")  # fmt: skip
            deleted, twice, writes = deleted + seen.gone, twice + seen.twice, max(writes, written)
            unlabelled += seen.unlabelled
            unanswered += served.total() - served[200] - served[404]
    writes_per_min, writes_max = 60.0 * writes / rest_s, math.ceil(WRITES_PER_MIN_MAX * rest_s / 60.0)
    say(f"pods deleted {deleted} (at most 0); Models served twice {twice} (at most 0); "
        f"pods without an installation {unlabelled} (at most 0)")  # fmt: skip
    say(f"status writes per Model in {rest_s:.0f} s when idle {writes} (at most {writes_max}); "
        f"other answers {unanswered}")  # fmt: skip
    require(deleted, twice, unlabelled, writes, writes_max)
    return {
        "installations_deleted": deleted, "installations_twice": twice, "installations_writes": writes_per_min,
    }  # fmt: skip


def require(deleted: int, twice: int, unlabelled: int, writes: int, writes_max: int) -> None:
    """Raise BenchError that names each figure above its limit."""
    figures = (
        ("pods deleted", deleted, 0),
        ("Models served twice", twice, 0),
        ("pods without an installation", unlabelled, 0),
        ("status writes of a Model when idle", writes, writes_max),
    )
    missed = [f"{what}: {found}, at most {most}" for what, found, most in figures if found > most]
    if missed:
        raise BenchError(f"missed figures: {'; '.join(missed)}")


async def _pair(
    one: Bed, place: Path, pair: Pair, called_s: float, rest_s: float
) -> tuple[Seen, Counter[str], Counter[int]]:
    """Return the pods, the status writes per Model without load, and the responses per HTTP status."""
    seen, served = Seen(), Counter[int]()
    place.mkdir()
    models = custom_resources.models(one.namespace)
    documents = [settings(devices=[], auth="none")]
    async with AsyncExitStack() as stack:
        houses = [
            await stack.enter_async_context(house(one, place / name, documents, words=words))
            for name, words in (("first", pair.first), ("second", pair.second))
        ]
        for name in MODELS:
            document = fake(name, "--host", "{host}", gpu={"count": 0}, image="fake", idleSeconds=3600)
            await one.api.create(models, {"apiVersion": API, **document})
        await _called(one, houses, seen, served, called_s)
        since_unix_s, until_s = time.time() + 2.0, time.monotonic() + 2.0 + rest_s
        while time.monotonic() < until_s:
            seen.look(await _pods(one))
            await asyncio.sleep(EVERY_S)
        patched = [at.name for at in one.asked(since_unix_s) if (at.verb, at.what) == ("patch", "models/status")]
        for name in MODELS:
            await one.api.delete(f"{models}/{name}")
        deadline_s = time.monotonic() + 60.0
        while left := await _pods(one):
            if time.monotonic() > deadline_s:
                raise BenchError(f"{pair.title}: no installation deleted {[pod['metadata']['name'] for pod in left]}")
            await asyncio.sleep(EVERY_S)
        for namespace in (one.namespace, OTHER):
            for lease in ("models.pilotlight.dev", "pilotlight", "two", "bench"):
                try:
                    await one.api.delete(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}")
                except ApiError as error:
                    if error.status != 404:
                        raise
    return seen, Counter(patched), served


async def _called(one: Bed, houses: list[House], seen: Seen, served: Counter[int], called_s: float) -> None:
    """Send requests for all Models to both installations until each Model is served, and for `called_s` after that."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        deadline_s = time.monotonic() + 60.0
        while (found := [await _answers(session, houses, name) for name in MODELS]) != [[200, 404]] * len(MODELS):
            if time.monotonic() > deadline_s:
                raise BenchError(f"not every Model has one installation that serves it: the responses were {found}")
            await asyncio.sleep(EVERY_S)
        until_s = time.monotonic() + called_s
        while time.monotonic() < until_s:
            for name in MODELS:
                served.update(await _answers(session, houses, name))
            seen.look(await _pods(one))


async def _answers(session: aiohttp.ClientSession, houses: list[House], name: str) -> list[int]:
    """Return the status of a request to each installation, highest last."""
    found = list[int]()
    for url in (f"{at.url}/v1/chat/completions" for at in houses):
        async with session.post(url, data=body(name), headers=JSON) as answer:
            await answer.read()
            found.append(answer.status)
    return sorted(found)


async def _pods(one: Bed) -> list[Object]:
    """Return all pods in both namespaces, with and without a label of an installation. All are pods of engines."""
    found = list[Object]()
    for namespace in (one.namespace, OTHER):
        listed = await one.api.get(f"/api/v1/namespaces/{namespace}/pods")
        found += listed["items"]
    return found
