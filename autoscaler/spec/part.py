"""What every part of a document is made of: strict, immutable, camelCase outside. Owns that base and nothing else."""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all parts of documents: immutable, strict, camelCase outside."""
