"""Converts KubeAI's engines: their command lines and weights sources. Pure.

vLLM becomes engine `vllm`. Ollama and Infinity become engine `command`, since each has its own way to select a model. A
source without an equivalent raises ConversionError with the fix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from autoscaler.importers.decode import CommandLine
from autoscaler.importers.result import ConversionError, Sketch

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
        spec["contextTokens"] = int(context)
    at_once = words.take("--max-num-seqs", when=_counts)
    if at_once is not None:
        spec["slots"] = int(at_once)
    gpu = spec["gpu"]
    count = gpu["count"] if isinstance(gpu, dict) else 0
    if not words.has("--tensor-parallel-size", "-tp"):
        if count > 1 and words.has("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"):
            words.left.append("--tensor-parallel-size=1")  # the default is the number of GPUs
    else:
        words.take("--tensor-parallel-size", "-tp", when=lambda value: value == str(count) and count > 1)
    spec["args"] = words.left


def write_ollama_spec(of: Source, args: Sequence[str], sketch: Sketch, *, talks: bool) -> None:
    """Write the spec of a command that runs Ollama with one model. `talks`: load the model before it is ready."""
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
