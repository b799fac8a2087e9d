"""The key of a Copy, and the names of folders and files in the store: of an origin and of a digest. Pure."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from artifacts.digest import BadDigestError, Digest, parse_digest

ORIGIN_DIGITS = 16
"""Length of the folder name of an origin."""


class CopyKey(NamedTuple):
    """Identifies a Copy."""

    origin: str
    """Its registry, as in `Reference.host`, or another source's name."""
    digest: Digest
    """Digest of its manifest."""

    @property
    def room(self) -> str:
        """Folder name of its registry."""
        return origin_folder_name(self.origin)

    @property
    def name(self) -> str:
        """Unique in the store."""
        return f"{self.room}-{digest_file_name(self.digest)}"


def origin_folder_name(origin: str) -> str:
    """Return the folder name for content of this origin."""
    return hashlib.sha256(origin.encode()).hexdigest()[:ORIGIN_DIGITS]


def digest_file_name(digest: Digest) -> str:
    """Return the file name of a digest."""
    return parse_digest(digest).replace(":", "-")


def parse_file_name(name: str) -> Digest | None:
    """Parse the result of `digest_file_name`; None for other names."""
    try:
        return parse_digest(name.replace("-", ":", 1))
    except BadDigestError:
        return None
