"""Protocol of a step of the loop. This package must not import `autoscaler.controller.loop.LoopStep`, which depends on
the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoscaler.state.actions import Action, Plan
from autoscaler.state.events import Transition
from autoscaler.state.world import World


class Decided(Protocol):
    """One step of the loop."""

    @property
    def before(self) -> World:
        """The `World` before the step."""

    @property
    def after(self) -> World:
        """The `World` after the step."""

    @property
    def plan(self) -> Plan:
        """The last plan of the step."""

    @property
    def actions(self) -> Sequence[Action]:
        """The Actions that were executed."""

    @property
    def transitions(self) -> Sequence[Transition]:
        """The state transitions of replicas."""
