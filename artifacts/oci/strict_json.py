"""Parses untrusted JSON with limits on size, number of elements and depth, and without duplicate keys. Pure.

Applies to every document from a registry. Duplicate keys are an error: two parsers that pick different values would let
a document pass one check and act as another.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NoReturn

DEPTH_MAX = 32
PARTS_MAX = 400_000
"""Limit of commas and opening brackets: each creates an object, some a hundred times as large as its text."""


class BadJsonError(ValueError):
    """The JSON is rejected; the message is a lowercase clause with the reason."""


def decode_json(content: bytes, most: int) -> object:
    """Parse a document of at most `most` bytes. Raises BadJsonError."""
    if len(content) > most:
        raise BadJsonError(f"larger than {most} bytes")
    if sum(map(content.count, (b",", b"{", b"["))) > PARTS_MAX:
        raise BadJsonError(f"with more than {PARTS_MAX} commas and opening brackets")
    try:
        found: object = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except BadJsonError:
        raise
    except RecursionError:
        raise BadJsonError(f"nested deeper than {DEPTH_MAX}") from None
    except ValueError as error:  # includes UnicodeDecodeError, and numbers with thousands of digits
        raise BadJsonError(f"not JSON: {str(error)[:80]}") from None
    _check_depth(found)
    return found


def decode_object(content: bytes, most: int) -> dict[str, object]:
    """As `decode_json`, but accept only an object."""
    found = decode_json(content, most)
    if not isinstance(found, dict):
        raise BadJsonError("not a JSON object")
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadJsonError(f"with the key {twice[:80]!r} twice")
    return found


def _constant(name: str) -> NoReturn:
    raise BadJsonError(f"not JSON: {name} is not a number")


def _check_depth(found: object) -> None:
    """Check the depth level by level, without recursion."""
    level = [found]
    for _ in range(DEPTH_MAX + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise BadJsonError(f"nested deeper than {DEPTH_MAX}")


def _children(node: object) -> list[object]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, dict | list)]
