"""Names to addresses for `transport`, without those that a registry must not send us to. I/O.

Owns the judgement of every address before it is connected to, by name or as it is: link-local and metadata addresses
are nobody's, and a private network is only for a registry that lies in one itself, or where a person allowed the host.
What was judged is what is connected to, so that a name that changes its address gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

from artifacts.errors import PolicyError
from artifacts.http.origin import Address, is_forbidden, is_private, normalize_host


class Resolver(AbstractResolver):
    """Asks another resolver, and judges what it says."""

    def __init__(self, names: AbstractResolver, own: str, allowed: frozenset[str]) -> None:
        self._names = names
        self._own = own
        self._allowed = {one.lower() for one in allowed}
        self._inside: bool | None = None
        """The registry itself lies in a private network, as all its answers said so far."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises PolicyError; else as the resolver that it asks."""
        found = await self._names.resolve(host, port, family)
        self.judge(host, [ipaddress.ip_address(each["host"].partition("%")[0]) for each in found], port)
        return found

    def judge(self, host: str, addresses: Sequence[Address], port: int) -> None:
        """Raises PolicyError where the host has an address that it may not have."""
        name = normalize_host(host)
        if any(is_forbidden(one) for one in addresses):
            raise PolicyError(f"{name}: is at a link-local or metadata address; those are never asked")
        inside = all(is_private(one) for one in addresses)
        if name == self._own:
            self._inside = inside if self._inside is None else self._inside and inside
        elif not self._inside and any(is_private(one) for one in addresses) and not self._is_allowed(name, port):
            raise PolicyError(
                f"{name}: is in a private network, and the registry is not; allow that host for this registry "
                f"where it is right"
            )

    def _is_allowed(self, name: str, port: int) -> bool:
        return name in self._allowed or f"{name}:{port}" in self._allowed

    async def close(self) -> None:
        """With its session."""
        await self._names.close()
