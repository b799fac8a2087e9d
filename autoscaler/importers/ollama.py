"""Converts Ollama's models: a Modelfile, or a manifest of its store, whose blobs are GGUF files. Pure.

A model with a known weights file gets engine `llama.cpp`, any other engine `ollama`. The names for clients, `NAME` and
`NAME:TAG`, stay the same, as do Ollama's default context size and its idle timeout of 5 minutes.

Each line of a Modelfile has one instruction: a case-insensitive name, and a value that is plain, quoted, or in triple
quotes over several lines. Lines that begin with `#` are comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from autoscaler.importers.decode import DocumentErrorContext, parse_count, read_mapping
from autoscaler.importers.result import ConversionError, ConversionResult, Document, Sketch
from autoscaler.spec.decode import WrongKeyError, suggest_nearest

KNOWN = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "RENDERER", "PARSER", "REQUIRES")
THREE = '"""'


class Instruction(NamedTuple):
    """A known instruction and its value."""

    name: str
    value: str


def parse_modelfile(text: str, known: Sequence[str] = KNOWN) -> list[Instruction]:
    """Parse a Modelfile. `known`: valid names, in upper case. Raises WrongKeyError with the line as its path."""
    found: list[Instruction] = []
    lines = list(enumerate(text.splitlines(), 1))
    while lines:
        number, line = lines.pop(0)
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if name.upper() not in known:
            names = ", ".join(known)
            raise WrongKeyError((f"line {number}",), f"expected one of {names}{suggest_nearest(name.upper(), known)}")
        value = rest.strip()
        for quote in (THREE, '"'):
            lead, begins, after = value.partition(quote)
            if begins and (not lead or name.upper() in ("PARAMETER", "MESSAGE")):
                while not after.rstrip().endswith(quote):
                    if not lines:
                        raise WrongKeyError((f"line {number}",), f"expected {quote} at its end")
                    after += "\n" + lines.pop(0)[1]
                value = lead + after.rstrip().removesuffix(quote)
                break
        if not value:
            raise WrongKeyError((f"line {number}",), f"expected a value after {name}")
        found.append(Instruction(name.upper(), value))
    return found


def parse_name_comment(text: str) -> str:
    """Return the name in the comment that `ollama show --modelfile` writes: the line after `replace FROM with:`."""
    lines = text.splitlines()
    for before, line in pairwise(lines):
        if before.startswith("#") and before.rstrip().endswith("replace FROM with:"):
            return line.removeprefix("#").strip().removeprefix("FROM").strip()
    return ""


CONTEXT_TOKENS = 4096
IDLE_S = 300
LATEST = "latest"
LIBRARY = ("registry.ollama.ai", "library")
KIND = "application/vnd.ollama.image."
ARGS = {"num_thread": "--threads", "num_batch": "--batch-size", "num_gpu": "--gpu-layers"}
"""Parameters that all supported llama.cpp servers have as flags."""
SENT = "clients must send it with each request"
NO_EQUAL = {
    "SYSTEM": "clients must send a system message",
    "MESSAGE": "clients must send these messages first",
    "TEMPLATE": "the template in the GGUF file is used",
    "LICENSE": "a Model has no field for the license text; the license still applies to the weights",
    "RENDERER": "llama.cpp uses the template in the GGUF file",
    "PARSER": "llama.cpp uses the template in the GGUF file",
    "REQUIRES": "it is the minimum version of Ollama, which does not serve this Model",
    "projector": "for images, add --mmproj with this file to spec.args",
}


class Blobs(NamedTuple):
    """Digests in a manifest."""

    model: str
    small: dict[str, str]
    """`params` and `config`, which the conversion reads."""
    others: tuple[tuple[str, str], ...]
    """(kind, digest): adapter, projector, template, system, ..."""


def convert_modelfile(source: str, text: str, name: str, folder: str, known: Mapping[str, str]) -> ConversionResult:
    """Convert a Modelfile in `folder` (absolute). `known`: paths of a given store's models. Raises DocumentError."""
    sketch = _sketch(name)
    with DocumentErrorContext(source):
        instructions = parse_modelfile(text)
        origin = next((value for name, value in instructions if name == "FROM"), None)
        if origin is None:
            raise WrongKeyError(("FROM",), "missing; expected a GGUF file or the name of a model")
        path = known.get(origin) or known.get(f"{origin}:{LATEST}") or _path(origin, folder)
        if path is None:
            fix = (
                f"run `ollama create {name} -f {source}` once, or also pass Ollama's folder to serve the file directly"
            )
            sketch.tell(f"FROM {origin}", f"engine ollama serves these weights from Ollama's store: {fix}")
            sketch.spec["engine"] = "ollama"
        else:
            sketch.spec |= {"engine": "llama.cpp", "artifact": f"file://{path}"}
        parameters = [value.partition(" ") for name, value in instructions if name == "PARAMETER"]
        try:
            _parameters([(key, value.strip()) for key, _, value in parameters], sketch)
        except ConversionError as error:
            return sketch.refused(str(error))
        for instruction, value in instructions if path is not None else ():
            if instruction == "ADAPTER":
                _adapter(_path(value, folder) or value, sketch)
            elif instruction in NO_EQUAL:
                sketch.tell(instruction, NO_EQUAL[instruction])
    return sketch.taken()


def model_name(parts: tuple[str, ...]) -> str:
    """Return the name that clients use. `parts`: the manifest's path below `manifests`, HOST/NAMESPACE/NAME/TAG."""
    *where, name, tag = parts
    where = [] if tuple(where) == LIBRARY else where[1:] if where[0] == LIBRARY[0] else where
    return "/".join((*where, f"{name}:{tag}"))


def parse_manifest(source: str, text: str) -> Blobs | None:
    """Parse a manifest; None if it has no weights. Raises DocumentError."""
    with DocumentErrorContext(source):
        try:
            manifest = read_mapping(msgspec.json.decode(text), ())
        except msgspec.DecodeError:
            raise WrongKeyError((), "expected a manifest of Ollama (JSON)") from None
        layers = manifest.get("layers")
        found: list[tuple[str, str]] = []
        for position, layer in enumerate(layers if isinstance(layers, list) else []):
            entry = read_mapping(layer, ("layers", position))
            found.append((str(entry.get("mediaType")).removeprefix(KIND), str(entry.get("digest"))))
        config = read_mapping(manifest.get("config"), ("config",)).get("digest")
    model = next((digest for kind, digest in found if kind == "model"), None)
    if model is None:
        return None
    small = {kind: digest for kind, digest in found if kind == "params"}
    others = tuple((kind, digest) for kind, digest in found if kind not in ("model", "params"))
    return Blobs(model, small | ({"config": config} if isinstance(config, str) else {}), others)


def blob_path(folder: str, digest: str) -> str:
    """Path of the blob with a digest; `folder` contains all blobs."""
    return f"{folder}/{digest.replace(':', '-')}"


def convert_stored_model(name: str, found: Blobs | None, folder: str, texts: Mapping[str, str]) -> ConversionResult:
    """Convert a model of a store whose blobs are in `folder`. `texts`: contents of its `small` blobs."""
    sketch = _sketch(name)
    if found is None:
        return sketch.refused("its manifest has no single weights file: only GGUF models can be served")
    sketch.spec |= {"engine": "llama.cpp", "artifact": f"file://{blob_path(folder, found.model)}"}
    parameters = read_mapping(_json(texts.get("params", "{}")), ("params",))
    pairs = (
        (key, each) for key, value in parameters.items() for each in (value if isinstance(value, list) else [value])
    )
    _parameters([(key, str(value)) for key, value in pairs], sketch)
    families = read_mapping(_json(texts.get("config", "{}")), ("config",)).get("model_families") or []
    if isinstance(families, list) and any("bert" in str(family) for family in families):
        _add_args(sketch, "--embeddings")
    for kind, digest in found.others:
        if kind == "adapter":
            _adapter(blob_path(folder, digest), sketch)
        elif kind == "projector":
            sketch.tell(f"projector {blob_path(folder, digest)}", NO_EQUAL["projector"])
        elif kind.upper() in NO_EQUAL:
            sketch.tell(kind.upper(), NO_EQUAL[kind.upper()])
    return sketch.taken()


def _sketch(name: str) -> Sketch:
    """Create a Model with its names: `llama3` and `llama3:latest` are the same model."""
    stem, colon, tag = name.rpartition(":")
    plain = stem if colon and tag == LATEST else name
    sketch = Sketch(plain)
    if plain != name or not colon:
        sketch.spec["aliases"] = [f"{plain}:{LATEST}"]
    sketch.spec |= {"idleSeconds": IDLE_S, "contextTokens": CONTEXT_TOKENS}
    return sketch


def _path(origin: str, folder: str) -> str | None:
    """Path of the file that FROM or ADAPTER names; None if it names none."""
    if origin.startswith("/"):
        return origin
    if origin.startswith(("./", "../")) or origin.endswith((".gguf", ".bin")):
        return f"{folder}/{origin.removeprefix('./')}"
    return None


def _parameters(parameters: list[tuple[str, str]], sketch: Sketch) -> None:
    gguf = sketch.spec["engine"] == "llama.cpp"
    for key in dict.fromkeys(key for key, _ in parameters):
        value = [value for name, value in parameters if name == key][-1]
        if key == "num_ctx" and value.isascii() and value.isdecimal():
            sketch.spec["contextTokens"] = parse_count(value, "PARAMETER num_ctx")
        elif key == "num_gpu" and value == "0":
            sketch.spec["gpu"] = {"count": 0}
        elif gguf and key in ARGS and value.isdecimal():
            _add_args(sketch, ARGS[key], value)
        elif gguf:  # for engine ollama, `ollama create` stores it
            sketch.tell(f"PARAMETER {key}", SENT)


def _adapter(path: str, sketch: Sketch) -> None:
    """Apply an adapter to every request, as Ollama does."""
    if path.startswith("/"):
        _add_args(sketch, "--lora-scaled", f"{path}:1")
    else:
        sketch.tell(f"ADAPTER {path}", "only a GGUF adapter is supported: add --lora-scaled FILE:1 to spec.args")


def _add_args(sketch: Sketch, *words: str) -> None:
    args = sketch.spec.setdefault("args", [])
    if isinstance(args, list):
        args.extend(words)


def _json(text: str) -> Document:
    try:
        return read_mapping(msgspec.json.decode(text), ())
    except (msgspec.DecodeError, WrongKeyError):
        return {}
