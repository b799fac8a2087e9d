"""A gateway in addition to those of a `serve`. A test can cut and restore its connection to the autoscaler."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from loadtest.client import Client
from loadtest.result import Result, Shot
from tests.support.harness.serve.serve import Serving
from tests.support.net.breakable_proxy import Cuttable
from tests.support.net.ports import free_port

START_S_MAX, STOP_S_MAX = 90.0, 90.0


class Outlying:
    """The additional gateway. Clients connect to its own address."""

    def __init__(self, contract: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.way = Cuttable(partial(asyncio.open_unix_connection, str(contract)))
        """The connection to the autoscaler."""

    async def listens(self) -> None:
        """Returns when the gateway listens, which it does once it knows the current state."""
        host, port = self.url.removeprefix("http://").split(":")
        async with asyncio.timeout(START_S_MAX):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    def cut(self) -> None:
        """Cuts the connection to the autoscaler in both directions."""
        self.way.closed = True
        self.way.cut()

    def mend(self) -> None:
        """Restores the connection."""
        self.way.closed = False

    def begin(self, *shots: Shot) -> asyncio.Task[list[Result]]:
        """Sends requests in the background."""
        return asyncio.create_task(Client(self.url).run(shots))


@asynccontextmanager
async def outlying(one: Serving) -> AsyncIterator[Outlying]:
    """Runs the gateway within the context."""
    run = one.state / "run"
    gateway = Outlying(run / "autoscaler.sock")
    way = await asyncio.start_unix_server(gateway.way.connected, str(run / "outlying.sock"))
    words = (
        "gateway", "--id", "outlying", "--autoscaler", f"unix:{run}/outlying.sock", "--listen",
        gateway.url.removeprefix("http://"), "--ops", "127.0.0.1:0", "--grace", "1",
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with way:
            await gateway.listens()
            yield gateway
    finally:
        gateway.cut()
        process.terminate()
        output, _ = await asyncio.wait_for(process.communicate(), STOP_S_MAX)
        print(output.decode())  # pytest shows it if the test fails
