"""Keeps Karpenter from disrupting a node while a replica on it starts or drains, and only then. I/O.

Replicas' pods are created with `karpenter.sh/do-not-disrupt`. The guard removes it when the replica is ready, and sets
it again while the replica drains or its node is reclaimed. So a serving replica does not block consolidation, and
Karpenter does not interrupt a start or a drain. Each change is one write; failures: see Reconciler. Only the leader
writes; a new leader first reads which pods have the annotation. Pods of Models or Settings that set the annotation
themselves, and adopted pods, are not changed. Nothing relies on the annotation: a pod that is evicted despite it is
drained (`Seen.TAKEN`), and the stop of its engine is delayed (`add_pre_stop_sleep` in
`autoscaler.drivers.kubernetes.objects.pod_manifest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Final, NamedTuple

from autoscaler.providers.kubernetes_access import NOT_FOUND, AnswerError, ApiServer
from autoscaler.providers.reconciler import Reconciler
from autoscaler.queries.operator_orders import find_drain_cordon
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.spec.pod import DO_NOT_DISRUPT
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import PodRef, Replica, World

BUSY: Final = frozenset({S.PENDING, S.STARTING, S.WAKING, S.DRAINING})
"""States in which a disruption would abort a start or a drain."""
SETTLED: Final = frozenset({S.READY, S.UNREADY, S.ASLEEP})
"""States in which the replica may be moved. In all other states it terminates, and its pod is not changed."""


class Guard(NamedTuple):
    """Whether a replica's pod should have the annotation."""

    pod: PodRef
    on: bool


class DisruptionGuard(Reconciler):
    """A listener of the controller (`look`). `leads`: whether this process may write."""

    def __init__(
        self, server: ApiServer, namespace: str, world: Callable[[], World], leads: Callable[[], bool]
    ) -> None:
        super().__init__(self._write, "the disruption annotations of pods are not updated")
        self._server, self._world, self._leads = server, world, leads
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._bare: set[str] | None = None
        """UIDs of pods without the annotation; all others have it. None: not read yet."""
        self._seen: tuple[object, ...] = ()
        """The parts of `World` that the last update used."""

    def look(self) -> None:
        """Wake up if the annotation of a pod has to change."""
        world = self._world()
        if not self._acts(world):
            return
        now = (world.replicas, world.nodes.cordons, world.nodes.slices, world.models, world.settings)
        if len(now) == len(self._seen) and all(one is other for one, other in zip(now, self._seen, strict=True)):
            return
        self._seen = now
        if self._bare is None or any(_differ(world, self._bare)):
            super().look()

    def _acts(self, world: World) -> bool:
        """Whether this process may write. If not, drop what was read, since another process may change it."""
        if world.leadership.leads and self._leads():
            return True
        self._bare, self._seen = None, ()
        return False

    async def _write(self) -> float:
        """Write all changes. A rejected write does not delay the others; an unavailable server delays all."""
        world, refused = self._world(), list[AnswerError]()
        if not self._acts(world):
            return inf
        if self._bare is None:
            self._bare = await self._read()
        bare = self._bare
        for pod, on in sorted(_differ(world, bare), key=lambda one: not one.on):  # set first: those are at risk
            try:
                await self._annotate(pod, on)
            except AnswerError as error:
                refused.append(error)
            else:
                (bare.discard if on else bare.add)(pod.uid)
        if world.leadership.synced:
            bare &= {one.runtime.pod.uid for one in world.replicas.values() if one.runtime.pod is not None}
        if refused:
            raise refused[0]
        return 0.0 if any(_differ(self._world(), bare)) else inf  # changes during the writes, which `look` has not seen

    async def _read(self) -> set[str]:
        pods = (
            one["metadata"] for one in await self._server.items(self._path, labelSelector=self._server.owner.engines)
        )
        return {str(one["uid"]) for one in pods if DO_NOT_DISRUPT not in (one.get("annotations") or {})}

    async def _annotate(self, pod: PodRef, on: bool) -> None:
        """Patch a pod's annotation. A deleted pod is ignored, and a new pod of the same name is not changed."""
        said = {"uid": pod.uid, "annotations": {DO_NOT_DISRUPT: "true" if on else None}}
        try:
            await self._server.patch(f"{self._path}/{pod.name}", {"metadata": said})
        except AnswerError as error:
            if error.status != NOT_FOUND:
                raise


def _differ(world: World, bare: set[str]) -> Iterator[Guard]:
    """Pods whose annotation has to change."""
    guards = (_guard(world, one) for one in world.replicas.values())
    return (one for one in guards if one is not None and one.on is (one.pod.uid in bare))


def _guard(world: World, replica: Replica) -> Guard | None:
    """The desired annotation; None if the guard does not manage this pod."""
    if replica.runtime.pod is None or replica.spec_hash == ADOPTED_HASH or replica.state not in BUSY | SETTLED:
        return None
    model = world.models.get(replica.model)
    own = {} if model is None else model.spec.pod.annotations
    if DO_NOT_DISRUPT in {**world.settings.pod.annotations, **own}:
        return None
    return Guard(replica.runtime.pod, replica.state in BUSY or find_drain_cordon(world, replica) is not None)
