"""Whole numbers and sizes as nodes tell them: in labels, annotations and objects that anybody may have written.

Owns the one way from such a text to a number that may be trusted: None for what is no number, or one that no device
can have. Must not raise, whatever it is given.
"""

from __future__ import annotations

import re
from typing import Any

from autoscaler.spec.quantity import parse_bytes

MIB = 1 << 20
MEMORY_MIB_MAX = 1 << 31
"""What HAMi and Kubernetes count in has 31 bits; no device has 2 PiB."""
COUNT_MAX = 1024
"""Devices of one node, and parts of one device."""
_DIGITS = re.compile(r"[0-9]{1,10}")


def whole(said: Any, most: int) -> int | None:
    """0 to `most`, from a text or a number; None: it is nothing of the kind."""
    if isinstance(said, str) and _DIGITS.fullmatch(said):
        said = int(said)
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= most else None


def counted(said: Any) -> int:
    """How many of something a node has: 0 where it does not say."""
    return whole(said, COUNT_MAX) or 0


def mebibytes(said: Any) -> int | None:
    """A size that is told in MiB, in bytes; None: it is not told, or 0."""
    mib = whole(said, MEMORY_MIB_MAX)
    return mib * MIB if mib else None


def size(said: Any) -> int | None:
    """A Kubernetes quantity in bytes; None: it is none that a device can have, or 0."""
    try:
        found = parse_bytes(said)
    except ValueError:
        return None
    return int(found) if 0 < found <= MEMORY_MIB_MAX * MIB else None


def in_mib(memory_bytes: int) -> int:
    """The least MiB that hold so many bytes."""
    return -(-memory_bytes // MIB)
