"""What Leases are called: by whom they are for, and not by which leader orders them. Pure.

Owns these names, so that two leaders who order at once order one, and the same name said again is the same Lease.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

from autoscaler.contract import ModelName

NAME_MAX = 40
_UNSAFE = re.compile(r"[^a-z0-9-]+")


def intent_of(provider: str, owner: ModelName, number: int) -> str:
    """The idempotency key of a Lease: the `number`th that its owner has at once. With its provider: so several
    installations that share a cluster, or a fabric, and name their providers apart are in nobody's way.
    """
    return hashlib.sha256(f"capacity/{provider}/{owner}/{number}".encode()).hexdigest()[:10]


def name_of(provider: str, owner: ModelName, number: int) -> str:
    """A name that everybody takes: RFC 1123, at most 63 characters."""
    stem = _UNSAFE.sub("-", owner.lower())[:NAME_MAX].strip("-")
    return "-".join(part for part in ("pilotlight", stem, intent_of(provider, owner, number)) if part)


def next_name(provider: str, owner: ModelName, taken: Collection[str]) -> str:
    """The first of its names that no Lease has."""
    return next(name for number in range(len(taken) + 1) if (name := name_of(provider, owner, number)) not in taken)
