"""Reads the KubeAI configuration that its Models refer to: resource profiles, images, the name of a Secret. Pure.

Starts from the defaults of KubeAI's chart and applies an installation's changes: the chart's values, or the ConfigMap
that the chart creates from them (`system.yaml`). Profiles count NVIDIA GPUs or CPUs. Profiles for other accelerators
are rejected, since Pilotlight cannot place them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from autoscaler.importers.decode import read_mapping, read_part
from autoscaler.importers.result import ConversionError, Document, Sketch
from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.quantity import whole_number

GPU = "nvidia.com/gpu"
SECRET = "kubeai-huggingface"  # noqa: S105  the name of a Secret
"""The Secret of KubeAI's chart with the Hugging Face token, under the key `token`."""
NARROW = frozenset({"t4", "l4", "a10", "l40"})
"""Products whose name is a prefix of another product's name."""
PRODUCTS = ("t4", "l4", "l40s", "l40", "a10g", "a10", "a16", "a100", "h100", "h200", "gh200", "b200", "v100")
_PRODUCT = re.compile(rf"(?:^|-)({'|'.join(PRODUCTS)}|rtx\w+)(?:-(\d+gb))?(?:-|$)")
_PROFILE = re.compile(r"([^:]+):([1-9]\d{0,3})")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")

Amount = str | int | float
GIVES_NVIDIA: Document = {"imageName": "nvidia-gpu", "limits": {GPU: "1"}}
PROFILES: dict[str, Document] = {
    "cpu": {"imageName": "cpu", "requests": {"cpu": 1, "memory": "2Gi"}},
    "nvidia-gpu-t4": GIVES_NVIDIA,
    "nvidia-gpu-l4": {**GIVES_NVIDIA, "requests": {"cpu": "6", "memory": "24Gi"}},
    "nvidia-gpu-l40s": {**GIVES_NVIDIA, "requests": {"cpu": "6", "memory": "24Gi"}},
    **{f"nvidia-gpu-{name}": GIVES_NVIDIA for name in ("h100", "a100-80gb", "a100-40gb", "a16", "rtx4070-8gb")},
    "nvidia-gpu-gh200": {**GIVES_NVIDIA, "imageName": "gh200"},
    "amd-gpu-mi300x": {"imageName": "amd-gpu", "limits": {"amd.com/gpu": "1"}},
}
"""Defaults of the chart."""
IMAGES: dict[str, dict[str, str]] = {
    "VLLM": {"default": "vllm/vllm-openai:v0.10.2", "cpu": "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.10.2"},
    "OLlama": {"default": "ollama/ollama:0.11.11"},
    "Infinity": {"default": "michaelf34/infinity:0.0.77", "cpu": "michaelf34/infinity:0.0.77-cpu"},
}
"""Engine -> the profile's `imageName` -> image: defaults of the chart."""


class ResourceProfile(Part, frozen=True):
    """One resource profile, with the amounts of one unit; a Model requests a number of units."""

    image_name: str = ""
    requests: dict[str, Amount] = {}
    limits: dict[str, Amount] = {}
    node_selector: dict[str, str] = {}
    affinity: dict[str, object] = {}
    tolerations: tuple[dict[str, object], ...] = ()
    scheduler_name: str = ""
    runtime_class_name: str = ""


class KubeAiConfig(NamedTuple):
    """The parts of KubeAI's configuration that its Models depend on."""

    profiles: Mapping[str, Document] = PROFILES
    images: Mapping[str, Mapping[str, str]] = IMAGES
    secret: str = SECRET
    """The Secret with the Hugging Face token; empty: these Models may read none."""

    def with_values(self, values: Document) -> KubeAiConfig:
        """Merge with the chart's values, or `system.yaml`. Raises WrongKeyError."""
        profiles = dict(self.profiles)
        for name, one in read_mapping(values.get("resourceProfiles"), ("resourceProfiles",)).items():
            profiles[name] = profiles.get(name, {}) | read_mapping(one, ("resourceProfiles", name))
        images = dict(self.images)
        for engine, one in read_mapping(values.get("modelServers"), ("modelServers",)).items():
            at: Path = ("modelServers", engine)
            given = read_mapping(read_mapping(one, at).get("images"), (*at, "images"))
            images[engine] = {**images.get(engine, {})} | {name: str(image) for name, image in given.items()}
        names = read_mapping(values.get("secretNames"), ("secretNames",))
        return KubeAiConfig(profiles, images, str(names.get("huggingface") or self.secret))

    def image(self, engine: str, image_name: str) -> str | None:
        """Return the image with which KubeAI starts an engine."""
        known = self.images.get(engine, {})
        return known.get(image_name) or known.get("default")


CHART = KubeAiConfig()
"""The defaults of KubeAI's chart."""


def is_kubeai_config(value: object) -> bool:
    """Whether a document is KubeAI's configuration and not a Kubernetes object."""
    return isinstance(value, dict) and "kind" not in value and bool({"resourceProfiles", "modelServers"} & value.keys())


def apply_resource_profile(wanted: str, system: KubeAiConfig, sketch: Sketch) -> str:
    """Convert `resourceProfile: NAME:COUNT` to `gpu`, `resources` and `pod`; return the name of its image.
    Raises ConversionError and WrongKeyError.
    """
    at: Path = ("spec", "resourceProfile")
    if not wanted:
        sketch.spec["gpu"] = {"count": 0}
        return ""
    found = _PROFILE.fullmatch(wanted)
    if found is None:
        raise WrongKeyError(at, "expected NAME:COUNT such as nvidia-gpu-l4:1")
    name, count = found[1], int(found[2])
    if name not in system.profiles:
        fix = "also pass the file with the profile: the chart's values, or the ConfigMap with system.yaml"
        raise ConversionError(
            f"spec.resourceProfile: profile {name} is neither in the given files nor in KubeAI's chart: {fix}"
        )
    profile = read_part(system.profiles[name], ResourceProfile, ("resourceProfiles", name), sketch.tell)
    amounts = profile.requests | profile.limits
    other = next((key for key in amounts if "/" in key and key != GPU), None)
    if other is not None:
        raise ConversionError(
            f"spec.resourceProfile: profile {name} needs {other}; Pilotlight supports only {GPU} and CPUs"
        )
    each = str(amounts.get(GPU, 0))
    number = whole_number(each)
    if number is None:
        raise WrongKeyError(("resourceProfiles", name, "limits", GPU), "expected a whole number")
    gpus = count * number
    products = _products(name)
    sketch.spec["gpu"] = {"count": gpus} | ({"models": products} if gpus and products else {})
    resources = {
        kind: {key: _times(amount, count) for key, amount in one.items() if key != GPU}
        for kind, one in (("requests", profile.requests), ("limits", profile.limits))
    }
    if present := {kind: one for kind, one in resources.items() if one}:
        sketch.spec["resources"] = present
    _pod(profile, name, sketch)
    return profile.image_name


def _pod(profile: ResourceProfile, name: str, sketch: Sketch) -> None:
    if "nodeAffinity" in profile.affinity:
        sketch.tell(f"resourceProfiles.{name}.affinity.nodeAffinity", "select nodes with spec.pod.nodeSelector")
    fields: Document = {
        "nodeSelector": profile.node_selector,
        "affinity": {key: one for key, one in profile.affinity.items() if key != "nodeAffinity"},
        "tolerations": [one for one in profile.tolerations if one.get("key") != GPU],  # replicas' pods have it anyway
        "schedulerName": profile.scheduler_name,
        "runtimeClassName": profile.runtime_class_name,
    }
    sketch.pod |= {key: one for key, one in fields.items() if one}


def _products(profile: str) -> list[str]:
    """Globs for a device's product, from a profile's name: `nvidia-gpu-a100-80gb`."""
    found = _PRODUCT.search(profile.lower())
    if found is None:
        return []
    product, memory = found[1].removeprefix("rtx"), found[2]
    if memory and not found[1].startswith("rtx"):
        return [f"*{product}*{memory}*"]
    return [f"*[- ]{product}", f"*[- ]{product}-*"] if product in NARROW else [f"*{product}*"]


def _times(amount: Amount, count: int) -> str:
    found = _QUANTITY.fullmatch(str(amount))
    if found is None:
        return str(amount)  # `finalize_document` reports the error
    return f"{float(found[1]) * count:g}{found[2]}"
