"""Chooses the kind of volume by which an engine's pod mounts its weights, and explains why. Pure.

If a node's agent pulls the weights (`oci://` and similar schemes), the pod mounts the node's copy as a volume of that
node. Otherwise it mounts the artifact as an image volume, if the artifact is an image and all components support that.
The node's directory is mounted by hostPath only if the Settings require it, because pod security `restricted` rejects
it. A claim (`pvc://`) is mounted unchanged, and so is a Dataset of Fluid, which creates a claim of its own name. Image
volumes: Kubernetes KEP-4639 (beta and enabled from 1.35), containerd from 2.1, CRI-O from 1.31.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from autoscaler.spec.artifact_name import is_stored
from autoscaler.spec.settings import Settings
from autoscaler.state.world import ClusterFacts, Version

Way = Literal["volume", "image", "claim", "hostPath"]

MOUNT = "/weights"
"""Mount path of the weights in an engine's container."""
ADAPTERS = "/adapters"
"""Mount path of the adapters' weights, each below its name."""
IMAGES_FROM, IMAGES_BY_DEFAULT = (1, 31), (1, 35)
"""The versions of Kubernetes that support image volumes if they are enabled, and that enable them by default."""
_RUNTIMES: dict[str, Version] = {"containerd": (2, 1), "cri-o": (1, 31)}
_VERSION = re.compile(r"v?([0-9]{1,9})\.([0-9]{1,9})")
_TAG = re.compile(r"(@[a-z0-9]+:[0-9a-f]+)$|(:[^/:@]+)?(@[a-z0-9]+:[0-9a-f]+)?$")
HOST_PATH = "or set weights.mount: hostPath in Settings, if pod security admits it"


class NodeMountFacts(NamedTuple):
    """Facts that a node reports about itself."""

    name: str
    hostname: str = ""
    """The label to which volumes are bound."""
    kubelet: str = ""
    """The version of the kubelet."""
    runtime: str = ""
    """The container runtime, as reported: `containerd://2.1.4`."""


class ArtifactFacts(NamedTuple):
    """Known facts about an artifact."""

    digest: str = ""
    """The digest of the manifest."""
    folder: str = ""
    """The directory of the node's copy, below the store. Empty: there is none."""
    file: str = ""
    """The file that the engine loads, below that directory. Empty: the whole directory."""
    image: str | None = None
    """The directory of the model in the image, if it is an image whose layers are a file system. None: it is not."""
    why: str = ""
    """The reason why it is not an image, if known."""


class MountChoice(NamedTuple):
    """The chosen mount. `way` is None if no mount is possible."""

    way: Way | None
    reason: str
    """The rest of a sentence that begins with "the weights of the model"."""


def is_mounted(artifact: str | None) -> bool:
    """Return whether Pilotlight provides a volume with such weights to the pod."""
    return is_stored(artifact) or (artifact or "").startswith("pvc://")


def claim_of(artifact: str) -> tuple[str, str]:
    """Return (claim, path in the claim) of `pvc://claim/path`."""
    claim, _, path = artifact.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def path_of(artifact: str | None) -> str | None:
    """Return the path in a claim from which the engine loads. None: the weights are in no claim."""
    if artifact is None or not artifact.startswith("pvc://"):
        return None
    return "/".join(filter(None, (MOUNT, claim_of(artifact)[1])))


def image_of(artifact: str, digest: str) -> str:
    """Return the reference of `oci://registry/repository:tag` by its digest, in the form that kubelets use."""
    return f"{_TAG.sub('', artifact.removeprefix('oci://'))}@{digest}"


def choose_mount(
    artifact: str,
    settings: Settings,
    facts: ClusterFacts,
    node: NodeMountFacts | None = None,
    found: ArtifactFacts | None = None,
) -> MountChoice:
    """Choose the mount. `node`: the pod's node, None if unknown; `found`: facts about the artifact, None if unknown."""
    if artifact.startswith("pvc://"):
        return MountChoice("claim", f"are in the claim {claim_of(artifact)[0]}, which is mounted as it is")
    mount = settings.weights.mount
    if mount == "hostPath":
        return MountChoice(
            "hostPath", "are mounted as a folder of their node, as Settings require (weights.mount: hostPath)"
        )
    no_volume, no_image = _no_volume(facts, node), _no_image(artifact, settings, facts, node, found)
    if mount in {"auto", "volume"} and not no_volume:
        return MountChoice("volume", "are mounted as a read-only volume of their node's store")
    if mount in {"auto", "image"} and not no_image:
        instead = f", since {no_volume}" if mount == "auto" else ", as Settings require (weights.mount: image)"
        return MountChoice("image", f"are mounted by the node's container runtime as an image{instead}")
    reasons = {"volume": no_volume, "image": no_image}.get(mount, f"{no_volume}, and {no_image}")
    return MountChoice(None, f"cannot be mounted in its pods: {reasons}; {_fix(mount, facts)}")


def is_image_mount(artifact: str, settings: Settings, facts: ClusterFacts | None) -> bool:
    """Return whether pods mount it as an image, or not at all, so that nodes need not pull it."""
    if facts is None:
        return settings.weights.mount == "image" and artifact.startswith("oci://")
    return choose_mount(artifact, settings, facts).way == "image"


def explain_unmountable(
    artifact: str | None, settings: Settings, facts: ClusterFacts | None, what: str = "its weights",
    found: ArtifactFacts | None = None,
) -> str:  # fmt: skip
    """Explain why no pod on any node can mount such weights. Empty: no obstacle is known."""
    if artifact is None or facts is None or not is_mounted(artifact):
        return ""
    choice = choose_mount(artifact, settings, facts, found=found)
    return "" if choice.way else f"{what} {choice.reason}"


def _fix(mount: str, facts: ClusterFacts) -> str:
    if mount == "image":
        return "set weights.mount: auto in Settings"
    if not facts.volumes:
        return f"put them into a claim (pvc://), {HOST_PATH}"
    return f"label the node, {HOST_PATH}"


def _no_volume(facts: ClusterFacts, node: NodeMountFacts | None) -> str:
    """Explain why a volume of the node's store is impossible. Empty: it is possible."""
    if not facts.volumes:
        return "Pilotlight may not create PersistentVolumes"
    if node is not None and not node.hostname:
        return f"node {node.name} has no label kubernetes.io/hostname"
    return ""


def _no_image(
    artifact: str, settings: Settings, facts: ClusterFacts, node: NodeMountFacts | None, found: ArtifactFacts | None
) -> str:
    """Explain why an image volume is impossible. Empty: it is possible, or that is unknown."""
    weights = settings.weights
    least = IMAGES_FROM if weights.mount == "image" else IMAGES_BY_DEFAULT
    if not artifact.startswith("oci://"):
        return "only registry images (oci://) can be mounted as images"
    if found is not None and found.image is None:
        return found.why or "the artifact is not known to be an image that container runtimes can mount"
    if weights.signatures.policy == "enforce":
        return "agents verify signatures only of weights that they pull (weights.signatures.policy: enforce)"
    if facts.server is None:
        return "the version of the API server is unknown"
    if facts.server < least:
        return f"the API server runs Kubernetes {_said(facts.server)}, and image volumes require {_said(least)}"
    return "" if node is None else _no_image_on(node, least)


def _no_image_on(node: NodeMountFacts, least: Version) -> str:
    kubelet = parse_version(node.kubelet)
    if kubelet is not None and kubelet < least:
        return f"the kubelet of node {node.name} has version {_said(kubelet)}, and image volumes require {_said(least)}"
    name, _, said = node.runtime.partition("://")
    runtime, wanted = parse_version(said), _RUNTIMES.get(name)
    if name and wanted is None:
        return f"the container runtime of node {node.name}, {name}, is not known to support image volumes"
    if runtime is not None and wanted is not None and runtime < wanted:
        return f"{name} on node {node.name} has version {_said(runtime)}, and image volumes require {_said(wanted)}"
    return ""


def parse_version(text: str) -> Version | None:
    """Return the first two numbers of `v1.36.3`. None: it is not a version."""
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _said(of: Version) -> str:
    return f"{of[0]}.{of[1]}"
