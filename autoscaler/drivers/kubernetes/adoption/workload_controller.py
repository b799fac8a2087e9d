"""What the driver keeps of a workload that is served, or would be if its annotations were right. Decides nothing."""

from __future__ import annotations

import asyncio

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.annotations import Hand
from autoscaler.drivers.kubernetes.adoption.objects import WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.runner import Runner
from autoscaler.spec.model import Model


class Candidate:
    """Of a workload that was just seen."""

    def __init__(self, seen: WorkloadSeen) -> None:
        self.seen = seen
        self.hand: Hand | None = None
        self.hand_s = 0.0
        """When that was, by our own clock, which nobody sets."""
        self.model: Model | None = None
        self.good: WorkloadSeen | None = None
        """As it is, under the last annotations that were right."""
        self.called: ModelName | None = None
        """In the whole installation, where an older Model has its name."""
        self.taken = ""
        """What others have of its names, in a sentence."""
        self.elsewhere: str | None = ""
        """Why another installation serves it, in a sentence; empty: this one does; None: it is not known yet."""
        self.problem = ""
        self.faulty = False
        """An exception was reported that no Model could be blamed for."""
        self.told = self.logged = ""
        self.released = False
        """It is gone, or its annotation is; what is left are Replicas that end."""
        self.runner: Runner | None = None
        self.running: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
