"""Requirements for every message that people read."""

from __future__ import annotations

from typing import Final

CHARACTERS_MAX: Final = 2_000
"""Maximum length of one message. The limits of its parts are tighter; this detects an input that is repeated whole."""


def check_line(error: Exception) -> None:
    """Raises AssertionError if an error's text is not one line."""
    assert is_line(str(error)), "the error is not one line"


def is_line(text: str) -> bool:
    """Whether it is one readable line, without control characters and surrogates."""
    return len(text) <= CHARACTERS_MAX and text.isprintable()
