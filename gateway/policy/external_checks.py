"""External checks: the messages between a gateway and the server of a check, and the addresses that it may have. Pure.

A gateway posts a JSON object with the request or the answer, and the server returns `{"allow": true}` or
`{"allow": false, "reason": "..."}` with status 200. Everything else is a failed check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import msgspec
from msgspec import Raw

from gateway.errors import invalid_request, translated_too_large
from gateway.http.body_buffers import Body, ChunkedBody
from gateway.http.response_reader import ResponseHead

CONTENT_BYTES_MAX = 4 << 20
"""Limit of a checked request or answer. A larger request is rejected, and a larger answer is an error."""
RESPONSE_BYTES_MAX = 64 << 10
"""Limit of the response of a check."""
_REASON_CHARS_MAX = 200

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class CheckMessage(msgspec.Struct):
    """The body of the POST. `body` is JSON, a text if it is not JSON, or null for forms and binary answers."""

    check: str
    """`request` or `answer`."""
    model: str
    tenant: str
    request_id: str
    endpoint: str
    """The path of the engine's API, such as /v1/chat/completions."""
    body: Raw


class Verdict(msgspec.Struct):
    """The response of a check."""

    allow: bool
    reason: str = ""


class CheckFailedError(Exception):
    """A check has no usable response; the message is the reason, without addresses and content."""


_encode = msgspec.json.Encoder().encode
_verdict = msgspec.json.Decoder(Verdict)
_raw = msgspec.json.Decoder(Raw)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


NO_BODY = Raw(b"null")
"""The body of a message for forms and binary answers."""


def read_request_body(body: Body) -> Raw:
    """Return the JSON body of a request for a check. Raises CallError 400; 413 if it is too large."""
    if len(body) > CONTENT_BYTES_MAX:
        raise translated_too_large(CONTENT_BYTES_MAX)
    content = b"".join(body.parts) if isinstance(body, ChunkedBody) else body
    if not isinstance(content, bytes) or not _is_json(
        content
    ):  # large bodies are not validated completely when they arrive
        raise invalid_request("the body is not valid JSON in UTF-8")
    return Raw(content)


def read_answer_body(head: ResponseHead, content: bytes) -> Raw:
    """Return the body of an answer for a check."""
    if b"content-encoding:" in head.fields.lower():
        return NO_BODY
    kind = head.content_type
    is_json = kind.startswith(b"application/json")
    if is_json and _is_json(content):
        return Raw(content)
    return Raw(_encode(content.decode("utf-8", "replace"))) if is_json or kind.startswith(b"text/") else NO_BODY


def _is_json(content: bytes) -> bool:
    try:
        if not content.isascii():
            content.decode()
        _raw.decode(_SURROGATE.sub(rb"\\ufffd", content))  # msgspec rejects lone surrogates, which JSON allows
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def render_check(message: CheckMessage) -> bytes:
    """Return the body of the POST."""
    return _encode(message)


def read_verdict(status: int, content: bytes) -> Verdict:
    """Read the response of a check. Raises CheckFailedError."""
    if status != 200:
        raise CheckFailedError(f"status {status}")
    try:
        found = _verdict.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CheckFailedError("the response is not an object with allow and reason") from None
    printable = "".join(one if one.isprintable() else " " for one in found.reason[:_REASON_CHARS_MAX])
    return Verdict(found.allow, printable.strip())


# --- addresses -------------------------------------------------------------------------------------------------------

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
