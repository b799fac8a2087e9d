"""Settings of all tests: the profiles of Hypothesis, and fixtures. Examples are the same in each run."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.harness.faults.contained_faults import raised

# No deadline and no check for slow generation: a machine may pause for a second.
for profile, examples in (("ci", 25), ("deep", 100)):
    too_slow = [HealthCheck.too_slow]
    settings.register_profile(
        profile, deadline=None, derandomize=True, suppress_health_check=too_slow, max_examples=examples
    )
settings.load_profile("ci")
# A shell without job control starts background commands with SIGINT ignored (POSIX, 2.11), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raises the limit of open files to the hard limit during a test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def no_contained_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is contained fails the test, unless the test replaces `report_fault` itself."""
    modules = (
        "autoscaler.controller.loop",
        "autoscaler.kubernetes.unreadable_objects",
        "gateway.control.fault_containment",
        "pilotlight.agent.weights.keeper",
    )
    for name in modules:
        module = sys.modules.get(name)
        if module is not None:
            monkeypatch.setattr(module, "report_fault", raised)
