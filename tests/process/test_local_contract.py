"""The local driver fulfils the contract, with real processes, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.contracts.driver import DriverContract, Rig
from tests.kit.localrig import LocalRig

pytestmark = pytest.mark.standard


class TestLocalDriver(DriverContract):
    """The whole contract suite."""

    @pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def rig(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
        rig = LocalRig(tmp_path, request.param)
        yield rig
        rig.close()
