"""A DNS server for the network of tests: `SERVICE.NAMESPACE.svc[.cluster.local]` resolves to the addresses of its pods.

Uses UDP port 53 of the server that this machine's resolv.conf names (`network.enter` assigns that address to `lo`, so
processes need no configuration). Every Service is resolved as a headless one, from its EndpointSlices: there is no
kube-proxy. All other names do not exist.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from autoscaler.kubernetes.api import Api, ApiError, UnreachableError
from tests.integration.network_namespace import nameserver

A, ANSWER, NO_SUCH_NAME, SERVER_FAILURE = 1, 0x8580, 3, 2
SERVICES = ".svc"


@asynccontextmanager
async def names(api: Api) -> AsyncIterator[list[str]]:
    """Resolves names of Services while it runs. Yields the list of names queried so far."""
    server = _Server(api)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=(nameserver(), 53)
    )
    try:
        yield server.asked
    finally:
        transport.close()


async def addresses(api: Api, service: str, namespace: str) -> list[str]:
    """Addresses of the Service's pods that are ready, or published before they are."""
    found = await api.get(
        f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
        labelSelector=f"kubernetes.io/service-name={service}",
    )
    ends = [end for one in found["items"] for end in one.get("endpoints") or []]
    return [end["addresses"][0] for end in ends if end.get("conditions", {}).get("ready") is not False]


class _Server(asyncio.DatagramProtocol):
    def __init__(self, api: Api) -> None:
        self._api = api
        self.asked: list[str] = []
        self._answering: set[asyncio.Task[None]] = set()
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # in Python 3.11 not a DatagramTransport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.create_task(self._answer(data, addr))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, asked: bytes, addr: tuple[str, int]) -> None:
        """Responds as in RFC 1035: the question again, and the records."""
        labels, end = [], 12
        while length := asked[end]:
            labels.append(asked[end + 1 : end + 1 + length].decode())
            end += 1 + length
        self.asked.append(".".join(labels))
        (kind,) = struct.unpack_from("!H", asked, end + 1)
        code, found = await self._find(".".join(labels).lower().removesuffix(".cluster.local"))
        records = [struct.pack("!HHHIH", 0xC00C, A, 1, 1, 4) + socket.inet_aton(one) for one in found if kind == A]
        head = asked[:2] + struct.pack("!HHHHH", ANSWER | code, 1, len(records), 0, 0)
        self._transport.sendto(head + asked[12 : end + 5] + b"".join(records), addr)

    async def _find(self, name: str) -> tuple[int, list[str]]:
        parts = name.removesuffix(SERVICES).split(".")
        if not name.endswith(SERVICES) or len(parts) != 2:
            return NO_SUCH_NAME, []
        try:
            return 0, await addresses(self._api, *parts)
        except (ApiError, UnreachableError):
            return SERVER_FAILURE, []
