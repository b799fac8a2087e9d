"""Questions about room that is not there yet, of which many are alike: each is asked once in a Plan. Pure.

Owns what makes two alike: the same Wants in the same order, on the same Devices of one node that has nothing else. What
a node is called, and for which Models it is asked, changes no answer; nor does what is only preferred among nodes
(Copies, images, apart or near), for there is but one. Where more is known of a node than that it is there, its
questions are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TypeAlias

from autoscaler.contract import ModelName
from autoscaler.placement.model.topology import CLIQUE
from autoscaler.placement.model.types import Force, Want
from autoscaler.placement.packer import order
from autoscaler.state.world import NodeId, Slice, SliceId, World

Got: TypeAlias = list[tuple[Want, tuple[SliceId, ...]]]
"""Who has room, and where."""
_OWN: Final = {"id", "device", "node", "labels"}
_same = attrgetter(*(name for name in Slice.__struct_fields__ if name not in _OWN))


class Answers:
    """Of one World at one time, while what a Plan does with it stays as it is."""

    def __init__(self) -> None:
        self._known: dict[object, list[tuple[int, tuple[int, ...]]]] = {}

    def of(self, world: World, wants: Sequence[Want], added: Sequence[Slice], ask: Callable[[], Got]) -> Got:
        """What `ask` says, or said of the like. `added`: all Slices of their nodes."""
        nodes = {one.node for one in added}
        if len(nodes) != 1 or not _plain(world, *nodes):
            return ask()
        wants = sorted(wants, key=order)
        key = (world.hosts.get(*nodes), _wanted(wants, *nodes), _there(wants, added))
        if key not in self._known:
            number = {one.id: at for at, one in enumerate(added)}
            turn = {want: at for at, want in enumerate(wants)}
            self._known[key] = [(turn[want], tuple(number[id] for id in ids)) for want, ids in ask()]
        return [(wants[at], tuple(added[one].id for one in ids)) for at, ids in self._known[key]]


def _plain(world: World, node: NodeId) -> bool:
    """Nothing is known of that node that could close what is added there."""
    if world.cordons or world.fallen or node in world.cuttable or node in world.others:
        return False
    agent = world.nodes.get(node)
    return agent is None or not agent.unhealthy


def _wanted(wants: Sequence[Want], node: NodeId) -> tuple[Want, ...]:
    """Without what changes no answer; which are of one Model is kept."""
    models = {model: ModelName(str(at)) for at, model in enumerate(dict.fromkeys(want.model for want in wants))}
    return tuple(
        want._replace(
            model=models[want.model], ordinal=at, unserved_since_s=0.0, reason="", artifact="", image="", spread=None,
            force=Force.NONE, avoids=(node,)[: node in want.avoids],
        )
        for at, want in enumerate(wants)
    )  # fmt: skip


def _there(wants: Sequence[Want], added: Sequence[Slice]) -> tuple[object, ...]:
    """The Devices, with those labels that somebody asks for."""
    asked = sorted({key for want in wants for key, _ in want.selector})
    devices = {device: at for at, device in enumerate(dict.fromkeys(one.device for one in added))}
    return tuple(
        (devices[one.device], _same(one), bool(one.labels.get(CLIQUE)), tuple(one.labels.get(key) for key in asked))
        for one in added
    )
