"""What an autoscaler tells the agent of a node: weights, images and Devices for it (interfaces, section 6).

Owns these messages: whole ones, as a stream of lines, of who leads only. An agent acts on those of the newest epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import Message, ReplicaId, WeightsReport
from autoscaler.spec.artifact import is_stored
from autoscaler.spec.artifact import normalize_artifact as artifact_name
from autoscaler.spec.engines import ENGINES, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Weights


class WeightsRequest(NamedTuple):
    """Weights that a node's store is to have, as a Model asks for them."""

    artifact: str
    pull_secret: str = ""
    """With whose login."""
    allow_unsafe: bool = False
    look: bool = False
    """Nothing of them is brought: what they are is all that is asked."""


def read_weights_request(said: NodeWant | WeightsReport) -> WeightsRequest:
    """Which wish it is about."""
    return WeightsRequest(said.artifact, said.pull_secret, said.allow_unsafe, said.look)


OWN = ""
"""Among the parts of a Model: its own weights; the others are adapters, by their names."""


class LaidAdapter(NamedTuple):
    """An adapter's weights on a node; as Laid."""

    name: str
    folder: str
    path: str
    digest: str = ""
    image: str | None = None


class Laid(NamedTuple):
    """A Model's weights on a node, held by its agent."""

    folder: str
    """Of their files, below the node's store; empty: they lie elsewhere, and only adapters came."""
    path: str
    """What of it the engine loads, below `folder`; empty: the folder."""
    adapters: tuple[LaidAdapter, ...] = ()
    """Those that came."""
    digest: str = ""
    image: str | None = None
    """It is on no node: pods mount the image of this digest, in which the model lies in this folder."""

    @property
    def folders(self) -> tuple[str, ...]:
        """All that its pod uses, each once."""
        return tuple(dict.fromkeys(filter(None, (self.folder, *(one.folder for one in self.adapters)))))


class NodeWant(Message, frozen=True):
    """Weights that are to be on the node."""

    artifact: str
    pull_secret: str = ""
    """The Secret in the engines' namespace with a login for their registry; empty: none."""
    replicas: tuple[ReplicaId, ...] = ()
    """Who waits for them there, sorted: each is an own try. None: they are only wanted ahead of a start."""
    allow_unsafe: bool = False
    """Code and pickled weights are taken, too."""
    look: bool = False
    """As Wish's: their pods mount them as an image, or nobody knows yet what they are."""


class ImageWant(Message, frozen=True):
    """An engine's image that is to be on the node."""

    image: str
    """As its Model says."""
    pull_secret: str = ""
    """As NodeWant's."""


class FabricWant(Message, frozen=True):
    """A Device of a fabric that was attached to the node, or is to be detached from it."""

    device: str
    """As the driver calls it."""
    leave: bool = False


class NodeWants(Message, frozen=True):
    """All that is wanted on one node, and what may not go there."""

    epoch: int
    wants: tuple[NodeWant, ...] = ()
    images: tuple[ImageWant, ...] = ()
    """Ahead of a start, the most urgent first (`autoscaler.weights.image_prepull`); a kubelet pulls what is not there
    then.
    """
    held: tuple[str, ...] = ()
    """Copies that pods use: folders below the store, sorted."""
    weights: Weights = Weights()
    """Files that it names are the agent's."""
    fabric: tuple[FabricWant, ...] = ()
    """Devices that come or leave: who is not named (any more) neither does."""


def should_store_on_node(artifact: str | None, engine: str) -> bool:
    """Whether such weights of a Model with that engine are to be in a node's store."""
    return is_stored(artifact) and not is_fetched_by_engine(artifact or "", ENGINES[engine])


def collect_weights_requests(model: Model) -> dict[str, WeightsRequest]:
    """What nodes' stores are to have of it: OWN, and adapters by their names."""
    spec = model.spec
    secret, unsafe = spec.pull_secret or "", spec.allow_unsafe
    own = {OWN: spec.artifact or ""} if should_store_on_node(spec.artifact, spec.engine) else {}
    named = own | {one.name: one.artifact for one in spec.adapters if is_stored(one.artifact)}
    return {name: WeightsRequest(artifact_name(artifact), secret, unsafe) for name, artifact in named.items()}
