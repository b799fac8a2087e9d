"""Digests: the names of bytes, checked before they stand in a path or a URL. Pure.

Owns their grammar. Only sha256 and sha512 are taken: a name that was never checked has been a way out of a store more
than once (CVE-2024-37032, CVE-2024-3727), and weaker sums prove nothing. A `Digest` went through `parse_digest`.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

Digest = NewType("Digest", str)
"""`sha256:` and 64 hexadecimal digits in lower case, or `sha512:` and 128."""

_GRAMMAR = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_SHOWN_CHARS_MAX = 80


class BadDigestError(ValueError):
    """No digest; the text is one line that shows what was given."""


def parse_digest(text: object) -> Digest:
    """The digest that this is. Raises BadDigestError."""
    if isinstance(text, str) and _GRAMMAR.fullmatch(text):
        return Digest(text)
    said = repr(text[:_SHOWN_CHARS_MAX]) if isinstance(text, str) else type(text).__name__
    raise BadDigestError(
        f"{said} is no digest: expected sha256: and 64 hexadecimal digits in lower case, or sha512: and 128"
    )


def get_algorithm(digest: Digest) -> str:
    """As `hashlib.new` wants it."""
    return digest.partition(":")[0]


def get_hex(digest: Digest) -> str:
    """Its digits alone."""
    return digest.partition(":")[2]


def compute_digest(content: bytes) -> Digest:
    """The sha256 of bytes that are at hand."""
    return Digest(f"sha256:{hashlib.sha256(content).hexdigest()}")


def is_digest_of(digest: Digest, content: bytes) -> bool:
    """Whether these are its bytes."""
    return hashlib.new(get_algorithm(digest), content).hexdigest() == get_hex(digest)
