"""A state directory on a disk that fills up: `unshare -m python -m tests.support.harness.faults.full_disk_engine
FOLDER`.

In its own mount namespace: a tmpfs on FOLDER, the local driver in it, and an engine that exits when its log cannot be
written. Prints what the driver observed as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from autoscaler.contract import ReplicaId
from autoscaler.state.events import Seen
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import TINY_ENGINE, LocalRig, python, replica

DISK_BYTES = 1 << 20
TALKATIVE = f"""
import threading, time, os
def talk():
    while True:
        try:
            os.write(1, b'x' * 99 + b'\\n')
        except OSError:
            os._exit(120)
        time.sleep(0.01)
threading.Thread(target=talk, daemon=True).start()
{TINY_ENGINE}
"""
R1, R2 = ReplicaId("r1"), ReplicaId("r2")


def fill(path: Path) -> None:
    """Writes until the disk has no free byte left."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                os.write(number, bytes(size))
        except OSError:
            pass
    os.close(number)


async def scenario(rig: LocalRig, others: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    argv = python(TALKATIVE, "{port}")
    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", argv))
        await observed.until(R1, Seen.READY)
        fill(others)
        results["ended"] = (await observed.until(R1, Seen.EXITED)).reason
        await observed.until(R1, Seen.CLEAN)
        results["r1"] = observed.words(R1)
        driver.start(*replica("r2", argv))
        results["waits"] = (await observed.until(R2, Seen.STARTING)).waits
        results["processes"] = rig.processes(R2)
        others.unlink()
        results["after"] = (await observed.until(R2, Seen.READY)).waits
        results["r2"] = observed.words(R2)
    return results


def main(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], check=True)
    rig = LocalRig(folder)
    try:
        with asyncio.Runner() as runner:
            print(json.dumps(runner.run(scenario(rig, folder / "others"))))
    finally:
        rig.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
