"""Discovers the autoscalers behind a DNS name and keeps the links up to date. I/O.

The name must resolve to the addresses of all autoscalers (a headless Service of Kubernetes has one per pod), because a
gateway follows and reports to every autoscaler, whichever leads. If a lookup fails, the previous addresses are
kept: a gateway does not lose its leader when DNS fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from gateway.control.sync import Link, Sync

LOOK_S = 2.0
"""Lookup interval, and so the delay until a new autoscaler is found."""
ADDRESSES_MAX = 16
"""Further addresses, in sorted order, are ignored."""

log = logging.getLogger("pilotlight.gateway.discovery")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) -> addresses. Raises OSError."""


async def resolve_addresses(name: str, port: int) -> Sequence[str]:
    """Resolve a name with the system resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Discovery:
    """Keeps `sync` linked to every address of a name. `link` builds the link for an address."""

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
        """Look up the name until canceled, then close the links."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S * random.uniform(0.8, 1))  # noqa: S311  jitter needs no cryptographic randomness
        finally:
            for link in self._links.values():
                await link.close()

    async def look(self) -> None:
        """Look up the name once."""
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
