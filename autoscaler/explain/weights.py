"""Finds the weights of a Model for explain: on which nodes they are, and how they get there. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from autoscaler.agent_contract import should_store_on_node
from autoscaler.spec.artifact_name import is_stored, normalize_artifact
from autoscaler.spec.model import Model
from autoscaler.state.world import Copy, World
from autoscaler.weights import desired, mount_choice
from autoscaler.weights.desired import find_unfetched_artifact

NODES_LISTED_MAX = 4
"""Maximum number of nodes in a sentence."""


def describe_weights(world: World, model: Model) -> list[str]:
    """Return a sentence about each pulled artifact (weights, adapters), and one about the mount of the weights."""
    found = [f"{what} ({artifact}) {_location(world, artifact)}." for what, artifact in _parts(world, model)]
    artifact, facts = find_unfetched_artifact(model), world.nodes.mounting
    if artifact is None or facts is None or model.adopted is not None or not mount_choice.is_mounted(artifact):
        return found
    seen = desired.find_artifact_facts(world, model)
    choice = mount_choice.choose_mount(artifact, world.settings, facts, found=seen)
    unverified = " (the artifact has not been inspected yet)" if choice.way == "image" and seen is None else ""
    return [*found, f"Its weights {choice.reason}{unverified}."]


def weights_state(world: World, model: Model) -> str:
    """Return the state of the weights: `here` (all are on nodes), `failed` or `absent`. Empty: none are pulled."""
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
    """Return the artifacts on any node. Cached for all Models of a table, because there may be thousands of nodes."""
    return frozenset(copy.artifact for copy in copies)


def _parts(world: World, model: Model) -> Iterator[tuple[str, str]]:
    """Yield (subject of a sentence, artifact) for the weights and adapters that are pulled.
    An artifact that the engine may fetch itself is included only if a node has it or failed to pull it.
    """
    known, spec = _here(world.nodes.copies), model.spec
    found = [("Its weights", normalize_artifact(spec.artifact or ""), should_store_on_node(spec.artifact, spec.engine))]
    for one in spec.adapters:
        stored = is_stored(one.artifact)
        found.append((f"The weights of its adapter {one.name}", normalize_artifact(one.artifact), stored))
    for what, artifact, stored in found:
        if stored or artifact in known or artifact in world.learned.unbrought:
            yield what, artifact


def _location(world: World, artifact: str) -> str:
    """Return where the artifact is, as the predicate of a sentence."""
    nodes = sorted(copy.node for copy in world.nodes.copies if copy.artifact == artifact)
    if nodes:
        more = f" and {len(nodes) - NODES_LISTED_MAX} more" if len(nodes) > NODES_LISTED_MAX else ""
        return f"are on {', '.join(nodes[:NODES_LISTED_MAX])}{more}"
    if artifact in world.learned.unbrought:
        return f"could not be pulled (retrying): {world.learned.unbrought[artifact]}"
    if _as_image(world, artifact):
        return "are not pulled to nodes"
    return "are on no node yet; the next start pulls them"


def _as_image(world: World, artifact: str) -> bool:
    """Return whether pods mount the artifact as an image from its registry."""
    return world.nodes.mounting is not None and mount_choice.is_image_mount(
        artifact, world.settings, world.nodes.mounting
    )
