"""Reliability section 5 D in virtual time: the leader is killed at every order that it gives (case 26)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.simulation.case_harness import Stage, both_are_called_one_after_the_other, model, simulated

A, B = model("a", idle_s=3.0), model("b", idle_s=3.0)
"""Only one of them fits on the device."""
ORDERS = 4
"""Starts and stops of the scenario without a kill."""


class Dies:
    """Kills the leader at its n-th order, before or after it is carried out; the successor leads at once."""

    def __init__(self, stage: Stage, number: int, *, before: bool) -> None:
        self.orders = 0
        self._town = stage.town
        self._number = number
        self._before = before
        assert self._town.autoscaler is not None
        driver = self._town.autoscaler.driver
        start, stop = driver.start, driver.stop
        driver.start = lambda replica, model: self._order(lambda: start(replica, model))  # type: ignore[method-assign]
        driver.stop = lambda replica, grace_s: self._order(lambda: stop(replica, grace_s))  # type: ignore[method-assign]

    def _order(self, carry_out: Callable[[], None]) -> None:
        self.orders += 1
        if self.orders < self._number or (self.orders == self._number and not self._before):
            carry_out()
        if self.orders == self._number:
            asyncio.get_running_loop().call_soon(self._town.take_over)


@simulated(A, B, gateways=2)
async def test_run_without_a_kill_has_four_start_and_stop_orders(stage: Stage) -> None:
    dies = Dies(stage, ORDERS + 1, before=False)
    await both_are_called_one_after_the_other(stage, 60.0)
    assert dies.orders == ORDERS


@pytest.mark.case("26")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, ORDERS + 1))
@simulated(A, B, gateways=2, strict=False)
async def test_leader_kill_at_any_start_or_stop_causes_no_duplicate_start(
    stage: Stage, number: int, before: bool
) -> None:
    """No request is lost, nothing is started twice, and nothing is left at the end."""
    stage.town.stand_by()
    await asyncio.sleep(0.1)
    Dies(stage, number, before=before)
    await both_are_called_one_after_the_other(stage, 60.0)
    assert stage.town.standby is None, "it was killed"
    assert (stage.starts("a"), stage.starts("b")) == (1, 1)
