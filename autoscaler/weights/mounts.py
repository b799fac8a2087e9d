"""Chooses the kind of volume by which an engine's pod gets its weights, and explains why. Pure.

If a node's agent pulls the weights (`oci://` and the like), the node's copy is mounted, as a volume of that node; else
the artifact itself as an image volume, if it is an image and all that mount it support that. The node's directory is
mounted by hostPath only if the Settings say so, since pod security `restricted` rejects it. A claim (`pvc://`) is
mounted as it is, and so is a Dataset of Fluid, which creates a claim of its own name. Image volumes: Kubernetes
KEP-4639 (beta and enabled from 1.35), containerd from 2.1, CRI-O from 1.31.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from autoscaler.spec.artifact import is_stored
from autoscaler.spec.settings import Settings
from autoscaler.state.world import ClusterFacts, Version

Way = Literal["volume", "image", "claim", "hostPath"]

MOUNT = "/weights"
"""Mount path of the weights in an engine's container."""
ADAPTERS = "/adapters"
"""Mount path of adapters' weights, each below its name."""
IMAGES_FROM, IMAGES_BY_DEFAULT = (1, 31), (1, 35)
"""Versions of Kubernetes that support image volumes where they are enabled; and that enable them by default."""
_RUNTIMES: dict[str, Version] = {"containerd": (2, 1), "cri-o": (1, 31)}
_VERSION = re.compile(r"v?([0-9]+)\.([0-9]+)")
_TAG = re.compile(r"(@[a-z0-9]+:[0-9a-f]+)$|(:[^/:@]+)?(@[a-z0-9]+:[0-9a-f]+)?$")
HOST_PATH = "or say weights.mount: hostPath in the Settings, where pod security lets it in"


class NodeMountFacts(NamedTuple):
    """What a node reports about itself."""

    name: str
    hostname: str = ""
    """Its label, to which volumes are bound."""
    kubelet: str = ""
    """Version of its kubelet."""
    runtime: str = ""
    """Its container runtime, as reported: `containerd://2.1.4`."""


class ArtifactFacts(NamedTuple):
    """What is known about an artifact."""

    digest: str = ""
    """Digest of its manifest."""
    folder: str = ""
    """Directory of its copy on the node, below the store; empty if there is none."""
    file: str = ""
    """What the engine loads, below that directory; empty: all of it."""
    image: str | None = None
    """Directory of the model in the image, if it is an image whose layers are a file system; None if not."""
    why: str = ""
    """Why it is not an image, as far as that is known."""


class MountChoice(NamedTuple):
    """The chosen mount; `way` is None if there is none."""

    way: Way | None
    reason: str
    """Ends a sentence about the model's weights."""


def is_mounted(artifact: str | None) -> bool:
    """Whether such weights reach a pod by a volume of ours."""
    return is_stored(artifact) or (artifact or "").startswith("pvc://")


def claim_of(artifact: str) -> tuple[str, str]:
    """(claim, path in it) of `pvc://claim/path`."""
    claim, _, path = artifact.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def path_of(artifact: str | None) -> str | None:
    """Path in a claim from which the engine loads; None if the weights are in no claim."""
    if artifact is None or not artifact.startswith("pvc://"):
        return None
    return "/".join(filter(None, (MOUNT, claim_of(artifact)[1])))


def image_of(artifact: str, digest: str) -> str:
    """Reference of `oci://registry/repository:tag` by its digest, in the form of kubelets."""
    return f"{_TAG.sub('', artifact.removeprefix('oci://'))}@{digest}"


def choose_mount(
    artifact: str,
    settings: Settings,
    facts: ClusterFacts,
    node: NodeMountFacts | None = None,
    found: ArtifactFacts | None = None,
) -> MountChoice:
    """Choose it. `node`: where the pod will be, None if not known yet; `found`: its artifact, None likewise."""
    if artifact.startswith("pvc://"):
        return MountChoice("claim", f"are in the claim {claim_of(artifact)[0]}, which is mounted as it is")
    mount = settings.weights.mount
    if mount == "hostPath":
        return MountChoice("hostPath", "are seen as a folder of their node, as Settings say (weights.mount: hostPath)")
    no_volume, no_image = _no_volume(facts, node), _no_image(artifact, settings, facts, node, found)
    if mount in {"auto", "volume"} and not no_volume:
        return MountChoice("volume", "are seen as a read-only volume of their node's store")
    if mount in {"auto", "image"} and not no_image:
        instead = f", since {no_volume}" if mount == "auto" else ", as Settings say (weights.mount: image)"
        return MountChoice("image", f"are mounted by the node's container runtime as an image{instead}")
    told = {"volume": no_volume, "image": no_image}.get(mount, f"{no_volume}, and {no_image}")
    return MountChoice(None, f"cannot be seen in its pods: {told}; {_fix(mount, facts)}")


def is_image_mount(artifact: str, settings: Settings, facts: ClusterFacts | None) -> bool:
    """Whether pods will mount it as an image, or not at all: then it is not pulled to any node."""
    if facts is None:
        return settings.weights.mount == "image" and artifact.startswith("oci://")
    return choose_mount(artifact, settings, facts).way == "image"


def explain_unmountable(
    artifact: str | None, settings: Settings, facts: ClusterFacts | None, what: str = "its weights",
    found: ArtifactFacts | None = None,
) -> str:  # fmt: skip
    """Why no pod on any node can mount such weights; empty if nothing is known to prevent it."""
    if artifact is None or facts is None or not is_mounted(artifact):
        return ""
    choice = choose_mount(artifact, settings, facts, found=found)
    return "" if choice.way else f"{what} {choice.reason}"


def _fix(mount: str, facts: ClusterFacts) -> str:
    if mount == "image":
        return "say weights.mount: auto in the Settings"
    if not facts.volumes:
        return f"put them into a claim (pvc://), {HOST_PATH}"
    return f"label the node, {HOST_PATH}"


def _no_volume(facts: ClusterFacts, node: NodeMountFacts | None) -> str:
    """Why a volume of the node's store is impossible; empty if it is not."""
    if not facts.volumes:
        return "no right is there to make PersistentVolumes"
    if node is not None and not node.hostname:
        return f"node {node.name} has no label kubernetes.io/hostname"
    return ""


def _no_image(
    artifact: str, settings: Settings, facts: ClusterFacts, node: NodeMountFacts | None, found: ArtifactFacts | None
) -> str:
    """Why an image volume is impossible; empty if it is not, or that is not known yet."""
    weights = settings.weights
    least = IMAGES_FROM if weights.mount == "image" else IMAGES_BY_DEFAULT
    if not artifact.startswith("oci://"):
        return "only images of registries are mounted as such"
    if found is not None and found.image is None:
        return found.why or "the artifact is not known to be an image that a container runtime mounts"
    if weights.signatures.policy == "enforce":
        return "signatures are judged only of what agents pull (weights.signatures.policy: enforce)"
    if facts.server is None:
        return "the version of the API server is not known"
    if facts.server < least:
        return f"the API server is Kubernetes {_said(facts.server)}, and images are mounted from {_said(least)}"
    return "" if node is None else _no_image_on(node, least)


def _no_image_on(node: NodeMountFacts, least: Version) -> str:
    kubelet = parse_version(node.kubelet)
    if kubelet is not None and kubelet < least:
        return f"the kubelet of node {node.name} is {_said(kubelet)}, and images are mounted from {_said(least)}"
    name, _, said = node.runtime.partition("://")
    runtime, wanted = parse_version(said), _RUNTIMES.get(name)
    if name and wanted is None:
        return f"the container runtime of node {node.name}, {name}, is not known to mount images"
    if runtime is not None and wanted is not None and runtime < wanted:
        return f"{name} on node {node.name} is {_said(runtime)}, and images are mounted from {_said(wanted)}"
    return ""


def parse_version(text: str) -> Version | None:
    """The first two numbers of `v1.36.3`; None if it is no version."""
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _said(of: Version) -> str:
    return f"{of[0]}.{of[1]}"
