"""Hostile JSON: a document in which a few places are replaced by values that break decoders.

A document is a tree of plain values. A mapping is a list of members (`Members`), because a hostile one may repeat a
name; `Written` is JSON text that no tree can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

CHANGES_MAX: Final = 3


class Written(NamedTuple):
    """JSON text, valid or not."""

    text: bytes


class Members(list[tuple[str, object]]):
    """A JSON object in which a name may occur twice."""


def _nested(opens: str, levels: int, closes: str) -> Written:
    return Written((opens * levels + "1" + closes * levels).encode())


VALUES: Final[tuple[object, ...]] = (
    None, True, False, 0, -1, 1, 3, 1.5, "", "a", "true", "0", "-1", "x" * 300, [], {}, [[]], [{}], {"a": 1}, [None],
    {"": ""},
    2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 1e308, -1e308, 5e-324,
    "9" * 5_000, "1e999", "nan", "\u0661", "\xb2", "0x10", "1_000", "16Gi", "-1Gi", "9" * 30 + "Gi", "1m", "1e5",
    "inf",
    "2026-01-01T00:00:00Z", "2026-13-45T99:99:99Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z",
    "a\x00b", "a\nb", "\x1b[31mred", "\x9b31m", "\u2028", "\u202e", "\ufeff", "/", "..", "../x", "a/b", "a,b", "[",
    '"', "{}",
    '[{"a":1}]', "[" * 2_000, "{" * 200, '{"a":' * 1_500, "- &a [*a]", "!!timestamp x", "é" * 64, "\U0001f600",
    Written(b"1e999"), Written(b"-0"), Written(b"NaN"), Written(b"9" * 400), Written(b"9" * 5_000), Written(b"1e400"),
    Written(b'"\\ud800"'), Written(b'"\\udc00\\ud800"'), Written(b'"\xff"'), Written(b'"\xed\xa0\x80"'), Written(b""),
    Written(b"0.1e-400"), Written(b'{"a":1,"a":2}'), Written(b'"\\u0000"'), Written(b"[,]"), Written(b'"\x01"'),
    _nested("[", 60, "]"), _nested("[", 99, "]"), _nested("[", 120, "]"), _nested('{"a":', 1_100, "}"),
    _nested("[", 20_000, "]"), Written(b"[" * 3_000), Written(b"[" + b"0," * 2_000 + b"0]"),
    Written(b'"' + b"x" * 100_000 + b'"'),
    Written(b"[" + b"{}," * 1_000 + b"{}]"),
)  # fmt: skip
"""Replacements of a value."""


def tree(value: object) -> object:
    """A plain value as a tree."""
    if isinstance(value, dict):
        return Members((name, tree(one)) for name, one in value.items())
    return [tree(one) for one in value] if isinstance(value, list) else value


def written(value: object) -> bytes:
    """A tree, or a plain value, as JSON. Surrogates are escaped."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, dict):
        value = Members(value.items())
    if isinstance(value, Members):
        return b"{" + b",".join(json.dumps(name).encode() + b":" + written(one) for name, one in value) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(written, value)) + b"]"
    return json.dumps(value).encode()


def retyped(value: object, random: Random) -> bytes:
    """The JSON of a plain value with up to CHANGES_MAX texts and numbers replaced; its schema still allows it."""
    root = tree(value)
    spots = [(of, at) for of, at in _spots(root) if isinstance(_get(of, at), str | int)]
    for of, at in random.sample(spots, min(len(spots), random.randint(1, CHANGES_MAX))):
        kind = _kind(_get(of, at))
        _put(of, at, random.choice([one for one in VALUES if _kind(one) == kind]))
    return written(root)


_TIME = re.compile(r"\d{4}-(0\d|1[0-2])-\d\dT[0-2]\d:[0-5]\d:[0-5]\dZ")


def fits(value: object, known: object) -> bool:
    """Whether a plain value has the types of a known one, as a schema requires: members, items, texts, numbers."""
    if isinstance(value, dict) and isinstance(known, dict):
        return value.keys() == known.keys() and all(fits(one, known[name]) for name, one in value.items())
    if isinstance(value, list) and isinstance(known, list):
        return len(value) == len(known) and all(map(fits, value, known))
    return _kind(value) == _kind(known)


def _kind(value: object) -> str:
    """Its type in a schema. Times are a type of their own, since API servers check their format."""
    if isinstance(value, str) and _TIME.fullmatch(value):
        return "date-time"
    huge = isinstance(value, int) and not -(2**63) <= value < 2**63
    return "huge" if huge else type(value).__name__


def mutated(value: object, random: Random, values: tuple[object, ...] = VALUES) -> bytes:
    """The JSON of a plain value with up to CHANGES_MAX changes."""
    root = tree(value)
    for _ in range(random.randint(1, CHANGES_MAX)):
        spots = list(_spots(root))
        if not spots:
            break
        random.choice(_CHANGES)(*random.choice(spots), random, values)
    return written(root)


Spot = tuple["list[object] | Members", int]


def _spots(root: object) -> list[Spot]:
    """All places of a tree: the container and the position in it."""
    found, left = list[Spot](), [root]
    while left:
        one = left.pop()
        if isinstance(one, Members):
            found += [(one, at) for at in range(len(one))]
            left += [inner for _, inner in one]
        elif isinstance(one, list):
            found += [(one, at) for at in range(len(one))]
            left += one
    return found


def _get(of: list[object] | Members, at: int) -> object:
    return of[at][1] if isinstance(of, Members) else of[at]


def _put(of: list[object] | Members, at: int, value: object) -> None:
    if isinstance(of, Members):
        of[at] = (of[at][0], value)
    else:
        of[at] = value


def _replace(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    _put(of, at, tree(random.choice(values)))  # a new one: it may be changed, too


def _remove(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    del random, values
    del of[at]


def _repeat(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    """Repeat a member or an item with another value."""
    other = tree(random.choice(values))
    if isinstance(of, Members):
        of.insert(random.randint(0, len(of)), (random.choice((of[at][0], of[at][0].upper(), of[at][0].title())), other))
    else:
        of += [of[at]] * random.choice((1, 50)) + [other]


def _rename(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    if isinstance(of, Members):
        name = of[at][0]
        of[at] = (random.choice((name.upper(), name + "s", "", "x" * 300, name[:-1], "\x1b[31m", "a\nb")), of[at][1])
    else:
        _replace(of, at, random, values)


def _wrap(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    del values
    inner = _get(of, at)
    _put(of, at, random.choice(([inner], Members([("a", inner)]), written(inner).decode("latin-1"))))


def _swap(of: list[object] | Members, at: int, random: Random, values: tuple[object, ...]) -> None:
    """Swap a value with another of its container: valid values of wrong types."""
    del values
    other = random.randrange(len(of))
    one = _get(of, at)
    _put(of, at, _get(of, other))
    _put(of, other, one)


Change = Callable[["list[object] | Members", int, Random, tuple[object, ...]], None]
_CHANGES: Final[tuple[Change, ...]] = (_replace, _replace, _replace, _replace, _remove, _repeat, _rename, _wrap, _swap)
