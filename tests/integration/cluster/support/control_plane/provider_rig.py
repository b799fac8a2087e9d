"""What the provider contracts on a real API server have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine

from autoscaler.kubernetes.api import UnreachableError
from autoscaler.providers.kubernetes_access import Object
from autoscaler.providers.provider import Provider
from autoscaler.spec.installation_ownership import Ownership
from pilotlight.provider_kubernetes_client import Objects
from tests.support.harness.driver_events import WAIT_S_MAX


class Lost(Objects):
    """An API server that can be unreachable. `todo` runs before its next request, and `patches` are counted."""

    away = False
    patches = 0
    todo: Coroutine[object, object, object] | None = None

    async def items(self, path: str, **query: str) -> list[Object]:
        """As in Objects, while the server is reachable."""
        await self._asked(path)
        return await super().items(path, **query)

    async def find(self, path: str) -> Object | None:
        """As in Objects, while the server is reachable."""
        await self._asked(path)
        return await super().find(path)

    async def patch(self, path: str, body: Object) -> Object:
        """As in Objects."""
        self.patches += 1
        return await super().patch(path, body)

    async def _asked(self, path: str) -> None:
        todo, self.todo = self.todo, None
        if todo is not None:
            await todo
        if self.away:
            raise UnreachableError(path)


class ServerRig(ABC):
    """See Rig."""

    _lost: Lost

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """See Rig."""
        asyncio.run(self._run(scenario))

    @abstractmethod
    async def _run(self, scenario: Coroutine[object, object, None]) -> None: ...

    @abstractmethod
    def provider(self) -> Provider:
        """See Rig."""

    @abstractmethod
    def deliver(self) -> None:
        """From now on the system behind the provider delivers capacity, if it has some."""

    async def until_here(self, name: str) -> None:
        """See Rig."""
        self.deliver()
        async with asyncio.timeout(WAIT_S_MAX):
            while {one.name: one.phase for one in await self.provider().list()}[name] != "here":
                await asyncio.sleep(0.05)

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        async with asyncio.timeout(WAIT_S_MAX):
            while name in [one.name for one in await self.provider().list()]:
                await asyncio.sleep(0.05)

    def go_away(self) -> None:
        """See Rig."""
        self._lost.away = True

    def belong_to(self, owner: Ownership) -> None:
        """See OwnedRig."""
        self._lost.owner = owner

    async def until_labelled(self) -> None:
        """See OwnedRig."""
        patches = -1
        async with asyncio.timeout(WAIT_S_MAX):
            while patches != self._lost.patches:  # a list that writes nothing found the label on every order
                patches = self._lost.patches
                await self.provider().list()
