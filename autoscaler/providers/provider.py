"""The seams of capacity: what a Provider is asked to do, and what the loop asks of who performs its orders.

Owns these Protocols and the error of the first; `tests/contracts/provider.py` holds every Provider to it. A Provider
decides nothing and remembers nothing: what it has is what its other side lists. So whoever leads next finds everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from autoscaler.state.capacity_orders import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.text import redact_addresses


class RefusedError(Exception):
    """It will not: there is none, a quota is used up, or the order is wrong. Nothing of it is there. `str()` says why,
    for people, without a secret; addresses, which the words of others may have, are taken out here.
    """

    def __init__(self, says: str) -> None:
        super().__init__(redact_addresses(says))


class Provider(Protocol):
    """One way to more capacity.

    Whatever a call raises but RefusedError means that nobody knows what came of it. It may be cancelled at any time.
    """

    def offers(self) -> Awaitable[tuple[Offer, ...]]:
        """What could be had now: of what is free, not of what there is at most. At most OFFERS_MAX. Raises RefusedError
        where it offers nothing until somebody changes that: what it is named for is not there, is closed, or no entry
        of the Settings says what it brings. None, where all is merely had by somebody.
        """

    def acquire(self, order: AcquireOrder) -> Awaitable[None]:
        """Orders it. Returns when the order stands, which `list` then shows; long before it has come.

        What is made carries the order's name, its owner and the leader's epoch, and is known as ours. The same name
        again is success without a second, whoever says it. Raises RefusedError.
        """

    def release(self, order: ReleaseOrder) -> Awaitable[None]:
        """Gives it back, or takes it back before it came. Returns when that stands. What is not there is success.

        Never takes what somebody uses, unless an order about Devices of a fabric says `force`; nor, of an order that
        says `uncommitted`, what has come so far that it cannot be taken back: it stays as it is, and that is success,
        too, since `list` shows it.
        """

    def list(self) -> Awaitable[tuple[Listed, ...]]:
        """All of ours, whoever ordered it, as it is now. Raises where it cannot be known: less is not all. RefusedError
        says for people why not.
        """


@runtime_checkable
class Attended(Protocol):
    """A Provider that does something between calls."""

    def attend(self, changed: Callable[[], None]) -> Awaitable[None]:
        """Does it, until cancelled. `changed`: `list` may show something new."""


@runtime_checkable
class Lacking(Protocol):
    """A Provider that may have only a part of what it is named for."""

    lacks: str
    """What is not there, as its last offers found it, in words that follow its name; empty: nothing."""


class Supplier(Protocol):
    """Who performs the loop's orders. Both return at once; what came of it is observed."""

    def acquire(self, order: AcquireOrder) -> None:
        """Has it ordered."""

    def release(self, order: ReleaseOrder) -> None:
        """Has it given back."""
