"""What providers need of a Kubernetes API server: a few requests and a watch, on plain dicts.

`Server` is a Protocol, because a provider does not know the driver: `pilotlight.kube` implements it, with writes
that end with the leadership. Any exception but AnswerError means that the result of the request is unknown.

`gather_or_cancel` runs several requests at once and returns all answers or raises the first error; none is left
running. It is no TaskGroup: if a TaskGroup is cancelled while one of its tasks fails, only the failure is raised, and a
caller that tries again would never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

from autoscaler.providers.provider import RefusedError
from autoscaler.spec.ownership import Ownership
from autoscaler.text import redact_addresses

Object = dict[str, Any]
"""As the API has it."""
SAID_MAX = 200
"""Characters of what it said, in a reason."""
NOT_FOUND, CONFLICT = 404, 409
ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of a pod of which nothing runs any more, though it is there."""
REFUSALS = frozenset({400, 403, 405, 422})
"""Statuses of what will not be otherwise by saying it again: the object is wrong, or somebody may not."""

AT_HAND: Mapping[str, str] = MappingProxyType({"resourceVersion": "0"})
"""How lists are asked for that may be a moment old, as the API server or a watch of ours has them at hand."""


class AnswerError(Exception):
    """The server said no: `status` as HTTP has it, `reason` the API's word for it, `message` for people."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        message = redact_addresses(message)  # a webhook that is away, in the words of who called it
        super().__init__(f"{status} {reason}: {message[:SAID_MAX]}")
        self.status, self.reason, self.message = status, reason, message


class Server(Protocol):
    """All raise AnswerError."""

    @property
    def owner(self) -> Ownership:
        """Whose the objects are that it creates: they are labelled."""

    def unix_s(self) -> float:
        """Now by the server's clock, to about a second."""

    def find(self, path: str) -> Awaitable[Object | None]:
        """One object; None: there is none."""

    def items(self, path: str, **query: str) -> Awaitable[list[Object]]:
        """A whole list, which is not to be changed; empty, where the server does not have such objects at all."""

    def follow(
        self, path: str, read: Callable[[Object], object], changed: Callable[[], None], **query: str
    ) -> Coroutine[Any, Any, None]:
        """Watches a list until cancelled: `changed`, whenever what `read` makes of an object is another than it was, or
        first seen (None: nothing of it matters). While the server is away, does not have such objects or does not let
        us watch them nothing is said of it here; it goes on when that ends.
        """

    def create(self, path: str, body: Object) -> Awaitable[Object]:
        """POST to a collection; CONFLICT where that name is taken."""

    def patch(self, path: str, body: Object) -> Awaitable[Object]:
        """A merge patch; with a `resourceVersion` in it CONFLICT where the object is another by now."""

    def delete(self, path: str, *, version: str | None = None) -> Awaitable[None]:
        """Has it deleted, if it is still of that version. What is not there is success."""


def choose_served_version(group: Object | None, versions: Sequence[str]) -> str:
    """The first of these versions that an API group (`/apis/NAME`) has; empty: it has none of them, or is not there."""
    there = {one["version"] for one in (group or {}).get("versions") or ()}
    return next((one for one in versions if one in there), "")


def raise_refusal(error: AnswerError) -> NoReturn:
    """Raises what an order's refusal means for who gave it: RefusedError, or the error itself."""
    if error.status in REFUSALS:
        raise RefusedError(f"the API server refuses it: {error.message[:SAID_MAX]}") from error
    raise error


Read = TypeVar("Read")


async def gather_or_cancel(asked: Sequence[Coroutine[Any, Any, Read]]) -> list[Read]:
    """See the module."""
    running = [asyncio.ensure_future(each) for each in asked]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
