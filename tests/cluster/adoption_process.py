"""The smallest autoscaler that adopts: `adoption_process.py KUBECONFIG NAMESPACE SOCKET HOLD_SECONDS`, until SIGTERM.

The loop, the contract for gateways and the driver of adopted workloads as the product has them, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.adopted import AdoptedDriver
from autoscaler.drivers.kubernetes.api import Api
from autoscaler.loop import Loop
from autoscaler.model import Model
from autoscaler.names import Origin
from autoscaler.serve import ContractServer
from autoscaler.world import DocumentsSeen, World


async def main(kubeconfig: Path, namespace: str, socket: Path, hold_s: float) -> None:
    """Runs until it is told to end."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Api(await access(kubeconfig)) as api:

        def documents(models: Mapping[Origin, Model]) -> None:
            loop.observe([DocumentsSeen(models=tuple(models.values()))])

        driver = AdoptedDriver(api, [namespace], documents, hold_s=lambda: hold_s, note=print)
        loop = Loop(World(epoch=int(time.time()), leading_since_s=time.monotonic()), driver, time.monotonic)
        loop.listeners.append(lambda step: sys.stdout.writelines(f"{one}\n" for one in step.transitions))
        runner = web.AppRunner(ContractServer(loop).application())
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        running = asyncio.create_task(loop.run())
        await asyncio.wait((running, asyncio.create_task(stop.wait())), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        running.cancel()
        await runner.cleanup()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
