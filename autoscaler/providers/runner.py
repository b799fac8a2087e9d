"""Executes capacity orders at their providers and reports offers and existing orders. I/O.

Executes orders one at a time per provider. Lists existing orders soon after a change, then at growing intervals, at
least twice a minute. Reads offers every minute, more often while there are none. Calls time out. Reports the text of a
RefusedError and the type name of any other exception; addresses are redacted. Makes no decisions. A process that does
not lead gets no orders, but lists existing ones. A list is stamped with its start time or, while orders are pending,
with the last time at which no order was pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers.provider import Attended, Lacking, Provider, RefusedError
from autoscaler.state.capacity import (
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

_log = logging.getLogger("pilotlight.autoscaler.providers")
Observation = ProvidersSeen | OffersSeen | LeasesSeen | LeaseRefused | ProviderTroubled | GroupsSeen | LearntSeen
Observe = Callable[[tuple[Observation, ...]], None]
"""Receives observations; does not block."""
Order = AcquireOrder | ReleaseOrder
CALL_S_MAX: Final = 30.0
LIST_S_MAX: Final = 30.0
LIST_S: Final = (0.5, LIST_S_MAX)
"""Seconds between lists of orders: the value after a change, and the maximum; the interval doubles each time. Therefore
capacity that arrives late is used or released within a minute (`STRAY_S` in `autoscaler.provisioning.release`)."""
OFFERS_S: Final = 60.0
REST_S: Final = 0.01
"""Minimum pause in seconds, since a timer may fire slightly before the clock reaches the due time."""
NONE_S: Final = 5.0
"""Seconds between reads of the offers while there are none, doubled each time up to OFFERS_S."""
CLOSING: Final = "it is closed or removed in Settings, and its capacity is being released"
ORDERS_MAX: Final = 256
"""Maximum number of queued orders per provider. Further orders are dropped; the planner issues them again."""


class ProviderRunner:
    """The Supplier for all providers, by name. `closing`: providers that accept no new orders.
    `hedges`: providers that may be used in parallel with others for one shortage.
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
        self._workers = {
            name: ProviderWorker(name, one, observe, clock, closing=name in closing) for name, one in providers.items()
        }

    def acquire(self, order: AcquireOrder) -> None:
        """Queue the order at its provider."""
        self._put(order)

    def release(self, order: ReleaseOrder) -> None:
        """Queue the release at its provider."""
        if order.force:
            _log.warning("event=detach_forced provider=%r order=%r", order.id.provider, order.id.name)
        self._put(order)

    async def run(self) -> None:
        """Run until cancelled."""
        self._observe((self._known,))
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(worker.work())
                tasks.create_task(worker.look())
                tasks.create_task(worker.attend())

    def _put(self, order: Order) -> None:
        worker = self._workers.get(order.id.provider)
        if worker is None:
            self._observe((LeaseRefused(id=order.id, reason=f"there is no provider {order.id.provider}"),))
        else:
            worker.put(order)


class ProviderWorker:
    """Executes the orders of one provider and polls it."""

    def __init__(
        self, name: str, provider: Provider, observe: Observe, clock: Callable[[], float], *, closing: bool
    ) -> None:
        self._name, self._provider, self._observe, self._clock = name, provider, observe, clock
        self._closing = closing
        self._orders: list[Order] = []
        self._ordered, self._news = asyncio.Event(), asyncio.Event()
        self._done_s = clock()
        """The last time at which an order completed and no other order was queued."""
        self._listed: frozenset[str] = frozenset()
        """Names of the orders in the last list."""

    def put(self, order: Order) -> None:
        """Queue an order, unless the same one is queued. A closing provider rejects new orders."""
        if self._closing and isinstance(order, AcquireOrder):
            self._observe((LeaseRefused(id=order.id, reason=CLOSING),))
            return
        if order not in self._orders and len(self._orders) < ORDERS_MAX:
            self._orders.append(order)
            self._ordered.set()

    async def work(self) -> None:
        """Execute queued orders in sequence."""
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
        except Exception as error:  # noqa: BLE001  the outcome is unknown; the next list shows it
            reraise_memory_error(error)
            self._trouble(error)

    async def attend(self) -> None:
        """Run the provider's background work, if any. When it reports a change, list at once."""
        if isinstance(self._provider, Attended):
            await self._provider.attend(self._news.set)

    async def look(self) -> None:
        """Poll the offers and the list of orders. The orders are listed after the offers are read, so that the list
        contains the orders that reduced the offers.
        """
        pace_s, offers_s, none_s = LIST_S[0], self._clock(), NONE_S
        while True:
            if self._clock() >= offers_s:
                some = await self._offers()
                offers_s = self._clock() + (OFFERS_S if some else none_s)
                none_s = NONE_S if some else min(none_s * 2.0, OFFERS_S)
            if await self._list():
                offers_s = self._clock()  # released capacity may be offered again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pace_s, max(REST_S, offers_s - self._clock()))):
                    await self._news.wait()
            pace_s = LIST_S[0] if self._news.is_set() else min(pace_s * 2.0, LIST_S[1])
            self._news.clear()

    async def _list(self) -> bool:
        """List the orders and report them; return whether any has disappeared."""
        began_s = self._done_s if self._orders else self._clock()
        try:
            async with asyncio.timeout(CALL_S_MAX):
                leases = tuple(map(_unaddressed, await self._provider.list()))
        except Exception as error:  # noqa: BLE001  a partial list must not replace the last complete one
            reraise_memory_error(error)
            self._trouble(error, listing=True)
            return False
        names = frozenset(one.name for one in leases)
        if len(leases) > LISTED_MAX or len(names) != len(leases):
            self._observe((ProviderTroubled(provider=self._name, says="returned invalid orders", listing=True),))
            return False
        self._observe((LeasesSeen(provider=self._name, leases=leases, began_s=began_s),))
        gone, self._listed = self._listed - names, names
        return bool(gone)

    async def _offers(self) -> bool:
        """Read the offers and report them; return whether there are any."""
        if self._closing:
            self._observe((OffersSeen(provider=self._name, offers=(), closed=CLOSING),))
            return True
        try:
            async with asyncio.timeout(CALL_S_MAX):
                offers = await self._provider.offers()
        except RefusedError as error:
            self._observe((OffersSeen(provider=self._name, offers=(), closed=str(error)),))
            return False
        except Exception as error:  # noqa: BLE001  the last known offers age
            reraise_memory_error(error)
            self._trouble(error)
            return False
        if len(offers) <= OFFERS_MAX and all(one.provider == self._name for one in offers):
            lacks = redact_addresses(self._provider.lacks) if isinstance(self._provider, Lacking) else ""
            part = (ProviderTroubled(provider=self._name, says=lacks, listing=False),) if lacks else ()
            # One batch, since a report of offers clears the problem of the provider.
            self._observe((OffersSeen(provider=self._name, offers=offers), *part))
        else:
            self._observe((ProviderTroubled(provider=self._name, says="returned invalid offers", listing=False),))
        return bool(offers)

    def _trouble(self, error: Exception, *, listing: bool = False) -> None:
        """Report a failed call. Only RefusedError's message is shown; others may contain an address."""
        refused = isinstance(error, RefusedError)
        says = f"cannot report its state: {error}" if refused else f"does not respond ({type(error).__name__})"
        self._observe((ProviderTroubled(provider=self._name, says=says, listing=listing),))


def _unaddressed(one: Listed) -> Listed:
    """Redact addresses in the texts of conditions, events and webhooks, for all providers."""
    return replace(one, says=redact_addresses(one.says)) if one.says else one
