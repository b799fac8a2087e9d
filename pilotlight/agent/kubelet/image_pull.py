"""Engine images, brought to a node ahead of a start by its own container runtime (CRI's PullImage). I/O.

Owns which pull runs when. What is wanted is a level, told again and again. Promises: one pull of an image at a time,
and PULLS_MAX together; one that failed is tried again later and later, while it is wanted; one that has begun goes on,
for what it has brought would be lost. A login is asked for at each try and shown to the runtime alone. Without a
socket, or without `grpcio`, it says so once and the kubelet pulls, as it does anyway: nobody waits for this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from artifacts import reference
from artifacts.credentials import docker_config
from artifacts.credentials.docker_config import Config, Login
from artifacts.protobuf import ProtobufError
from pilotlight.agent.kubelet import sockets
from pilotlight.agent.kubelet.sockets import DaemonClient, SocketError

PULLS_MAX: Final = 2
"""At once: weights come over the same line."""
WANTED_MAX: Final = 64
"""Images of one node; of more, those beyond are left to the kubelet."""
PULL_S_MAX: Final = 3600.0
"""An image of 10 GiB at 3 MiB a second."""
AGAIN_S, AGAIN_S_MAX = 10.0, 300.0
"""After a failure; twice as long after each, as kubelets do (MaxContainerBackOff)."""

log = logging.getLogger("pilotlight.agent")


class ImageWanted(NamedTuple):
    """One that is to be on the node."""

    image: str
    """As its Model says."""
    pull_secret: str = ""
    """Whose login it needs; empty: none."""


class PullError(Exception):
    """It did not come; `str()` says why, in one line."""


async def pull_image(daemon: DaemonClient, image: str, login: Login | None, within_s: float = PULL_S_MAX) -> str:
    """Has the runtime pull; what it calls the image. Raises PullError."""
    try:
        return sockets.decode_pull_response(
            await daemon.ask(sockets.PULL_IMAGE, sockets.encode_pull_request(image, login), within_s)
        )
    except (SocketError, ProtobufError) as error:
        raise PullError(" ".join(str(error).split())[:500]) from None


class Images:
    """Brings what is wanted, while `run` runs. `secret_of`: name of a pull secret -> its text; what it raises is a
    failed pull, with its message as the reason. `came` hears that one is there. `wait` lets seconds pass.
    """

    def __init__(
        self,
        socket: Path,
        secret_of: Callable[[str], Awaitable[Config]],
        came: Callable[[], None] = lambda: None,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._daemon = DaemonClient(socket)
        self._secret_of = secret_of
        self._came = came
        self._wait = wait
        self._wanted: tuple[ImageWanted, ...] = ()
        self._here: set[ImageWanted] = set()
        """Of those: they came since they are wanted."""
        self._under_way: set[ImageWanted] = set()
        self._failed: dict[ImageWanted, str] = {}
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(PULLS_MAX)
        self._absent = ""

    @property
    def failed(self) -> Mapping[ImageWanted, str]:
        """Of those that are wanted: why they did not come yet."""
        return self._failed

    def want(self, wanted: Iterable[ImageWanted]) -> None:
        """All that are wanted now, the most urgent first."""
        now = tuple(dict.fromkeys(wanted))[:WANTED_MAX]
        if now == self._wanted:
            return
        self._wanted, self._here = now, self._here.intersection(now)
        self._failed = {one: why for one, why in self._failed.items() if one in now}
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()
                    for one in self._wanted:
                        if one not in self._here and one not in self._under_way:
                            self._under_way.add(one)
                            tasks.create_task(self._bring(one))
                    await self._changed.wait()
        finally:
            await self._daemon.close()

    async def _bring(self, one: ImageWanted) -> None:
        try:
            await self._tries(one)
        finally:
            self._under_way.discard(one)
            self._changed.set()

    async def _tries(self, one: ImageWanted) -> None:
        """While it is wanted."""
        again_s = AGAIN_S
        while one in self._wanted:
            async with self._turns:
                if one not in self._wanted:
                    return
                try:
                    await self._pulled(one)
                except PullError as error:
                    self._say(one, str(error))
                else:
                    self._here.add(one)
                    self._failed.pop(one, None)
                    self._absent = ""
                    log.info("event=agent_image image=%s", one.image)
                    self._came()
                    return
            await self._wait(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX)

    async def _pulled(self, one: ImageWanted) -> None:
        """With each of its logins until one is let in, as kubelets do it. Raises PullError, the first."""
        failed: PullError | None = None
        logins: list[Login | None] = [*await self._logins(one)]
        for login in logins or [None]:
            try:
                await pull_image(self._daemon, one.image, login)
            except PullError as error:
                failed = failed or error
            else:
                return
        if failed is not None:
            raise failed

    async def _logins(self, one: ImageWanted) -> list[Login]:
        """Raises PullError."""
        if not one.pull_secret:
            return []
        try:
            of = reference.parse_reference(f"oci://{one.image}")
            secret = await self._secret_of(one.pull_secret)
            return docker_config.list_logins([secret], of.host, of.repository)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs this image alone, and is its reason
            raise PullError(str(error) or type(error).__name__) from None

    def _say(self, one: ImageWanted, why: str) -> None:
        """Once, until it is another reason; of a socket that is not there once for all images."""
        socket_is_there = self._daemon.socket.exists()
        known = self._failed.get(one) if socket_is_there else self._absent
        self._failed[one] = why
        if why == known:
            return
        if socket_is_there:
            log.warning("event=agent_image image=%s reason=%r", one.image, why)
        else:
            self._absent = why
            log.warning("event=agent_image socket=%s reason=%r", self._daemon.socket.name, f"{why}: kubelets pull")
