"""The sockets of a node's own daemons, by gRPC: the kubelet's (PodResources) and the container runtime's (CRI). I/O.

Owns the asking: how often, how long, and that it is optional. Without `grpcio`, without a socket, or with one that does
not answer, the agent says so once, until it does again, and goes on; what was said last is told on. Messages are read
by `nodewire`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from artifacts.protobuf import ProtobufError
from pilotlight.agent.kubelet import nodewire
from pilotlight.agent.kubelet.nodewire import AssignedPod

T = TypeVar("T")

ASK_S_MAX = 2.0
IMAGES_EVERY_S = 30.0
"""A list of images costs a container runtime more than a table of pods costs a kubelet."""
ANSWER_BYTES_MAX = 16 << 20
"""110 pods with eight devices each are 100 KiB; a thousand images are 1 MiB."""
POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MISSING = "grpcio is not installed: pip install 'pilotlight[agent]'"

log = logging.getLogger("pilotlight.agent")

Ask = Callable[[], Awaitable[bytes]]


class SocketError(Exception):
    """It did not answer; `str()` says why."""


class Daemon:
    """Who listens on one socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._channel: Any = None  # grpc has no types

    async def ask(self, method: str, message: bytes = b"", within_s: float | None = None) -> bytes:
        """The answer, within ASK_S_MAX where nothing else is said. Raises SocketError."""
        if not self.socket.exists():
            raise SocketError("there is no such socket")
        try:
            grpc = importlib.import_module("grpc")
            aio = importlib.import_module("grpc.aio")
        except ModuleNotFoundError:
            raise SocketError(MISSING) from None
        if self._channel is None:
            options = (("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", ANSWER_BYTES_MAX))
            self._channel = aio.insecure_channel(f"unix:{self.socket}", options=options)
        call: Callable[..., Awaitable[bytes]] = self._channel.unary_unary(method)
        try:
            return await call(message, timeout=ASK_S_MAX if within_s is None else within_s)
        except grpc.RpcError as error:
            raise SocketError(f"{error.code().name} {error.details()}".strip()) from None

    async def close(self) -> None:
        """Ends the connection; the next question opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Asked(Generic[T]):
    """One question to one socket, asked again every `every_s` at most; `last` is None until it was answered once."""

    def __init__(self, socket: Path, method: str, read: Callable[[bytes], T], every_s: float = 0.0) -> None:
        self._daemon = Daemon(socket)
        self._method = method
        self._read = read
        self._every_s = every_s
        self._next_s = 0.0
        self._said = ""
        self.last: T | None = None

    def due(self) -> None:
        """The next look asks, whenever the last one did."""
        self._next_s = 0.0

    async def look(self) -> T | None:
        """The newest answer there is."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            return self.last
        self._next_s = now_s + self._every_s
        try:
            self.last = self._read(await self._daemon.ask(self._method))
        except (SocketError, ProtobufError) as error:
            await self.close()
            if str(error) != self._said:
                self._said = str(error)
                log.warning("event=agent_socket socket=%s reason=%r", self._daemon.socket.name, self._said)
        else:
            self._said = ""
        return self.last

    async def close(self) -> None:
        """Ends its connection; the next look opens another."""
        await self._daemon.close()


class NodeSockets:
    """Those that there are to ask; None: that one is not asked."""

    def __init__(self, pod_resources: Path | None = None, runtime: Path | None = None) -> None:
        self._pods = None if pod_resources is None else Asked(pod_resources, nodewire.LIST_PODS, nodewire.assigned)
        self._images = (
            None if runtime is None else Asked(runtime, nodewire.LIST_IMAGES, nodewire.images, IMAGES_EVERY_S)
        )

    async def pods(self) -> tuple[AssignedPod, ...] | None:
        """Pods that have devices; None: the kubelet never said."""
        return None if self._pods is None else await self._pods.look()

    async def images(self) -> tuple[str, ...]:
        """Names of the images that are there; none: the runtime never said."""
        return () if self._images is None else await self._images.look() or ()

    def images_changed(self) -> None:
        """The next look asks for them."""
        if self._images is not None:
            self._images.due()

    async def close(self) -> None:
        """Ends its connections."""
        for one in (self._pods, self._images):
            if one is not None:
                await one.close()
