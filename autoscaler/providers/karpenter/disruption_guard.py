"""Has Karpenter leave a node alone while a Replica on it starts or drains, and no longer. I/O.

Owns `karpenter.sh/do-not-disrupt` of Replicas' pods from when they are made, each with it: it goes when the Replica is
ready, and is there again while that drains, or is to leave since its node is taken. So a Replica that only serves keeps
nobody from tidying up nodes, and what loads or ends is not begun anew. Promises: one write for each change; what fails:
see Reconciler. Whoever does not lead writes nothing; whoever begins to lead reads once which pods say so. A Model, or
the Settings, that say it themselves are left alone, and so are pods that others made. Nothing relies on it: a pod that
is evicted all the same drains (`Seen.TAKEN`), and its engine hears of that late (`pods.linger`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Final, NamedTuple

from autoscaler.providers.kube import NOT_FOUND, AnswerError, Server
from autoscaler.providers.reconciler import Reconciler
from autoscaler.queries.cordons import find_drain_cordon
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.spec.pod import DO_NOT_DISRUPT
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import PodRef, Replica, World

BUSY: Final = frozenset({S.PENDING, S.STARTING, S.WAKING, S.DRAINING})
"""What it is at would be done again, or cut short, elsewhere."""
SETTLED: Final = frozenset({S.READY, S.UNREADY, S.ASLEEP})
"""In these it may be moved. The others end, and are not written to any more."""


class Guard(NamedTuple):
    """What a Replica's pod is to say."""

    pod: PodRef
    on: bool


class DisruptionGuard(Reconciler):
    """`leads`: whether this process may write. A listener of the loop (`look`)."""

    def __init__(self, server: Server, namespace: str, world: Callable[[], World], leads: Callable[[], bool]) -> None:
        super().__init__(self._write, "pods do not say what they are to of being disrupted")
        self._server, self._world, self._leads = server, world, leads
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._bare: set[str] | None = None
        """Uids of pods that do not say so: any other does. None: it must be read."""
        self._seen: tuple[object, ...] = ()
        """Of what World that was found, or is being made so."""

    def look(self) -> None:
        """Other pods may have to say so now."""
        world = self._world()
        if not self._acts(world):
            return
        now = (world.replicas, world.cordons, world.slices, world.models, world.settings)
        if len(now) == len(self._seen) and all(one is other for one, other in zip(now, self._seen, strict=True)):
            return
        self._seen = now
        if self._bare is None or any(_differ(world, self._bare)):
            super().look()

    def _acts(self, world: World) -> bool:
        """Whether that is ours to do. What was found is forgotten where it is not: another may change it."""
        if world.leads and self._leads():
            return True
        self._bare, self._seen = None, ()
        return False

    async def _write(self) -> float:
        """One that is refused keeps no other waiting; a server that is away keeps all."""
        world, refused = self._world(), list[AnswerError]()
        if not self._acts(world):
            return inf
        if self._bare is None:
            self._bare = await self._read()
        bare = self._bare
        for pod, on in sorted(_differ(world, bare), key=lambda one: not one.on):  # who is about to be taken is first
            try:
                await self._say(pod, on)
            except AnswerError as error:
                refused.append(error)
            else:
                (bare.discard if on else bare.add)(pod.uid)
        if world.synced:
            bare &= {one.pod.uid for one in world.replicas.values() if one.pod is not None}
        if refused:
            raise refused[0]
        return 0.0 if any(_differ(self._world(), bare)) else inf  # what changed meanwhile looked as it was before

    async def _read(self) -> set[str]:
        pods = (
            one["metadata"] for one in await self._server.items(self._path, labelSelector=self._server.owner.engines)
        )
        return {str(one["uid"]) for one in pods if DO_NOT_DISRUPT not in (one.get("annotations") or {})}

    async def _say(self, pod: PodRef, on: bool) -> None:
        """A pod that is gone says nothing any more; its namesake is none of ours to change."""
        said = {"uid": pod.uid, "annotations": {DO_NOT_DISRUPT: "true" if on else None}}
        try:
            await self._server.patch(f"{self._path}/{pod.name}", {"metadata": said})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def _differ(world: World, bare: set[str]) -> Iterator[Guard]:
    """Pods that do not say what they are to."""
    guards = (_guard(world, one) for one in world.replicas.values())
    return (one for one in guards if one is not None and one.on is (one.pod.uid in bare))


def _guard(world: World, replica: Replica) -> Guard | None:
    """None: that is not ours to say."""
    if replica.pod is None or replica.spec_hash == ADOPTED_HASH or replica.state not in BUSY | SETTLED:
        return None
    model = world.models.get(replica.model)
    own = {} if model is None else model.spec.pod.annotations
    if DO_NOT_DISRUPT in {**world.settings.pod.annotations, **own}:
        return None
    return Guard(replica.pod, replica.state in BUSY or find_drain_cordon(world, replica) is not None)
