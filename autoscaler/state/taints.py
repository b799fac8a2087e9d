"""What keeps Models off nodes for a while: taints that a pod minds, and what a scheduler said lately. Pure.

Owns the matching of taints, which is Kubernetes' own (an empty effect is any, `Exists` without a key is all). Only
those that keep pods away count: NoSchedule and NoExecute. They come and go with the start of a node, so to be kept away
is to wait, and not never to fit. Of those that do not, one kind is read all the same: who removes nodes says by them
which it finds unneeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoscaler.spec.pod import Pod, Toleration

UNNEEDED = frozenset({"DeletionCandidateOfClusterAutoscaler"})
"""Taints of nodes that would be removed if nothing changes. They go again when somebody needs the node."""


class Taint(NamedTuple):
    """Of a node."""

    key: str
    value: str
    effect: str

    @property
    def keeps_away(self) -> bool:
        """Whether pods that do not tolerate it are kept off."""
        return self.effect != "PreferNoSchedule"

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class Shun(NamedTuple):
    """A Model is not placed on a node for a while: its Replica was kept off it (`autoscaler.queries.stranded_pods`)."""

    until_s: float
    times: int
    """In a row."""


def tolerations(defaults: Pod | None, own: Pod) -> tuple[Toleration, ...]:
    """What the Settings and a Model say, together: lists of both are laid over a pod."""
    return own.tolerations if defaults is None else (*defaults.tolerations, *own.tolerations)


def repels(taints: Iterable[Taint], tolerated: Sequence[Toleration]) -> Taint | None:
    """The first that keeps away who tolerates that; None: none does."""
    hard = (taint for taint in taints if taint.keeps_away)
    return next((taint for taint in hard if not any(_covers(one, taint) for one in tolerated)), None)


def _covers(one: Toleration, taint: Taint) -> bool:
    if one.effect is not None and one.effect != taint.effect:
        return False
    if one.key and one.key != taint.key:
        return False
    return one.operator == "Exists" or (bool(one.key) and (one.value or "") == taint.value)
