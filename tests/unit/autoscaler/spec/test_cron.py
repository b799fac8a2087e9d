"""Cron expressions with five fields in a time zone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from autoscaler.spec.cron import list_occurrences, parse_cron, zone_of

DAY_S = 86_400.0


def moments(text: str, zone: str, day: str, days: float = 1.0) -> list[str]:
    since_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    found = list_occurrences(text, zone, since_s, since_s + days * DAY_S)
    return [datetime.fromtimestamp(one, UTC).strftime("%d %H:%M") for one in found]


def test_occurrence_follows_its_time_zone_in_winter_and_summer() -> None:
    assert moments("30 8 * * *", "Europe/Berlin", "2027-01-11") == ["11 07:30"]
    assert moments("30 8 * * *", "Europe/Berlin", "2027-07-12") == ["12 06:30"]
    assert moments("30 8 * * *", "UTC", "2027-07-12") == ["12 08:30"]


def test_cron_ranges_steps_lists_and_names_are_supported() -> None:
    assert moments("*/30 8-9 * * *", "UTC", "2027-01-11") == ["11 08:00", "11 08:30", "11 09:00", "11 09:30"]
    assert moments("0 20/2,5 * * *", "UTC", "2027-01-11") == ["11 05:00", "11 20:00", "11 22:00"]
    assert moments("0 0 * JAN mon-fri", "UTC", "2027-01-09", 3.5) == ["11 00:00", "12 00:00"]
    assert moments("0 0 * * 7", "UTC", "2027-01-09", 3.5) == moments("0 0 * * 0", "UTC", "2027-01-09", 3.5) != []


def test_two_restricted_day_fields_match_if_either_matches() -> None:
    assert moments("0 0 13 * fri", "UTC", "2027-01-08", 7.0) == ["08 00:00", "13 00:00", "15 00:00"]
    assert moments("0 0 13 * *", "UTC", "2027-01-08", 7.0) == ["13 00:00"]


def test_skipped_local_time_still_occurs_and_repeated_time_occurs_once() -> None:
    assert moments("30 2 * * *", "Europe/Berlin", "2027-03-28") == ["28 01:30"]
    assert moments("30 2 * * *", "Europe/Berlin", "2027-10-31") == ["31 00:30"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *"),
        *("* * * * 8", "x * * * *", "* * * jan/x *", "1,,2 * * * *", "* * * * * *"),
    ],
)
def test_invalid_cron_text_is_rejected_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_cron(text)


@pytest.mark.parametrize("name", ["Europe/Nowhere", "../etc/passwd", "/etc/localtime", "", "\0"])
def test_unknown_time_zone_is_rejected_with_a_clear_error(name: str) -> None:
    with pytest.raises(ValueError, match="expected a time zone"):
        zone_of(name)
