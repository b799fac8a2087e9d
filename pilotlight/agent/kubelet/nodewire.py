"""What a node's own daemons say and are told: which pod has which devices (PodResources v1); images (CRI v1).

Pure: answers of theirs as bytes, in their protocol-buffer form, become what an agent tells, and what is asked of them
such bytes. Only the fields that are wanted are known here, by their numbers:
https://github.com/kubernetes/kubernetes/blob/v1.34.0/staging/src/k8s.io/kubelet/pkg/apis/podresources/v1/api.proto
https://github.com/kubernetes/kubernetes/blob/v1.34.0/staging/src/k8s.io/cri-api/pkg/apis/runtime/v1/api.proto
"""

from __future__ import annotations

from typing import NamedTuple

from artifacts.credentials.docker_config import Login
from artifacts.protobuf import messages, text, texts, written

LIST_PODS = "/v1.PodResourcesLister/List"
LIST_IMAGES = "/runtime.v1.ImageService/ListImages"
PULL_IMAGE = "/runtime.v1.ImageService/PullImage"
VENDOR = "nvidia.com/"
"""Of the resources whose devices are told."""
SHARED = "::"
"""What comes after a device's id where a device plug-in offers it several times."""
IMAGES_MAX = 2000
"""Names of images that are told: 200 images with all their names fit, and so does the report."""


class AssignedPod(NamedTuple):
    """A pod that has devices."""

    namespace: str
    name: str
    devices: tuple[str, ...]
    """Ids as the driver has them, in order."""


def assigned(answer: bytes) -> tuple[AssignedPod, ...]:
    """Pods with devices of VENDOR, in order. Raises ProtobufError.

    ListPodResourcesResponse {1: PodResources {1: name, 2: namespace, 3: ContainerResources {2: ContainerDevices
    {1: resource_name, 2: device_ids}}}}.
    """
    found: list[AssignedPod] = []
    for pod in messages(answer, 1):
        devices = {
            id.partition(SHARED)[0]
            for container in messages(pod, 3)
            for one in messages(container, 2)
            if text(one, 1).startswith(VENDOR)
            for id in texts(one, 2)
        }
        if devices:
            found.append(AssignedPod(text(pod, 2), text(pod, 1), tuple(sorted(devices))))
    return tuple(sorted(found))


def images(answer: bytes) -> tuple[str, ...]:
    """All names of the images that are there, in order, IMAGES_MAX at most. Raises ProtobufError.

    ListImagesResponse {1: Image {2: repo_tags, 3: repo_digests}}.
    """
    names = {name for image in messages(answer, 1) for number in (2, 3) for name in texts(image, number)}
    return tuple(sorted(names)[:IMAGES_MAX])


def pull_image(image: str, login: Login | None) -> bytes:
    """PullImageRequest {1: ImageSpec {1: image}, 2: AuthConfig {1: username, 2: password, 5: identity_token,
    6: registry_token}}.
    """
    if login is None:
        return written((1, written((1, image))))
    tokens = (5, login.identity_token), (6, login.registry_token)
    return written((1, written((1, image))), (2, written((1, login.user), (2, login.password), *tokens)))


def pulled(answer: bytes) -> str:
    """What the runtime calls the image that it pulled. Raises ProtobufError. PullImageResponse {1: image_ref}."""
    return text(answer, 1)
