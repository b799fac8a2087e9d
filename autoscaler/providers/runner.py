"""Performs orders about capacity at their Providers, and says what these offer and have.

Owns the pace: an order goes out at once, one at a time to each Provider; lists are asked for soon after an order, then
more and more rarely, at least twice a minute; offers every minute, and more often while there are none. A call that
takes too long is given up. What a call raises is no answer: only RefusedError is, and its words are told, whatever was
asked; nor is anything told with an address, whoever said it. It decides nothing; whoever does not lead gives no orders
and lists all the same. A list says when it began, and is not of later than what was still to be done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from autoscaler.providers.provider import Attended, Lacking, Provider, RefusedError
from autoscaler.state.capacity_orders import (
    LISTED_MAX,
    OFFERS_MAX,
    AcquireOrder,
    GroupsSeen,
    LearntSeen,
    LeaseRefused,
    LeasesSeen,
    Listed,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
    ReleaseOrder,
)
from autoscaler.text import redact_addresses

_log = logging.getLogger(__name__)
Told = ProvidersSeen | OffersSeen | LeasesSeen | LeaseRefused | ProviderTroubled | GroupsSeen | LearntSeen
Observe = Callable[[tuple[Told, ...]], None]
"""Where it puts what it sees. Never blocks."""
Order = AcquireOrder | ReleaseOrder
CALL_S_MAX: Final = 30.0
LIST_S_MAX: Final = 30.0
LIST_S: Final = (0.5, LIST_S_MAX)
"""From one list to the next: after an order the first, then twice as long each time, up to the last. So what comes
after it was given up has a place, or goes, within a minute (`returning.STRAY_S`).
"""
OFFERS_S: Final = 60.0
REST_S: Final = 0.01
"""No pause is shorter: a timer may end a little before the clock says so, and what it ends would be asked in vain."""
NONE_S: Final = 5.0
"""While nothing is offered it is looked again after so long, then twice as long each time, up to OFFERS_S."""
CLOSING: Final = "it is closed by the Settings, and what came of it is given back"
ORDERS_MAX: Final = 256
"""That wait at one Provider; further ones are dropped, and given anew by who decides."""


class ProviderRunner:
    """A Supplier for all Providers, by name. `hedges`: who may be started beside another for one lack; `closing`: who
    only keeps what there is until it is given back.
    """

    def __init__(
        self,
        providers: Mapping[str, Provider],
        observe: Observe,
        clock: Callable[[], float],
        hedges: frozenset[str] = frozenset(),
        closing: frozenset[str] = frozenset(),
    ) -> None:
        self._observe = observe
        self._known = ProvidersSeen(providers=tuple(sorted(providers)), hedges=hedges)
        self._desks = {
            name: ProviderWorker(name, one, observe, clock, closing=name in closing) for name, one in providers.items()
        }

    def acquire(self, order: AcquireOrder) -> None:
        """See Supplier."""
        self._put(order)

    def release(self, order: ReleaseOrder) -> None:
        """See Supplier."""
        if order.force:
            _log.warning("event=detach_forced provider=%r lease=%r", order.id.provider, order.id.name)
        self._put(order)

    async def run(self) -> None:
        """Until cancelled."""
        self._observe((self._known,))
        async with asyncio.TaskGroup() as tasks:
            for desk in self._desks.values():
                tasks.create_task(desk.work())
                tasks.create_task(desk.look())
                tasks.create_task(desk.attend())

    def _put(self, order: Order) -> None:
        desk = self._desks.get(order.id.provider)
        if desk is None:
            self._observe((LeaseRefused(id=order.id, reason=f"there is no provider {order.id.provider}"),))
        else:
            desk.put(order)


class ProviderWorker:
    """One Provider."""

    def __init__(
        self, name: str, provider: Provider, observe: Observe, clock: Callable[[], float], *, closing: bool
    ) -> None:
        self._name, self._provider, self._observe, self._clock = name, provider, observe, clock
        self._closing = closing
        self._orders: list[Order] = []
        self._ordered, self._news = asyncio.Event(), asyncio.Event()
        self._done_s = clock()
        """When the last order was done, and none waited."""
        self._listed: frozenset[str] = frozenset()
        """The names of its Leases, as it said last."""

    def put(self, order: Order) -> None:
        """The same again waits once."""
        if self._closing and isinstance(order, AcquireOrder):
            self._observe((LeaseRefused(id=order.id, reason=CLOSING),))
            return
        if order not in self._orders and len(self._orders) < ORDERS_MAX:
            self._orders.append(order)
            self._ordered.set()

    async def work(self) -> None:
        """Performs orders in their sequence."""
        while True:
            await self._ordered.wait()
            while self._orders:
                await self._perform(self._orders[0])
                self._orders.pop(0)
            self._ordered.clear()
            self._done_s = self._clock()
            self._news.set()

    async def _perform(self, order: Order) -> None:
        try:
            async with asyncio.timeout(CALL_S_MAX):
                if isinstance(order, AcquireOrder):
                    await self._provider.acquire(order)
                else:
                    await self._provider.release(order)
        except RefusedError as error:
            if isinstance(order, AcquireOrder):
                self._observe((LeaseRefused(id=order.id, reason=str(error)),))
        except Exception as error:  # noqa: BLE001  whatever it was, nobody knows what came of it: the list tells
            self._trouble(error)

    async def attend(self) -> None:
        """What it tells of itself is looked at, at once."""
        if isinstance(self._provider, Attended):
            await self._provider.attend(self._news.set)

    async def look(self) -> None:
        """Offers and lists, by their pace. A list comes after the offers: it shows who took what these lack."""
        pace_s, offers_s, none_s = LIST_S[0], self._clock(), NONE_S
        while True:
            if self._clock() >= offers_s:
                some = await self._offers()
                offers_s = self._clock() + (OFFERS_S if some else none_s)
                none_s = NONE_S if some else min(none_s * 2.0, OFFERS_S)
            if await self._list():
                offers_s = self._clock()  # what went may be had again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pace_s, max(REST_S, offers_s - self._clock()))):
                    await self._news.wait()
            pace_s = LIST_S[0] if self._news.is_set() else min(pace_s * 2.0, LIST_S[1])
            self._news.clear()

    async def _list(self) -> bool:
        """Whether any is gone."""
        began_s = self._done_s if self._orders else self._clock()
        try:
            async with asyncio.timeout(CALL_S_MAX):
                leases = tuple(map(_unaddressed, await self._provider.list()))
        except Exception as error:  # noqa: BLE001  less is not all: what was known stays
            self._trouble(error, listing=True)
            return False
        names = frozenset(one.name for one in leases)
        if len(leases) > LISTED_MAX or len(names) != len(leases):
            self._observe((ProviderTroubled(provider=self._name, says="lists what cannot be", listing=True),))
            return False
        self._observe((LeasesSeen(provider=self._name, leases=leases, began_s=began_s),))
        gone, self._listed = self._listed - names, names
        return bool(gone)

    async def _offers(self) -> bool:
        """Whether there are any."""
        if self._closing:
            self._observe((OffersSeen(provider=self._name, offers=(), closed=CLOSING),))
            return True
        try:
            async with asyncio.timeout(CALL_S_MAX):
                offers = await self._provider.offers()
        except RefusedError as error:
            self._observe((OffersSeen(provider=self._name, offers=(), closed=str(error)),))
            return False
        except Exception as error:  # noqa: BLE001  what was offered ages
            self._trouble(error)
            return False
        if len(offers) <= OFFERS_MAX and all(one.provider == self._name for one in offers):
            lacks = redact_addresses(self._provider.lacks) if isinstance(self._provider, Lacking) else ""
            part = (ProviderTroubled(provider=self._name, says=lacks, listing=False),) if lacks else ()
            self._observe((OffersSeen(provider=self._name, offers=offers), *part))  # at once: it ends with new offers
        else:
            self._observe((ProviderTroubled(provider=self._name, says="offers what cannot be", listing=False),))
        return bool(offers)

    def _trouble(self, error: Exception, *, listing: bool = False) -> None:
        """The message of another than RefusedError may have an address in it."""
        refused = isinstance(error, RefusedError)
        says = f"cannot say what it has: {error}" if refused else f"gives no answer ({type(error).__name__})"
        self._observe((ProviderTroubled(provider=self._name, says=says, listing=listing),))


def _unaddressed(one: Listed) -> Listed:
    """Conditions, events and webhooks say what they like: of all Providers it is taken out here."""
    return replace(one, says=redact_addresses(one.says)) if one.says else one
