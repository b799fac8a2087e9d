"""Recurring times: five-field cron expressions in a time zone. Pure.

The fields are minute, hour, day of the month, month and day of the week (0 and 7 are Sunday). Each field is `*`, a
number, a range `1-5`, a step `*/15`, or a list of these. Months and days of the week can be given by their first three
letters. If both days are restricted, one match is enough, as in cron. A time that a clock change skips is shifted
forward by the size of the change. A time that occurs twice counts at its first occurrence. Times are in seconds since
1970.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))
_NAMES = {
    "month": ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    "day of the week": ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
_PART = re.compile(r"(\*|[0-9a-z]+(?:-[0-9a-z]+)?)(?:/([0-9]{1,2}))?")
TEXT_MAX = 100


class Cron(NamedTuple):
    """The values that each field of a cron expression accepts."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """Sunday is 0."""
    either: bool
    """Whether a day matches if it is in `days` or in `weekdays`; otherwise it must be in both."""

    def admits(self, day: date) -> bool:
        """Return whether the expression has times on that day."""
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return of_month or of_week if self.either else of_month and of_week


@lru_cache(maxsize=1024)
def parse_cron(text: str) -> Cron:
    """Parse an expression such as `30 8 * * mon-fri`. Raises ValueError with the expected form."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS) or len(text) > TEXT_MAX:
        raise ValueError("expected five fields such as `30 8 * * mon-fri`: minute, hour, day, month, day of the week")
    parts = [_field(field, *of) for field, of in zip(fields, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = parts
    either = not fields[2].startswith("*") and not fields[4].startswith("*")
    return Cron(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either)


def _field(text: str, what: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        span = None if match is None else _span(match[1], what, low, high, stepped=match[2] is not None)
        step = int(match[2]) if match is not None and match[2] else 1
        if span is None or not step:
            raise ValueError(
                f"expected for the {what} `*`, numbers from {low} to {high}, ranges or steps such as `*/2`"
            )
        found.update(range(span[0], span[1] + 1, step))
    return frozenset(found)


def _span(text: str, what: str, low: int, high: int, *, stepped: bool) -> tuple[int, int] | None:
    if text == "*":
        return low, high
    first, dash, last = text.partition("-")
    one, other = _number(first, what), _number(last or first, what)
    if one is None or other is None or not low <= one <= other <= high:
        return None
    if stepped and not dash:
        return (one % 7, 6) if high == 7 else (one, high)  # Sunday is 0 here, else a step could reach it twice
    return one, other


def _number(text: str, what: str) -> int | None:
    if text.isdecimal():
        return int(text)
    names = _NAMES.get(what, [])
    return names.index(text) + (what == "month") if text in names else None


def list_occurrences(text: str, zone: str, since_s: float, until_s: float) -> list[float]:
    """Return all times from `since_s` to `until_s`, in order. Raises ValueError for an invalid expression or zone."""
    where = zone_of(zone)
    day = datetime.fromtimestamp(since_s, where).date() - timedelta(days=1)
    last = datetime.fromtimestamp(until_s, where).date()
    found: list[float] = []
    while day <= last:
        found += [at_s for at_s in _of_day(text, zone, day) if since_s <= at_s <= until_s]
        day += timedelta(days=1)
    return found


@lru_cache(maxsize=4096)
def _of_day(text: str, zone: str, day: date) -> tuple[float, ...]:
    cron, where = parse_cron(text), zone_of(zone)
    if not cron.admits(day):
        return ()
    at = (datetime(day.year, day.month, day.day, hour, minute, tzinfo=where)
          for hour in sorted(cron.hours) for minute in sorted(cron.minutes))  # fmt: skip
    return tuple(sorted({one.timestamp() for one in at}))


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return the time zone of a name such as `Europe/Berlin`. UTC is always known. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError
        raise ValueError("expected a time zone such as Europe/Berlin") from error
    except KeyError:
        raise ValueError("expected a time zone that is installed on this machine, such as Europe/Berlin") from None
