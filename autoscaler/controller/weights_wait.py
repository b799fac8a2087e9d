"""Waits, for the Kubernetes driver, until a node's agent reports that a replica's weights are present. Async, no I/O.

Keeps the list of waiting replicas and checks it after each step of the loop. `autoscaler.weights.desired` derives from
the `World` what agents must fetch and what they reported. If the check of a replica raises an exception, its Model is
quarantined, and the other replicas are still checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

from autoscaler.agent_contract import OWN, Laid, collect_weights_requests
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.controller.loop import LoopStep
from autoscaler.exception_handling import Failure, attempt
from autoscaler.spec.model import Model
from autoscaler.state.world import ClusterFacts, Replica, World
from autoscaler.weights import mount_choice
from autoscaler.weights.desired import find_artifact_facts, find_unfetched_artifact
from autoscaler.weights.replica_weights import WeightsFailed, WeightsPending, assess_weights, explain_no_node

HOW = "it is unknown how pods can mount them: the API server reports neither its version nor the permissions"
LOOK_S_MAX = 30.0
"""How long to wait for these cluster facts. A new leader queries them again after 5 s."""


class NotBroughtError(Exception):
    """The weights could not be fetched; `str()` gives a human-readable reason."""


@dataclass(slots=True)
class _Waiting:
    replica: Replica
    model: Model
    report_progress: Callable[[str], None]
    since_s: float
    laid: asyncio.Future[Laid]
    said: str = ""


class AgentNodeSupply:
    """Implements `autoscaler.drivers.driver.NodeSupply`; `on_step` is a listener of the loop.

    `fault` receives Models whose check raised an exception, as `Loop.fault` does.
    """

    def __init__(
        self,
        world: Callable[[], World],
        clock: Callable[[], float],
        fault: Callable[[ModelName, str, Exception], None],
    ) -> None:
        self._world = world
        self._clock = clock
        self._fault = fault
        self._waiting: dict[ReplicaId, _Waiting] = {}

    def __call__(
        self, replica: Replica, model: Model, report_progress: Callable[[str], None]
    ) -> Awaitable[Laid] | None:
        """Wait for the replica's weights and report the progress; None if agents fetch nothing for this Model."""
        return self._laid(replica, model, report_progress) if self.brings(model) else None

    def brings(self, model: Model) -> Collection[str]:
        """The parts of the Model (its own weights, adapters) that agents fetch."""
        return collect_weights_requests(model).keys()

    def obstacle(self, model: Model) -> str:
        """Why no node could provide the weights; empty: no obstacle is known."""
        world, requests = self._world(), collect_weights_requests(model)
        if requests and model.spec.gpu.count == 0:
            return explain_no_node(model)
        of = {OWN: ("its weights", find_unfetched_artifact(model))} | {
            name: (f"the weights of its adapter {name}", request.artifact)
            for name, request in requests.items()
            if name != OWN
        }
        why = (
            mount_choice.explain_unmountable(
                artifact, world.settings, world.nodes.mounting, what, find_artifact_facts(world, model, name)
            )
            for name, (what, artifact) in of.items()
        )
        return next(filter(None, why), "")

    def mounting(self) -> ClusterFacts:
        """The cluster facts that decide how pods mount weights."""
        return self._world().nodes.mounting or ClusterFacts()

    async def _laid(self, replica: Replica, model: Model, report_progress: Callable[[str], None]) -> Laid:
        now_s = self._clock()
        one = _Waiting(replica, model, report_progress, now_s, asyncio.get_running_loop().create_future())
        self._waiting[replica.id] = one
        try:
            self._look(one, self._world(), now_s)
            return await one.laid
        finally:
            del self._waiting[replica.id]

    def on_step(self, step: LoopStep) -> None:
        """Check all waiting replicas against the new `World`."""
        for one in list(self._waiting.values()):
            done = attempt(partial(self._look, one, step.after, step.acted_s))
            if isinstance(done, Failure):
                self._fault(one.model.name, "weights", done.error)

    def _look(self, one: _Waiting, world: World, now_s: float) -> None:
        if one.laid.done():
            return
        found = assess_weights(world, one.replica, one.model, one.since_s, now_s)
        if isinstance(found, Laid) and world.nodes.mounting is None:
            found = WeightsPending(HOW) if now_s < one.since_s + LOOK_S_MAX else WeightsFailed(HOW)
        if isinstance(found, WeightsFailed):
            one.laid.set_exception(NotBroughtError(found.reason))
        elif not isinstance(found, WeightsPending):
            one.laid.set_result(found)
        elif found.words != one.said:
            one.said = found.words
            one.report_progress(found.words)
