"""Whether a Model fits on any Device at all: known without a Call, from its document and the Slices that exist.

Owns the question; the answer is the packer's own (`autoscaler.rulings.never_reason`), so that people read what a Call
gets. Keeps nothing: a Device that comes, or a document that changes, gives another answer at once. It must not ask what
is free now.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autoscaler.contract import ModelName
from autoscaler.model import Model
from autoscaler.packer import choices_of, face
from autoscaler.packing import Force, Want
from autoscaler.rulings import never_reason
from autoscaler.shelves import empty_shelves, want_of
from autoscaler.world import World


class Fitting:
    """The Slices of one World, as if nobody were on them. Nothing is said before the driver has listed them."""

    def __init__(self, world: World) -> None:
        self._listed = world.synced
        self._all = empty_shelves(world)
        self._defaults = world.settings.pod
        choices = choices_of((self._want(model) for model in self._choosy(world)), ())
        self._kinds = tuple({face(shelf, choices): shelf for shelf in self._all}.values())
        """One of each kind: who needs one Device is not asked of hundreds of equal ones."""

    def never(self, model: Model) -> str:
        """Why no Device could hold a Replica of `model`, however empty; empty text: one could."""
        want = self._want(model)
        if not self._listed or want.devices == 0:
            return ""
        return never_reason(want, self._all if want.devices > 1 else self._kinds) or ""

    def _choosy(self, world: World) -> Iterator[Model]:
        """Models that choose by labels of nodes."""
        everyone = bool(self._defaults.node_selector)
        return (model for model in world.models.values() if everyone or model.spec.pod.node_selector)

    def _want(self, model: Model) -> Want:
        return want_of(model, 0, inf, Force.NONE, "", self._defaults)


def misfits(world: World) -> dict[ModelName, str]:
    """The Models of the documents that fit on no Device -> why, in order of names."""
    fitting = Fitting(world)
    found = ((name, fitting.never(world.models[name])) for name in sorted(world.models))
    return {name: reason for name, reason in found if reason}
