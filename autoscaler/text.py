"""Numbers as people read them in reasons: durations, sizes, counts of Calls; and others' text as part of a message.

Owns these forms and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

LINE_CHARACTERS_MAX = 1_000
"""Of a message with others' text in it."""

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
"""Hosts that a certificate names, and the one that it does not."""
_HOST = re.compile(r"(?<![\w.*-])[\w*-]+(?:\.[\w-]+)+")
"""None of these takes longer than by the length of a text, whatever is in it."""


def format_rfc3339(unix_s: float) -> str:
    """A time as API servers write it (RFC 3339), in whole seconds; such texts sort by time."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_duration(duration_s: float) -> str:
    """0.42 -> `0.4 s`, 12.3 -> `12 s`, 200 -> `3 min 20 s`, 7300 -> `2 h 1 min`."""
    if duration_s < 10:
        return f"{max(0.0, duration_s):.1f}".removesuffix(".0") + " s"
    whole = round(duration_s)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


def format_size(size_bytes: int) -> str:
    """20 x 2^30 -> `20Gi`, rounded to a tenth."""
    for suffix, unit in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + suffix
    return f"{size_bytes} bytes"


def redact_addresses(text: str) -> str:
    """What others say, with `(address)` in the place of each URL, IP address, host with a port, and host that a lookup
    did not find or a certificate is not for.
    """
    named = _VALID_FOR.sub(lambda found: _HOST.sub("(address)", found[0]), text)
    return _ADDRESS.sub("(address)", named)


def one_line(text: str, characters_max: int = LINE_CHARACTERS_MAX) -> str:
    """Others' text for a message: without control characters, in one line, cut where it is longer."""
    cut = text if len(text) <= characters_max else f"{text[:characters_max]}..."
    return " ".join("".join(letter if letter.isprintable() else " " for letter in cut).split())


def format_count(count: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_tenants(names: Iterable[str]) -> str:
    """`tenant acme`, `tenants acme, lab and 3 more`."""
    ordered = sorted(names)
    if len(ordered) == 1:
        return f"tenant {ordered[0]}"
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"tenants {', '.join(ordered[:3])}{more}"
