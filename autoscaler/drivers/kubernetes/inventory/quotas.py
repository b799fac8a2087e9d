"""What a namespace says of the devices in it, where nodes may not be read: its ResourceQuotas, for `declared`. I/O.

Owns when the Slices are told: as soon as the World, the Settings or a quota make them others.
"""

from __future__ import annotations

from collections.abc import Callable

from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.inventory import declared
from autoscaler.drivers.kubernetes.inventory.declared import Quota
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.resources.step import Decided
from autoscaler.kubernetes.watching import Change, Watched
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import World


class DeclaredDevices:
    """Of one namespace. `world` gives the World as it is."""

    def __init__(self, api: Api, namespace: str, observe: Observe, world: Callable[[], World]) -> None:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        self._quotas = Watched(api, path, declared.read_quota, self._changed)
        self._observe = observe
        self._world = world

    async def run(self) -> None:
        """Until cancelled. Without the right to read quotas none is known: what one forbids waits at the API server."""
        await self._quotas.run()

    def on_step(self, step: Decided) -> None:
        """What a step of the loop changed."""
        before, after = step.before, step.after
        now = (after.settings, after.replicas, after.slices)
        if any(one is not was for one, was in zip(now, (before.settings, before.replicas, before.slices), strict=True)):
            self._tell()

    def _changed(self, _: list[Change[Quota]]) -> None:
        self._tell()

    def _tell(self) -> None:
        world = self._world()
        slices = declared.slices(world.settings.nodes, list(self._quotas.items.values()), world.replicas)
        if {slice_.id: slice_ for slice_ in slices} != world.slices:
            self._observe((SlicesSeen(slices=slices),))
