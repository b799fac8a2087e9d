"""An API server with 5,000 pods of others and 500 Models: memory, time until ready and CPU time of an autoscaler.

The pods are objects only, of a realistic size, on nodes that are objects only; one pod in ten has a GPU. The autoscaler
starts after they exist. It is synced when its operations port reports that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import psutil
import yaml

from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.kubeconfig import load_api_access
from bench import kit
from bench.clusterbed import Bed, bed
from bench.clusterhouse import House, house
from bench.documents import API, ROOT, fake, settings
from bench.kit import MIB, BenchError, Figures, cpu_s, say, spread

PODS, NODES, MODELS = 5000, 100, 500
AT_ONCE = 8
"""Clients, each with its own request budget."""
STEADY_S = 20.0
REST_S_MAX, SETTLE_S = 180.0, 5.0
UNREACHABLE = "node.kubernetes.io/unreachable"
SYNCED_S_MAX = 60.0
CRDS = ROOT / "charts" / "pilotlight" / "crds"


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return rss_mib, sync_s and cpu_core."""
    rounds = 1 if quick else 3
    kit.title(f"{PODS:,} pods of others and {MODELS} Models on the API server, {rounds} starts of an autoscaler")
    rss, sync, cpu = list[float](), list[float](), list[float]()
    async with bed(place) as one:
        await crds(one.api)
        begun_s = time.monotonic()
        objects, namespace = one.plane.kubeconfig, f"namespaces/{one.namespace}"
        await made(objects, "/api/v1/nodes", (node(number) for number in range(NODES)))
        await made(objects, f"/api/v1/{namespace}/pods", (pod(number) for number in range(PODS)))
        await made(objects, f"/apis/{API}/{namespace}/models", (model(number) for number in range(MODELS)))
        say(f"(all created in {time.monotonic() - begun_s:.0f} s)")
        for number in range(rounds):
            async with house(one, place / f"house-{number}", [settings(devices=[], auth="none")]) as running:
                sync.append(await synced(running))
                process = psutil.Process(running.scalers[0].process.pid)
                await at_rest(one)
                before_s, at_s = cpu_s([process]), time.monotonic()
                await asyncio.sleep(STEADY_S)
                cpu.append((cpu_s([process]) - before_s) / (time.monotonic() - at_s))
                rss.append(process.memory_info().rss / MIB)
    for what, values, digits, most in (
        ("RSS, MiB", rss, 0, 250), ("start to synced, s", sync, 2, 5), ("steady CPU, core", cpu, 3, 0.05),
    ):  # fmt: skip
        say(f"{what:<26} {spread(values, digits):<24} (at most {most})")
    return {"rss_mib": max(rss), "sync_s": max(sync), "cpu_core": max(cpu)}


async def synced(running: House) -> float:
    """Return the seconds from the start of the process until it knows all objects, including Models."""
    begun_s = psutil.Process(running.scalers[0].process.pid).create_time()
    deadline_s = time.monotonic() + SYNCED_S_MAX
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            try:
                if await knows_all(session, running.operations[0]):
                    return time.time() - begun_s
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)
    raise BenchError(f"not synced after {SYNCED_S_MAX:.0f} s; see {running.scalers[0].log}")


async def knows_all(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the autoscaler is ready and has every Model."""
    async with session.get(f"{url}/readyz") as answer:
        if answer.status != 200:
            return False
    async with session.get(f"{url}/api/v1/models") as answer:
        return len(await answer.json()) == MODELS


async def at_rest(one: Bed) -> None:
    """Wait until every Model's status is written, and the controllers have noticed that the nodes of others are dead.
    Before that there is one-time work.
    """
    deadline_s = time.monotonic() + REST_S_MAX
    while time.monotonic() < deadline_s:
        models = (await one.api.get(f"/apis/{API}/namespaces/{one.namespace}/models"))["items"]
        nodes = [
            found for found in (await one.api.get("/api/v1/nodes"))["items"] if found["metadata"]["name"] != one.node
        ]
        lost = [found for found in nodes if UNREACHABLE in {taint["key"] for taint in found["spec"].get("taints", ())}]
        if len(lost) == len(nodes) and all(found.get("status", {}).get("conditions") for found in models):
            await asyncio.sleep(SETTLE_S)
            return
        await asyncio.sleep(1.0)
    raise BenchError(f"the autoscaler is still busy after {REST_S_MAX:.0f} s")


async def crds(api: Api) -> None:
    """Create Pilotlight's custom resource definitions and wait until they are served."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for file in sorted(CRDS.glob("*.yaml")):
        made = await api.create(path, yaml.safe_load(file.read_text()))
        while not any(
            (one["type"], one["status"]) == ("Established", "True")
            for one in (made.get("status", {}).get("conditions") or [])
        ):
            await asyncio.sleep(0.05)
            made = await api.get(f"{path}/{made['metadata']['name']}")


async def made(kubeconfig: Path, path: str, objects: Iterable[Object]) -> None:
    """Create all objects, a few at a time."""
    waiting = iter(objects)

    async def some() -> None:
        async with Api(await load_api_access(kubeconfig), agent="bench") as api:
            for one in waiting:
                await api.create(path, one)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def node(number: int) -> Object:
    """Return a node with eight GPUs and no kubelet."""
    amounts = {"cpu": "64", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": f"others-{number}", "labels": labels},
        "status": {"capacity": amounts, "allocatable": amounts},
    }  # fmt: skip


def pod(number: int) -> Object:
    """Return a pod of another owner, which stays even if its node fails."""
    gpu = {"limits": {"nvidia.com/gpu": "1"}} if number % 10 == 0 else {}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": f"other-{number}", "labels": {"app": f"app-{number % 50}", "tier": "back"},
            "annotations": {f"example.com/note-{i}": "x" * 150 for i in range(8)},
        },
        "spec": {
            "nodeName": f"others-{number % NODES}", "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": name, "image": f"registry.example/{name}:1", "args": [f"--flag-{i}={i}" for i in range(8)],
                    "env": [{"name": f"NAME_{i}", "value": "value"} for i in range(8)],
                    "resources": gpu if name == "main" else {},
                }
                for name in ("main", "side")
            ],
        },
    }  # fmt: skip


def model(number: int) -> Object:
    """Return a Model at zero."""
    document = fake(f"model-{number}", image="fake-engine")
    return {"apiVersion": API, **document}
