"""A RedfishFabric in front of a fake fabric, over real HTTP on loopback, with the test's own clock.

Implements `Rig` of `tests.contracts.provider`. Only sleeps advance the clock, and a pause of seconds returns almost at
once. So minutes of retries take milliseconds, while requests are real.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager

from autoscaler.capacity.attachable_nodes import AttachableNode
from autoscaler.providers.redfish.attach_detach import Around
from autoscaler.providers.redfish.client import Login, Logins, Service
from autoscaler.providers.redfish.inventory import Reading, StoredMarks
from autoscaler.providers.redfish.planning import FabricContext
from autoscaler.providers.redfish.provider import RedfishFabric
from autoscaler.state.capacity import AcquireOrder, Listed
from tests.contracts.provider import order
from tests.support.fakes.redfish import PASSWORD, USER, FakeFabric
from tests.support.net import certificates

TURN_S = 0.002
"""The real duration of a pause."""
WAIT_S = 60.0
"""How long a test waits for an expected event."""


class MemoryNotes:
    """Notes, stored outside the service."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.version = 0

    async def read(self) -> StoredMarks:
        """See Notes."""
        return StoredMarks(dict(self.kept), str(self.version))

    async def write(self, noted: StoredMarks) -> bool:
        """See Notes."""
        if noted.version != str(self.version):
            return False
        self.kept, self.version = dict(noted.marks), self.version + 1
        return True


def terms(provider: str = "rack") -> FabricContext:
    """The terms of a provider that has no observations of nodes."""
    return FabricContext(provider, 6.0, lambda _: 1.0, lambda _: 0, lambda _: True)


async def open_sites(nodes: Collection[str]) -> Mapping[str, AttachableNode]:
    """All nodes."""
    return {one: AttachableNode(one, 64) for one in nodes}


class FabricRig:
    """See the module. `systems`: by node."""

    def __init__(self, fabric: FakeFabric, *, tls: bool = False, notes: bool = False) -> None:
        self.fabric, self._tls = fabric, tls
        self.notes = MemoryNotes() if notes else None
        self.systems: Mapping[str, str] = {f"w{one}": fabric.path(one) for one in fabric.systems}
        self.name = terms().provider
        """The name of the providers that are created from now on."""
        self.used: set[str] = set()
        self.now_s = 0.0
        self.changes = 0
        self.password = PASSWORD
        self.leads = True
        self._made: list[RedfishFabric] = []
        self._tasks: asyncio.TaskGroup
        self._attending: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FabricRig]:
        """Serves the fabric and runs the providers that are created within the context."""
        server = certificates.sides().server if self._tls else None
        async with self.fabric.serving(server), asyncio.timeout(WAIT_S), asyncio.TaskGroup() as self._tasks:
            try:
                yield self
            finally:
                self.end()
                for made in self._made:
                    await made.close()

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """See Rig."""

        async def whole() -> None:
            async with self.running():
                await scenario

        asyncio.run(whole())

    def provider(self) -> RedfishFabric:
        """See Rig."""
        made = self._new()
        self._made.append(made)
        self._attending.append(self._tasks.create_task(made.attend(self._changed)))
        return made

    def end(self) -> None:
        """Stops the running providers, as when their process ends."""
        for one in self._attending:
            one.cancel()

    async def marked(self) -> AcquireOrder:
        """An order for w1 by a leader that ended before it was attached."""
        removed = self._new()
        made = order(next(one for one in await removed.offers() if one.node == "w1"))
        await removed.acquire(made)
        await removed.close()
        return made

    def _new(self) -> RedfishFabric:
        reading = Reading(self.service(self.logins), self.systems, self.name, self.notes)
        around = Around(self.in_use, lambda: self.now_s, self.sleep)
        return RedfishFabric(reading, around, terms(self.name), open_sites)

    def service(self, logins: Logins) -> Service:
        """A new client of the service."""
        return Service(self.fabric.url, logins, self.tls, sleep=self.sleep, may_write=lambda: self.leads)

    async def tls(self) -> ssl.SSLContext | None:
        """The TLS context that trusts our authority."""
        return certificates.sides().client if self._tls else None

    async def logins(self) -> Login | None:
        """The login for the fabric."""
        return Login(USER, self.password) if self.fabric.login != "none" else None

    async def sleep(self, s: float) -> None:
        """Advances the clock."""
        await asyncio.sleep(TURN_S)
        self.now_s += s

    async def in_use(self, node: str, uuids: tuple[str, ...]) -> str:
        """Returns the node if the test marked one of the devices as used."""
        return node if not self.used.isdisjoint(uuids) else ""

    async def until(self, holds: Callable[[tuple[Listed, ...]], bool]) -> tuple[Listed, ...]:
        """Waits until the list of a new provider satisfies the predicate; returns it."""
        looking = self._new()
        try:
            while not holds(shown := await looking.list()):
                await asyncio.sleep(TURN_S)
        finally:
            await looking.close()
        return shown

    async def until_here(self, name: str) -> None:
        """See Rig."""
        self.fabric.finish()
        await self.until(lambda shown: any(one.name == name and one.phase == "here" for one in shown))

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        self.fabric.finish()
        await self.until(lambda shown: all(one.name != name for one in shown))
        for made in self._made:
            while any(one.name == name for one in await made.list()):
                await asyncio.sleep(TURN_S)

    def use(self, name: str) -> None:
        """See Rig."""
        self.used |= {f"GPU-{one}" for one in self.fabric.attached("1") + self.fabric.attached("2")}

    def leave_little(self) -> None:
        """See Rig."""
        for one in self.fabric.blocks.values():
            one.reserved = True

    def go_away(self) -> None:
        """See Rig."""
        self.fabric.away = True

    def _changed(self) -> None:
        self.changes += 1
