"""A Model that fits on no device: its requests get `no_capacity`, and the reason can be queried at any time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loadtest.result import Ending
from tests.support.harness.serve.serve import Serving, fake, serving, settings
from tests.support.waiting import until

NEVER = "needs 200Mi on one device; the largest has 100Mi"


def pilotlight(one: Serving, *words: str) -> str:
    """Return the output of a command that queries the operations port."""
    command = [sys.executable, "-m", "pilotlight", *words, "--ops", one.ops]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.standard
async def test_requests_for_a_model_that_fits_no_device_are_rejected_with_503(tmp_path: Path) -> None:
    huge, ada = fake(tmp_path, "huge", gpu={"memory": "200Mi"}), fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, huge, ada) as one:
        warning = f"pilotlight: Model huge fits on no device: {NEVER}; its requests get 503 no_capacity"
        await until("it is logged at the start", lambda: warning in one.output().splitlines())
        assert f"It fits on no device: {NEVER}." in pilotlight(one, "explain", "model", "huge"), "before any Call"
        for _ in range(2):
            refused = await one.call("huge")
            assert (refused.status, refused.code, refused.clear) == (503, "no_capacity", True)
            assert 0 < int(refused.headers["retry-after"]) <= 120
        await until("it has no requests", lambda: one.demand("huge") == {"waiting": 0, "running": 0})
        explanation = pilotlight(one, "explain", "model", "huge")
        assert f"It fits on no device: {NEVER}. Its requests are rejected with no_capacity." in explanation
        assert "gpu0: it has 100Mi in total, which does not satisfy 200Mi on one device." in explanation
        assert f"it fits on no device: {NEVER}" in pilotlight(one, "explain", "last")
        assert f"fits on no device: {NEVER}" in pilotlight(one, "status", "huge")
        assert one.states("huge") == ["refused"], "once, however often it is called"
        assert (await one.call("ada")).ending is Ending.COMPLETED

        small = fake(tmp_path, "huge", "--tokens-per-s", "0", gpu={"memory": "40Mi"})
        one.config.write_text(yaml.safe_dump_all([small, ada, settings()]))
        assert one.process is not None
        one.process.send_signal(signal.SIGHUP)
        await until("it fits", lambda: "a device is now available for huge" in one.output())
        assert "no device" not in pilotlight(one, "explain", "model", "huge").partition("Last: ")[0]
        assert "no device" not in pilotlight(one, "status", "huge")
        async with asyncio.timeout(120):
            while (served := await one.call("huge")).code == "no_capacity":
                await asyncio.sleep(0.02)  # its gateway learns of the change after the autoscaler has logged it
        assert served.ending is Ending.COMPLETED
