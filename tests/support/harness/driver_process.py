"""A process that runs a local driver and that a test kills: `python -m tests.support.harness.driver_process STATE
[ARGV-AS-JSON]...`.

Starts one replica per given command, named r1, r2 ..., and prints each observation of a replica as a line. Lines on its
standard input are commands: `stop NAME`, `spare` (starts another child, prints its pid), `collect` (waits for it).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from autoscaler.drivers.driver import Observation
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.drivers.local.replica_processes import become_subreaper
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.state.events import ReplicaSeen, Synced
from tests.support.harness.local_rig import GPU0, launch, python, replica
from tests.support.waiting import until


def say(batch: tuple[Observation, ...]) -> None:
    """Prints one line per replica observed, and one for Synced."""
    for seen in batch:
        if isinstance(seen, ReplicaSeen):
            print(seen.id, seen.seen.value, seen.reason, flush=True)
        elif isinstance(seen, Synced):
            print("synced", flush=True)


async def main(state: str, commands: list[tuple[str, ...]]) -> None:
    """Runs until it is killed or its input ends."""
    become_subreaper()
    driver = LocalDriver(StateDirectory.open(state), launch, Devices((GPU0,)))
    replicas = {f"r{i}": replica(f"r{i}", argv) for i, argv in enumerate(commands, 1)}
    synced = asyncio.Event()

    def observe(batch: tuple[Observation, ...]) -> None:
        say(batch)
        if any(isinstance(one, Synced) for one in batch):
            synced.set()

    running = asyncio.create_task(driver.run(observe))
    # A process that is started while the driver looks for those of an earlier one is killed: it has no record yet.
    await until("the driver has synced", lambda: synced.is_set() or running.done())
    if running.done():
        await running  # raises what ended it
    for one, model in replicas.values():
        driver.start(one, model)
    unrelated: list[subprocess.Popen[bytes]] = []
    while order := (await asyncio.to_thread(sys.stdin.readline)).split():
        if order[0] == "stop":
            driver.stop(replicas[order[1]][0], 5.0)
        elif order[0] == "spare":
            unrelated.append(subprocess.Popen(python("import sys; sys.exit(7)"), start_new_session=True))
            print("unrelated", unrelated[-1].pid, flush=True)
        elif order[0] == "collect":
            print("status", unrelated.pop().wait(), flush=True)
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [tuple(json.loads(argument)) for argument in sys.argv[2:]]))
