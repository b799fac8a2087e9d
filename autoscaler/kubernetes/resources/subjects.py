"""Whose status is written: the Model objects of the cluster, beside what they are called and what is wrong. Pure.

Owns the meeting of two views: objects as `customs` reads them, with uid and generation, and Models as the installation
settled their names. An object is a subject whether or not it is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.kubernetes.resources.conditions import INVALID, NAME_TAKEN, Problem
from autoscaler.kubernetes.resources.installation import CUSTOMS
from autoscaler.kubernetes.resources.watcher import ModelObject
from autoscaler.kubernetes.watching import Key
from autoscaler.spec.names import Origin, Settled


class Subject(NamedTuple):
    """One Model object."""

    namespace: str
    name: str
    uid: str
    generation: int
    model: ModelName | None
    """What it is called in the World; None: nothing of it is in force."""
    problem: Problem | None = None
    elsewhere: str = ""
    """Why another installation serves it; empty: this one does."""
    shown: str = ""
    """What the object shows of that now."""


def subjects(
    objects: Mapping[Key, ModelObject], settled: Settled, whose: Callable[[str, str | None], str | None]
) -> Iterator[Subject]:
    """One for each object of which is known who serves it (`Installation.whose`). That it is wrong goes before that its
    name is taken.
    """
    for key, found in objects.items():
        elsewhere = whose(key.namespace, found.named)
        if elsewhere is None:
            continue
        origin = Origin(CUSTOMS, *key)
        problem = None
        if found.wrong:
            problem = Problem(INVALID, found.wrong)
        elif origin in settled.taken:
            problem = Problem(NAME_TAKEN, settled.taken[origin])
        name = None if elsewhere else settled.names.get(origin)
        yield Subject(key.namespace, key.name, found.uid, found.generation, name, problem, elsewhere, found.shown)
