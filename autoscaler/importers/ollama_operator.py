"""Converts Models of ollama-operator (`ollama.ayaka.io/v1`). Pure.

Each becomes a command that runs Ollama with one model, as for KubeAI's Models. The operator's number of replicas is
kept. Every key is converted or reported.

Source: https://github.com/nekomeowww/ollama-operator (api/ollama/v1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from autoscaler.documents.document_rules import is_alias
from autoscaler.importers.decode import (
    DocumentErrorContext,
    expand_object_lists,
    parse_yaml_documents,
    read_mapping,
    read_part,
)
from autoscaler.importers.kubeai.models import Source, write_ollama_spec
from autoscaler.importers.pod_template import convert_environment, keep_own, read_name, write_resources
from autoscaler.importers.result import ConversionError, ConversionResult, Document, Sketch
from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.document_names import simplify_name

API_VERSION = "ollama.ayaka.io/v1"
IMAGE = "ollama/ollama"
"""The image that the operator runs."""
STORE = "models"
"""Folder of the models in a claim that the operator mounts as Ollama's home."""
SPEC: Path = ("spec",)
REASONS = {
    "spec.imagePullPolicy": "Kubernetes' default is used",
    "spec.storageClassName": "each replica pulls the model: to share it, mount a claim with spec.persistentVolumeClaim",
    "spec.persistentVolume": "each replica pulls the model: to share it, mount a claim with spec.persistentVolumeClaim",
    "spec.envFrom": "list each variable in spec.env, with valueFrom for Secrets",
    "spec.podTemplate": "set the fields of the pod in spec.pod",
}


class OllamaModelSpec(Part, frozen=True):
    """The spec of a Model of the operator."""

    image: str
    """The name of the model in Ollama's registry."""
    replicas: Annotated[int, Meta(ge=0)] = 1
    image_pull_secrets: tuple[dict[str, object], ...] = ()
    resources: dict[str, object] = {}
    env: tuple[dict[str, object], ...] = ()
    persistent_volume_claim: dict[str, object] | str = ""


def convert_models(sources: Sequence[tuple[str, str]]) -> list[ConversionResult]:
    """Convert the Models in (file, text) pairs. Raises a one-line DocumentError."""
    out = []
    for source, text in sources:
        for number, value in enumerate(expand_object_lists(parse_yaml_documents(source, text)), 1):
            with DocumentErrorContext(source, value, number):
                whole = read_mapping(value, ())
                if whole.get("kind") != "Model" or whole.get("apiVersion") != API_VERSION:
                    key = "apiVersion" if whole.get("kind") == "Model" else "kind"
                    raise WrongKeyError((key,), f"expected Model ({API_VERSION})")
                out.append(_model(whole))
    return out


def _model(whole: Document) -> ConversionResult:
    name, namespace, metadata = read_name(whole)
    sketch = Sketch(name, namespace)
    if labels := keep_own(read_mapping(metadata.get("labels"), ("metadata", "labels"))):
        sketch.metadata["labels"] = labels
    spec = read_part(whole.get("spec"), OllamaModelSpec, SPEC, lambda key, why: sketch.tell(key, REASONS.get(key, why)))
    claim = spec.persistent_volume_claim
    claimed = str(claim.get("claimName") or "") if isinstance(claim, dict) else claim
    source = Source("pvc", f"{claimed}/{STORE}", {"model": spec.image}) if claimed else Source("ollama", spec.image, {})
    try:
        write_ollama_spec(source, (), sketch, talks=False)
    except ConversionError:
        return sketch.refused("spec.image: expected the name of a model in Ollama's registry, such as phi3:3.8b")
    own = read_mapping(sketch.spec.get("env"), ("env",))
    sketch.spec |= {"image": IMAGE, "env": own | convert_environment(spec.env, sketch)}
    write_resources(spec.resources, ("spec", "resources"), sketch)
    sketch.spec["replicas"] = {"min": spec.replicas, "max": max(spec.replicas, 1)}
    if not spec.replicas:
        sketch.spec["paused"] = True
    if spec.image_pull_secrets:
        sketch.pod["imagePullSecrets"] = list(spec.image_pull_secrets)
    if spec.image != name and is_alias(spec.image):
        sketch.spec["aliases"] = [spec.image]
    elif spec.image != name:
        sketch.tell("spec.image", f"clients must request {name}, not {simplify_name(spec.image)}")
    text = f"clients use the address of the gateway; set replicas.min to 0 to scale {name} to zero"
    return sketch.taken()._replace(about=(text,))
