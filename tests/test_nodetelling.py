"""What the agent of a node is told of images, as the World changes."""

from __future__ import annotations

from typing import cast

import msgspec
from msgspec.structs import replace

from autoscaler.actions import Plan
from autoscaler.images import NodeImages, image
from autoscaler.loop import Listener, Loop, Step
from autoscaler.nodetelling import BLANK, NodeTelling
from autoscaler.nodewants import ImageWant, NodeWants
from autoscaler.world import NodeId, World
from tests.kit.worlds import T0
from tests.test_prepull import ENGINE, at, needs, starting


class Watched:
    """A loop that decides nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: list[Listener] = []

    def becomes(self, world: World) -> None:
        before, self.world = self.world, world
        for listener in self.listeners:
            listener(Step(before, world, Plan(), (), (), T0, T0, T0))


def images(line: bytes) -> tuple[ImageWant, ...]:
    assert line != BLANK, "it was told already"
    return msgspec.json.decode(line, type=NodeWants).images


async def test_an_agent_hears_at_once_which_images_its_node_is_to_have_and_when_they_are_there() -> None:
    a = needs()
    began = replace(at([a], [starting(a, 3)], agents=[3]), documented=True)
    loop = Watched(replace(began, replicas={}, by_model={}, by_slice={}))
    telling = NodeTelling(cast("Loop", loop))
    told = telling.messages(NodeId("n3"))
    assert images(await anext(told)) == ()
    loop.becomes(began)
    assert images(await anext(told)) == (ENGINE,)
    has = {"n3": NodeImages((), (image((ENGINE.image,)),))}
    loop.becomes(replace(began, images=has))
    assert images(await anext(told)) == ()
    loop.becomes(began)
    assert images(await anext(told)) == (ENGINE,)
    loop.becomes(replace(began, nodes={}))
    assert images(await anext(told)) == (), "no agent is known there any more"
    await told.aclose()
