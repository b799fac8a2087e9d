"""Looks at groups of machines (MachineSet, MachineDeployment), whoever makes them grow. I/O; decides nothing.

Owns the pace: soon after one look the next where there are any, else rarely. What cannot be read (Upkeep) is as if it
were not there: then what grows may be ordered a second time, as without this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from autoscaler.leases import GroupsSeen
from autoscaler.providers.kube import Object, Server
from autoscaler.providers.machinegroups import CAPI, DEPLOYMENT, OPENSHIFT, Found, groups
from autoscaler.providers.reconciler import Upkeep
from autoscaler.world import World

LOOK_S, NONE_S = 5.0, 60.0
"""From one look to the next, where there are groups and where there are none."""
PODS: Final = "/api/v1/pods"
WAITING: Final = "spec.nodeName=,status.phase=Pending"


async def machines(server: Server) -> list[Found]:
    """All MachineDeployments and MachineSets of a cluster. Raises AnswerError."""
    found: list[Found] = []
    capi = await _version(server, CAPI)
    if capi:
        for kind in (DEPLOYMENT, "MachineSet"):
            found += await _listed(server, kind, capi)
    if await _version(server, OPENSHIFT):
        found += await _listed(server, "MachineSet", f"{OPENSHIFT}/v1beta1")
    return found


async def _version(server: Server, group: str) -> str:
    """The one that its server likes best; empty: it has none of it."""
    said = await server.find(f"/apis/{group}")
    return "" if said is None else str((said.get("preferredVersion") or said["versions"][0])["groupVersion"])


async def _listed(server: Server, kind: str, version: str) -> list[Found]:
    items: list[Object] = await server.items(f"/apis/{version}/{kind.lower()}s")
    return [Found(kind, {**one, "apiVersion": version}) for one in items]


class Growing(Upkeep):
    """`observe` is told what there is, at each look."""

    def __init__(
        self, server: Server, world: Callable[[], World], observe: Callable[[tuple[GroupsSeen, ...]], None]
    ) -> None:
        super().__init__(self._once, "groups of machines are not read, so what grows there is not counted on")
        self._server, self._world, self._observe = server, world, observe

    async def _once(self) -> float:
        """Pods that wait matter only where something may come for them. That there are none is told once: what is found
        later is new.
        """
        found, known = await machines(self._server), self._world().capacity
        if found or known.groups or not known.grouped:
            pods = await self._server.items(PODS, fieldSelector=WAITING) if found else []
            self._observe((GroupsSeen(groups=groups(found, pods, self._world().settings)),))
        return LOOK_S if found else NONE_S
