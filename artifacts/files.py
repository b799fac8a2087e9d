"""What a file of a model is, by its name alone: weights and of which form, config, tokenizer, code, and so on. Pure.

Owns the names. A name proves nothing of the bytes; it decides what an engine will do with the file, and so whether it
may be let in: a pickle is a program, whatever its sender calls it.
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
"""What a file is for. `draft`: a small model that guesses ahead; `mixed`: an archive whose names decide."""

WEIGHTS = frozenset({"weight", "adapter", "projector", "draft"})
HARMLESS = frozenset({"safetensors", "gguf"})
"""Forms of weights that hold numbers and nothing that is run."""

PROGRAMS = frozenset(
    {
        "bin",
        "pt",
        "pth",
        "ckpt",
        "checkpoint",
        "pkl",
        "pickle",
        "p",
        "joblib",
        "dill",
        "npy",
        "npz",
        "h5",
        "hdf5",
        "keras",
    }
    | {"mar", "pt2", "ptl", "pte", "engine", "trt", "plan", "llamafile", "pb", "nemo", "skops", "cbm", "mleap"}
)
"""Suffixes of weights that run what they contain when they are loaded, or may."""
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
"""Beside an adapter's safetensors, in the folder that vLLM and SGLang load. https://huggingface.co/docs/peft"""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""A part of a split model: its name without that, its number, how many there are."""


class Kind(NamedTuple):
    """What a name says."""

    role: Role
    form: str = ""
    """Of weights: their suffix."""


def classify_file(path: str) -> Kind | None:
    """What this path's last part says; None: nothing that is known."""
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
    """Of an artifact's files those that could be laid over other weights: its one GGUF file, or of several those that
    are called an adapter; else folders with an adapter's config (empty: the artifact's own).
    """
    every = list(paths)
    ggufs = [one for one in every if one.endswith(".gguf")]
    if ggufs:
        return (
            ggufs
            if len(ggufs) == 1
            else [one for one in ggufs if _weights(one.rpartition("/")[2].casefold()) == "adapter"]
        )
    return [one.removesuffix(PEFT).rstrip("/") for one in every if one.rpartition("/")[2] == PEFT]


def adapter_bytes(sizes: Mapping[str, int], adapter: str) -> int:
    """What an adapter of these files weighs; `adapter`: of `list_adapters`. Of a folder its safetensors count, not
    those of folders below it.
    """
    if adapter.endswith(".gguf"):
        return sizes.get(adapter, 0)
    at = [one for one in sizes if one.endswith(".safetensors") and one.rpartition("/")[0] == adapter]
    return sum(sizes[one] for one in at)


def _weights(name: str) -> Role:
    """Of a file with harmless weights: whose they are."""
    if "mmproj" in name:
        return "projector"
    return "adapter" if re.match(r"adapter[-_.]|(?:.*[-_.])?lora[-_.]", name) else "weight"
