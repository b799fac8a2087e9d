"""Cron expressions in a time zone: clock changes and errors. tests/property/test_cron.py compares all others."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from autoscaler.spec.cron import list_occurrences, parse_cron, zone_of

DAY_S = 86_400.0


def moments(text: str, zone: str, day: str, days: float = 1.0) -> list[str]:
    since_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    found = list_occurrences(text, zone, since_s, since_s + days * DAY_S)
    return [datetime.fromtimestamp(one, UTC).strftime("%d %H:%M") for one in found]


def test_cron_time_skipped_or_repeated_by_daylight_saving_occurs_once() -> None:
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
def test_unknown_time_zone_is_rejected_with_the_expected_form(name: str) -> None:
    with pytest.raises(ValueError, match="expected a time zone"):
        zone_of(name)
