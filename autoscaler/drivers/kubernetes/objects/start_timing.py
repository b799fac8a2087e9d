"""Timestamps of the start of one pod, as observed by this process. Pure.

A kubelet records whole seconds of the clock of its node, and a start is often shorter than a second. Therefore the
timestamps are the times of our observations, by our own clock. A pod that already runs at its first observation has no
timestamps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msgspec.structs import replace

from autoscaler.state.world import Placing

READY_TO_START = "PodReadyToStartContainers"
"""Condition of a pod whose sandbox, network and volumes are ready (KEP-3085). Kubelets before 1.35 set it only after
the image was pulled, so the two phases cannot be distinguished."""


@dataclass(slots=True)
class StartTiming:
    """Timestamps of one pod, or of one container in it."""

    placing: Placing = field(default_factory=Placing)
    started_s: float | None = None
    """When its process was observed to begin; None: not yet, or before the first observation."""
    _was_observed: bool = False
    _seen_s: float = math.inf
    """When its object was first seen."""

    def ask(self, now_s: float | None) -> None:
        """Record when the API server confirmed the create (None: not yet). The watch may report the object earlier."""
        self._was_observed = True
        asked_s = min(math.inf if now_s is None else now_s, self._seen_s)
        if self.placing.asked_s is None and math.isfinite(asked_s):
            self.placing = replace(self.placing, asked_s=asked_s)

    def pull(self, now_s: float) -> None:
        """Record that the weights are on the node."""
        self._was_observed = True
        self.placing = replace(self.placing, pulled_s=now_s)

    def see(self, now_s: float, *, bound: bool, prepared: bool, runs: bool) -> None:
        """Record the state of the pod's object."""
        self._seen_s = min(self._seen_s, now_s)
        if runs:
            if self._was_observed and self.started_s is None:
                self.started_s = now_s
            return
        self._was_observed = True
        if bound and self.placing.bound_s is None:
            self.placing = replace(self.placing, bound_s=now_s)
        if prepared and self.placing.prepared_s is None:
            self.placing = replace(self.placing, prepared_s=now_s)
