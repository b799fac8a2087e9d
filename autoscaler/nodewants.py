"""What an autoscaler tells the agent of a node: the weights and images that are to be there (interfaces, section 6).

Owns these messages: whole ones, as a stream of lines, of who leads only. An agent acts on those of the newest epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import Message, ReplicaId
from autoscaler.settings import Weights


class Laid(NamedTuple):
    """A Model's weights on a node, held by its agent."""

    folder: str
    """Of their files, below the node's store."""
    path: str
    """What of it the engine loads, below `folder`; empty: the folder."""


class NodeWant(Message, frozen=True):
    """Weights that are to be on the node."""

    artifact: str
    pull_secret: str = ""
    """The Secret in the engines' namespace with a login for their registry; empty: none."""
    replicas: tuple[ReplicaId, ...] = ()
    """Who waits for them there, sorted: each is an own try. None: they are only wanted ahead of a start."""


class ImageWant(Message, frozen=True):
    """An engine's image that is to be on the node."""

    image: str
    """As its Model says."""
    pull_secret: str = ""
    """As NodeWant's."""


class NodeWants(Message, frozen=True):
    """All that is wanted on one node, and what may not go there."""

    epoch: int
    wants: tuple[NodeWant, ...] = ()
    images: tuple[ImageWant, ...] = ()
    """Ahead of a start, the most urgent first (`autoscaler.prepull`); a kubelet pulls what is not there then."""
    held: tuple[str, ...] = ()
    """Copies that pods use: folders below the store, sorted."""
    weights: Weights = Weights()
    """Files that it names are the agent's."""
