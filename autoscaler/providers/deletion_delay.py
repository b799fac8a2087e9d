"""Delays the deletion of nodes that have fabric devices attached by our capacity orders. I/O.

Deleting the node would take the devices with it. Cluster Autoscaler waits for a node annotation (at most 2 minutes,
`--node-deletion-delay-timeout`) after the pods of a node have gone and before it deletes the node: time to prove the
devices clean and to detach them. Each installation has its own annotation, written with the first device and removed
with the last. Only the leader writes; a new leader first reads what was written before. No decisions about orders are
made here. Failures: see Reconciler.
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
"""Prefix of the annotations (`delay_annotation_key`).
An earlier version used it alone, for all installations. It is not written any more, and removed only where the own
annotation is set, since elsewhere another installation may need it.
"""


class DeletionDelay(Reconciler):
    """A listener of the controller (`look`). `leads`: whether this process may write."""

    def __init__(
        self, server: Server, world: Callable[[], World], leads: Callable[[], bool], place: tuple[str, str]
    ) -> None:
        """`place`: Pilotlight's namespace and the name of the leader-election Lease."""
        super().__init__(self._write, "nodes with detached GPUs are not protected from deletion")
        self._server, self._world, self._leads, self._key = server, world, leads, delay_annotation_key(*place)
        self._noted: set[str] | None = None
        """Nodes with the annotation; None: not read yet."""

    def look(self) -> None:
        """Wake up if the annotation of a node has to change."""
        if self._due(self._world()):
            super().look()

    def _due(self, world: World) -> bool:
        """Whether there is something to read or write."""
        if not (world.leadership.leads and self._leads()):
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
        """Patch a node's annotations; a deleted node is ignored."""
        try:
            await self._server.patch(f"{NODES}/{node}", {"metadata": {"annotations": said}})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def delay_annotation_key(home: str, lease: str) -> str:
    """The annotation of one installation, so that several in one cluster do not remove each other's."""
    return f"{DELAY}-{installation_id(home, lease)}"


def _differ(world: World, noted: set[str]) -> list[tuple[str, bool]]:
    """Nodes whose annotation has to change, and whether it is to be set.
    Nothing is removed before all providers have listed their orders.
    """
    wanted, known = list_leased_nodes(world), world.capacity.listed_s.keys() >= set(world.capacity.providers)
    return [(node, node in wanted) for node in sorted(noted ^ wanted if known else wanted - noted)]
