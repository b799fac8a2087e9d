"""Settings of tests/conftest.py are in effect where a test is defined."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_hypothesis_tests_have_no_deadline_and_a_fixed_seed() -> None:
    for one in (settings.default, settings(max_examples=1)):
        assert one is not None
        assert one.deadline is None
        assert HealthCheck.too_slow in one.suppress_health_check
        assert one.derandomize
