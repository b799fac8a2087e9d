"""An engine that exits on a full disk does not count as a failed start, and starts again when there is space."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoscaler.drivers.local import disk_space
from tests.support.harness.faults.full_disk import why_no_mount


@pytest.mark.standard
async def test_engine_stopped_by_a_full_disk_restarts_when_space_is_free(tmp_path: Path) -> None:
    if (why := why_no_mount()) is not None:
        pytest.skip(f"no mount namespace of its own here: {why}")
    words = ("-m", "tests.support.harness.faults.full_disk_engine", str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        "unshare", "-m", sys.executable, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(240):
        out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    result = json.loads(out)
    assert result["ended"] == f"{disk_space.REASON} (exited with status 120)"
    assert result["r1"][:2] == ["starting", "ready"]
    assert {*result["r1"][2:-3]} <= {"unready", "ready"}, "an engine that is paused for seconds is unready meanwhile"
    assert result["r1"][-3:] == ["leaving", "exited", "clean"]
    assert (result["waits"], result["processes"]) == (disk_space.REASON, [])
    assert result["after"] == ""
    assert result["r2"] == ["starting", "ready"], "no failed start"
