"""How one pod begins, moment by moment, as this process saw it. Pure.

A kubelet writes down whole seconds, by the clock of its node; a start is often shorter. So the moments are those at
which we heard, by our own clock. Promises: of a pod that ran already when it was first seen, none is made up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msgspec.structs import replace

from autoscaler.state.world import Placing

READY_TO_START = "PodReadyToStartContainers"
"""The condition of a pod whose sandbox, network and volumes are there (KEP-3085). Kubelets before 1.35 say so only once
they have had its image, too: then nothing is told apart."""


@dataclass(slots=True)
class StartTiming:
    """Of one pod, or of one container in it."""

    placing: Placing = field(default_factory=Placing)
    started_s: float | None = None
    """When its process was seen to begin; None: it has not, or before we looked."""
    _looked: bool = False
    _seen_s: float = math.inf
    """When its object was first seen."""

    def ask(self, now_s: float | None) -> None:
        """The API server answered then, or has not yet. A watch may show the object before the answer arrives."""
        self._looked = True
        asked_s = min(math.inf if now_s is None else now_s, self._seen_s)
        if self.placing.asked_s is None and math.isfinite(asked_s):
            self.placing = replace(self.placing, asked_s=asked_s)

    def pull(self, now_s: float) -> None:
        """Its weights are on its node."""
        self._looked = True
        self.placing = replace(self.placing, pulled_s=now_s)

    def see(self, now_s: float, *, bound: bool, prepared: bool, runs: bool) -> None:
        """What its object says."""
        self._seen_s = min(self._seen_s, now_s)
        if runs:
            if self._looked and self.started_s is None:
                self.started_s = now_s
            return
        self._looked = True
        if bound and self.placing.bound_s is None:
            self.placing = replace(self.placing, bound_s=now_s)
        if prepared and self.placing.prepared_s is None:
            self.placing = replace(self.placing, prepared_s=now_s)
