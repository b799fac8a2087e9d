"""Rules for request targets: origins, forbidden addresses and redirects. Pure.

Credentials belong to an origin: scheme, host and port. A URL that passed `parse_untrusted_url` has no user, no control
characters and no unexpected scheme. Link-local addresses (cloud metadata) are never contacted, in any notation.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple

from yarl import URL

from artifacts.registry_errors import PolicyError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REDIRECTS_MAX = 10
URL_CHARS_MAX = 8192
METADATA_HOSTS = frozenset({"metadata.google.internal", "metadata"})
METADATA = frozenset(
    ipaddress.ip_address(one)
    for one in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
)
"""Metadata services of clouds outside the link-local ranges."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_TEXT = re.compile(r"[!$-;=?-\[\]_a-z~]+")
"""Printable ASCII without space, quotes, #, <, >, backslash, ^, `, {, |, }: what all parsers read alike."""
_NEXT = re.compile(r"<([^<>]{1,4096})>\s*;[^,]*\brel=\"?next\"?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
PORTS = {"http": 80, "https": 443}


def bracket_host(host: str) -> str:
    """Return the host, in brackets if it is an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def format_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"{bracket_host(host)}:{port}"


class Origin(NamedTuple):
    """The scope of credentials."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        """Format host and non-default port, as shown in errors."""
        return bracket_host(self.host) if self.port == PORTS[self.scheme] else format_host_port(self.host, self.port)


def parse_untrusted_url(text: str) -> URL:
    """Parse an absolute http or https URL from outside. Raises PolicyError, which shows no part of the URL."""
    if len(text) > URL_CHARS_MAX or not _TEXT.fullmatch(text):
        raise PolicyError("the registry returned a URL that is too long or has invalid characters")
    try:
        url = URL(text, encoded=True)  # unchanged, since the signature of a presigned URL covers its exact text
        port = url.port
    except ValueError:
        raise PolicyError("the registry returned an invalid URL") from None
    if url.scheme not in PORTS:
        raise PolicyError("the registry returned a URL that is neither https nor http")
    if not url.raw_host or port is None or "@" in text.split("/", 3)[2]:
        raise PolicyError("the registry returned a URL without a host, or with a user name")
    check_host(url.raw_host)
    return url


def get_origin(url: URL) -> Origin:
    """Return the origin of an absolute URL."""
    return Origin(url.scheme, normalize_host(url.raw_host or ""), url.port or PORTS.get(url.scheme, 0))


def normalize_host(host: str) -> str:
    """Normalize a host for comparison."""
    return host.lower().strip("[]").removesuffix(".")


def parse_address(host: str) -> Address | None:
    """Return the address if the host is one, None for a name. Raises PolicyError for odd notations (`2852039166`)."""
    host = normalize_host(host)
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise PolicyError("the registry returned a host that is an unusual notation of an address") from None
        return None


def unwrap_ipv4(one: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address, else the address itself."""
    if isinstance(one, ipaddress.IPv6Address):
        if one.ipv4_mapped is not None:
            return one.ipv4_mapped
        if one in _NAT64:
            return ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
    return one


def is_forbidden(one: Address) -> bool:
    """Whether the address must never be contacted; no registry has such an address."""
    one = unwrap_ipv4(one)
    return one.is_link_local or one.is_multicast or one.is_unspecified or one in METADATA


def is_private(one: Address) -> bool:
    """Whether the address is in a private network or on this machine."""
    return not unwrap_ipv4(one).is_global


def check_host(host: str) -> None:
    """Raise PolicyError for a host that must never be contacted."""
    found = parse_address(host)
    if normalize_host(host) in METADATA_HOSTS or (found is not None and is_forbidden(found)):
        raise PolicyError("the registry returned a link-local or metadata address; these are never contacted")


def is_loopback(host: str) -> bool:
    """Whether the host is this machine."""
    found = parse_address(host)
    return normalize_host(host) == "localhost" if found is None else unwrap_ipv4(found).is_loopback


def find_next_page(page: URL, headers: Mapping[str, str]) -> URL | None:
    """Return the URL of the next page of a list, which must be at the same origin, or None. Raises PolicyError."""
    link = _NEXT.search(headers.get("Link", ""))
    if link is None:
        return None
    url = resolve_location(page, link[1])
    if get_origin(url) != get_origin(page):
        raise PolicyError(f"{get_origin(page)}: its next page is on another host")
    return url


def resolve_redirect(asked: URL, location: str | None, method: str, status: int, hops: int) -> URL:
    """Return the target of a 3xx response. `hops`: redirects before this one. Raises PolicyError."""
    said = str(get_origin(asked))
    if hops >= REDIRECTS_MAX:
        raise PolicyError(f"{said}: more than {REDIRECTS_MAX} redirects")
    url = resolve_location(asked, location)
    if method not in {"GET", "HEAD"} and (status not in {307, 308} or get_origin(url) != get_origin(asked)):
        raise PolicyError(f"{said}: redirects a write to another host; pushes are sent only to the registry itself")
    return url


def resolve_location(asked: URL, location: str | None) -> URL:
    """Resolve a possibly relative Location header. Raises PolicyError, also for a downgrade from TLS."""
    said = str(get_origin(asked))
    if not location:
        raise PolicyError(f"{said}: redirects without a Location")
    if not _TEXT.fullmatch(location) or len(location) > URL_CHARS_MAX:
        raise PolicyError(f"{said}: its Location is not a URL")
    try:
        url = parse_untrusted_url(str(asked.join(URL(location, encoded=True))))
    except ValueError:
        raise PolicyError(f"{said}: its Location is not a URL") from None
    if asked.scheme == "https" and url.scheme != "https":
        raise PolicyError(
            f"{said}: redirects from https to http; if the registry is behind a proxy, set the registry's external URL "
            f"to https"
        )
    return url
