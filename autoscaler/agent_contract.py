"""The messages from an autoscaler to a node's agent: weights, images and devices of the node (interfaces, section 6).

Messages are complete and sent as a stream of lines, only by the leader. An agent acts on those of the newest epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import Message, ReplicaId, WeightsReport
from autoscaler.spec.artifact_name import is_stored
from autoscaler.spec.artifact_name import normalize_artifact as artifact_name
from autoscaler.spec.engines import ENGINES, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Weights


class WeightsRequest(NamedTuple):
    """Weights that a node's store needs, as a Model requests them."""

    artifact: str
    pull_secret: str = ""
    """The pull secret with the login for the registry."""
    allow_unsafe: bool = False
    look: bool = False
    """Whether the weights are only inspected and not pulled."""


def read_weights_request(said: NodeWant | WeightsReport) -> WeightsRequest:
    """Return the weights request that a message is about."""
    return WeightsRequest(said.artifact, said.pull_secret, said.allow_unsafe, said.look)


OWN = ""
"""The key of a Model's own weights among its parts. Other parts are adapters, by their names."""


class LaidAdapter(NamedTuple):
    """An adapter's weights on a node. The fields are as in Laid."""

    name: str
    folder: str
    path: str
    digest: str = ""
    image: str | None = None


class Laid(NamedTuple):
    """A Model's weights on a node, which its agent keeps."""

    folder: str
    """The files' folder below the node's store. Empty: only adapters are here; the Model's weights are elsewhere."""
    path: str
    """The path that the engine loads, below `folder`. Empty: the folder."""
    adapters: tuple[LaidAdapter, ...] = ()
    """The adapters that are available."""
    digest: str = ""
    image: str | None = None
    """The weights are in an image, not on the node: pods mount the image `digest`, with the model in this folder."""

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders that the pod uses, each once."""
        return tuple(dict.fromkeys(filter(None, (self.folder, *(one.folder for one in self.adapters)))))


class NodeWant(Message, frozen=True):
    """Weights that the node needs."""

    artifact: str
    pull_secret: str = ""
    """The Secret in the engines' namespace with the login for the registry. Empty: none."""
    replicas: tuple[ReplicaId, ...] = ()
    """Replicas that wait for the weights on this node, sorted. A failed attempt is repeated only for a new replica.
    None: the weights are only prefetched.
    """
    allow_unsafe: bool = False
    """Whether code and pickled weights are accepted."""
    look: bool = False
    """Whether the weights are only inspected and not pulled: pods mount them as an image, or their form is not known
    yet.
    """


class ImageWant(Message, frozen=True):
    """An engine image that the node needs."""

    image: str
    """The image as the Model names it."""
    pull_secret: str = ""
    """As in NodeWant."""


class FabricWant(Message, frozen=True):
    """A fabric device that was attached to the node, or is to be detached from it."""

    device: str
    """The driver's ID of the device."""
    leave: bool = False


class NodeWants(Message, frozen=True):
    """Everything that one node needs."""

    epoch: int
    wants: tuple[NodeWant, ...] = ()
    images: tuple[ImageWant, ...] = ()
    """Images to prefetch, most urgent first (`autoscaler.weights.image_prepull`). A kubelet pulls missing images when a
    pod starts.
    """
    held: tuple[str, ...] = ()
    """Copies that pods use: folders below the store, sorted. They must not be deleted."""
    weights: Weights = Weights()
    """The weights settings. The files that these settings name are on the agent's machine."""
    fabric: tuple[FabricWant, ...] = ()
    """Devices that are being attached or detached."""


def should_store_on_node(artifact: str | None, engine: str) -> bool:
    """Return whether weights of this artifact, for a Model with this engine, belong in a node's store."""
    return is_stored(artifact) and not is_fetched_by_engine(artifact or "", ENGINES[engine])


def collect_weights_requests(model: Model) -> dict[str, WeightsRequest]:
    """Return the weights that nodes' stores need for a Model: OWN, and adapters by their names."""
    spec = model.spec
    secret, unsafe = spec.pull_secret or "", spec.allow_unsafe
    own = {OWN: spec.artifact or ""} if should_store_on_node(spec.artifact, spec.engine) else {}
    named = own | {one.name: one.artifact for one in spec.adapters if is_stored(one.artifact)}
    return {name: WeightsRequest(artifact_name(artifact), secret, unsafe) for name, artifact in named.items()}
