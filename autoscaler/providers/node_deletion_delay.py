"""Delays the deletion of nodes that have fabric devices attached by our capacity orders. I/O.

Deleting a node also removes its devices. When a node has no more pods, Cluster Autoscaler waits until an annotation is
removed from the node (at most 2 minutes, `--node-deletion-delay-timeout`). In this time the devices are proven clean
and detached. Each installation has its own annotation, written with the first device and removed with the last. Only
the leader writes; a new leader first reads the existing annotations. Failures: see Reconciler.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from autoscaler.capacity.attachable_nodes import list_leased_nodes
from autoscaler.providers.kubernetes_access import NOT_FOUND, AnswerError, ApiServer
from autoscaler.providers.reconciler import Reconciler
from autoscaler.spec.installation_ownership import installation_id
from autoscaler.state.world import World

NODES: Final = "/api/v1/nodes"
DELAY: Final = "delay-deletion.cluster-autoscaler.kubernetes.io/pilotlight"
"""Prefix of the annotations (`delay_annotation_key`).
An earlier version used the bare prefix for all installations. It is no longer written, and is removed only from nodes
with this installation's annotation, since another installation may need it on other nodes.
"""


class DeletionDelay(Reconciler):
    """A listener of the controller (`look`). `leads`: whether this process may write."""

    def __init__(
        self, server: ApiServer, world: Callable[[], World], leads: Callable[[], bool], place: tuple[str, str]
    ) -> None:
        """`place`: Pilotlight's namespace and the name of the leader-election Lease."""
        super().__init__(self._write, "nodes with attached GPUs are not protected from deletion")
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
            await self._annotate(node, {self._key: "true", DELAY: None} if keep else {self._key: None})
            self._noted = self._noted | {node} if keep else self._noted - {node}
        return inf

    async def _annotate(self, node: str, annotations: dict[str, str | None]) -> None:
        """Patch a node's annotations; a deleted node is ignored."""
        try:
            await self._server.patch(f"{NODES}/{node}", {"metadata": {"annotations": annotations}})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def delay_annotation_key(home: str, lease: str) -> str:
    """Return the annotation of one installation; each has its own, so that none removes another's."""
    return f"{DELAY}-{installation_id(home, lease)}"


def _differ(world: World, noted: set[str]) -> list[tuple[str, bool]]:
    """Return the nodes whose annotation has to change, and whether it is to be set.
    No annotation is removed before all providers have listed their orders.
    """
    wanted, known = list_leased_nodes(world), world.capacity.listed_s.keys() >= set(world.capacity.providers)
    return [(node, node in wanted) for node in sorted(noted ^ wanted if known else wanted - noted)]
