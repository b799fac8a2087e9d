"""Converts Services of Knative Serving (`serving.knative.dev/v1`) whose container is an LLM engine. Pure.

vLLM becomes engine `vllm`. Any other engine becomes engine `command` if the manifest contains its command, or if its
image is one of llama.cpp. Names under which the engine serves its model become aliases, because clients request them.
Every key is converted or reported.

Source: https://knative.dev/docs/serving/reference/serving-api/ and
https://knative.dev/docs/serving/autoscaling/ (annotations).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoscaler.documents.document_rules import is_alias
from autoscaler.importers.command_line import CommandLine, unwrap_shell
from autoscaler.importers.decode import (
    DocumentErrorContext,
    expand_object_lists,
    parse_yaml_documents,
    read_mapping,
    read_part,
    simplify_number,
)
from autoscaler.importers.kubeai.models import Source, write_vllm_spec
from autoscaler.importers.pod_template import (
    REPLICAS_MAX,
    Container,
    Count,
    PodSpec,
    convert_environment,
    keep_own,
    read_name,
    write_pod,
    write_resources,
)
from autoscaler.importers.result import ConversionError, ConversionResult, Document, Sketch
from autoscaler.spec.decode import Path, WrongKeyError
from autoscaler.spec.document_names import simplify_name

API_VERSION = "serving.knative.dev/v1"
SCALING, SERVING = "autoscaling.knative.dev/", "serving.knative.dev/"
PORT, PORT_DEFAULT = "{port}", 8080
"""Placeholder of the port, and Knative's default of `containerPort`."""
TARGET = 100
"""Knative's default for requests per replica without a limit."""
LLAMA_SERVER = "/app/llama-server"
"""The entry point of llama.cpp's images."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class Revision(PodSpec, frozen=True):
    """The spec of a revision."""

    container_concurrency: Count = 0
    timeout_seconds: Count = 0
    response_start_timeout_seconds: Count = 0
    idle_timeout_seconds: Count = 0


REASONS = {
    "traffic": "requests are not split between revisions: a changed Model replaces its replicas (spec.rollout)",
    "envFrom": "list each variable in spec.env, with valueFrom for Secrets",
    "livenessProbe": "Pilotlight checks engines itself",
    "startupProbe": "spec.start.secondsMax limits a start",
    "securityContext": "set spec.pod.securityContext",
    "imagePullPolicy": "Kubernetes' default is used",
    "initContainers": "weights come from spec.artifact or a volume",
    "enableServiceLinks": "replicas have no links to Services",
    "affinity": "set spec.pod.affinity; Pilotlight sets nodeAffinity",
}
"""Known keys without an equivalent."""


def convert_services(sources: Sequence[tuple[str, str]]) -> list[ConversionResult]:
    """Convert the Services of Knative in (file, text) pairs; other objects are skipped. Raises DocumentError."""
    out = []
    for source, text in sources:
        for number, value in enumerate(expand_object_lists(parse_yaml_documents(source, text)), 1):
            with DocumentErrorContext(source, value, number):
                whole = read_mapping(value, ())
                is_knative = str(whole.get("apiVersion", "")).startswith(SERVING)
                if is_knative and whole.get("kind") == "Service":
                    out.append(_service(whole))
                elif "kind" not in whole:
                    raise WrongKeyError(("kind",), f"expected Service ({API_VERSION})")
    return out


def _service(whole: Document) -> ConversionResult:
    name, namespace, metadata = read_name(whole)
    sketch = Sketch(name, namespace)
    if labels := keep_own(
        read_mapping(metadata.get("labels"), ("metadata", "labels")), ("networking.knative.dev/", SERVING)
    ):
        sketch.metadata["labels"] = labels
    spec = read_mapping(whole.get("spec"), ("spec",))
    for key in spec.keys() - {"template"}:
        _tell(sketch, f"spec.{key}", "")
    template = read_mapping(spec.get("template"), ("spec", "template"))
    about = read_mapping(template.get("metadata"), ("spec", "template", "metadata"))
    if about.get("labels"):
        sketch.tell("spec.template.metadata.labels", "set spec.pod.labels")
    at: Path = ("spec", "template", "spec")
    revision = read_part(template.get("spec"), Revision, at, lambda key, why: _tell(sketch, key, why))
    try:
        _scaling(read_mapping(about.get("annotations"), (*at[:2], "metadata", "annotations")), revision, sketch)
        _containers(revision, at, sketch)
    except ConversionError as error:
        return sketch.refused(str(error))
    write_pod(revision, sketch)
    text = f"clients use the address of the gateway, and request the Model {name} or one of its aliases"
    return sketch.taken()._replace(about=(text,))


def _tell(sketch: Sketch, key: str, why: str) -> None:
    sketch.tell(key, REASONS.get(key.rpartition(".")[2], why or "this import does not support the key"))


# --- scaling ----------------------------------------------------------------------------------------------------------


def _scaling(annotations: Document, revision: Revision, sketch: Sketch) -> None:
    """Convert the bounds, the concurrency and the timeouts. Raises ConversionError."""
    left = {key: str(value) for key, value in annotations.items()}
    most = _number(left, "max-scale", "maxScale")
    sketch.spec["replicas"] = {"min": _number(left, "min-scale", "minScale"), "max": most or REPLICAS_MAX}
    target = _number(left, "target") if left.get(f"{SCALING}metric", "concurrency") == "concurrency" else 0
    sketch.spec["slots"] = revision.container_concurrency or target or TARGET
    idle_s = [
        _duration(left, f"{SCALING}{name}") for name in ("scale-to-zero-pod-retention-period", "scale-down-delay")
    ]
    if max(idle_s):
        sketch.spec["idleSeconds"] = simplify_number(max(idle_s))
    start_s = _duration(left, f"{SERVING}progress-deadline")
    if start_s:
        sketch.spec["start"] = {"secondsMax": simplify_number(start_s)}
    for seconds, key in (
        (revision.timeout_seconds, "responseSecondsMax"),
        (revision.response_start_timeout_seconds, "firstByteSecondsMax"),
        (revision.idle_timeout_seconds, "stallSecondsMax"),
    ):
        if seconds:
            sketch.spec[key] = seconds
    for key in [key for key in left if key.startswith((SCALING, SERVING))]:
        sketch.tell(key, "Pilotlight scales by requests and slots, and has no equivalent")
        del left[key]
    if own := keep_own(left):
        sketch.pod["annotations"] = own


def _number(annotations: dict[str, str], *names: str) -> int:
    """Remove an annotation and return its number; 0 if there is none. Raises ConversionError."""
    texts = [annotations.pop(f"{SCALING}{name}", "") for name in names]
    text = next((one for one in texts if one), "0")
    found = re.fullmatch(r"(\d{1,9})(\.\d+)?", text)
    if found is None:
        raise ConversionError(f"{SCALING}{names[0]}: expected a number")
    return int(found[1])


def _duration(annotations: dict[str, str], key: str) -> float:
    """Remove an annotation and return its duration, such as `1h30m`, in seconds; 0 if there is none."""
    text = annotations.pop(key, "0s")
    if not re.fullmatch(rf"({_DURATION.pattern})+", text):
        raise ConversionError(f"{key}: expected a duration such as 15m or 90s")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


# --- containers -------------------------------------------------------------------------------------------------------


def _containers(revision: Revision, at: Path, sketch: Sketch) -> None:
    """Write the engine of the container that receives requests. Raises ConversionError."""
    read = [
        read_part(one, Container, (*at, "containers", number), lambda key, why: _tell(sketch, key, why))
        for number, one in enumerate(revision.containers)
    ]
    if not read:
        raise ConversionError("spec.template.spec.containers: expected the container of the engine")
    chosen = next((one for one in read if one.ports), read[0])
    for other in (one for one in read if one is not chosen):
        sketch.tell(f"container {other.name or other.image}", "a pod of a Model has one container, the engine")
    port = next((one["containerPort"] for one in chosen.ports if "containerPort" in one), PORT_DEFAULT)
    write_resources(chosen.resources, ("resources",), sketch)
    words = [re.sub(r"\$\(PORT\)", PORT, word) for word in (*chosen.command, *chosen.args)]
    words = unwrap_shell(words)
    is_vllm = "vllm" in chosen.image or any("vllm" in word for word in words)
    arguments = _vllm_arguments(words, is_entry_point=not chosen.command) if is_vllm else None
    if arguments is not None:
        _vllm(arguments, sketch)
    else:
        _command(words, chosen, str(port), sketch)
    if chosen.image:
        sketch.spec["image"] = chosen.image
    sketch.spec["env"] = convert_environment(chosen.env, sketch)
    if chosen.volume_mounts:
        sketch.pod["volumeMounts"] = list(chosen.volume_mounts)
    probe = chosen.readiness_probe.get("httpGet")
    path = probe.get("path") if isinstance(probe, dict) else None
    if isinstance(path, str) and path != "/health":
        sketch.spec["readinessPath"] = path
    elif chosen.readiness_probe and path is None:
        sketch.tell("readinessProbe", "the engine is ready when GET /health returns 200; set spec.readinessPath")


def _vllm_arguments(words: list[str], *, is_entry_point: bool) -> list[str] | None:
    """Return the arguments of vLLM's server; None if the command is another program. `is_entry_point`: the words are
    arguments of the image's entry point, which is the server.
    """
    for position, word in enumerate(words):
        if word in {"serve", "vllm.entrypoints.openai.api_server"} or word.endswith("api_server.py"):
            return words[position + 1 :]
    return words if is_entry_point else None


def _vllm(arguments: list[str], sketch: Sketch) -> None:
    """Write engine `vllm`. Raises ConversionError."""
    model = ""
    if arguments and not arguments[0].startswith("-"):
        model, arguments = arguments[0], arguments[1:]
    names = list[str]()
    line = CommandLine(_take_names(arguments, names))
    model = line.take("--model") or model
    if not model or PORT in model:
        raise ConversionError("args: the model was not found: pass it as --model or after `serve`")
    if line.take("--api-key") is not None:
        sketch.tell(
            "args --api-key", "removed: clients' keys are not passed to engines: define keys in Tenant documents"
        )
    slots = sketch.spec["slots"]
    write_vllm_spec(Source("hf", model, {}), line.left, sketch)
    if model.startswith("/"):
        sketch.spec["artifact"] = f"file://{model}"
    if sketch.spec["slots"] != slots:
        sketch.tell("containerConcurrency", "spec.slots is --max-num-seqs; further requests wait")
    _aliases(names or [model], sketch)


def _take_names(arguments: list[str], names: list[str]) -> list[str]:
    """Add the values of `--served-model-name`, which can be several, to `names`; return the other arguments."""
    out, is_name = list[str](), False
    for word in arguments:
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--served-model-name":
            names += [value] if equals else []
            is_name = not equals
        elif is_name and not word.startswith("-"):
            names.append(word)
        else:
            is_name = False
            out.append(word)
    return out


def _aliases(names: Sequence[str], sketch: Sketch) -> None:
    """Write the names that clients request as aliases."""
    aliases = dict[str, None]()
    for name in names:
        kept = name if is_alias(name) else simplify_name(name)
        if kept != name:
            sketch.tell(f"name: {name}", f"clients must request {kept or sketch.name}")
        aliases |= {kept: None} if kept and kept != sketch.name else {}
    sketch.spec["aliases"] = list(aliases)


def _command(words: list[str], container: Container, port: str, sketch: Sketch) -> None:
    """Write engine `command`, with the placeholder of the port. Raises ConversionError."""
    is_llama = re.search(r"(?:^|/)llama\.cpp(?::|@|$)", container.image) is not None
    if not container.command and is_llama:
        words = [LLAMA_SERVER, *words]
    elif not container.command:
        raise ConversionError(
            "spec.template.spec.containers: no LLM engine was recognized: add the command that the image runs"
        )
    fixed = re.compile(rf"(.*[=: ])?{re.escape(port)}(\D.*)?", re.DOTALL)
    matches = [None if PORT in word else fixed.fullmatch(word) for word in words]
    words = [word if m is None else f"{m[1] or ''}{PORT}{m[2] or ''}" for word, m in zip(words, matches, strict=True)]
    if not any(PORT in word for word in words):
        if not is_llama:
            raise ConversionError("command: the port was not found: pass it as $(PORT), as a separate word")
        words[1:1] = ["--host", "0.0.0.0", "--port", PORT]  # noqa: S104  in a pod
    last = max(position for position, word in enumerate(words) if PORT in word)
    sketch.spec |= {"engine": "command", "command": words[: last + 1], "args": words[last + 1 :]}
