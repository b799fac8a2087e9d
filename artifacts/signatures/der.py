"""Parses DER (X.690) as used in timestamps: bytes to nested values. Pure.

Interprets no types except integers and times. Only the shortest encoding is accepted, so that the signed and the parsed
bytes are the same; nothing is read beyond a value's length; all faults raise one error type.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

INTEGER, OCTETS, OID, SEQUENCE, SET, TIME = 0x02, 0x04, 0x06, 0x30, 0x31, 0x18
VALUES_MAX = 64
"""Maximum sibling values."""


class DerError(ValueError):
    """The bytes are not valid DER, or not the expected value."""


class Value(NamedTuple):
    """One value with its raw tag."""

    tag: int
    content: bytes
    whole: bytes
    """The encoding including tag and length."""

    def inner(self) -> list[Value]:
        """Parse the nested values. Raises DerError."""
        return parse_values(self.content)


def context_tag(number: int) -> int:
    """Return the constructed context-specific tag `[number]`."""
    return 0xA0 | number


def parse_values(data: bytes) -> list[Value]:
    """Parse all sibling values. Raises DerError."""
    found, at = list[Value](), 0
    while at < len(data):
        if len(found) == VALUES_MAX:
            raise DerError(f"more than {VALUES_MAX} values side by side")
        begins, size_at = at, at + 2
        if size_at > len(data) or data[at] & 0x1F == 0x1F:
            raise DerError("a tag or a length is truncated, or a tag has more than one byte")
        size = data[at + 1]
        if size >= 0x80:
            count = size & 0x7F
            size_at += count
            size = int.from_bytes(data[at + 2 : size_at])
            if not 1 <= count <= 4 or size_at > len(data) or size < 0x80 or data[at + 2] == 0:
                raise DerError("a length is invalid, or not in its shortest encoding")
        at = size_at + size
        if at > len(data):
            raise DerError("a value is longer than the rest of the input")
        found.append(Value(data[begins], data[size_at:at], data[begins:at]))
    return found


def expect_tags(found: list[Value], *tags: int) -> list[Value]:
    """Return the leading values, which must have these tags. Raises DerError."""
    if [one.tag for one in found[: len(tags)]] != list(tags):
        raise DerError("an unexpected tag")
    return found[: len(tags)]


def parse_single_value(data: bytes, tag: int) -> Value:
    """Parse bytes that are exactly one value with this tag. Raises DerError."""
    found = parse_values(data)
    if len(found) != 1:
        raise DerError("not one value")
    return expect_tags(found, tag)[0]


def unix_s(time: Value) -> float:
    """Convert a GeneralizedTime in RFC 3161's form: `YYYYMMDDhhmmss[.s...]Z`. Raises DerError."""
    text = time.content.decode("ascii", "replace")
    whole, dot, part = text.removesuffix("Z").partition(".")
    if not text.endswith("Z") or not whole.isdigit() or len(whole) != 14 or (dot and not part.isdigit()):
        raise DerError("an invalid time")
    try:
        moment = datetime.strptime(whole, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        raise DerError("an invalid time") from None
    return moment.timestamp() + float(f"0.{part or 0}")
