"""Protocols of a capacity provider (`Provider`) and of the component that executes capacity orders (`Supplier`).

A provider makes no decisions and keeps no state: `list` returns what exists in the external system, so a new leader
finds every order. `tests/contracts/provider.py` is the contract test of all providers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from autoscaler.state.capacity import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.text import redact_addresses


class RefusedError(Exception):
    """A provider rejects a request: no capacity, an exhausted quota, or an invalid order. Nothing was created.
    `str()` is the reason, without secrets; addresses of upstream messages are redacted here.
    """

    def __init__(self, says: str) -> None:
        super().__init__(redact_addresses(says))


class Provider(Protocol):
    """One way to obtain more capacity.
    Any exception except RefusedError means that the outcome is unknown. Calls may be cancelled at any time.
    """

    def offers(self) -> Awaitable[tuple[Offer, ...]]:
        """Return the capacity that can be ordered now; at most OFFERS_MAX offers, empty if all of it is in use.
        Raises RefusedError if the configuration must be changed first: the named object is missing or closed, or no
        Settings entry describes its devices.
        """

    def acquire(self, order: AcquireOrder) -> Awaitable[None]:
        """Place the order. Return when `list` shows it, long before the capacity is delivered.
        The created object carries the order's name, owner and leader epoch, and is marked as this installation's. The
        call is idempotent by the order's name, also for another leader. Raises RefusedError.
        """

    def release(self, order: ReleaseOrder) -> Awaitable[None]:
        """Release the order, or cancel it before delivery. Return when that is recorded or the order does not exist.
        Capacity in use is never removed, unless an order for fabric devices sets `force`. If the order sets
        `uncommitted` and delivery cannot be cancelled any more, the call succeeds without effect.
        """

    def list(self) -> Awaitable[tuple[Listed, ...]]:
        """Return the current state of all orders of this installation, whichever leader placed them.
        Raises instead of returning a partial list; the text of a RefusedError is shown to users.
        """


@runtime_checkable
class Attended(Protocol):
    """A provider with background work."""

    def attend(self, changed: Callable[[], None]) -> Awaitable[None]:
        """Run the background work until cancelled. Call `changed` when `list` may return something new."""


@runtime_checkable
class Lacking(Protocol):
    """A provider that can report missing parts of its configuration."""

    lacks: str
    """Missing parts found by the last `offers` call, as a phrase that follows the provider's name; empty: none."""


class Supplier(Protocol):
    """Executes the controller's capacity orders. Both methods return at once; observations report the outcome."""

    def acquire(self, order: AcquireOrder) -> None:
        """Order capacity."""

    def release(self, order: ReleaseOrder) -> None:
        """Release capacity."""
