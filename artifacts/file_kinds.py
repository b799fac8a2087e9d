"""Classifies model files by name: weights and their format, config, tokenizer, code and so on. Pure.

A name proves nothing about the content, but it decides how an engine treats the file and so whether the file may be
accepted: a pickle is a program, whatever its sender calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Role = Literal[
    "weight",
    "adapter",
    "projector",
    "draft",
    "config",
    "tokenizer",
    "template",
    "license",
    "doc",
    "code",
    "dataset",
    "mixed",
    "unknown",
]
"""Purpose of a file. `draft`: a speculative-decoding draft model; `mixed`: an archive, classified by member names."""

WEIGHTS = frozenset({"weight", "adapter", "projector", "draft"})
HARMLESS = frozenset({"safetensors", "gguf"})
"""Weight formats that hold only numbers and execute nothing."""

PROGRAMS = frozenset(
    {"bin", "pt", "pth", "ckpt", "checkpoint", "pkl", "pickle", "p", "joblib", "dill", "npy", "npz", "h5", "hdf5"}
    | {"keras", "mar", "pt2", "ptl", "pte", "engine", "trt", "plan", "llamafile", "pb", "nemo", "skops", "cbm", "mleap"}
)
"""Suffixes of weight formats that execute, or may execute, their content when loaded."""
_OTHER_WEIGHTS = frozenset(
    {"onnx", "onnx_data", "tflite", "ggml", "msgpack", "ot", "mlmodel", "dduf", "weights", "tensor"}
)
_CODE = frozenset(
    {"py", "pyc", "pyo", "pyd", "ipynb", "sh", "bash", "zsh", "ps1", "bat", "cmd", "js", "mjs", "ts", "lua", "rb", "pl"}
    | {"c", "cc", "cpp", "cxx", "cu", "h", "hpp", "cuh", "rs", "go", "java", "jar", "so", "dll", "dylib", "a", "exe"}
    | {"whl", "egg", "wasm", "ptx", "cubin", "pth.py", "pyx"}
)
_CODE_NAMES = re.compile(
    r"(?:requirements.*\.txt|setup\.(?:py|cfg)|pyproject\.toml|makefile.*|dockerfile.*|.*\.so\.[0-9.]+)"
)
_TOKENIZER = re.compile(
    r"(?:.*tokenizer.*\.(?:json|model|txt)|.*\.tiktoken|tiktoken\.model|s(?:entence)?piece.*\.(?:model|vocab)|"
    r"vocab.*\.(?:json|txt)|merges\.txt|added_tokens\.(?:json|txt)|special_tokens_map\.json|.*\.tokenizer)"
)
_TEMPLATE = re.compile(r"(?:.*\.jinja2?|chat_template(?:\.json)?|template|system)")
_LICENSE = re.compile(r"(?:licen[cs]e|copying|notice|usage_policy|use_policy)(?:[-_. ].*)?|.*\.license")
_PATTERNS: dict[Role, re.Pattern[str]] = {"license": _LICENSE, "tokenizer": _TOKENIZER, "template": _TEMPLATE}
_CONFIG = frozenset({"json", "yaml", "yml", "toml", "ini", "cfg", "imatrix"})
_DOC = frozenset({"md", "markdown", "rst", "txt", "pdf", "html", "png", "jpg", "jpeg", "gif", "svg", "webp"})
_DATASET = frozenset({"parquet", "arrow", "csv", "tsv", "jsonl", "tfrecord"})
_DOC_NAMES = frozenset({"readme", ".gitattributes", ".gitignore", "changelog", "authors", "model_card"})
_CONFIG_NAMES = frozenset({"kitfile", "modelfile", "params"})


PEFT = "adapter_config.json"
"""Config next to an adapter's safetensors in the folder that vLLM and SGLang load. https://huggingface.co/docs/peft"""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""One part of a split GGUF model: base name, part number, number of parts."""


class Kind(NamedTuple):
    """Classification of a file name."""

    role: Role
    form: str = ""
    """File suffix; weights only."""


def classify_file(path: str) -> Kind | None:
    """Classify a path by its last component; None if the name is unknown."""
    name = path.rpartition("/")[2].casefold()
    suffix = name.rpartition(".")[2] if "." in name.lstrip(".") else ""
    if suffix in HARMLESS:
        return Kind(_weights(name), suffix)
    if _CODE_NAMES.fullmatch(name) or suffix in _CODE:
        return Kind("code")
    if suffix in PROGRAMS or re.fullmatch(r".*\.(?:bin|pkl|pt|pth|ckpt)[.\d-]+(?:index)?", name):
        return Kind("weight", suffix if suffix in PROGRAMS else "bin")
    found = next((role for role, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)
    if found is not None:
        return Kind(found)
    if suffix in _OTHER_WEIGHTS:
        return Kind("weight", suffix)
    if suffix in _CONFIG or name in _CONFIG_NAMES:
        return Kind("config")
    if suffix in _DATASET:
        return Kind("dataset")
    return Kind("doc") if suffix in _DOC or name in _DOC_NAMES else None


def list_adapters(paths: Iterable[str]) -> list[str]:
    """Return the files or folders of an artifact that can be adapters: its only GGUF file, or of several GGUF files
    those named as adapters; without GGUF files, folders with an adapter config (empty string: the artifact's root).
    """
    every = list(paths)
    ggufs = [one for one in every if one.endswith(".gguf")]
    if ggufs:
        named = [one for one in ggufs if _weights(one.rpartition("/")[2].casefold()) == "adapter"]
        return ggufs if len(ggufs) == 1 else named
    return [one.removesuffix(PEFT).rstrip("/") for one in every if one.rpartition("/")[2] == PEFT]


def adapter_bytes(sizes: Mapping[str, int], adapter: str) -> int:
    """Return the size in bytes of an adapter from `list_adapters`. For a folder this counts the safetensors directly in
    it, not those in subfolders.
    """
    if adapter.endswith(".gguf"):
        return sizes.get(adapter, 0)
    at = [one for one in sizes if one.endswith(".safetensors") and one.rpartition("/")[0] == adapter]
    return sum(sizes[one] for one in at)


def _weights(name: str) -> Role:
    """Return the role of a safetensors or GGUF file by its name."""
    if "mmproj" in name:
        return "projector"
    return "adapter" if re.match(r"adapter[-_.]|(?:.*[-_.])?lora[-_.]", name) else "weight"
