"""What holds for every test: cases that Hypothesis makes are the same in each run, and no clock judges how fast."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A machine that stands still for a second says nothing of what is tested: neither how long one case takes nor how
# long it takes to make one.
for profile, examples in (("ci", 25), ("deep", 100)):
    too_slow = [HealthCheck.too_slow]
    settings.register_profile(
        profile, deadline=None, derandomize=True, suppress_health_check=too_slow, max_examples=examples
    )
settings.load_profile("ci")


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many sockets as this process may open; who comes after it has what it had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
