"""Operator orders on the operations port: POST .../wake, stop, cordon, uncordon, drain. I/O; it decides nothing.

Checks each request: a valid body, no page of another origin, an API key with the role operator if keys are needed, and
a process that leads. `autoscaler.server.order_effects` defines the meaning of an order; this module executes it and
logs one line (who, what; never a key or an address). A rejection is one clear error and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from autoscaler.controller.loop import Loop
from autoscaler.drivers.driver import CordonError, Cordons
from autoscaler.queries.operator_orders import list_cordon_targets
from autoscaler.server import operator_request_checks, order_effects, read_responses
from autoscaler.server.operator_request_checks import (
    JSON,
    OrderError,
    check_leads,
    format_names,
    order_error_response,
    read_order_body,
)
from autoscaler.server.order_effects import Order, Wish
from autoscaler.state.world import World

BODY_BYTES_MAX = 1024

log = logging.getLogger("pilotlight.autoscaler.operators")

_decode = msgspec.json.Decoder(Wish).decode


class Commands:
    """The routes of orders. `wall` returns Unix seconds."""

    def __init__(self, loop: Loop, cordons: Cordons, wall: Callable[[], float] = time.time) -> None:
        self._loop = loop
        self._cordons = cordons
        self._wall = wall

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the operations port."""
        for path, answers in (
            ("/api/v1/models/{name:.+}/{verb:wake|stop}", self._model),
            ("/api/v1/{kind:devices|nodes}/{name:.+}/{verb:cordon|uncordon|drain}", self._place),
        ):
            app.router.add_post(path, answers)

    async def _model(self, request: web.Request) -> web.Response:
        def order(world: World, wish: Wish) -> Order:
            known = read_responses.find_model(world, request.match_info["name"])
            if known is None:
                raise OrderError(404, f"no such model; existing: {format_names(world.models)}")
            return order_effects.model_order(world, known, request.match_info["verb"], wish)

        return await self._act(request, order)

    async def _place(self, request: web.Request) -> web.Response:
        def order(world: World, wish: Wish) -> Order:
            kind, name = request.match_info["kind"].removesuffix("s"), request.match_info["name"]
            known = {place.name: place for place in list_cordon_targets(world) if place.kind == kind}
            if name not in known:
                raise OrderError(404, f"no such {kind}; existing: {format_names(known)}")
            now_s = asyncio.get_running_loop().time()
            return order_effects.place_order(world, known[name], request.match_info["verb"], wish, now_s)

        return await self._act(request, order)

    async def _act(self, request: web.Request, order: Callable[[World, Wish], Order]) -> web.Response:
        try:
            wish = await _wish(request)
            world = self._loop.world
            who = operator_request_checks.authenticate_operator(
                world, request.headers.get("authorization", ""), self._wall()
            )
            check_leads(world)
            made = order(world, wish)
            await self._perform(made)
        except OrderError as error:
            return order_error_response(error)
        except CordonError as error:
            return order_error_response(OrderError(500, f"the order has no effect: {error}"))
        response = made.response
        log.warning(
            "event=operator who=%r verb=%s %s=%s%s",
            who,
            response.verb,
            response.kind,
            response.name,
            " force=true" * wish.force,
        )
        return web.Response(body=msgspec.json.encode(response), content_type=JSON)

    async def _perform(self, order: Order) -> None:
        if order.observed is not None:
            self._loop.observe((order.observed,))
        if order.put is not None:
            await self._cordons.put(order.put)
        if order.lift is not None:
            await self._cordons.lift(order.lift)


async def _wish(request: web.Request) -> Wish:
    """Decode the body of an order. Raises OrderError."""
    body = await read_order_body(request, BODY_BYTES_MAX)
    try:
        return _decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise OrderError(400, 'expected {} or {"force": true}') from None
