"""How an engine's pod sees its weights: which kind of volume, and why that one. Pure.

Owns the choice and its words. Of what a node's agent pulls (`oci://` and the like) the node's Copy is mounted, as a
volume of that node; else the artifact itself as an image volume, where it is an image and all who mount it can; the
node's folder by hostPath only where Settings say so, since pod security `restricted` refuses it. A claim (`pvc://`) is
mounted as it is, and so is a Dataset of Fluid, which makes a claim of its own name. Kubernetes: KEP-4639 for images
(beta and on from 1.35), containerd from 2.1, CRI-O from 1.31.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from autoscaler.spec.artifact import is_stored
from autoscaler.spec.settings import Settings
from autoscaler.state.world import ClusterFacts, Version

Way = Literal["volume", "image", "claim", "hostPath"]

MOUNT = "/weights"
"""Where an engine's container sees them."""
ADAPTERS = "/adapters"
"""And adapters' weights, each below its name."""
IMAGES_FROM, IMAGES_BY_DEFAULT = (1, 31), (1, 35)
"""Versions of Kubernetes that know image volumes, where somebody switched them on; and that have them on."""
_RUNTIMES: dict[str, Version] = {"containerd": (2, 1), "cri-o": (1, 31)}
_VERSION = re.compile(r"v?([0-9]+)\.([0-9]+)")
_TAG = re.compile(r"(@[a-z0-9]+:[0-9a-f]+)$|(:[^/:@]+)?(@[a-z0-9]+:[0-9a-f]+)?$")
HOST_PATH = "or say weights.mount: hostPath in the Settings, where pod security lets it in"


class NodeMountFacts(NamedTuple):
    """What a node says of itself."""

    name: str
    hostname: str = ""
    """Its label, by which volumes are bound to it."""
    kubelet: str = ""
    """Its version."""
    runtime: str = ""
    """As it says: `containerd://2.1.4`."""


class ArtifactFacts(NamedTuple):
    """What is known of an artifact."""

    digest: str = ""
    """Of its manifest."""
    folder: str = ""
    """Of its Copy on the node, below the store; empty: there is none."""
    file: str = ""
    """What the engine loads, below that folder; empty: all of it."""
    image: str | None = None
    """It is an image whose layers are a file system, and the model lies in this folder of it; None: it is none."""
    why: str = ""
    """Why it is none, as far as that is known."""


class MountChoice(NamedTuple):
    """`way` None: there is none."""

    way: Way | None
    reason: str
    """The end of a sentence about the Model's weights."""


def is_mounted(artifact: str | None) -> bool:
    """Whether such weights come into a pod by a volume of ours."""
    return is_stored(artifact) or (artifact or "").startswith("pvc://")


def claim_of(artifact: str) -> tuple[str, str]:
    """(claim, path in it) of `pvc://claim/path`."""
    claim, _, path = artifact.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def path_of(artifact: str | None) -> str | None:
    """What the engine is told to load out of a claim; None: they are in none."""
    if artifact is None or not artifact.startswith("pvc://"):
        return None
    return "/".join(filter(None, (MOUNT, claim_of(artifact)[1])))


def image_of(artifact: str, digest: str) -> str:
    """The reference of `oci://registry/repository:tag` by its digest, as kubelets take it."""
    return f"{_TAG.sub('', artifact.removeprefix('oci://'))}@{digest}"


def choose_mount(
    artifact: str,
    settings: Settings,
    facts: ClusterFacts,
    node: NodeMountFacts | None = None,
    found: ArtifactFacts | None = None,
) -> MountChoice:
    """`node`: where its pod will be; None: that is not known yet. `found`: of its artifact; None: the same."""
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
    """Whether pods will mount it as an image, or not at all: nothing of it is to be brought to any node."""
    if facts is None:
        return settings.weights.mount == "image" and artifact.startswith("oci://")
    return choose_mount(artifact, settings, facts).way == "image"


def explain_unmountable(
    artifact: str | None, settings: Settings, facts: ClusterFacts | None, what: str = "its weights",
    found: ArtifactFacts | None = None,
) -> str:  # fmt: skip
    """Why no pod can see such weights, wherever it is; empty: nothing is known to stand in the way."""
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
    """Why a volume of the node's store is impossible; empty: it is not."""
    if not facts.volumes:
        return "no right is there to make PersistentVolumes"
    if node is not None and not node.hostname:
        return f"node {node.name} has no label kubernetes.io/hostname"
    return ""


def _no_image(
    artifact: str, settings: Settings, facts: ClusterFacts, node: NodeMountFacts | None, found: ArtifactFacts | None
) -> str:
    """Why an image volume is impossible; empty: it is not, or nobody knows yet."""
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
    """The first two numbers of `v1.36.3`; None: it is no version."""
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _said(of: Version) -> str:
    return f"{of[0]}.{of[1]}"
