"""DER is accepted only in its one shortest encoding."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.signatures import der
from artifacts.signatures.der import DerError, Value
from tests.support.builders.artifacts.sigstore_rekor_v2 import number, sequence, tlv


@given(st.lists(st.tuples(st.sampled_from([0x02, 0x04, 0x30, 0xA0]), st.binary(max_size=300)), max_size=8))
def test_encoded_der_values_are_parsed_back_unchanged(parts: list[tuple[int, bytes]]) -> None:
    found = der.parse_values(b"".join(tlv(tag, content) for tag, content in parts))
    assert [(one.tag, one.content) for one in found] == parts
    assert b"".join(one.whole for one in found) == b"".join(tlv(tag, content) for tag, content in parts)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_parsed_or_raise_der_error(data: bytes) -> None:
    with contextlib.suppress(DerError):
        assert b"".join(one.whole for one in der.parse_values(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        b"\x04", b"\x1f\x01\x00", b"\x04\x80", b"\x04\x81\x05" + 5 * b"x", b"\x04\x82\x00\x81" + 129 * b"x",
        b"\x04\x02x", b"\x04\x85\x01\x00\x00\x00\x00", b"\x04\x84\xff\xff\xff\xff", b"\x04\x81", 65 * b"\x05\x00",
    ],
)  # fmt: skip
def test_der_value_with_an_invalid_tag_or_length_is_rejected(data: bytes) -> None:
    with pytest.raises(DerError):
        der.parse_values(data)


def test_der_values_with_unexpected_tags_are_rejected() -> None:
    inner = der.parse_single_value(sequence(number(1), tlv(0x04, b"x")), der.SEQUENCE).inner()
    assert der.expect_tags(inner, der.INTEGER) == [Value(0x02, b"\x01", b"\x02\x01\x01")]
    for tags in ((der.OCTETS,), (der.INTEGER, der.OCTETS, der.OID)):
        with pytest.raises(DerError):
            der.expect_tags(inner, *tags)
    for data in (b"", number(1) + number(2), tlv(0x04, b"x")):
        with pytest.raises(DerError):
            der.parse_single_value(data, der.INTEGER)


def test_der_time_that_is_not_utc_or_malformed_is_rejected() -> None:
    def at(text: str) -> float:
        return der.unix_s(Value(der.TIME, text.encode(), b""))

    assert at("20260101000200.25Z") == at("20260101000200Z") + 0.25
    for text in ("20260101000200", "20260101000200+0100", "202601010002Z", "2026010100020\xb2Z", "20260101000200.Z"):
        with pytest.raises(DerError):
            at(text)
