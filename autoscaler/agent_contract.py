"""The messages between autoscalers and the agents of nodes: weights, images, devices (interfaces, section 6).

An agent reports the complete state of its node. What the node needs is sent as a stream of lines, only by the leader;
an agent acts on the lines of the newest epoch.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from autoscaler.contract import Age, BytesPerSecond, Id, Message, Number, ReplicaId
from autoscaler.spec.artifact_name import is_stored
from autoscaler.spec.artifact_name import normalize_artifact as artifact_name
from autoscaler.spec.engines import ENGINES, is_fetched_by_engine
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Weights

NODE_PERIOD_S = 3.0
"""The maximum time between two reports of an agent about its node."""
NODE_EXPIRY_S = 10.0
IMAGES_MAX = 2000
"""Maximum number of names of images in a report: enough for all names of 200 images."""
"""The age at which a node's report expires."""


class DeviceReport(Message, frozen=True):
    """One device as measured by its node's agent."""

    id: str
    """The driver's ID: NVML's UUID."""
    product: str = ""
    memory_bytes: Number = 0
    used_bytes: Number = 0
    """Memory that any process uses."""
    healthy: bool = True


class PodDevices(Message, frozen=True):
    """A pod and its devices. Devices that the kubelet allocated to it (the pod has a name), or those on which its
    processes use memory (it has a UID).
    """

    devices: tuple[str, ...]
    pod_uid: str = ""
    namespace: str = ""
    name: str = ""


class WeightsReport(Message, frozen=True):
    """The agent's progress with weights that its node needs."""

    artifact: str
    pull_secret: str = ""
    replicas: tuple[ReplicaId, ...] = ()
    """The replicas for which the pull succeeded or failed. Others have no result yet."""
    folder: str = ""
    """The folder of the files below the node's store. Empty: the files are missing or forbidden for the requester."""
    digest: str = ""
    ggufs: tuple[str, ...] = ()
    """Entry files of GGUF models below `folder`, at most 5. None: the engine loads the folder."""
    adapters: tuple[str, ...] = ()
    """Adapters below `folder`: files or folders (empty: `folder` itself), at most 5."""
    bytes: Number = 0
    total_bytes: Number = 0
    bytes_per_s: BytesPerSecond = 0.0
    failed: str = ""
    """The reason why the pull failed."""
    allow_unsafe: bool = False
    look: bool = False
    """Whether the weights were only inspected and not pulled."""
    image: str | None = None
    """Result of an inspection: the folder with the model in the image `digest`. None: the artifact is not an image."""
    no_image: str = ""
    """The reason why it is not an image."""
    header: str = ""
    """Result of an inspection before a start: the memory requirements from the header, in the encoding of the front
    door (`bytes`: those of the single adapter).
    """
    no_header: str = ""
    """The reason why the header could not be read."""


class PodUse(Message, frozen=True):
    """The memory of a device that the processes of one pod use."""

    pod_uid: str
    device: str
    used_bytes: Number


class FabricReport(Message, frozen=True):
    """The agent's progress in attaching a fabric device to its node, or detaching it."""

    device: str
    leave: bool = False
    done: bool = False
    """The device is usable on the node, or the node has released it and it may be detached."""
    failed: bool = False
    """The device was attached and is not visible on the node."""
    says: str = ""
    """The event that the agent waits for, or the reason of the failure."""


class NodeReport(Message, frozen=True):
    """The complete state of one node as its agent observes it. It expires after NODE_EXPIRY_S.

    The sizes of numbers are limited: the decoder raises msgspec.ValidationError with the name of the field.
    """

    node: str
    boot: Id
    """Changes at every start of the agent."""
    sequence: Number
    brings: bool = False
    """Whether the agent pulls weights."""
    epoch: Number = 0
    """The newest epoch that the agent knows. The agent acts on the `NodeWants` of this epoch."""
    peer: str = ""
    """The address at which it serves weights to other agents, `https://HOST:PORT`. Empty: it does not."""
    copies: tuple[str, ...] = ()
    """Artifacts that are complete on the node."""
    weights: tuple[WeightsReport, ...] = ()
    images: Annotated[tuple[str, ...], Meta(max_length=IMAGES_MAX)] = ()
    """Names of container images on the node."""
    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()
    uses: tuple[PodUse, ...] = ()
    """Memory usage of pods, where it can be determined."""
    age_s: Age = 0.0
    """The time since the agent began to collect the report, in seconds."""
    attaches: bool = False
    """Whether the agent handles fabric devices that are attached to or detached from its node."""
    fabric: tuple[FabricReport, ...] = ()


class NodeAnswer(Message, frozen=True):
    """The response to a node's report."""

    epoch: int


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
