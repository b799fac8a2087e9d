"""Protocols of a capacity provider (`Provider`) and of the component that executes capacity orders (`Supplier`).

A provider makes no decisions and keeps no state: `list` returns what exists in the external system, so a new leader
finds every order. `tests/contracts/provider.py` is the contract test of all providers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from autoscaler.state.capacity_orders import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.text import redact_addresses


class RefusedError(Exception):
    """A provider rejects a request: no capacity, a used-up quota, or an invalid order. Nothing was created.
    `str()` is the reason for people, without secrets. Addresses that upstream messages may contain are redacted here.
    """

    def __init__(self, says: str) -> None:
        super().__init__(redact_addresses(says))


class Provider(Protocol):
    """One way to obtain more capacity.
    Any exception except RefusedError means that the outcome is unknown. Calls may be cancelled at any time.
    """

    def offers(self) -> Awaitable[tuple[Offer, ...]]:
        """Return what can be ordered now: free capacity, not the maximum; at most OFFERS_MAX offers.
        Empty if all capacity is in use. Raises RefusedError if nothing is offered until somebody changes the
        configuration: the named object is missing or closed, or no Settings entry describes what it provides.
        """

    def acquire(self, order: AcquireOrder) -> Awaitable[None]:
        """Place the order. Return when `list` shows it, long before the capacity is delivered.
        The created object carries the order's name, owner and leader epoch, and is marked as this installation's. An
        order with an existing name succeeds without a second one, whoever sends it. Raises RefusedError.
        """

    def release(self, order: ReleaseOrder) -> Awaitable[None]:
        """Release the order, or cancel it before delivery. Return when that is recorded; a missing order is a success.
        Capacity in use is never removed, unless an order for fabric devices sets `force`. If the order sets
        `uncommitted` and delivery cannot be cancelled any more, it stays; that is a success, too, since `list` shows
        it.
        """

    def list(self) -> Awaitable[tuple[Listed, ...]]:
        """Return the current state of all orders of this installation, whichever leader placed them.
        Raises if it cannot be known: a partial list is never returned. RefusedError gives the reason for people.
        """


@runtime_checkable
class Attended(Protocol):
    """A provider with background work."""

    def attend(self, changed: Callable[[], None]) -> Awaitable[None]:
        """Run the background work until cancelled. Call `changed` when `list` may return something new."""


@runtime_checkable
class Lacking(Protocol):
    """A provider of which some configured parts may be missing."""

    lacks: str
    """What the last `offers` call found missing, as a phrase that follows the provider's name; empty: nothing."""


class Supplier(Protocol):
    """Executes the controller's capacity orders. Both methods return at once; the outcome is observed."""

    def acquire(self, order: AcquireOrder) -> None:
        """Order capacity."""

    def release(self, order: ReleaseOrder) -> None:
        """Release capacity."""
