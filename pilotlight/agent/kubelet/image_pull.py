"""Pulls engine images to a node before they are needed, with its container runtime (CRI's PullImage). I/O.

`want` sets the full list of wanted images and may be called repeatedly. Each image has at most one pull at a time, and
PULLS_MAX run together. A failed pull is retried with backoff while the image is wanted. A pull that has begun is not
cancelled, since its progress would be lost. Logins are read for each try and sent to the runtime only. If there is no
socket or no `grpcio`, the module logs this once and does nothing; the kubelet then pulls the images. No start waits for
this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from artifacts import reference
from artifacts.credentials.docker_config import Config, Login, list_logins
from artifacts.protobuf import ProtobufError, read_string
from autoscaler.exception_handling import describe_error, reraise_memory_error
from pilotlight.agent.kubelet.grpc_clients import PULL_IMAGE, DaemonClient, SocketError, encode_pull_request

PULLS_MAX: Final = 2
"""Concurrent pulls; weights use the same network."""
WANTED_MAX: Final = 64
"""Maximum number of images per node; the kubelet pulls the rest."""
PULL_S_MAX: Final = 3600.0
"""Time limit of a pull: enough for an image of 10 GiB at 3 MiB per second."""
AGAIN_S, AGAIN_S_MAX = 10.0, 300.0
"""Delay after a failure, doubled each time up to the maximum, as in kubelets (MaxContainerBackOff)."""

log = logging.getLogger("pilotlight.agent.kubelet")


class ImageWanted(NamedTuple):
    """An image to be pulled to the node."""

    image: str
    """As written in its Model."""
    pull_secret: str = ""
    """Name of the pull secret; empty if none is needed."""


class PullError(Exception):
    """A pull failed; `str()` is the reason, in one line."""


async def pull_image(daemon: DaemonClient, image: str, login: Login | None, within_s: float = PULL_S_MAX) -> str:
    """Pull an image and return the runtime's reference to it. Raises PullError."""
    try:
        answer = await daemon.ask(PULL_IMAGE, encode_pull_request(image, login), within_s)
        return read_string(answer, 1)  # PullImageResponse {1: image_ref}
    except (SocketError, ProtobufError) as error:
        raise PullError(" ".join(str(error).split())[:500]) from None


class Images:
    """Pulls the wanted images while `run` runs. `secret_of` returns a pull secret by name; if it raises, the pull fails
    with its message as the reason. `came` is called after each pull. `wait` sleeps.
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
        """Wanted images whose pull has succeeded since they were requested."""
        self._under_way: set[ImageWanted] = set()
        self._failed: dict[ImageWanted, str] = {}
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(PULLS_MAX)
        self._absent = ""

    @property
    def failed(self) -> Mapping[ImageWanted, str]:
        """Reasons for failure, by wanted image."""
        return self._failed

    def want(self, wanted: Iterable[ImageWanted]) -> None:
        """Set all wanted images, the most urgent first."""
        now = tuple(dict.fromkeys(wanted))[:WANTED_MAX]
        if now == self._wanted:
            return
        self._wanted, self._here = now, self._here.intersection(now)
        self._failed = {one: why for one, why in self._failed.items() if one in now}
        self._changed.set()

    async def run(self) -> None:
        """Start pulls until cancelled."""
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
        """Try to pull the image while it is wanted."""
        again_s = AGAIN_S
        while one in self._wanted:
            async with self._turns:
                if one not in self._wanted:
                    return
                try:
                    await self._pulled(one)
                except PullError as error:
                    self._say(one, str(error))
                except Exception as error:  # noqa: BLE001 - any error fails only this image, which is tried again
                    reraise_memory_error(error)
                    self._say(one, describe_error(error))
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
        """Try each login until a pull succeeds, as kubelets do. Raises the first PullError."""
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
        """Return the logins for the image. Raises PullError."""
        if not one.pull_secret:
            return []
        try:
            of = reference.parse_reference(f"oci://{one.image}")
            secret = await self._secret_of(one.pull_secret)
            return list_logins([secret], of.host, of.repository)
        except Exception as error:  # noqa: BLE001 - any error fails only this image and becomes its reason
            reraise_memory_error(error)
            raise PullError(str(error) or type(error).__name__) from None

    def _say(self, one: ImageWanted, why: str) -> None:
        """Log a reason once until it changes; log a missing socket once for all images."""
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
