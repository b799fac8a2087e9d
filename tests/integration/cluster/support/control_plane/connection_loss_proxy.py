"""A proxy to the API server whose connections a test closes periodically or all at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from tests.integration.cluster.support.control_plane.components import HOST, Plane
from tests.support.net.breakable_proxy import Cuttable


class Cutter(Cuttable):
    """A proxy to a port. Closes all connections every `every_s` seconds; None: never."""

    def __init__(self, port: int, every_s: float | None = None) -> None:
        super().__init__(partial(asyncio.open_connection, HOST, port))
        self._every_s = every_s
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Runs the proxy and yields its port."""
        server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        cutting = asyncio.create_task(self._cut_often())
        try:
            yield self.port
        finally:
            cutting.cancel()
            server.close()
            self.cut()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def kubeconfig(self, plane: Plane, folder: Path) -> Path:
        """Writes a kubeconfig that uses this proxy."""
        config = json.loads(plane.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://{HOST}:{self.port}"
        (folder / "kubeconfig").write_text(json.dumps(config))
        return folder / "kubeconfig"

    async def _cut_often(self) -> None:
        while self._every_s is not None:
            await asyncio.sleep(self._every_s)
            self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        await self.connected(reader, writer)


def port_of(plane: Plane) -> int:
    """The port of the plane's API server."""
    return int(plane.server.rpartition(":")[2])
