"""A Kubernetes API server as Providers of capacity ask it (`autoscaler.capacity.server.Server`). I/O.

Owns the way from the driver's Api to that: questions and watches over one connection, writes over the one that ends
with our leadership.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoscaler.capacity.server import NOT_FOUND, AnswerError, Object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from autoscaler.drivers.kubernetes.api import Api


class Objects:
    """See Server. `writes` may be fenced, `reads` need not be."""

    def __init__(self, writes: Api, reads: Api) -> None:
        self._writes, self._reads = writes, reads

    def unix_s(self) -> float:
        """See Server."""
        return self._reads.unix_s()

    async def find(self, path: str) -> Object | None:
        """See Server."""
        try:
            return await _answered(self._reads.get(path))
        except AnswerError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def items(self, path: str, **query: str) -> list[Object]:
        """See Server."""
        from autoscaler.drivers.kubernetes.api import ApiError

        found: list[Object] = []
        try:
            async for page in self._reads.pages(path, query):
                found += page["items"]
        except ApiError as error:
            if error.status == NOT_FOUND:
                return []
            raise AnswerError(error.status, error.reason, error.message) from error
        return found

    async def follow(
        self, path: str, read: Callable[[Object], object], changed: Callable[[], None], **query: str
    ) -> None:
        """See Server."""
        from autoscaler.drivers.kubernetes.watching import Watched

        await Watched(self._reads, path, read, lambda _: changed(), optional=True, **query).run()

    async def create(self, path: str, body: Object) -> Object:
        """See Server."""
        return await _answered(self._writes.create(path, body))

    async def patch(self, path: str, body: Object) -> Object:
        """See Server."""
        return await _answered(self._writes.patch(path, body))

    async def delete(self, path: str, *, version: str | None = None) -> None:
        """See Server."""
        try:
            await _answered(self._writes.delete(path, version=version))
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


async def _answered(asked: Awaitable[Object]) -> Object:
    from autoscaler.drivers.kubernetes.api import ApiError

    try:
        return await asked
    except ApiError as error:
        raise AnswerError(error.status, error.reason, error.message) from error
