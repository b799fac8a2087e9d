"""Quantities are parsed and formatted exactly, and other texts are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.spec.quantity import Bytes, format_bytes, parse_bytes, parse_milli


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        (512, 512),
        ("16Gi", 16 << 30),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("2k", 2000),
        ("0.5Ki", 512),
        ("1Ei", 1 << 60),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_size_in_kubernetes_notation_is_converted_to_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), Bytes)


OUT_OF_RANGE = (-1, True, 1 << 63, "8Ei", "9223372036854775808", "9999999999999999999Ei")
NO_SIZES = ("", "16GB", "16 Gi", "-1", "1e3", "Gi", "1.Gi", ".5Gi", "500m", "16gi", "\u0661")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        *((size, "expected a size such as 16Gi") for size in NO_SIZES),
        *((size, "expected a size") for size in OUT_OF_RANGE),
        ("0.3Ki", "whole number of bytes"),
    ],
)
def test_invalid_out_of_range_or_fractional_size_is_rejected(size: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(size)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 1 << 62))
def test_formatted_size_is_parsed_back_unchanged(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


def test_size_is_formatted_with_the_largest_exact_unit() -> None:
    assert [format_bytes(size) for size in (0, 1, 1023, 1 << 10, 3 << 20, (1 << 30) + 1)] == [
        "0", "1", "1023", "1Ki", "3Mi", "1073741825",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "milli"), [("500m", 500), ("2", 2_000), (2, 2_000), ("0.5", 500), ("0.0001", 1), ("1.5Ki", 1_536_000)]
)
def test_quantity_is_parsed_to_milli_units_rounded_up(text: str | int, milli: int) -> None:
    assert parse_milli(text) == milli
    with pytest.raises(ValueError, match="expected a quantity such as 500m or 16Gi"):
        parse_milli("1e3")
