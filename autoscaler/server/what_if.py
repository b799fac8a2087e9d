"""Simulates where replicas would start for an assumed demand, in the running system: POST /api/v1/what-if. I/O.

Checks each request (a bounded body, permission) and runs one simulation at a time in a thread
(`autoscaler.planner.what_if`), on the `World` that decisions use. A simulation changes nothing, but it uses CPU time of
the leader: an operator's key is required if orders require one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from autoscaler.contract import ModelName
from autoscaler.controller.fault_attribution import find_culprits, rank_suspects
from autoscaler.controller.loop import Loop
from autoscaler.exception_handling import Failure, attempt
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import assume_quarantined, mask_quarantined
from autoscaler.planner.what_if import CALLS_MAX, PATH, Answer, AssumedDemand, Question, simulate_world
from autoscaler.server import operator_request_checks, read_responses
from autoscaler.server.operator_request_checks import (
    JSON,
    OrderError,
    check_leads,
    format_names,
    order_error_response,
    read_order_body,
)
from autoscaler.state.world import World

BODY_BYTES_MAX = 64 * 1024
EXPECTED = f'expected {{"demand": {{"MODEL": {{"waiting": NUMBER, "running": NUMBER}}}}}}, from 0 to {CALLS_MAX}'
BUSY = "another simulation is running: try again in a moment"


_decode = msgspec.json.Decoder(Question).decode


class WhatIfApi:
    """The route. `wall` returns Unix seconds."""

    def __init__(self, loop: Loop, wall: Callable[[], float] = time.time) -> None:
        self._loop, self._wall = loop, wall
        self._work: asyncio.Task[Answer] | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the route to the operations port."""
        app.router.add_post(PATH, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            question = _question(await read_order_body(request, BODY_BYTES_MAX))
            operator_request_checks.authenticate_operator(
                self._loop.world, request.headers.get("authorization", ""), self._wall(), "a what-if"
            )
            check_leads(self._loop.world)
            work = self._begun(_asked(self._loop.world, question))
        except OrderError as error:
            return order_error_response(error)
        answer = await asyncio.shield(work)  # the client may disconnect; a thread cannot be stopped
        return web.Response(body=msgspec.json.encode(answer), content_type=JSON)

    def _begun(self, asked: dict[ModelName, AssumedDemand]) -> asyncio.Task[Answer]:
        if self._work is not None and not self._work.done():
            raise OrderError(429, BUSY)
        world, now_s = self._loop.tried(asked)
        self._work = asyncio.create_task(self._simulated(world, asked, now_s))
        return self._work

    async def _simulated(self, world: World, asked: dict[ModelName, AssumedDemand], now_s: float) -> Answer:
        """Simulate in a thread. If that raises, quarantine the Models that cause it and simulate without them."""
        first = await asyncio.to_thread(_attempt, world, asked, now_s)
        if not isinstance(first, Failure):
            return first
        found = await asyncio.to_thread(_find_culprits, world, asked, now_s, first.error)
        for name in found:
            self._loop.fault(name, "what-if", first.error)
        again = await asyncio.to_thread(_attempt, assume_quarantined(world, found), asked, now_s)
        if isinstance(again, Failure):
            raise again.error
        return again


def _attempt(world: World, asked: Mapping[ModelName, AssumedDemand], now_s: float) -> Answer | Failure:
    """Simulate without demand for quarantined Models, whose replicas keep their devices."""
    out = list_quarantined_models(world)
    rest = {name: calls for name, calls in asked.items() if name not in out}
    return attempt(lambda: simulate_world(mask_quarantined(world), rest, now_s))


def _find_culprits(
    world: World, asked: Mapping[ModelName, AssumedDemand], now_s: float, error: Exception
) -> tuple[ModelName, ...]:
    return find_culprits(
        rank_suspects(world.models.keys() - list_quarantined_models(world), error),
        lambda out: not isinstance(_attempt(assume_quarantined(world, out), asked, now_s), Failure),
    )


def _question(body: bytes) -> Question:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise OrderError(400, EXPECTED) from None


def _asked(world: World, question: Question) -> dict[ModelName, AssumedDemand]:
    found: dict[ModelName, AssumedDemand] = {}
    for name, calls in question.demand.items():
        model = read_responses.find_model(world, name)
        if model is None:
            raise OrderError(404, f"{name[:100]}: no such model; existing: {format_names(world.models)}")
        if model.name in found:
            raise OrderError(400, f"{name}: Model {model.name} occurs twice")
        found[model.name] = AssumedDemand(calls.waiting, calls.running)
    return found
