"""What every message for people must be."""

from __future__ import annotations

from typing import Final

CHARACTERS_MAX: Final = 2_000
"""Of one message. The limits of its parts are tighter; this finds an input that is repeated whole."""


def check_line(error: Exception) -> None:
    """Raises AssertionError if an error's text is not one line."""
    assert is_line(str(error)), "the error is not one line"


def is_line(text: str) -> bool:
    """Whether it is one line, without control characters and surrogates, that a person reads."""
    return len(text) <= CHARACTERS_MAX and text.isprintable()
