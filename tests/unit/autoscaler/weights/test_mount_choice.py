"""How weights are mounted into pods: the kind of volume, and the reason for it."""

from __future__ import annotations

import pytest

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.spec.settings import Settings, Signatures, Weights
from autoscaler.state.world import ClusterFacts
from autoscaler.weights import mount_choice
from autoscaler.weights.mount_choice import ArtifactFacts, MountChoice, NodeMountFacts

OCI = "oci://ghcr.io/acme/llama:8b"
DIGEST = "sha256:" + 64 * "a"
NEW = ClusterFacts(volumes=True, server=(1, 36))
NO_RIGHT = ClusterFacts(volumes=False, server=(1, 36))
NODE = NodeMountFacts("n1", "n1", "v1.36.3", "containerd://2.1.4")
IMAGE, MODELPACK = ArtifactFacts(DIGEST, image="models"), ArtifactFacts(DIGEST)


def weight_settings(**weights: object) -> Settings:
    return parse_documents(
        [("s.yaml", f"apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\nweights: {weights}")]
    ).settings


def chosen(
    mount: str = "auto",
    facts: ClusterFacts = NEW,
    node: NodeMountFacts | None = NODE,
    found: ArtifactFacts | None = IMAGE,
) -> MountChoice:
    return mount_choice.choose_mount(OCI, weight_settings(mount=mount), facts, node, found)


def test_auto_mount_prefers_a_volume_of_the_node_store() -> None:
    assert chosen() == ("volume", "are mounted as a read-only volume of their node's store")
    assert chosen("volume").way == "volume"
    assert chosen(found=None).way == "volume"
    assert chosen(node=None).way == "volume", "nothing is known against it"


def test_image_mount_is_chosen_if_volumes_cannot_be_created() -> None:
    assert chosen(facts=NO_RIGHT) == (
        "image",
        "are mounted by the node's container runtime as an image, since Pilotlight may not create PersistentVolumes",
    )
    nameless = NODE._replace(hostname="")
    assert "node n1 has no label kubernetes.io/hostname" in chosen(node=nameless).reason
    assert chosen("image") == (
        "image",
        "are mounted by the node's container runtime as an image, as Settings require (weights.mount: image)",
    )


@pytest.mark.parametrize(
    ("facts", "node", "found", "why"),
    [
        (NO_RIGHT, NODE, MODELPACK, "the artifact is not known to be an image that container runtimes can mount"),
        (ClusterFacts(), NODE, IMAGE, "the version of the API server is unknown"),
        (
            ClusterFacts(server=(1, 34)), NODE, IMAGE,
            "the API server runs Kubernetes 1.34, and image volumes require 1.35",
        ),
        (
            NO_RIGHT, NODE._replace(kubelet="v1.33.0"), IMAGE,
            "the kubelet of node n1 has version 1.33, and image volumes require 1.35",
        ),
        (
            NO_RIGHT, NODE._replace(runtime="containerd://1.7.27"), IMAGE,
            "containerd on node n1 has version 1.7, and image volumes require 2.1",
        ),
        (
            NO_RIGHT, NODE._replace(runtime="docker://28.0.1"), IMAGE,
            "the container runtime of node n1, docker, is not known to support image volumes",
        ),
    ],
)  # fmt: skip
def test_auto_mount_without_volume_or_image_gives_both_reasons_and_a_fix(
    facts: ClusterFacts, node: NodeMountFacts, found: ArtifactFacts, why: str
) -> None:
    way, reason = chosen(facts=facts, node=node, found=found)
    assert way is None
    assert reason == (
        f"cannot be mounted in its pods: Pilotlight may not create PersistentVolumes, and {why}; put them into a claim "
        "(pvc://), or set weights.mount: hostPath in Settings, if pod security admits it"
    )


def test_explicit_mount_setting_is_not_replaced_by_another_mount() -> None:
    volume, image = chosen("volume", NO_RIGHT), chosen("image", found=MODELPACK)
    assert volume.way is None
    assert "image" not in volume.reason
    no_image = "the artifact is not known to be an image that container runtimes can mount"
    assert image == (None, f"cannot be mounted in its pods: {no_image}; set weights.mount: auto in Settings")
    nameless = chosen("volume", node=NODE._replace(hostname=""))
    assert nameless.way is None
    assert "label the node, or set weights.mount: hostPath" in nameless.reason


def test_explicit_image_mount_is_allowed_on_older_versions_than_auto() -> None:
    older = NEW._replace(server=(1, 33))
    node = NODE._replace(kubelet="v1.33.1-gke.100", runtime="cri-o://1.33.0")
    assert chosen("image", older, node).way == "image"
    assert chosen("image", NEW._replace(server=(1, 30)), node).way is None


def test_image_mount_is_rejected_if_signatures_are_enforced() -> None:
    strict = Settings(weights=Weights(mount="image", signatures=Signatures(policy="enforce")))
    way, reason = mount_choice.choose_mount(OCI, strict, NEW, NODE, IMAGE)
    assert way is None
    assert "agents verify signatures only of weights that they pull" in reason


def test_host_path_is_used_only_if_set_in_the_settings() -> None:
    for facts in (NEW, NO_RIGHT, ClusterFacts()):
        assert chosen("hostPath", facts).way == "hostPath"
        assert all(chosen(mount, facts).way != "hostPath" for mount in ("auto", "volume", "image"))


def test_pvc_is_mounted_unchanged_under_every_mount_setting() -> None:
    for mount in ("auto", "volume", "image", "hostPath"):
        way, reason = mount_choice.choose_mount(
            "pvc://shared/llama/8b.gguf", weight_settings(mount=mount), ClusterFacts()
        )
        assert (way, reason) == ("claim", "are in the claim shared, which is mounted as it is")
    assert mount_choice.path_of("pvc://shared/llama/8b.gguf") == "/weights/llama/8b.gguf"
    assert [mount_choice.path_of(one) for one in ("pvc://shared", "pvc://shared/", OCI, None)] == [
        "/weights", "/weights", None, None,
    ]  # fmt: skip


def test_only_a_known_unmountable_artifact_blocks_a_start() -> None:
    none = ClusterFacts(server=(1, 30))
    assert mount_choice.explain_unmountable(OCI, weight_settings(), none).startswith(
        "its weights cannot be mounted in its pods: Pilotlight may not create"
    )
    assert not mount_choice.explain_unmountable(OCI, weight_settings(), None), (
        "the cluster's features are not known yet"
    )
    assert not mount_choice.explain_unmountable(OCI, weight_settings(), NEW)
    assert not mount_choice.explain_unmountable("pvc://shared", weight_settings(), none)
    for mount, facts in (("image", NEW), ("auto", NO_RIGHT)):
        assert not mount_choice.explain_unmountable(OCI, weight_settings(mount=mount), facts), (
            "the artifact has not been inspected yet"
        )
        why = mount_choice.explain_unmountable(
            OCI, weight_settings(mount=mount), facts, found=ArtifactFacts(DIGEST, why="it is not an image (ModelPack)")
        )
        assert "it is not an image (ModelPack)" in why
        assert not mount_choice.explain_unmountable(OCI, weight_settings(mount=mount), facts, found=IMAGE)
    assert mount_choice.explain_unmountable("hf://a/b", weight_settings(), none), "its engine does not fetch it"
    assert not mount_choice.explain_unmountable(None, weight_settings(), none)


def test_image_mount_applies_if_set_or_if_volumes_are_unavailable() -> None:
    assert mount_choice.is_image_mount(OCI, weight_settings(mount="image"), NEW)
    assert mount_choice.is_image_mount(OCI, weight_settings(mount="image"), None), (
        "it is no volume, regardless of the cluster's features"
    )
    assert mount_choice.is_image_mount(OCI, weight_settings(), NO_RIGHT)
    for mount, facts in (("auto", NEW), ("auto", None), ("volume", NO_RIGHT), ("hostPath", NO_RIGHT)):
        assert not mount_choice.is_image_mount(OCI, weight_settings(mount=mount), facts)
    assert not mount_choice.is_image_mount(OCI, weight_settings(mount="image"), NEW._replace(server=(1, 30))), (
        "it is impossible"
    )
    assert not mount_choice.is_image_mount("pvc://a", weight_settings(mount="image"), NEW)


@pytest.mark.parametrize(
    ("artifact", "image"),
    [
        ("oci://ghcr.io/acme/llama:8b", "ghcr.io/acme/llama"),
        ("oci://localhost:5000/llama", "localhost:5000/llama"),
        (f"oci://r:5000/a/b:1@{DIGEST}", "r:5000/a/b"),
        (f"oci://r.io/a@{DIGEST}", "r.io/a"),
    ],
)
def test_mounted_image_reference_has_the_digest_instead_of_the_tag(artifact: str, image: str) -> None:
    assert mount_choice.image_of(artifact, DIGEST) == f"{image}@{DIGEST}"


def test_pulled_and_pvc_artifacts_are_mounted_but_local_files_are_not() -> None:
    assert [one for one in (OCI, "pvc://a", "file:///a", "hf://a/b", "", None) if mount_choice.is_mounted(one)] == [
        OCI, "pvc://a", "hf://a/b",
    ]  # fmt: skip


def test_unknown_mount_setting_is_rejected_with_the_allowed_values() -> None:
    with pytest.raises(DocumentError, match=r"weights\.mount: expected one of auto, hostPath, image, volume"):
        weight_settings(mount="hostpath")
