"""Byte ranges of a blob: request headers, and validation of the response (RFC 9110, section 14). Pure.

Ranges are always closed, since some registries answer 416 to open ones. `Accept-Ranges` is ignored: most registries
that support ranges do not send it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from artifacts.registry_errors import MismatchError, PolicyError

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


class Part(NamedTuple):
    """Bytes from `first` up to (excluding) `end` of a blob of `size` bytes."""

    first: int
    end: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether the part is the whole blob."""
        return self.first == 0 and self.end == self.size

    @property
    def header(self) -> str:
        """Value of the Range request header."""
        return f"bytes={self.first}-{self.end - 1}"


def validate_range_response(part: Part, status: int, headers: Mapping[str, str], asked_range: bool, said: str) -> int:
    """Return how many bytes of the response precede the part. Raises MismatchError, PolicyError.

    `status` is 200 or 206; `said` names the blob in errors.
    """
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        raise PolicyError(f"{said}: has a Content-Encoding, which a proxy must have added; bypass the proxy")
    length = headers.get("Content-Length")
    if status == 200:
        if length is not None and length != str(part.size):
            raise MismatchError(f"{said}: the registry has {_shown(length)} bytes of it, expected {part.size}")
        return part.first
    if not asked_range:
        raise MismatchError(f"{said}: the registry returned a part that was not requested")
    if headers.get("Content-Type", "").lower().startswith("multipart/"):
        raise MismatchError(f"{said}: the registry returned several parts, where one was requested")
    given = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if given is not None and given[3] not in {"*", str(part.size)}:
        raise MismatchError(f"{said}: the registry has {given[3]} bytes of it, expected {part.size}")
    if given is None or (int(given[1]), int(given[2])) != (part.first, part.end - 1):
        raise MismatchError(f"{said}: the registry returned another part than the requested one")
    if length is not None and length != str(part.end - part.first):
        raise MismatchError(f"{said}: the registry's part is {_shown(length)} bytes long, not {part.end - part.first}")
    return 0


def _shown(length: str) -> str:
    return length if length.isdigit() and len(length) < 20 else "an unknown number of"
