"""What holds for every test: cases that Hypothesis makes are the same in each run, and no clock judges how fast."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that stands still for a second says nothing of what is tested: neither how long one case takes nor how
# long it takes to make one.
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")
