"""Kubernetes quantities (`16Gi`, `500m`) as exact numbers. Pure.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity (decimal and binary suffixes).
"""

from __future__ import annotations

import re
from typing import Any, Final

MIB = 1 << 20

MEMORY_MIB_MAX = 1 << 31
"""HAMi and Kubernetes count in 31 bits; no device has 2 PiB."""

COUNT_MAX = 1024
"""Maximum number of devices of one node, and of parts of one device."""

_DIGITS = re.compile(r"[0-9]{1,10}")


_QUANTITY = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_ODD = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?(?:([nu])|[eE]([+-]?[0-9]{1,2}))")
"""Forms that other programs may write."""
_SUFFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    f"{p}i": 1 << 10 * i for i, p in enumerate("KMGTPE", 1)
}
SIZE_MAX: Final = (1 << 63) - 1
"""The largest quantity that Kubernetes computes with."""


class Bytes(int):
    """A size in bytes, written as a quantity in documents."""


class BytesOrAuto(Bytes):
    """A size, or `auto`, which is 0.

    It is a type of its own because msgspec does not support custom types in a union.
    """


AUTO = "auto"


def parse_bytes(text: str | int) -> Bytes:
    """Parse a size: `16Gi` -> Bytes(17179869184). Raises ValueError with the expected form."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("expected a size such as 16Gi, got a negative number")
        return _bounded(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[3] == "m":
        raise ValueError("expected a size such as 16Gi or 500M")
    whole, fraction, suffix = match[1], match[2] or "", _SUFFIX[match[3] or ""]
    scaled = int(whole + fraction) * suffix
    size, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        raise ValueError("expected a whole number of bytes")
    return _bounded(size)


def _bounded(size: int) -> Bytes:
    if size > SIZE_MAX:
        raise ValueError("expected a size such as 16Gi, got 8Ei or more")
    return Bytes(size)


def parse_bytes_or_auto(text: str | int) -> BytesOrAuto:
    """Parse a size or `auto`, which is 0. Raises ValueError."""
    if text == AUTO:
        return BytesOrAuto(0)
    size = parse_bytes(text)
    if not size:
        raise ValueError("expected auto, or a size such as 16Gi above 0")
    return BytesOrAuto(size)


def parse_milli(text: str | int) -> int:
    """Parse `0.5`, `500m` or `16Gi` to thousandths, rounded up. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError("expected a quantity such as 500m or 16Gi")
    whole, fraction, suffix = match[1], match[2] or "", match[3] or ""
    scaled: int = int(whole + fraction) * (1 if suffix == "m" else 1000 * _SUFFIX[suffix])
    return int(-(-scaled // 10 ** len(fraction)))


def read_milli(text: str | int) -> int:
    """Parse a quantity of an API server to thousandths: also `129e6` and `1500u`, which documents do not accept."""
    odd = _ODD.fullmatch(str(text))
    if odd is None:
        return parse_milli(text)
    digits, power = int(odd[1] + (odd[2] or "")), {"n": -9, "u": -6}.get(odd[3]) or int(odd[4] or 0)
    power += 3 - len(odd[2] or "")
    return int(digits * 10**power if power >= 0 else -(-digits // 10**-power))


def format_bytes(size: int) -> str:
    """Format a size as the shortest exact binary quantity: 17179869184 -> `16Gi`."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        if size and size % _SUFFIX[suffix] == 0:
            return f"{size // _SUFFIX[suffix]}{suffix}"
    return str(size)


def whole_number(text: object) -> int | None:
    """Parse a text of at most 15 decimal digits; None for any other text. (`int` raises beyond 4,300 digits.)"""
    if isinstance(text, str) and len(text) <= 15 and text.isascii() and text.isdecimal():
        return int(text)
    return None


def parse_bounded_int(said: Any, most: int) -> int | None:
    """Parse an integer from 0 to `most` from a string or a number; None if it is not one."""
    if isinstance(said, str) and _DIGITS.fullmatch(said):
        said = int(said)
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= most else None


def parse_count(said: Any) -> int:
    """Parse a count of at most COUNT_MAX; 0 if it is missing or invalid."""
    return parse_bounded_int(said, COUNT_MAX) or 0


def parse_mebibytes(said: Any) -> int | None:
    """Parse a size in MiB and return bytes; None if it is missing, invalid or 0."""
    mib = parse_bounded_int(said, MEMORY_MIB_MAX)
    return mib * MIB if mib else None


def parse_size(said: Any) -> int | None:
    """Parse a Kubernetes quantity and return bytes; None if it is invalid, 0 or more than any device has."""
    try:
        found = parse_bytes(said)
    except ValueError:
        return None
    return int(found) if 0 < found <= MEMORY_MIB_MAX * MIB else None


def in_mib(memory_bytes: int) -> int:
    """Convert bytes to MiB, rounded up."""
    return -(-memory_bytes // MIB)
