"""The local driver fulfils the contract, with real processes, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from autoscaler.drivers import probes
from autoscaler.drivers.local import driver
from tests.contracts.driver import DriverContract, Rig
from tests.support.harness.local_rig import LocalRig

pytestmark = pytest.mark.standard


class TestLocalDriver(DriverContract):
    """The whole contract suite."""

    @pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def rig(self, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
        # An engine, or this process, may be paused for seconds: that is no failed probe, and no incomplete adoption.
        monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 60.0)
        monkeypatch.setattr(driver, "ADOPT_SECONDS_MAX", 60.0)
        rig = LocalRig(tmp_path, request.param)
        yield rig
        rig.close()
