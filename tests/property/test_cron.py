"""Cron expressions have the same local times as by croniter, which is an independent implementation."""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from croniter import CroniterBadDateError, croniter
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autoscaler.spec.cron import list_occurrences
from tests.support.example_budget import examples

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("SUN", "mon", "tue", "wed", "thu", "fri", "sat")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe")
DAY, SHIFT_MAX = timedelta(days=1), timedelta(hours=2)


def fields(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    """A field: `*`, or a list of numbers, names, ranges and steps."""
    number = st.integers(low, high)
    texts = {low + at: name for at, name in enumerate(names)}
    value = st.builds(lambda one, named: texts.get(one, str(one)) if named else str(one), number, st.booleans())
    span = (
        st.tuples(number, number).filter(lambda ends: ends[0] != ends[1]).map(lambda ends: f"{min(ends)}-{max(ends)}")
    )
    step = st.integers(1, high - low).map("/{}".format)
    part = st.one_of(value, span, st.builds("{}{}".format, st.one_of(st.just("*"), value, span), step))
    return st.just("*") | st.lists(part, min_size=1, max_size=3).map(",".join)


EXPRESSIONS = st.tuples(
    *(fields(0, 59), fields(0, 23), fields(1, 31), fields(1, 12, MONTHS), fields(0, 7, WEEKDAYS))
).map(" ".join)
STARTS = st.datetimes(datetime(2026, 1, 1), datetime(2029, 12, 31))  # noqa: DTZ001 -- a local time


def is_read_as_star(text: str) -> bool:
    """Whether croniter reads a field as `*` that is not, such as the weekdays `3-3` or `0-6`."""
    fields = zip(text.split(), croniter(text).expanded, strict=True)
    return any(values == ["*"] and not field.startswith("*") for field, values in fields)


def by_croniter(text: str, where: ZoneInfo, since_s: float, until_s: float) -> list[float]:
    """Its local times, converted: the first of a repeated time, and a skipped time shifted forward."""
    first, last = (datetime.fromtimestamp(one, where).replace(tzinfo=None) for one in (since_s, until_s))
    either = not any(field.startswith("*") for field in text.split()[2::2])
    found = set[float]()
    try:
        for one in croniter(text, first - SHIFT_MAX, ret_type=datetime, day_or=either):
            if one > last + SHIFT_MAX:
                break
            found.add(one.replace(tzinfo=where).timestamp())
    except CroniterBadDateError:
        pass  # no more times, such as for 30 February
    return sorted(one for one in found if since_s <= one <= until_s)


@settings(deadline=None, max_examples=examples(300), derandomize=True)
@given(text=EXPRESSIONS, zone=st.sampled_from(ZONES), start=STARTS, days=st.integers(0, 4))
@example("30 8 * * MON-fri", "Europe/Berlin", datetime(2027, 7, 12), 7)  # noqa: DTZ001 -- a local time
@example("0 0 13 * fri", "UTC", datetime(2027, 1, 8), 7)  # noqa: DTZ001 -- a local time
@example("0 0 */2 * mon", "UTC", datetime(2027, 1, 8), 7)  # noqa: DTZ001 -- a local time
@example("0 0 * * 5/2", "UTC", datetime(2027, 1, 8), 7)  # noqa: DTZ001 -- a local time
def test_cron_occurrences_are_the_same_as_by_croniter(text: str, zone: str, start: datetime, days: int) -> None:
    assume(not is_read_as_star(text))
    where = ZoneInfo(zone)
    since_s, until_s = start.replace(tzinfo=where).timestamp(), (start + days * DAY).replace(tzinfo=where).timestamp()
    if since_s <= until_s:
        assert list_occurrences(text, zone, since_s, until_s) == by_croniter(text, where, since_s, until_s)
