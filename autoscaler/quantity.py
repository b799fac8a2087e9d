"""Kubernetes quantities (`16Gi`, `500m`) as exact numbers. Owns their grammar; knows nothing of documents.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity (decimal and binary suffixes).
"""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_SUFFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    f"{p}i": 1 << 10 * i for i, p in enumerate("KMGTPE", 1)
}


class Bytes(int):
    """A size in bytes, written as a quantity in documents."""


class BytesOrAuto(Bytes):
    """A size, or `auto`, which is 0. A type of its own, for msgspec allows none of ours in a union."""


AUTO = "auto"


def parse_bytes(text: str | int) -> Bytes:
    """`16Gi` -> Bytes(17179869184). Raises ValueError, naming what was expected, on anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("expected a size such as 16Gi, got a negative number")
        return Bytes(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[3] == "m":
        raise ValueError("expected a size such as 16Gi or 500M")
    whole, fraction, suffix = match[1], match[2] or "", _SUFFIX[match[3] or ""]
    scaled = int(whole + fraction) * suffix
    size, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        raise ValueError("expected a whole number of bytes")
    return Bytes(size)


def parse_bytes_or_auto(text: str | int) -> BytesOrAuto:
    """As `parse_bytes`; 0 for `auto`."""
    if text == AUTO:
        return BytesOrAuto(0)
    size = parse_bytes(text)
    if not size:
        raise ValueError("expected auto, or a size such as 16Gi above 0")
    return BytesOrAuto(size)


def format_bytes(size: int) -> str:
    """The shortest exact binary quantity: 17179869184 -> `16Gi`."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        if size and size % _SUFFIX[suffix] == 0:
            return f"{size // _SUFFIX[suffix]}{suffix}"
    return str(size)
