"""The operations port of the autoscaler (interfaces, section 4): health, metrics and the read API.

Owns the HTTP side only: everything it shows is read from the loop's World, its Plan and its log, which are what the
decisions were taken on. Gateways on Unix sockets are asked for their metrics, which are merged into ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from autoscaler import explain
from autoscaler.contract import ModelName
from autoscaler.log import Log
from autoscaler.loop import Loop
from autoscaler.merge import merge
from autoscaler.world import World

SCRAPE_TIMEOUT_S = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class OperationsServer:
    """The operations port as an aiohttp application. `gateway_sockets` lists the gateways' own ports as they are."""

    def __init__(
        self, loop: Loop, log: Log, metrics: Callable[[], bytes], gateway_sockets: Callable[[], Sequence[Path]]
    ) -> None:
        self._loop = loop
        self._log = log
        self._metrics = metrics
        self._gateway_sockets = gateway_sockets

    def application(self) -> web.Application:
        """All paths of section 4 that are due."""
        app = web.Application()
        get = app.router.add_get
        get("/healthz", self._healthz)
        get("/readyz", self._readyz)
        get("/metrics", self._metrics_text)
        get("/api/v1/status", self._status)
        get("/api/v1/models", self._models)
        get("/api/v1/models/{name:.+}", self._model)
        get("/api/v1/tenants", self._tenants)
        get("/api/v1/devices", self._devices)
        get("/api/v1/plan", self._plan)
        get("/api/v1/explain/model/{name:.+}", self._explain)
        get("/api/v1/explain/last", self._last)
        return app

    @property
    def _world(self) -> World:
        return self._loop.world

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if not self._world.synced:
            return web.Response(status=503, text="what runs is still being listed\n")
        return web.Response(text="ok\n")

    async def _metrics_text(self, _: web.Request) -> web.Response:
        texts = await asyncio.gather(*(scrape(path) for path in self._gateway_sockets()))
        body = merge([self._metrics(), *(text for text in texts if text is not None)])
        return web.Response(body=body, headers={"content-type": METRICS_TYPE})

    async def _status(self, _: web.Request) -> web.Response:
        return answer(explain.status(self._world, self._loop.plan, self._now_s()))

    async def _models(self, _: web.Request) -> web.Response:
        return answer([self._one(name) for name in sorted(self._world.models)])

    async def _model(self, request: web.Request) -> web.Response:
        name = ModelName(request.match_info["name"])
        if name not in self._world.models:
            return missing("model", sorted(self._world.models))
        return answer(self._one(name))

    async def _tenants(self, _: web.Request) -> web.Response:
        rows = [
            {"name": t.name, "weight": t.spec.weight, "keys": len(t.spec.keys)} for t in self._world.tenants.values()
        ]
        return answer(rows)

    async def _devices(self, _: web.Request) -> web.Response:
        world = self._world
        rows = []
        for slice_ in world.slices.values():
            held = [world.replicas[r] for r in world.by_slice.get(slice_.id, ())]
            replicas = [{"id": r.id, "model": r.model, "state": r.state, "memory_bytes": r.memory_bytes} for r in held]
            rows.append({**msgspec.to_builtins(slice_), "replicas": replicas})
        return answer(rows)

    async def _plan(self, _: web.Request) -> web.Response:
        return answer(self._loop.plan)

    async def _explain(self, request: web.Request) -> web.Response:
        name = ModelName(request.match_info["name"])
        if name not in self._world.models:
            return missing("model", sorted(self._world.models))
        return answer(explain.explain_model(self._world, self._loop.plan, self._log, name, self._now_s()))

    async def _last(self, _: web.Request) -> web.Response:
        return answer(explain.last(self._world, self._log, self._now_s()))

    def _one(self, name: ModelName) -> dict[str, object]:
        """One Model as interfaces section 2 shows its status."""
        world = self._world
        counts: dict[str, int] = {}
        for replica in world.by_model.get(name, ()):
            state = world.replicas[replica].state.value
            counts[state] = counts.get(state, 0) + 1
        load, history = world.loads.get(name), world.histories.get(name)
        waiting, running = (load.waiting, load.running) if load is not None else (0, 0)
        starts = history.starts_s if history is not None else ()
        return {
            "name": name,
            "replicas": counts,
            "demand": {"waiting": waiting, "running": running},
            "last_start_seconds": starts[-1] if starts else None,
        }

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def scrape(path: Path) -> bytes | None:
    """A gateway's own /metrics; None when it does not answer in time (it may be restarting)."""
    timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
            session.get("http://gateway/metrics") as response,
        ):
            return await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def answer(value: object) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def missing(kind: str, names: Sequence[str]) -> web.Response:
    """404 that says what there is."""
    text = f"no such {kind}; there are: {', '.join(names) or 'none'}"
    return web.Response(status=404, body=msgspec.json.encode({"error": text}), content_type="application/json")
