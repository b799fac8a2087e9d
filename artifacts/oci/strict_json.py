"""JSON from strangers, read once: bounded in bytes, parts and depth, and every key only once. Pure.

Owns what every document of a registry is held to before anybody looks into it. Two readers that see different values
for a key that stands twice are how a document passes one check and acts on another; so that is an error here.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NoReturn

DEPTH_MAX = 32
PARTS_MAX = 400_000
"""Commas and opening brackets: each makes an object in memory, some of them hundred times as large as its text."""


class BadJsonError(ValueError):
    """No JSON that is taken; the text is a clause, without a capital, that says why."""


def decode_json(content: bytes, most: int) -> object:
    """What the document of at most `most` bytes says. Raises BadJsonError."""
    if len(content) > most:
        raise BadJsonError(f"larger than {most} bytes")
    if sum(map(content.count, (b",", b"{", b"["))) > PARTS_MAX:
        raise BadJsonError(f"of more than {PARTS_MAX} parts")
    try:
        found: object = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except BadJsonError:
        raise
    except RecursionError:
        raise BadJsonError(f"nested deeper than {DEPTH_MAX}") from None
    except ValueError as error:  # also of UnicodeDecodeError, and of numbers with thousands of digits
        raise BadJsonError(f"no JSON: {str(error)[:80]}") from None
    _check_depth(found)
    return found


def decode_object(content: bytes, most: int) -> dict[str, object]:
    """The same, where only an object will do."""
    found = decode_json(content, most)
    if not isinstance(found, dict):
        raise BadJsonError("no JSON object")
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadJsonError(f"with the key {twice[:80]!r} twice")
    return found


def _constant(name: str) -> NoReturn:
    raise BadJsonError(f"no JSON: {name} is no number")


def _check_depth(found: object) -> None:
    """Level by level, so that depth costs no stack."""
    level = [found]
    for _ in range(DEPTH_MAX + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise BadJsonError(f"nested deeper than {DEPTH_MAX}")


def _children(node: object) -> list[object]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, dict | list)]
