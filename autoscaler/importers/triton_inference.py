"""Converts objects of kind `Inference` that run Triton. Pure.

KubeDL (`serving.kubedl.io/v1alpha1`) lists predictors, each with a pod template; each becomes a Model. Of the
`Inference` of other operators, a pod template in `spec.template` or the fields of a container in `spec` are read. The
model repository becomes the artifact: `--model-repository` of the command, or a key of the spec. Every key is converted
or reported.

Source: https://github.com/kubedl-io/kubedl (apis/serving/v1alpha1/inference_types.go).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from autoscaler.importers.command_line import CommandLine, unwrap_shell
from autoscaler.importers.decode import (
    DocumentErrorContext,
    expand_object_lists,
    parse_yaml_documents,
    read_mapping,
    read_part,
)
from autoscaler.importers.pod_template import (
    REPLICAS_MAX,
    Container,
    PodSpec,
    convert_environment,
    keep_own,
    read_name,
    write_pod,
    write_resources,
)
from autoscaler.importers.result import ConversionError, ConversionResult, Document, Sketch
from autoscaler.spec.decode import Part, Path, WrongKeyError, format_path

KIND = "Inference"
SPEC: Path = ("spec",)
REPOSITORY_KEYS = ("modelRepository", "modelRepositoryPath", "modelStore", "storageUri")
"""Keys of a spec that name the model repository."""
SERVER_FLAGS = ("--http-port", "--http-address", "--grpc-port", "--metrics-port", "--model-control-mode")
"""Flags that Pilotlight sets itself."""
REASONS = {
    "modelVersion": "push the files of the ModelVersion as an artifact (pilotlight weights push)",
    "modelPath": "the artifact is mounted where Pilotlight chooses",
    "trafficWeight": "requests are not split between predictors: each is a Model of its own",
    "batching": "set dynamic_batching in the config.pbtxt of the model",
    "autoScaler": "Pilotlight scales by requests and slots",
    "imagePullPolicy": "Kubernetes' default is used",
    "livenessProbe": "Pilotlight checks engines itself",
    "readinessProbe": "a replica is ready when Triton has loaded its model",
    "startupProbe": "spec.start.secondsMax limits a start",
    "ports": "Pilotlight chooses the port",
    "securityContext": "set spec.pod.securityContext",
    "initContainers": "weights come from spec.artifact or a volume",
}
"""Keys without an equivalent."""
Count = Annotated[int, Meta(ge=0)]


class AutoScale(Part, frozen=True):
    """The bounds of a predictor."""

    min_replicas: Count = 0
    max_replicas: Count = 0


class Predictor(Part, frozen=True):
    """A predictor of KubeDL. Other operators have one, whose keys are those of the spec."""

    name: str = ""
    replicas: Count = 1
    template: dict[str, object] = {}
    auto_scale: dict[str, object] = {}


def convert_inferences(sources: Sequence[tuple[str, str]]) -> list[ConversionResult]:
    """Convert the Inferences in (file, text) pairs. Raises a one-line DocumentError."""
    out = []
    for source, text in sources:
        for number, value in enumerate(expand_object_lists(parse_yaml_documents(source, text)), 1):
            with DocumentErrorContext(source, value, number):
                whole = read_mapping(value, ())
                if whole.get("kind") != KIND:
                    raise WrongKeyError(("kind",), f"expected {KIND}")
                out += _inference(whole)
    return out


def _inference(whole: Document) -> list[ConversionResult]:
    """Convert each predictor. Raises WrongKeyError."""
    name, namespace, metadata = read_name(whole)
    labels = keep_own(read_mapping(metadata.get("labels"), ("metadata", "labels")))
    spec = read_mapping(whole.get("spec"), SPEC)
    framework = spec.get("framework", "Triton")
    if framework != "Triton":
        return [Sketch(name, namespace).refused("spec.framework: expected Triton: no engine serves models of others")]
    given = spec.get("predictors")
    if given is not None and not isinstance(given, list):
        raise WrongKeyError((*SPEC, "predictors"), "expected a list")
    predictors: list[tuple[object, Path]] = [(one, (*SPEC, "predictors", n)) for n, one in enumerate(given or ())]
    out = []
    for value, at in predictors or [({key: spec[key] for key in spec.keys() - {"framework"}}, SPEC)]:
        one = read_mapping(value, at)
        own = str(one.get("name") or "") if len(predictors) > 1 else ""
        sketch = Sketch(f"{name}-{own}" if own else name, namespace)
        if labels:
            sketch.metadata["labels"] = labels
        try:
            _predictor(one, at, sketch)
        except ConversionError as error:
            out.append(sketch.refused(str(error)))
            continue
        text = f"clients use the address of the gateway; the model repository must contain a folder {sketch.name}"
        out.append(sketch.taken()._replace(about=(text,)))
    return out


def _predictor(value: Document, at: Path, sketch: Sketch) -> None:
    """Write the Model of one predictor. Raises ConversionError, WrongKeyError."""

    def tell(key: str, why: str) -> None:
        sketch.tell(key, REASONS.get(key.rpartition(".")[2], why))

    in_spec, in_container = _keys(PodSpec), _keys(Container) - {"name"}
    repository = next((str(value[key]) for key in REPOSITORY_KEYS if value.get(key)), "")
    own = {key: one for key, one in value.items() if key not in {*REPOSITORY_KEYS, *in_spec, *in_container}}
    predictor = read_part(own, Predictor, at, tell)
    _replicas(predictor, at, tell, sketch)
    pod_at, given = (*at, "template", "spec"), read_mapping(predictor.template.get("spec"), (*at, "template", "spec"))
    about_at: Path = (*at, "template", "metadata")
    about = read_mapping(predictor.template.get("metadata"), about_at)
    for key in ("labels", "annotations"):
        if kept := keep_own(read_mapping(about.get(key), (*about_at, key))):
            sketch.pod[key] = kept
    if not predictor.template:
        container = {key: one for key, one in value.items() if key in in_container}
        pod_at, given = at, {key: one for key, one in value.items() if key in in_spec} | {"containers": [container]}
    pod = read_part(given, PodSpec, pod_at, tell)
    write_pod(pod, sketch)
    if len(pod.containers) != 1:
        raise ConversionError(f"{format_path((*pod_at, 'containers'))}: expected one container, with Triton")
    _container(read_part(pod.containers[0], Container, (*pod_at, "containers", 0), tell), repository, sketch)


def _keys(kind: type[Part]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def _replicas(predictor: Predictor, at: Path, tell: Callable[[str, str], None], sketch: Sketch) -> None:
    bounds = read_part(predictor.auto_scale, AutoScale, (*at, "autoScale"), tell)
    least, most = bounds.min_replicas, bounds.max_replicas
    if not predictor.auto_scale:
        least, most = predictor.replicas, max(predictor.replicas, 1)
        sketch.spec |= {} if predictor.replicas else {"paused": True}
    sketch.spec["replicas"] = {"min": least, "max": most or REPLICAS_MAX}


def _container(container: Container, repository: str, sketch: Sketch) -> None:
    """Write engine `triton` with the model repository as its artifact. Raises ConversionError, WrongKeyError."""
    words = unwrap_shell([*container.command, *container.args])
    if words and words[0].rpartition("/")[2] == "tritonserver":
        del words[0]
    line = CommandLine(words)
    repository = line.take("--model-repository", "--model-store") or repository
    for flag in SERVER_FLAGS:
        line.take(flag)
    for flag in ("--allow-http", "--allow-grpc", "--allow-metrics"):
        line.take(flag)
    if (model := line.take("--load-model")) not in {None, "*", sketch.name}:
        sketch.tell("args --load-model", f"the Model loads {sketch.name}: rename it to {model}")
    if repository.startswith("/"):
        repository = f"file://{repository}"
    if not repository.startswith(("file:///", "s3://")):
        raise ConversionError(
            "the model repository was not found: pass it as --model-repository, as a path of a volume or s3://"
        )
    write_resources(container.resources, ("resources",), sketch)
    sketch.spec |= {
        "engine": "triton",
        "artifact": repository,
        "image": container.image,
        "args": line.left,
        "env": convert_environment(container.env, sketch),
    }
    for key, given in (("ports", container.ports), ("readinessProbe", container.readiness_probe)):
        if given:
            sketch.tell(key, REASONS[key])
    if container.volume_mounts:
        sketch.pod["volumeMounts"] = list(container.volume_mounts)
