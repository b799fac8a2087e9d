"""Host check: keeps web pages away from loopback ports that need no key. Pure.

The author of a web page can register `evil.example` and let the name resolve to 127.0.0.1 (DNS rebinding). The browser
then reads a loopback port as part of the page's own site, but still sends the name in `Host`. The check refuses names
that an attacker can register. IP addresses, single labels (containers, Compose services, nginx upstreams) and names
reserved for local use (RFC 6761, RFC 6762, RFC 8375, and `.internal` by ICANN) cannot be registered.
Without rebinding a page can send some requests but not read the responses. Browsers mark these requests with `Origin`
or `Sec-Fetch-Site`.

`pilotlight.net.http_server`, which guards the operations ports, uses the parser and the rule for loopback addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~%-]+))(?::[0-9]{0,5})?")
"""uri-host and port (RFC 9110, 7.2), without the characters of a name that no resolver accepts."""


class HostCheck:
    """The check under the current settings: additional host names, and the origins of pages that may call."""

    __slots__ = ("_hosts", "_origins")

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        self._hosts = frozenset(_normalized(host) for host in hosts)
        self._origins = frozenset(origins)

    def has_allowed_host(self, name: str | None) -> bool:
        """Whether a request for this host is served. None: HTTP/1.0 without `Host`, which no browser sends."""
        return name is None or not is_registrable(name) or name in self._hosts

    def has_allowed_origin(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether no web page sent the request, or one of an allowed origin did."""
        origin = headers.get(b"origin")
        if origin is not None:
            return "*" in self._origins or origin.decode("latin-1") in self._origins
        return b"cross-site" not in headers.get(b"sec-fetch-site", b"").lower()


def is_from_foreign_page(headers: Mapping[bytes, bytes], origins: Collection[str]) -> bool:
    """Whether a web page sent the request whose origin is neither the gateway's own nor one of these.

    Such a page can send a body of some content types without a preflight.
    """
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if (site is None and origin is None) or (site is not None and site.lower() in (b"same-origin", b"none")):
        return False
    if (
        site is None
        and b"host" in headers
        and origin in (b"http://" + headers[b"host"], b"https://" + headers[b"host"])
    ):
        return False  # browsers send Sec-Fetch-Site only to ports with TLS or on loopback
    return "*" not in origins and (origin is None or origin.decode("latin-1") not in origins)


def host_name(header: str) -> str | None:
    """The name or address in a `Host` header, in lower case and without port, brackets and final dot.

    None: the header is malformed.
    """
    match = _HOST.fullmatch(header)
    return None if match is None else _normalized(match[1] or match[2])


def is_registrable(name: str) -> bool:
    """Whether anyone can register this DNS name, given as `host_name` returns it."""
    is_single_label = "." not in name and ":" not in name
    return not is_single_label and not name.endswith(LOCAL_SUFFIXES) and not _is_address(name)


def is_loopback(name: str) -> bool:
    """Whether a name or address is `localhost` or a loopback address, also as an IPv4-mapped IPv6 address."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_on_loopback(socket_address: object) -> bool:
    """Whether a socket address (`getsockname`) is a TCP address on loopback; False for Unix sockets."""
    return isinstance(socket_address, tuple) and is_loopback(str(socket_address[0]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _normalized(name: str) -> str:
    return name.removesuffix(".").lower()
