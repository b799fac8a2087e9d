"""Which autoscalers there are behind a name, as they come and go. I/O.

Owns the looking-up of one name, and the links that follow from it. The name stands for every address that it has (a
headless Service of Kubernetes has one for each pod), because all autoscalers are followed and reported to, whoever
leads. While it cannot be looked up, those that it stood for last stay: a gateway does not lose its leader with its DNS.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from gateway.control.sync import Link, Sync

LOOK_S = 2.0
"""A name is looked up this often: an autoscaler that is new is heard so late."""
ADDRESSES_MAX = 16
"""More are not followed, in order of addresses."""

log = logging.getLogger("pilotlight.gateway.finding")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) -> its addresses. Raises OSError."""


async def resolve_addresses(name: str, port: int) -> Sequence[str]:
    """As the system does it. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Discovery:
    """Keeps `sync` on everybody behind a name. `link` makes the way to an address."""

    def __init__(
        self, host: str, port: int, link: Callable[[str], Link], sync: Sync, resolve: Resolve = resolve_addresses
    ) -> None:
        self._host = host
        self._port = port
        self._link = link
        self._sync = sync
        self._resolve = resolve
        self._links: dict[str, Link] = {}
        self._unknown = False

    async def run(self) -> None:
        """Looks until cancelled, then closes its links."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S * random.uniform(0.8, 1))  # noqa: S311  no secret
        finally:
            for link in self._links.values():
                await link.close()

    async def look(self) -> None:
        """Looks the name up once."""
        try:
            found = set(sorted(set(await self._resolve(self._host, self._port)))[:ADDRESSES_MAX])
        except OSError as error:
            if not self._unknown:
                log.warning("event=autoscalers_unknown name=%s error=%s", self._host, error.strerror)
            self._unknown = True
            return
        self._unknown = False
        for address in sorted(found - self._links.keys()):
            link = self._links[address] = self._link(address)
            self._sync.join(link)
        for address in sorted(self._links.keys() - found) if found else ():
            link = self._links.pop(address)
            self._sync.leave(link)
            await link.close()
