"""Converts KubeAI's Models (`kubeai.org/v1`) and their engines. Pure.

Reads manifests, lists as kubectl prints them, values of KubeAI's chart `models`, and KubeAI's own configuration
(`config`). A Model keeps its name and namespace. Every key of it is converted or reported. vLLM becomes engine `vllm`.
Ollama and Infinity become engine `command`, since each has its own way to select a model. A source without an
equivalent raises ConversionError with the fix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from autoscaler.importers.command_line import CommandLine
from autoscaler.importers.decode import (
    DocumentErrorContext,
    expand_object_lists,
    parse_count,
    parse_yaml_documents,
    read_mapping,
    read_part,
)
from autoscaler.importers.kubeai.config import CHART, KubeAiConfig, apply_resource_profile, is_kubeai_config
from autoscaler.importers.result import ConversionError, ConversionResult, Document, Sketch
from autoscaler.spec.decode import Part, WrongKeyError, format_path
from autoscaler.spec.model import Model

MODEL_PATH = "/model"
"""Mount path of a claim."""
BUCKETS = frozenset({"s3", "gs", "oss"})
_URL = re.compile(r"([a-z0-9]+)://([^?]+)(?:\?(.*))?")
_SAFE = re.compile(r"[A-Za-z0-9._:/@-]+")
"""Text that needs no quotes in a shell command."""
OLLAMA = (
    "export OLLAMA_HOST='[{{host}}]:{{port}}'; ollama serve & server=$!; trap 'kill $server' TERM INT; "
    "{{ until ollama list; do sleep 0.2; done; {get}{load}ollama cp {ref} {name}; }} >&2 || kill $server & "
    "wait $server"
)
"""Serves `ref` under the Model's name, as KubeAI does; /v1/models/NAME returns 200 after the last step.
The shell remains the parent process and forwards SIGTERM.
"""


class Source(NamedTuple):
    """The parts of a `url` of KubeAI."""

    scheme: str
    ref: str
    query: dict[str, str]


def parse_source(url: str) -> Source:
    """Parse a `url`. Raises ConversionError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ConversionError("spec.url: expected SCHEME://... such as hf://org/name")
    pairs = (pair.partition("=") for pair in (found[3] or "").split("&") if pair)
    return Source(found[1], found[2], {key: value for key, _, value in pairs})


def write_vllm_spec(of: Source, args: Sequence[str], sketch: Sketch) -> None:
    """Write the spec of engine `vllm`."""
    words = CommandLine(args)
    spec = sketch.spec
    spec["engine"] = "vllm"
    revision = words.take("--revision")
    if of.scheme == "hf":
        spec["artifact"] = f"hf://{of.ref}" + (f"@{revision}" if revision else "")
    elif of.scheme == "pvc":
        _mount(of, sketch)
        spec["artifact"] = f"file://{MODEL_PATH}"
    else:
        raise _no_source(of)
    for flags in (("--model",), ("--host",), ("--port",), ("--served-model-name",)):
        if words.take(*flags) is not None:
            sketch.tell(f"spec.args {flags[0]}", "Pilotlight sets it; use spec.aliases for more names")
    context = words.take("--max-model-len", when=_counts)
    if context is not None:
        spec["contextTokens"] = parse_count(context, "spec.args --max-model-len")
    at_once = words.take("--max-num-seqs", when=_counts)
    if at_once is not None:
        spec["slots"] = parse_count(at_once, "spec.args --max-num-seqs")
    gpu = spec["gpu"]
    count = gpu["count"] if isinstance(gpu, dict) else 0
    if not words.has("--tensor-parallel-size", "-tp"):
        if count > 1 and words.has("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"):
            words.left.append("--tensor-parallel-size=1")  # the default is the number of GPUs
    else:
        words.take("--tensor-parallel-size", "-tp", when=lambda value: value == str(count) and count > 1)
    spec["args"] = words.left


def write_ollama_spec(of: Source, args: Sequence[str], sketch: Sketch, *, talks: bool) -> None:
    """Write the spec of a command that runs Ollama with one model. `talks`: the model generates text, so a prompt loads
    it before the replica becomes ready.
    """
    ref = of.query.get("model", "") if of.scheme == "pvc" else of.ref
    if of.scheme not in ("ollama", "pvc"):
        raise _no_source(of)
    if not _SAFE.fullmatch(ref) or not _SAFE.fullmatch(sketch.name):
        raise ConversionError("spec.url: expected ollama://MODEL, or pvc://CLAIM?model=MODEL")
    environment = {"OLLAMA_KEEP_ALIVE": "-1"}
    get = ""
    if of.scheme == "pvc":
        _mount(of, sketch)
        environment["OLLAMA_MODELS"] = MODEL_PATH
    elif of.query.get("pull", "").lower() != "false":
        get = f"ollama pull {'--insecure ' * (of.query.get('insecure', '').lower() == 'true')}{ref} && "
    load = f"ollama run {ref} hi && " if talks else ""
    script = OLLAMA.format(get=get, ref=ref, name=sketch.name, load=load)
    _command(["/bin/sh", "-c", script], args, environment, sketch)
    sketch.spec["readinessPath"] = f"/v1/models/{sketch.name}"


def write_infinity_spec(of: Source, args: Sequence[str], sketch: Sketch) -> None:
    """Write the spec of a command that runs Infinity with one model."""
    if of.scheme == "pvc":
        _mount(of, sketch)
    elif of.scheme != "hf":
        raise _no_source(of)
    environment = {
        "INFINITY_MODEL_ID": MODEL_PATH if of.scheme == "pvc" else of.ref,
        "INFINITY_SERVED_MODEL_NAME": sketch.name,
        "INFINITY_URL_PREFIX": "/v1",
        "INFINITY_ENGINE": "torch",
    }
    _command(["infinity_emb", "v2", "--host", "{host}", "--port", "{port}"], args, environment, sketch)


def _command(command: list[str], args: Sequence[str], environment: dict[str, str], sketch: Sketch) -> None:
    sketch.spec |= {"engine": "command", "command": command, "args": list(args), "env": environment}


def _mount(of: Source, sketch: Sketch) -> None:
    """Mount the claim of `pvc://CLAIM/FOLDER` at MODEL_PATH."""
    claim, _, folder = of.ref.partition("/")
    sketch.pod["volumes"] = [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}]
    within = {"subPath": folder.strip("/")} if folder.strip("/") else {}
    sketch.pod["volumeMounts"] = [{"name": "model", "mountPath": MODEL_PATH} | within]


def _no_source(of: Source) -> ConversionError:
    if of.scheme in BUCKETS:
        return ConversionError(
            f"spec.url: {of.scheme}:// is not supported yet: copy the weights into a claim and use pvc://"
        )
    return ConversionError(f"spec.url: this engine does not support {of.scheme}://")


def _counts(value: str) -> bool:
    return value.isascii() and value.isdecimal()


API_VERSION = "kubeai.org/v1"
NO_LIMIT = 1000
"""Value for an absent `maxReplicas`: Pilotlight's maximum."""
TARGET = 100
"""Value for an absent `targetRequests`."""
FOREIGN_KEYS = ("kubectl.kubernetes.io/", "meta.helm.sh/", "helm.sh/", "app.kubernetes.io/", "argocd.argoproj.io/")
"""Labels and annotations of the tools that created an object, which do not apply to the converted one."""

Count = Annotated[int, Meta(ge=0)]


class Spec(Part, frozen=True):
    """The spec of a Model of KubeAI."""

    url: str
    engine: Literal["OLlama", "VLLM", "FasterWhisper", "Infinity"]
    features: tuple[str, ...] = ()
    adapters: tuple[dict[str, object], ...] = ()
    resource_profile: str = ""
    cache_profile: str = ""
    image: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    env_from: tuple[dict[str, object], ...] = ()
    replicas: Count | None = None
    min_replicas: Count = 0
    max_replicas: Count | None = None
    autoscaling_disabled: bool = False
    target_requests: Annotated[int, Meta(ge=1)] | None = None
    scale_down_delay_seconds: Count | None = None
    owner: str = ""
    load_balancing: dict[str, object] = {}
    files: tuple[dict[str, object], ...] = ()
    priority_class_name: str = ""


def convert_models(sources: Sequence[tuple[str, str]]) -> list[ConversionResult]:
    """Convert the Models in (file, text) pairs. Raises a one-line DocumentError."""
    system = CHART
    found: list[tuple[str, int, object]] = []
    for source, text in sources:
        for number, value in enumerate(expand_object_lists(parse_yaml_documents(source, text)), 1):
            with DocumentErrorContext(source, value, number):
                settings = _settings(source, value)
                if settings is not None:
                    system = system.with_values(settings)
                else:
                    found += [(source, number, each) for each in _models(value)]
    out = []
    for source, number, value in found:
        with DocumentErrorContext(source, value, number):
            out.append(convert_model(value, system))
    return out


def convert_live_model(value: object, system: KubeAiConfig = CHART) -> tuple[Model | None, str, tuple[str, ...]]:
    """Convert an object of a cluster; return its Model, or why it has none, and a line per unconverted key."""
    try:
        taken = convert_model(value, system)
    except WrongKeyError as error:
        return None, " ".join(f"{format_path(error.path)}: {error.message}".split()), ()
    return taken.model, taken.refused, tuple(f"{key}: {why}" for key, why in taken.notes)


def convert_model(value: object, system: KubeAiConfig = CHART) -> ConversionResult:
    """Convert one Model. Raises WrongKeyError if it is invalid."""
    whole = read_mapping(value, ())
    metadata = read_mapping(whole.get("metadata"), ("metadata",))
    name = metadata.get("name")
    if not isinstance(name, str):
        raise WrongKeyError(("metadata", "name"), "missing; expected text")
    sketch = Sketch(name, str(metadata.get("namespace") or ""))
    for key in ("labels", "annotations"):
        if own := _own(read_mapping(metadata.get(key), ("metadata", key))):
            sketch.metadata[key] = own
    spec = read_part(whole.get("spec"), Spec, ("spec",), sketch.tell)
    try:
        _write(spec, system, sketch)
    except ConversionError as error:
        return sketch.refused(str(error))
    return sketch.taken()


def _settings(source: str, value: object) -> Document | None:
    """Return KubeAI's configuration, also from its ConfigMap; None if the document is something else."""
    if isinstance(value, dict) and value.get("kind") == "ConfigMap":
        text = read_mapping(value.get("data"), ("data",)).get("system.yaml")
        if not isinstance(text, str):
            raise WrongKeyError(("data", "system.yaml"), "missing; expected KubeAI's configuration")
        inner = parse_yaml_documents(f"{source}: system.yaml", text)
        return read_mapping(inner[0] if inner else None, ("data", "system.yaml"))
    return value if isinstance(value, dict) and is_kubeai_config(value) else None


def _models(value: object) -> list[object]:
    """Return the Models of a document: itself, or those enabled in a catalogue (values of the chart `models`)."""
    whole = read_mapping(value, ())
    if "kind" not in whole and "catalog" in whole:
        every = bool(read_mapping(whole.get("all"), ("all",)).get("enabled"))
        entries = read_mapping(whole["catalog"], ("catalog",)).items()
        on = ((name, read_mapping(entry, ("catalog", name))) for name, entry in entries)
        return [_entry(name, entry) for name, entry in on if every or entry.get("enabled")]
    if whole.get("kind") != "Model" or whole.get("apiVersion") != API_VERSION:
        at = ("apiVersion",) if whole.get("kind") == "Model" else ("kind",)
        wanted = API_VERSION if whole.get("kind") == "Model" else f"Model ({API_VERSION}), or values of KubeAI's charts"
        raise WrongKeyError(at, f"expected {wanted}")
    return [whole]


def _entry(name: str, entry: Document) -> Document:
    spec = {key: value for key, value in entry.items() if key != "enabled"}
    return {"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": name}, "spec": spec}


def _own(notes: Document) -> Document:
    """Remove labels or annotations of FOREIGN_KEYS."""
    return {key: value for key, value in notes.items() if not key.startswith(FOREIGN_KEYS)}


def _write(spec: Spec, system: KubeAiConfig, sketch: Sketch) -> None:
    """Convert all keys of the spec. Raises ConversionError."""
    source = parse_source(spec.url)
    image_name = apply_resource_profile(spec.resource_profile, system, sketch)
    sketch.spec["slots"] = spec.target_requests or TARGET
    if spec.engine == "VLLM":
        write_vllm_spec(source, spec.args, sketch)
        if spec.target_requests not in (None, sketch.spec["slots"]):
            sketch.tell("spec.targetRequests", "spec.slots is --max-num-seqs; further requests wait")
    elif spec.engine == "OLlama":
        write_ollama_spec(source, spec.args, sketch, talks="TextGeneration" in spec.features)
    elif spec.engine == "Infinity":
        write_infinity_spec(source, spec.args, sketch)
    else:
        fix = "serve these weights with engine vllm, which supports speech to text, or adopt a Deployment of the server"
        raise ConversionError(f"spec.engine: FasterWhisper uses the `model` of a request as the name of weights: {fix}")
    image = spec.image or system.image(spec.engine, image_name)
    if image:
        sketch.spec["image"] = image
    _environment(spec, source.scheme, system, sketch)
    _replicas(spec, sketch)
    if spec.scale_down_delay_seconds is not None:
        sketch.spec["idleSeconds"] = spec.scale_down_delay_seconds
    if spec.priority_class_name:
        sketch.pod["priorityClassName"] = spec.priority_class_name
    _tell(spec, sketch)


def _environment(spec: Spec, scheme: str, system: KubeAiConfig, sketch: Sketch) -> None:
    first = read_mapping(sketch.spec.get("env"), ("spec", "env"))
    token: Document = {}
    if scheme == "hf" and "HF_TOKEN" not in spec.env and not system.secret:
        sketch.tell(
            "HF_TOKEN",
            "KubeAI's Secret is used only in the pods' namespace: create the Model there if it needs the token",
        )
    elif scheme == "hf" and "HF_TOKEN" not in spec.env:
        key = {"name": system.secret, "key": "token", "optional": True}
        token["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": key}}
    sketch.spec["env"] = first | token | spec.env


def _replicas(spec: Spec, sketch: Sketch) -> None:
    """Convert the bounds. Unless autoscaling is disabled, KubeAI itself writes `replicas`, so it is ignored."""
    if not spec.autoscaling_disabled:
        most = NO_LIMIT if spec.max_replicas is None else spec.max_replicas
        sketch.spec["replicas"] = {"min": spec.min_replicas, "max": most}
        return
    fixed = spec.replicas or 0
    sketch.spec["replicas"] = {"min": fixed, "max": max(fixed, 1)}
    if not fixed:
        sketch.spec["paused"] = True


def _tell(spec: Spec, sketch: Sketch) -> None:
    """Report keys that have no equivalent."""
    reasons = {
        "spec.features": "a Model accepts all paths that its engine supports",
        "spec.cacheProfile": "weights are not cached in a shared claim: copy them into a claim and use url pvc://",
        "spec.envFrom": "list each variable in spec.env, with valueFrom for Secrets",
        "spec.owner": "it only sets the owner in /v1/models; use spec.tenants to restrict access",
        "spec.files": "put them into a ConfigMap and mount it with spec.pod.volumes and volumeMounts",
        "spec.loadBalancing": "PrefixHash is not supported: the replica with the most free slots is chosen",
    }
    there = {
        "spec.features": bool(spec.features), "spec.cacheProfile": bool(spec.cache_profile),
        "spec.envFrom": bool(spec.env_from), "spec.owner": bool(spec.owner), "spec.files": bool(spec.files),
        "spec.loadBalancing": spec.load_balancing.get("strategy") == "PrefixHash",
    }  # fmt: skip
    for key, why in reasons.items():
        if there[key]:
            sketch.tell(key, why)
    for position, adapter in enumerate(spec.adapters):
        name = adapter.get("name")
        fix = f"add {{name: {name}, artifact: ...}} to spec.adapters, with a file://, oci://, hf:// or s3:// address"
        called = f"clients then request {sketch.name}:{name}, not {sketch.name}_{name}"
        sketch.tell(f"spec.adapters[{position}]", f"adapters are not converted: {fix}; {called}")
