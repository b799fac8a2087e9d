"""Describes where the weights of a Model are: on nodes, not pulled yet, or failed. Pure.

The World has the copies on nodes (`copies`, `unbrought`); the replica reports the progress of a pull.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from autoscaler.agent_contract import should_store_on_node
from autoscaler.spec.artifact import is_stored, normalize_artifact
from autoscaler.spec.model import Model
from autoscaler.state.world import Copy, World
from autoscaler.weights import desired, mounts
from autoscaler.weights.desired import find_unfetched_artifact

NODES_TOLD = 4


def describe_weights(world: World, model: Model) -> list[str]:
    """Return a sentence for the weights of the Model and of each adapter that are pulled, and one about their mount."""
    found = [f"{what} ({artifact}) {_standing(world, artifact)}." for what, artifact in _parts(world, model)]
    artifact, facts = find_unfetched_artifact(model), world.nodes.mounting
    if artifact is None or facts is None or model.adopted is not None or not mounts.is_mounted(artifact):
        return found
    seen = desired.find_artifact_facts(world, model)
    choice = mounts.choose_mount(artifact, world.settings, facts, found=seen)
    yet = ", if they are one, which nobody has seen yet" if choice.way == "image" and seen is None else ""
    return [*found, f"Its weights {choice.reason}{yet}."]


def weights_state(world: World, model: Model) -> str:
    """Return the state of all weights: here (each on some node), failed, absent. Empty: none are pulled."""
    artifacts = {artifact for _, artifact in _parts(world, model)}
    if not artifacts:
        return ""
    absent, unbrought = artifacts - _here(world.nodes.copies), world.learned.unbrought
    missing = {one for one in absent if one in unbrought or not _as_image(world, one)}
    if missing & unbrought.keys():
        return "failed"
    return "absent" if missing else "here"


@lru_cache(maxsize=1)
def _here(copies: frozenset[Copy]) -> frozenset[str]:
    """Return artifacts on any node. Cached for all Models of a table, because there may be thousands of nodes."""
    return frozenset(copy.artifact for copy in copies)


def _parts(world: World, model: Model) -> Iterator[tuple[str, str]]:
    """Yield the parts with pulled weights.

    Weights that an engine may fetch itself count only if there is knowledge of them.
    """
    known, spec = _here(world.nodes.copies), model.spec
    found = [("Its weights", normalize_artifact(spec.artifact or ""), should_store_on_node(spec.artifact, spec.engine))]
    for one in spec.adapters:
        brought = is_stored(one.artifact)
        found.append((f"The weights of its adapter {one.name}", normalize_artifact(one.artifact), brought))
    for what, artifact, brought in found:
        if brought or artifact in known or artifact in world.learned.unbrought:
            yield what, artifact


def _standing(world: World, artifact: str) -> str:
    nodes = sorted(copy.node for copy in world.nodes.copies if copy.artifact == artifact)
    if nodes:
        more = f" and {len(nodes) - NODES_TOLD} more" if len(nodes) > NODES_TOLD else ""
        return f"are on {', '.join(nodes[:NODES_TOLD])}{more}"
    if artifact in world.learned.unbrought:
        return f"did not come, and it is tried again: {world.learned.unbrought[artifact]}"
    if _as_image(world, artifact):
        return "are brought to no node"
    return "are on no node yet: they come for a start"


def _as_image(world: World, artifact: str) -> bool:
    """Return whether pods mount the artifact as an image from its registry."""
    return world.nodes.mounting is not None and mounts.is_image_mount(artifact, world.settings, world.nodes.mounting)
