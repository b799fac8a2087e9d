"""Where a request may go: origins, addresses that nobody may send us to, redirects. Pure.

Owns the rules, not the requests. Credentials belong to an origin: scheme, host and port, all three. Promises: a URL
that went through `parse_untrusted_url` has no user in it, no control characters and no foreign scheme; addresses of a
machine's own link (cloud metadata) are never asked, however they are written.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from yarl import URL

from artifacts.errors import PolicyError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REDIRECTS_MAX = 10
URL_CHARS_MAX = 8192
METADATA_HOSTS = frozenset({"metadata.google.internal", "metadata"})
METADATA = frozenset(
    ipaddress.ip_address(one)
    for one in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
)
"""Beside the link-local ones: where clouds tell a machine its secrets."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_TEXT = re.compile(r"[!$-;=?-\[\]_a-z~]+")
"""Printable ASCII without space, quotes, #, <, >, backslash, ^, `, {, |, }: what all parsers read alike."""
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Whom credentials belong to."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        """Host and, where it is not the scheme's own, port: what errors show."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def parse_untrusted_url(text: str) -> URL:
    """An absolute http or https URL from outside. Raises PolicyError; its text shows no part of the URL."""
    if len(text) > URL_CHARS_MAX or not _TEXT.fullmatch(text):
        raise PolicyError("the registry names a URL with characters that no URL has, or a far too long one")
    try:
        url = URL(text, encoded=True)  # as it is: a presigned one is signed as it is written
        port = url.port
    except ValueError:
        raise PolicyError("the registry names a URL that cannot be read") from None
    if url.scheme not in PORTS:
        raise PolicyError("the registry names a URL that is neither https nor http")
    if not url.raw_host or port is None or "@" in text.split("/", 3)[2]:
        raise PolicyError("the registry names a URL without a host, or with a user in it")
    check_host(url.raw_host)
    return url


def get_origin(url: URL) -> Origin:
    """Of an absolute URL."""
    return Origin(url.scheme, normalize_host(url.raw_host or ""), url.port or PORTS.get(url.scheme, 0))


def normalize_host(host: str) -> str:
    """As it is compared."""
    return host.lower().strip("[]").removesuffix(".")


def parse_address(host: str) -> Address | None:
    """The address that a host is, if it is none by name. Raises PolicyError for one in disguise (`2852039166`)."""
    host = normalize_host(host)
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise PolicyError("the registry names a host that is an odd way to write an address") from None
        return None


def unwrap_ipv4(one: Address) -> Address:
    """The IPv4 address inside of an IPv6 one, where there is one."""
    if isinstance(one, ipaddress.IPv6Address):
        if one.ipv4_mapped is not None:
            return one.ipv4_mapped
        if one in _NAT64:
            return ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
    return one


def is_forbidden(one: Address) -> bool:
    """Nobody may send us there, no registry lies there."""
    one = unwrap_ipv4(one)
    return one.is_link_local or one.is_multicast or one.is_unspecified or one in METADATA


def is_private(one: Address) -> bool:
    """Inside of somebody's network, or of this machine."""
    return not unwrap_ipv4(one).is_global


def check_host(host: str) -> None:
    """Raises PolicyError for a host that is never asked."""
    found = parse_address(host)
    if normalize_host(host) in METADATA_HOSTS or (found is not None and is_forbidden(found)):
        raise PolicyError("the registry names a link-local or metadata address; those are never asked")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    found = parse_address(host)
    return normalize_host(host) == "localhost" if found is None else unwrap_ipv4(found).is_loopback


def resolve_redirect(asked: URL, location: str | None, method: str, status: int, hops: int) -> URL:
    """Where an answer with a status of 3xx sends us. Raises PolicyError. `hops`: redirects before this one."""
    said = str(get_origin(asked))
    if hops >= REDIRECTS_MAX:
        raise PolicyError(f"{said}: more than {REDIRECTS_MAX} redirects")
    url = resolve_location(asked, location)
    if method not in {"GET", "HEAD"} and (status not in {307, 308} or get_origin(url) != get_origin(asked)):
        raise PolicyError(f"{said}: redirects a write to somewhere else; what is pushed goes to the registry itself")
    return url


def resolve_location(asked: URL, location: str | None) -> URL:
    """A Location header's URL, which may be relative. Raises PolicyError, also where it leaves TLS."""
    said = str(get_origin(asked))
    if not location:
        raise PolicyError(f"{said}: sends us elsewhere and says not where (no Location)")
    if not _TEXT.fullmatch(location) or len(location) > URL_CHARS_MAX:
        raise PolicyError(f"{said}: its Location is no URL")
    try:
        url = parse_untrusted_url(str(asked.join(URL(location, encoded=True))))
    except ValueError:
        raise PolicyError(f"{said}: its Location is no URL") from None
    if asked.scheme == "https" and url.scheme != "https":
        raise PolicyError(f"{said}: sends us from https to http; behind a proxy its own address must be set to https")
    return url
