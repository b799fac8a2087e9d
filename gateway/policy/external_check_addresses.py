"""The addresses that the servers of external checks may have. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address


Network = IPv4Network | IPv6Network


_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::23", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata services of clouds that are not link-local."""


_NAT64 = ip_network("64:ff9b::/96")


_SHARED = ip_network("100.64.0.0/10")


_THIS = ip_network("0.0.0.0/8")


_SERVICE_PREFIX = {4: 20, 6: 108}
"""The prefix of a service network that is only known by one of its addresses: the smallest that clouds use."""


class AddressRules:
    """The addresses that checks may have: not loopback, link-local, metadata or cluster services, unless `hosts` has
    the host or the address.

    `service_networks`: networks of cluster services. If they are not known, `service_address` is the address of one of
    these services, and no private address is allowed; empty: there is no cluster.
    """

    def __init__(
        self, hosts: Iterable[str] = (), service_networks: Iterable[str] = (), service_address: str = ""
    ) -> None:
        self._hosts = frozenset(map(_normalized, hosts))
        self._networks: list[Network] = [ip_network(one) for one in service_networks]
        self._no_private = bool(service_address) and not self._networks
        if self._no_private:
            own = _parsed(service_address)
            if own is not None:
                self._networks.append(ip_network(f"{own}/{_SERVICE_PREFIX[own.version]}", strict=False))

    def allows(self, host: str, address: str) -> bool:
        """Return whether a check with this host in its URL may connect to the address."""
        if _normalized(host) in self._hosts:
            return True
        found = _parsed(address)
        if found is None:
            return False
        return str(found) in self._hosts or not any(map(self._is_forbidden, _reachable_addresses(found)))

    def _is_forbidden(self, address: Address) -> bool:
        if address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified:
            return True
        if address.is_reserved or address in _METADATA or address in _THIS:
            return True
        if isinstance(address, IPv6Address) and address.is_site_local:
            return True
        if self._no_private and (address.is_private or address in _SHARED):
            return True
        return any(address in network for network in self._networks)


def _normalized(host: str) -> str:
    found = _parsed(host)
    return host.lower().rstrip(".") if found is None else str(found)


def _parsed(text: str) -> Address | None:
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _reachable_addresses(address: Address) -> list[Address]:
    """Return the addresses that a connection to this one may reach: IPv6 addresses can contain one of IPv4."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [IPv4Address(int(address) & 0xFFFF_FFFF)]
    inner = [one for one in (address.sixtofour, *(address.teredo or ())) if one is not None]
    return [address, *inner]
