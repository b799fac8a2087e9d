"""When a request is tried again, and after how long. Pure.

Owns the answers that are worth another try, how long `Retry-After` is heeded, and when it is enough. Time, and the
drawn number that keeps many from coming back together, are arguments.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime

STATUSES = frozenset({408, 429, 500, 502, 503, 504})
TRIES_MAX = 6
"""In a row without a byte of progress."""
FIRST_S, LONGEST_S = 0.25, 8.0
RETRY_AFTER_S_MAX = 60.0
"""A registry that says one day is asked again after this, until the time is used up."""
WAIT_S_MAX = 180.0
"""All waits of one request together."""


def retry_after_s(header: str | None, unix_s: float) -> float | None:
    """How long the header asks to wait, in seconds or until a date; None: it says nothing that can be read."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 10 else RETRY_AFTER_S_MAX
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - unix_s)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def wait_s(tries: int, waited_s: float, asked_s: float | None, draw: float) -> float | None:
    """Before the next try, after `tries` in a row; None: it is enough. `draw` is within 0 and 1."""
    if tries >= TRIES_MAX:
        return None
    backoff_s = min(LONGEST_S, FIRST_S * 2 ** (tries - 1))
    if asked_s is None:
        wait = backoff_s * (0.5 + draw / 2)
    else:
        wait = max(min(asked_s, RETRY_AFTER_S_MAX), FIRST_S) + backoff_s * draw / 2  # not before, and not all together
    return wait if waited_s + wait <= WAIT_S_MAX else None
