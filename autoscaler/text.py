"""Formats durations, sizes and counts for messages, and sanitizes text from other systems before it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

LINE_CHARACTERS_MAX = 1_000
"""Maximum length of foreign text in a message, in characters."""

_GROUPS = r"[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6}"
_ADDRESS = re.compile(
    rf"""[a-z][a-z0-9+.-]{{0,30}}://[^\s"'<>]+       # a URL
    | (?<![\w.])(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?::\d+)?(?![\w.]*\d)  # IPv4
    | \[[0-9a-f]*:[0-9a-z:.%]*\](?::\d+)?       # IPv6, as it stands before a port
    | (?<![\w.])(?:{_GROUPS}::(?:{_GROUPS})?|::{_GROUPS}|(?:[0-9a-f]{{1,4}}:){{7,8}}[0-9a-f]{{1,4}})
      (?:\.\d{{1,3}}){{0,3}}(?:%\w+)?(?![\w])      # IPv6 by itself: with ::, or all eight groups
    | (?<=\blookup\ )[\w-]+(?:\.[\w-]+)+(?::\d+)?  # a host that has no address
    | (?<![\w.-])[a-z0-9-]+(?:\.[a-z0-9-]+)+:\d+  # a host and its port""",
    re.IGNORECASE | re.VERBOSE,
)
_VALID_FOR = re.compile(r"(?<=certificate is valid for )[^\s,]+(?:, (?:not )?[^\s,]+)*")
"""The host names in a TLS error: those that the certificate is valid for, and the one that it is not."""
_HOST = re.compile(r"(?<![\w.*-])[\w*-]+(?:\.[\w-]+)+")
"""A host name. All of these patterns match in time linear in the length of the text, whatever it contains."""


def format_rfc3339(unix_s: float) -> str:
    """Format a Unix time as an API server does (RFC 3339, UTC, whole seconds). The strings sort by time."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_duration(duration_s: float) -> str:
    """Format a duration: 0.42 -> `0.4 s`, 12.3 -> `12 s`, 200 -> `3 min 20 s`, 7300 -> `2 h 1 min`."""
    if duration_s < 10:
        return f"{max(0.0, duration_s):.1f}".removesuffix(".0") + " s"
    whole = round(duration_s)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


def format_size(size_bytes: int) -> str:
    """Format a size, rounded to a tenth: 20 x 2^30 -> `20Gi`."""
    for suffix, unit in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + suffix
    return f"{size_bytes} bytes"


def redact_addresses(text: str) -> str:
    """Replace URLs, IP addresses, hosts with a port, and hosts in errors of DNS or certificates by `(address)`."""
    named = _VALID_FOR.sub(lambda found: _HOST.sub("(address)", found[0]), text)
    return _ADDRESS.sub("(address)", named)


def one_line(text: str, characters_max: int = LINE_CHARACTERS_MAX) -> str:
    """Return foreign text as one line without control characters, truncated to `characters_max`."""
    cut = text if len(text) <= characters_max else f"{text[:characters_max]}..."
    return " ".join("".join(letter if letter.isprintable() else " " for letter in cut).split())


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: `1 model`, `2 models`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_tenants(names: Iterable[str]) -> str:
    """Format a list of tenants: `tenant acme`, `tenants acme, lab and 3 more`."""
    ordered = sorted(names)
    if len(ordered) == 1:
        return f"tenant {ordered[0]}"
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"tenants {', '.join(ordered[:3])}{more}"


def unix_seconds(time: str) -> float:
    """Parse an RFC 3339 time to seconds since 1970. Raises ValueError for other texts and for a time without a zone."""
    moment = datetime.fromisoformat(time)
    if moment.tzinfo is None or len(time) < len("2027-01-31T12:00:00Z"):
        raise ValueError("expected a time such as 2027-01-31T12:00:00Z")
    return moment.timestamp()


def format_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_engine_address(host: str, port: int, tls_name: str | None) -> str:
    """Format an address as routes contain it (`autoscaler.contract`).
    `tls_name`: the name in the engine's certificate, empty if that is the host; None for plain HTTP.
    """
    if tls_name is None:
        return format_host_port(host, port)
    return (
        f"https://{tls_name}@{format_host_port(host, port)}" if tls_name else f"https://{format_host_port(host, port)}"
    )
