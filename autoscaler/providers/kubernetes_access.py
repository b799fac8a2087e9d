"""The Kubernetes API access that providers need: a few requests and a watch, on plain dicts.

`ApiServer` is a Protocol because providers may not import the driver. `pilotlight.provider_kubernetes_client`
implements it and rejects writes after the loss of leadership. Any exception except AnswerError means that the result of
the request is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

from autoscaler.contract import ModelName
from autoscaler.providers.provider import RefusedError
from autoscaler.spec.installation_ownership import Ownership
from autoscaler.text import redact_addresses

Object = dict[str, Any]
"""An object as the API returns it."""
SAID_MAX = 200
"""Maximum characters of a server's message that are quoted in a reason."""
NOT_FOUND, CONFLICT = 404, 409
ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of a pod whose containers have terminated."""
REFUSALS = frozenset({400, 403, 405, 422})
"""HTTP statuses for which a retry is useless: the object is invalid, or the caller lacks permission."""

AT_HAND: Mapping[str, str] = MappingProxyType({"resourceVersion": "0"})
"""Query for lists that may be slightly stale, answered from a cache of the API server or from a local watch."""


class AnswerError(Exception):
    """The server rejected a request: the HTTP `status`, the API's `reason`, and a `message` for people."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        message = redact_addresses(message)  # errors about an unavailable webhook contain its address
        super().__init__(f"{status} {reason}: {message[:SAID_MAX]}")
        self.status, self.reason, self.message = status, reason, message


class ApiServer(Protocol):
    """Access to one API server. All methods raise AnswerError."""

    @property
    def owner(self) -> Ownership:
        """The installation that owns created objects; they are labelled with it."""

    def is_foreign(self, model: ModelName) -> bool:
        """Whether orders for this Model that have no label are left to another installation, which serves it."""

    def unix_s(self) -> float:
        """The current time by the server's clock, accurate to about 1 s."""

    def find(self, path: str) -> Awaitable[Object | None]:
        """Return one object; None if it does not exist."""

    def items(self, path: str, **query: str) -> Awaitable[list[Object]]:
        """Return a complete list, which must not be modified; empty if the server does not serve this resource."""

    def follow(
        self, path: str, read: Callable[[Object], object], changed: Callable[[], None], **query: str
    ) -> Coroutine[Any, Any, None]:
        """Watch a list until cancelled.
        Calls `changed` when an object's value of `read` changes or is first seen; objects with None are ignored.
        While the server is unavailable, does not serve the resource or denies access, the watch reports nothing; it
        resumes later.
        """

    def create(self, path: str, body: Object) -> Awaitable[Object]:
        """POST to a collection; CONFLICT if the name exists."""

    def patch(self, path: str, body: Object) -> Awaitable[Object]:
        """Apply a merge patch. With a `resourceVersion` in `body`: CONFLICT if the object has changed since."""

    def delete(self, path: str, *, version: str | None = None) -> Awaitable[None]:
        """Delete the object, if it still has this `version`. Succeeds if it does not exist."""


def choose_served_version(group: Object | None, versions: Sequence[str]) -> str:
    """Return the first of these versions that an API group (`/apis/NAME`) serves; empty if there is none."""
    there = {one["version"] for one in (group or {}).get("versions") or ()}
    return next((one for one in versions if one in there), "")


def raise_refusal(error: AnswerError) -> NoReturn:
    """Raise RefusedError if the status is one of REFUSALS, else the error itself."""
    if error.status in REFUSALS:
        raise RefusedError(f"the API server rejected the request: {error.message[:SAID_MAX]}") from error
    raise error


Read = TypeVar("Read")


async def gather_or_cancel(requests: Sequence[Coroutine[Any, Any, Read]]) -> list[Read]:
    """Run requests concurrently; return all results, or raise the first error and cancel the others.

    A TaskGroup is not used: if it is cancelled while one of its tasks fails, it raises only the failure, so a caller
    that retries failures would ignore its own cancellation.
    """
    running = [asyncio.ensure_future(each) for each in requests]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
