"""Has who removes nodes wait while Devices of a fabric are there by Leases of ours, which would go with the node. I/O.

Owns one annotation of nodes, by which Cluster Autoscaler waits (2 minutes at most, `--node-deletion-delay-timeout`)
after the pods of a node have gone and before it deletes the node: time to prove the Devices clean and to detach them.
Promises: it is written with the first Device and taken away with the last; a write that fails is tried again. Whoever
does not lead writes nothing; whoever begins to lead finds what was written before. It decides nothing about Leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from autoscaler.attached import lent
from autoscaler.capacity.server import NOT_FOUND, AnswerError, Server
from autoscaler.world import World

NODES: Final = "/api/v1/nodes"
DELAY: Final = "delay-deletion.cluster-autoscaler.kubernetes.io/pilotlight"
RETRY_S: Final = 10.0
log = logging.getLogger(__name__)


class Delaying:
    """`leads`: whether this process may write."""

    def __init__(self, server: Server, leads: Callable[[], bool]) -> None:
        self._server, self._leads = server, leads
        self._wanted: frozenset[str] = frozenset()
        self._known = False
        """All Leases are."""
        self._noted: set[str] | None = None
        """Nodes that say so; None: it must be read."""
        self._due = asyncio.Event()

    def look(self, world: World) -> None:
        """Which nodes are to say so now. Nothing is taken away before all providers have said what is theirs."""
        capacity = world.capacity
        if not (world.leads and self._leads()):
            self._noted = None
        elif self._noted is not None or capacity.providers:
            self._wanted, self._known = lent(world), capacity.listed_s.keys() >= set(capacity.providers)
            if self._noted is None or self._differs(self._noted):
                self._due.set()

    def _differs(self, noted: set[str]) -> list[str]:
        """Nodes that do not say what they are to."""
        return sorted(noted ^ self._wanted if self._known else self._wanted - noted)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._write()
            except Exception as error:  # noqa: BLE001  whatever it was, it is tried again
                log.warning("nodes are not kept for their detached GPUs: %s", _said(error))
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        if self._noted is None:
            nodes = await self._server.items(NODES)
            self._noted = {
                one["metadata"]["name"] for one in nodes if DELAY in (one["metadata"].get("annotations") or {})
            }
        for node in self._differs(self._noted):
            keep = node in self._wanted
            await self._note(node, "true" if keep else None)
            self._noted = self._noted | {node} if keep else self._noted - {node}

    async def _note(self, node: str, said: str | None) -> None:
        """A node that is gone says nothing any more."""
        try:
            await self._server.patch(f"{NODES}/{node}", {"metadata": {"annotations": {DELAY: said}}})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def _said(error: Exception) -> str:
    """The message of another than AnswerError may have an address in it."""
    return str(error) if isinstance(error, AnswerError) else type(error).__name__
