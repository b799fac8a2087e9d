"""Name resolution for `transport` that rejects addresses to which a registry must not send us. I/O.

Checks every address before it is connected to, resolved or literal: link-local and metadata addresses are forbidden,
and private networks are allowed only if the registry itself is in one or an administrator allowed the host. The checked
addresses are the ones that are connected to, so DNS rebinding has no effect.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

from artifacts.http.url_policy import Address, bracket_host, format_host_port, is_forbidden, is_private, normalize_host
from artifacts.registry_errors import PolicyError


class Resolver(AbstractResolver):
    """Wraps another resolver and checks its results."""

    def __init__(self, names: AbstractResolver, own: str, allowed: frozenset[str]) -> None:
        self._names = names
        self._own = own
        self._allowed = {one.lower() for one in allowed}
        self._inside: bool | None = None
        """Whether all addresses of the registry so far were private; None before the first."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve and check a host. Raises PolicyError, and what the wrapped resolver raises."""
        found = await self._names.resolve(host, port, family)
        self.judge(host, [ipaddress.ip_address(each["host"].partition("%")[0]) for each in found], port)
        return found

    def judge(self, host: str, addresses: Sequence[Address], port: int) -> None:
        """Raise PolicyError if the host has a forbidden address."""
        name = normalize_host(host)
        if any(is_forbidden(one) for one in addresses):
            raise PolicyError(f"{name}: is at a link-local or metadata address; these are never contacted")
        inside = all(is_private(one) for one in addresses)
        if name == self._own:
            self._inside = inside if self._inside is None else self._inside and inside
        elif not self._inside and any(map(is_private, addresses)) and not self._is_allowed(name, port):
            raise PolicyError(
                f"{name}: is in a private network, and the registry is not; a registry with a public address may refer "
                f"only to hosts with public addresses"
            )

    def _is_allowed(self, name: str, port: int) -> bool:
        return not self._allowed.isdisjoint({name, bracket_host(name), format_host_port(name, port)})

    async def close(self) -> None:
        """Close the wrapped resolver; called with the session."""
        await self._names.close()
