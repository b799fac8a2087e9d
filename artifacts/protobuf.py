"""Protocol Buffers wire format: reads and writes selected fields. Pure.

Implements the encoding (https://protobuf.dev/programming-guides/encoding) for a few small messages with hard-coded
field numbers, without generated code; unknown fields are skipped. Invalid input of any kind raises one error type.
Reads never go past the end of the input, and only the field values are copied.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10
NUMBER_MAX = (1 << 29) - 1


class ProtobufError(ValueError):
    """The bytes are not a valid message."""


def iter_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field in order: an unsigned integer for a varint, bytes for all other types.

    Raises ProtobufError for truncated or invalid input. Groups (deprecated) are rejected.
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= NUMBER_MAX:
            raise ProtobufError(f"there is no field {number}")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == LENGTH:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ProtobufError(f"field {number} has wire type {kind}")
        if size > end - at:
            raise ProtobufError(f"field {number} is longer than the rest of the input")
        yield number, data[at : at + size]
        at += size


def iter_messages(data: bytes, number: int) -> Iterator[bytes]:
    """Yield each value of a length-delimited field. Raises ProtobufError, also if the field has another wire type."""
    for found, value in iter_fields(data):
        if found == number:
            if isinstance(value, int):
                raise ProtobufError(f"field {number} is a number")
            yield value


def iter_strings(data: bytes, number: int) -> Iterator[str]:
    """Yield each value of a string field. Raises ProtobufError."""
    for value in iter_messages(data, number):
        try:
            yield value.decode()
        except UnicodeDecodeError:
            raise ProtobufError(f"field {number} is not a text") from None


def read_string(data: bytes, number: int) -> str:
    """Return the last value of a string field, or an empty string if it is absent. Raises ProtobufError."""
    last = ""
    for value in iter_strings(data, number):
        last = value
    return last


def encode_message(*parts: tuple[int, bytes | str]) -> bytes:
    """Encode strings, bytes or submessages as length-delimited fields, in order; empty values are omitted."""
    out = bytearray()
    for number, value in parts:
        data = value.encode() if isinstance(value, str) else value
        if data:
            out += _number(number << 3 | LENGTH) + _number(len(data)) + data
    return bytes(out)


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, end offset) of the varint at this offset."""
    value = 0
    for n, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at + n + 1
    raise ProtobufError("a number is incomplete")
