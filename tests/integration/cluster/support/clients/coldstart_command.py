"""Runs `pilotlight load coldstart --ops` as a user does to measure a cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.integration.cluster.support.installations.single_instance import House

PARTS = ["place.write", "place.schedule", "place.kubelet"]


async def coldstart(house: House, since: str) -> dict[str, Any]:
    """Returns the command's report for one round of `ada`."""
    words = ("load", "coldstart", "--url", house.url, "--model", "ada", "--rounds", "1")
    load = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight", *words, "--from", since, "--ops", f"http://127.0.0.1:{house.ops}",
        "--output", "json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await load.communicate()
    assert load.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(output)
    return found
