"""Content digests, validated before they are used in a path or URL. Pure.

Only sha256 and sha512 are accepted. Unvalidated digests have repeatedly allowed path traversal out of a store
(CVE-2024-37032, CVE-2024-3727), and weaker hashes prove nothing. Every `Digest` has passed `parse_digest`.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

Digest = NewType("Digest", str)
"""`sha256:` and 64 lowercase hexadecimal digits, or `sha512:` and 128."""

_GRAMMAR = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_SHOWN_CHARS_MAX = 80


class BadDigestError(ValueError):
    """The text is not a digest; the message is one line that shows the input."""


def parse_digest(text: object) -> Digest:
    """Parse and validate a digest. Raises BadDigestError."""
    if isinstance(text, str) and _GRAMMAR.fullmatch(text):
        return Digest(text)
    said = repr(text[:_SHOWN_CHARS_MAX]) if isinstance(text, str) else type(text).__name__
    raise BadDigestError(
        f"{said} is not a digest: expected sha256: and 64 hexadecimal digits in lower case, or sha512: and 128"
    )


def get_algorithm(digest: Digest) -> str:
    """Return the hash name that `hashlib.new` expects."""
    return digest.partition(":")[0]


def get_hex(digest: Digest) -> str:
    """Return the hexadecimal digits without the algorithm prefix."""
    return digest.partition(":")[2]


def compute_digest(content: bytes) -> Digest:
    """Return the sha256 digest of bytes in memory."""
    return Digest(f"sha256:{hashlib.sha256(content).hexdigest()}")


def is_digest_of(digest: Digest, content: bytes) -> bool:
    """Return whether the content matches the digest."""
    return hashlib.new(get_algorithm(digest), content).hexdigest() == get_hex(digest)
