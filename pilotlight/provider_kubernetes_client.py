"""Implements `autoscaler.providers.kubernetes_access.ApiServer` for capacity providers on the driver's `Api`. I/O.

Reads and watches share one connection. Writes use the connection that is closed when leadership is lost. If an
unfiltered list is watched, `items` with `AT_HAND` returns it from the watch instead of requesting it from the API
server. Objects in a list that cannot be decoded are skipped, logged and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoscaler.providers.kubernetes_access import AT_HAND, NOT_FOUND, AnswerError, Object
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from autoscaler.contract import ModelName
    from autoscaler.kubernetes.api import Api
    from autoscaler.kubernetes.unreadable_objects import Unreadable
    from autoscaler.kubernetes.watch import Change, Watched

KEPT_S = 600.0
"""How long an undecodable object is counted if its list is not requested again."""


@dataclass(frozen=True)
class _Kept:
    """A watched object, and the part of it whose change is reported."""

    news: object
    found: Object = field(compare=False)


class Objects:
    """Implements `ApiServer`. The client `writes` may be fenced: it then sends requests only while this process
    leads.
    """

    def __init__(
        self, writes: Api, reads: Api, owner: Ownership = ANYBODYS,
        is_foreign: Callable[[ModelName], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self._writes, self._reads, self.owner, self._is_foreign = writes, reads, owner, is_foreign
        self._watched: dict[str, Watched[_Kept]] = {}
        """Unfiltered lists, by path."""
        self._forgetting: dict[Hashable, asyncio.TimerHandle] = {}
        """Per list, the timer after which its undecodable objects are no longer counted."""

    def is_foreign(self, model: ModelName) -> bool:
        """Return whether orders for this Model that have no label are left to another installation."""
        return self._is_foreign(model)

    def unix_s(self) -> float:
        """Return the current time of the API server."""
        return self._reads.unix_s()

    async def find(self, path: str) -> Object | None:
        """Return one object, or None if it does not exist."""
        try:
            return await _answered(self._reads.get(path))
        except AnswerError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def items(self, path: str, **query: str) -> list[Object]:
        """Return a whole list, or an empty one if the API server does not serve this kind."""
        from autoscaler.kubernetes.api import ApiError

        watched = self._watched.get(path) if query == AT_HAND else None
        if watched is not None and watched.synced.is_set() and not watched.trouble:
            return [kept.found for kept in watched.items.values()]
        found: list[Object] = []
        skipped: list[Unreadable] = []
        try:
            async for page in self._reads.pages(path, query):
                found += page.items
                skipped += page.unreadable
        except ApiError as error:
            if error.status == NOT_FOUND:
                return []
            raise AnswerError(error.status, error.reason, error.message) from error
        self._skip((path, *sorted(query.items())), path, skipped)
        return found

    def _skip(self, listed: Hashable, path: str, skipped: list[Unreadable]) -> None:
        """Record the undecodable objects of a list until it is listed again, or for KEPT_S."""
        timer = self._forgetting.pop(listed, None)
        if timer is not None:
            timer.cancel()
        unreadable = self._reads.unreadable
        unreadable.keep(listed, {(one.namespace, one.name) for one in skipped})
        for one in skipped:
            unreadable.add(listed, one, path)
        if skipped:
            self._forgetting[listed] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, listed)

    def _forget(self, listed: Hashable) -> None:
        del self._forgetting[listed]
        self._reads.unreadable.forget(listed)

    async def follow(
        self, path: str, read: Callable[[Object], object], changed: Callable[[], None], **query: str
    ) -> None:
        """Watch a list until cancelled; call `changed` when the value of `read` changes for an object."""
        from autoscaler.kubernetes.watch import Watched

        def hear(changes: list[Change[_Kept]]) -> None:
            if any((one.old and one.old.news) != (one.new and one.new.news) for one in changes):
                changed()

        watched = Watched(
            self._reads, path, lambda found: _Kept(read(found), found), hear, optional=True, **query
        )  # fmt: skip
        if query:
            await watched.run()
            return
        self._watched[path] = watched
        try:
            await watched.run()
        finally:
            if self._watched.get(path) is watched:
                del self._watched[path]

    async def create(self, path: str, body: Object) -> Object:
        """Create an object, labelled with its owner."""
        return await _answered(self._writes.create(path, self.owner.label(body)))

    async def patch(self, path: str, body: Object) -> Object:
        """Apply a merge patch."""
        return await _answered(self._writes.patch(path, body))

    async def delete(self, path: str, *, version: str | None = None) -> None:
        """Delete an object; a missing object counts as deleted."""
        try:
            await _answered(self._writes.delete(path, version=version))
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


async def _answered(asked: Awaitable[Object]) -> Object:
    from autoscaler.kubernetes.api import ApiError

    try:
        return await asked
    except ApiError as error:
        raise AnswerError(error.status, error.reason, error.message) from error
