"""What rooms here need of a step of the loop (`autoscaler.controller.loop.LoopStep`), which they may not know: it knows
the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoscaler.state.actions import Action, Plan
from autoscaler.state.events import Transition
from autoscaler.state.world import World


class Decided(Protocol):
    """One decision."""

    @property
    def before(self) -> World:
        """The World before it."""

    @property
    def after(self) -> World:
        """The World after it."""

    @property
    def plan(self) -> Plan:
        """The last Plan."""

    @property
    def actions(self) -> Sequence[Action]:
        """What was ordered."""

    @property
    def transitions(self) -> Sequence[Transition]:
        """The moves of Replicas."""
