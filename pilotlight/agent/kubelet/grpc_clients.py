"""gRPC clients for the daemons of a node: the kubelet (PodResources v1) and the container runtime (CRI v1).

Both are optional. Without `grpcio` or a socket, or while a daemon does not answer, the agent logs this once and uses
the last answer. Messages are encoded and decoded here, limited to the needed fields, by number:
https://github.com/kubernetes/kubernetes/blob/v1.34.0/staging/src/k8s.io/kubelet/pkg/apis/podresources/v1/api.proto
https://github.com/kubernetes/kubernetes/blob/v1.34.0/staging/src/k8s.io/cri-api/pkg/apis/runtime/v1/api.proto

The pod of a process is derived from its cgroup, whose name contains the pod's UID (systemd and cgroupfs drivers).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from artifacts.credentials.docker_config import Login
from artifacts.protobuf import ProtobufError, encode_message, iter_messages, iter_strings, read_string

LIST_PODS = "/v1.PodResourcesLister/List"
LIST_IMAGES = "/runtime.v1.ImageService/ListImages"
PULL_IMAGE = "/runtime.v1.ImageService/PullImage"
VENDOR = "nvidia.com/"
"""Prefix of the resources whose devices are reported."""
SHARED = "::"
"""Separates a device's id from the suffix that a device plug-in adds if it offers the device several times."""


class AssignedPod(NamedTuple):
    """A pod with assigned devices."""

    namespace: str
    name: str
    devices: tuple[str, ...]
    """The driver's device ids, sorted."""


def decode_assigned_pods(answer: bytes) -> tuple[AssignedPod, ...]:
    """Return the pods with devices of VENDOR, sorted. Raises ProtobufError.

    ListPodResourcesResponse {1: PodResources {1: name, 2: namespace, 3: ContainerResources {2: ContainerDevices
    {1: resource_name, 2: device_ids}}}}.
    """
    found: list[AssignedPod] = []
    for pod in iter_messages(answer, 1):
        devices = {
            id.partition(SHARED)[0]
            for container in iter_messages(pod, 3)
            for one in iter_messages(container, 2)
            if read_string(one, 1).startswith(VENDOR)
            for id in iter_strings(one, 2)
        }
        if devices:
            found.append(AssignedPod(read_string(pod, 2), read_string(pod, 1), tuple(sorted(devices))))
    return tuple(sorted(found))


def decode_image_names(answer: bytes) -> tuple[str, ...]:
    """Return all image names, sorted. Raises ProtobufError.

    ListImagesResponse {1: Image {2: repo_tags, 3: repo_digests}}.
    """
    names = {name for image in iter_messages(answer, 1) for number in (2, 3) for name in iter_strings(image, number)}
    return tuple(sorted(names))


def encode_pull_request(image: str, login: Login | None) -> bytes:
    """Encode PullImageRequest {1: ImageSpec {1: image}, 2: AuthConfig {1: username, 2: password, 5: identity_token,
    6: registry_token}}.
    """
    if login is None:
        return encode_message((1, encode_message((1, image))))
    tokens = (5, login.identity_token), (6, login.registry_token)
    return encode_message(
        (1, encode_message((1, image))), (2, encode_message((1, login.user), (2, login.password), *tokens))
    )


T = TypeVar("T")

ASK_S_MAX = 2.0
IMAGES_EVERY_S = 30.0
"""Listing images costs a container runtime more than listing pods costs a kubelet."""
ANSWER_BYTES_MAX = 16 << 20
"""Response limit: 110 pods with eight devices each take 100 KiB; a thousand images take 1 MiB."""
POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MISSING = "grpcio is not installed: pip install 'pilotlight[agent]'"

log = logging.getLogger("pilotlight.agent.kubelet")

Ask = Callable[[], Awaitable[bytes]]


class SocketError(Exception):
    """A request failed; `str()` is the reason."""


class DaemonClient:
    """A gRPC client for one socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._channel: Any = None  # grpc has no types

    async def ask(self, method: str, message: bytes = b"", within_s: float | None = None) -> bytes:
        """Return the response, within ASK_S_MAX by default. Raises SocketError."""
        if not self.socket.exists():
            raise SocketError("the socket does not exist")
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
        """Close the connection; the next request opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Asked(Generic[T]):
    """Polls one method of one socket at most every `every_s`; `last` is None until the first response."""

    def __init__(self, socket: Path, method: str, read: Callable[[bytes], T], every_s: float = 0.0) -> None:
        self._daemon = DaemonClient(socket)
        self._method = method
        self._read = read
        self._every_s = every_s
        self._next_s = 0.0
        self._said = ""
        self.last: T | None = None

    def due(self) -> None:
        """Poll at the next `look`, regardless of the interval."""
        self._next_s = 0.0

    async def look(self) -> T | None:
        """Return the latest response."""
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
                log.warning("event=socket_query_failed socket=%s reason=%r", self._daemon.socket.name, self._said)
        else:
            self._said = ""
        return self.last

    async def close(self) -> None:
        """Close the connection; the next `look` opens another."""
        await self._daemon.close()


class NodeSockets:
    """The daemons' sockets; a daemon without a path is not polled."""

    def __init__(self, pod_resources: Path | None = None, runtime: Path | None = None) -> None:
        self._pods = None if pod_resources is None else Asked(pod_resources, LIST_PODS, decode_assigned_pods)
        self._images = None if runtime is None else Asked(runtime, LIST_IMAGES, decode_image_names, IMAGES_EVERY_S)

    async def pods(self) -> tuple[AssignedPod, ...] | None:
        """Return the pods with devices, or None if the kubelet has never answered."""
        return None if self._pods is None else await self._pods.look()

    async def images(self) -> tuple[str, ...]:
        """Return the image names; empty if the runtime has never answered."""
        return () if self._images is None else await self._images.look() or ()

    def images_changed(self) -> None:
        """Poll the images at the next `images`."""
        if self._images is not None:
            self._images.due()

    async def close(self) -> None:
        """Close the connections."""
        for one in (self._pods, self._images):
            if one is not None:
                await one.close()


_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
_POD = re.compile(rf"/(?:kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?:/|$)", re.MULTILINE)


def pod_uid(cgroup: str) -> str:
    """Return the pod UID in the text of /proc/PID/cgroup, or an empty string for a process outside of pods."""
    found = _POD.search(cgroup) if "kubepods" in cgroup else None
    return found[1].replace("_", "-") if found is not None else ""
