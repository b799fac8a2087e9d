"""Has who removes nodes wait while Devices of a fabric are there by Leases of ours, which would go with the node. I/O.

Owns one annotation of nodes, its installation's own, by which Cluster Autoscaler waits (2 minutes at most,
`--node-deletion-delay-timeout`) after the pods of a node have gone and before it deletes the node: time to prove the
Devices clean and to detach them. Promises: it is written with the first Device and taken away with the last; what
fails: see Reconciler. Whoever does not lead writes nothing; whoever begins to lead finds what was written before. It
decides nothing about Leases.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from autoscaler.capacity.attachable_nodes import list_leased_nodes
from autoscaler.providers.kube import NOT_FOUND, AnswerError, Server
from autoscaler.providers.reconciler import Reconciler
from autoscaler.spec.ownership import installation_id
from autoscaler.state.world import World

NODES: Final = "/api/v1/nodes"
DELAY: Final = "delay-deletion.cluster-autoscaler.kubernetes.io/pilotlight"
"""Alone it is all installations', as it once was: nobody writes it any more, nor takes it from where others may have
something. What follows it here is one's own (`delay_annotation_key`).
"""


class DeletionDelay(Reconciler):
    """`leads`: whether this process may write. A listener of the loop (`look`)."""

    def __init__(
        self, server: Server, world: Callable[[], World], leads: Callable[[], bool], place: tuple[str, str]
    ) -> None:
        """`place`: our own namespace, and what the Lease of leadership is called."""
        super().__init__(self._write, "nodes are not kept for their detached GPUs")
        self._server, self._world, self._leads, self._key = server, world, leads, delay_annotation_key(*place)
        self._noted: set[str] | None = None
        """Nodes that say so; None: it must be read."""

    def look(self) -> None:
        """Other nodes may have to say so now."""
        if self._due(self._world()):
            super().look()

    def _due(self, world: World) -> bool:
        """Whether something is to be read or written."""
        if not (world.leads and self._leads()):
            self._noted = None
            return False
        return bool(world.capacity.providers if self._noted is None else _differ(world, self._noted))

    async def _write(self) -> float:
        world = self._world()
        if not self._due(world):
            return inf
        if self._noted is None:
            nodes = await self._server.items(NODES)
            self._noted = {
                one["metadata"]["name"] for one in nodes if self._key in (one["metadata"].get("annotations") or {})
            }
        for node, keep in _differ(world, self._noted):
            await self._note(node, {self._key: "true", DELAY: None} if keep else {self._key: None})
            self._noted = self._noted | {node} if keep else self._noted - {node}
        return inf

    async def _note(self, node: str, said: dict[str, str | None]) -> None:
        """A node that is gone says nothing any more."""
        try:
            await self._server.patch(f"{NODES}/{node}", {"metadata": {"annotations": said}})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def delay_annotation_key(home: str, lease: str) -> str:
    """An installation's annotation: of several in one cluster none takes away what another says."""
    return f"{DELAY}-{installation_id(home, lease)}"


def _differ(world: World, noted: set[str]) -> list[tuple[str, bool]]:
    """Nodes that do not say what they are to, and whether they are to say so. Nothing is taken away before all
    providers have said what is theirs.
    """
    wanted, known = list_leased_nodes(world), world.capacity.listed_s.keys() >= set(world.capacity.providers)
    return [(node, node in wanted) for node in sorted(noted ^ wanted if known else wanted - noted)]
