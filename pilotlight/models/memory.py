"""What a Model takes of its Devices, from its artifact and from what its engine is told. I/O: reads the artifact.

Owns which words of a command line or an environment change llama.cpp's memory, and which engines take what they need
(llama.cpp) or what they are given (vLLM and SGLang, which page their cache). The arithmetic is
`artifacts.formats.memory`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from artifacts import files as kinds
from artifacts.formats import hf_config, memory
from artifacts.formats.memory import Estimate, Item, ServingOptions, Shape
from autoscaler.engines import ENGINES
from autoscaler.spec.artifact import STORED
from autoscaler.spec.engines import CHECKPOINTS
from autoscaler.spec.model import Cache, Model
from pilotlight.models.gguf_file import load_gguf_header

LLAMA_SERVERS_CHECKPOINTS = 32
LLAMA_SERVERS_PROMPTS_MIB = 8192
"""What llama-server does where nobody tells it, as it is when a `command` starts it."""
PAGED_SHARE = 0.9
"""What vLLM takes of a Device where nobody says; SGLang takes about as much."""
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Of llama.cpp's types for caches: bytes of a block by its elements."""
MIB = 1 << 20
FILE = "file://"
REMOTE_CODE = "--trust-remote-code"
"""vLLM's and SGLang's word for it."""


def local_path(model: Model) -> Path | None:
    """The file behind a `file://` artifact."""
    artifact = model.spec.artifact
    return Path(artifact.removeprefix("file://")) if artifact is not None and artifact.startswith("file://") else None


def is_fetched_by_store(model: Model) -> bool:
    """Whether the store brings its weights; of the Hub's not those whose engine is to run code of the repository: the
    store takes none, so that engine fetches them itself; where the Model allows what is unsafe, it does.
    """
    artifact = model.spec.artifact or ""
    scheme = artifact.partition("://")[0]
    taken = model.spec.allow_unsafe or REMOTE_CODE not in model.spec.args or "?" in artifact
    return scheme in STORED and (scheme != "hf" or taken)


def adapter_paths(model: Model) -> list[Path]:
    """The files or folders of its adapters, of those that lie here."""
    files = [one.artifact for one in model.spec.adapters if one.artifact.startswith(FILE)]
    return [Path(one.removeprefix(FILE)) for one in files]


class Known(NamedTuple):
    """What an artifact says of memory."""

    source: str
    """What says it, in words."""
    shape: Shape
    adapters_bytes: int


def load_artifact_facts(model: Model) -> Known | None:
    """Of files of this machine; None: no file here says. Raises GgufError, ConfigError and OSError."""
    found = load_shape(model)
    if found is None:
        return None
    return Known(*found, sum(map(_weighs, adapter_paths(model))))


def _weighs(adapter: Path) -> int:
    """A GGUF file, or the folder of a PEFT adapter. Raises OSError."""
    if not adapter.is_dir():
        return adapter.stat().st_size
    return kinds.adapter_bytes({one.name: one.stat().st_size for one in adapter.iterdir()}, "")


def estimate_memory(model: Model, known: Known | None = None) -> Estimate | None:
    """What one Replica takes, part by part; None: nothing says. `known`: of its artifact; None: what is known here.
    Raises as `load_artifact_facts` does.
    """
    found = known or load_artifact_facts(model)
    if found is None:
        return None
    make = memory.estimate_paged_engine if has_paged_cache(model) else memory.estimate_llama_cpp
    made = make(found.shape, read_serving_options(model))
    items = made.items
    if found.adapters_bytes:
        items = (*items, Item(name="adapters", bytes=found.adapters_bytes, words="their files"))
    if has_auto_sized_cache(model):
        items = (*_of_each(items, model.spec.gpu.count), _reserve(items, model.spec.gpu.count))
    return Estimate(items=items, slot_bytes=made.slot_bytes, token_bytes=made.token_bytes)


def _of_each(items: tuple[Item, ...], devices: int) -> tuple[Item, ...]:
    """What each Device has of it, where tensors are parallel: activation and overhead are in all of them."""
    kept = {"activation", "overhead"}
    if devices <= 1:
        return items
    return tuple(
        i if i.name in kept else replace(i, bytes=-(-i.bytes // devices), words=f"{i.words}; of {devices} devices each")
        for i in items
    )


def _reserve(items: tuple[Item, ...], devices: int) -> Item:
    """So much more it must be given, that the share which it takes of that is enough."""
    taken = sum(item.bytes for item in _of_each(items, devices))
    words = f"it takes {PAGED_SHARE:.0%} of what it is given where it has that to itself"
    return Item(name="reserve", bytes=int(taken / PAGED_SHARE) + 1 - taken, words=words)


def estimate_cache(model: Model, made: Estimate, known: Known | None = None, *, gpus: bool) -> Cache | None:
    """What less or more cache of a Model of llama.cpp would save or take, beside `made`, its estimate. Raises as
    `estimate_memory` does.
    """
    found = known or load_artifact_facts(model)
    if found is None:
        return None
    other = estimate_memory(replace(model, slots=model.slots - 1 if model.slots > 1 else 2), known)
    total_bytes = made.total_bytes(gpus=gpus)
    slot_bytes = 0 if other is None else abs(total_bytes - other.total_bytes(gpus=gpus))
    tokens = found.shape.context_tokens
    return Cache(total_bytes=total_bytes, slot_bytes=slot_bytes, token_bytes=made.token_bytes, context_tokens=tokens)


def load_shape(model: Model) -> tuple[str, Shape] | None:
    """What says it, in words, and what it says; None: no file here does. Raises GgufError, ConfigError and OSError."""
    path = local_path(model)
    if path is None:
        return None
    if has_paged_cache(model) and path.suffix != ".gguf":
        config = hf_config.load_config_info(path)
        return f"Its config.json ({config.architecture})", config.shape
    if path.suffix != ".gguf" and model.spec.engine != "llama.cpp":
        return None  # nobody says what it is
    info = load_gguf_header(path)
    return f"Its GGUF header ({info.architecture})", info.shape


def has_paged_cache(model: Model) -> bool:
    """Whether its engine pages its cache: it takes a share of its Devices, whatever the Model needs."""
    return ENGINES[model.spec.engine].pages


def has_auto_sized_cache(model: Model) -> bool:
    """Whether its engine pages its cache, and is to be given what its artifact says (`gpu.memory: auto`)."""
    return has_paged_cache(model) and model.spec.gpu.memory_bytes == 0


def has_fixed_memory(model: Model) -> bool:
    """Whether its artifact does not matter: its engine takes what there is, or what its document says."""
    return has_paged_cache(model) and not has_auto_sized_cache(model)


def read_device_share(model: Model) -> float:
    """How much of each Device an engine that pages its cache takes, as its document says or as it does by itself."""
    flags = ("--gpu-memory-utilization", "--mem-fraction-static")
    try:
        told = float(_told(model, "", *flags))
    except ValueError:
        return PAGED_SHARE
    return told if 0.0 < told <= 1.0 else PAGED_SHARE


def read_serving_options(model: Model) -> ServingOptions:
    """How its engine will serve it, as its document tells the engine."""
    context, slots = model.spec.context_tokens, model.slots
    if has_paged_cache(model):
        element = 1.0 if _told(model, "", "--kv-cache-dtype").startswith("fp8") else 2.0
        told = _number(_told(model, "", "--max-model-len", "--context-length"))
        spec, tokens = model.spec, told or context
        calls = slots if has_auto_sized_cache(model) and tokens and spec.slots is not None else 1
        return ServingOptions(
            slots=slots, context_tokens=tokens, key_bytes=element, value_bytes=element, whole_calls=calls
        )
    together = _number(_told(model, "LLAMA_ARG_CTX_SIZE", "--ctx-size", "-c"))
    each = _number(_told(model, "", "--context-tokens"))
    if together:
        context = -(-together // slots)
    checkpoints, prompts_mib = _host(model)
    key = _told(model, "LLAMA_ARG_CACHE_TYPE_K", "--cache-type-k", "-ctk")
    value = _told(model, "LLAMA_ARG_CACHE_TYPE_V", "--cache-type-v", "-ctv")
    return ServingOptions(
        slots=slots,
        context_tokens=each or context,
        key_bytes=ELEMENT_BYTES.get(key, 2.0),
        value_bytes=ELEMENT_BYTES.get(value, 2.0),
        batch_tokens=_number(_told(model, "LLAMA_ARG_UBATCH", "--ubatch-size", "-ub")) or 512,
        checkpoints=checkpoints,
        prompts_bytes=prompts_mib * MIB,
        whole_windows=_said(model, "LLAMA_ARG_SWA_FULL", "--swa-full"),
        scores=_told(model, "LLAMA_ARG_FLASH_ATTN", "--flash-attn", "-fa") in {"off", "0", "false", "disabled"},
    )


def _host(model: Model) -> tuple[int, int]:
    """Checkpoints of each slot, and MiB of earlier Calls' prompts: what llama.cpp keeps in the host's memory."""
    ours, prompts_mib = CHECKPOINTS, 0
    if model.spec.engine == "command":
        server = "llama-server" in Path(next(iter(model.spec.command), "")).name
        ours, prompts_mib = (LLAMA_SERVERS_CHECKPOINTS, LLAMA_SERVERS_PROMPTS_MIB) if server else (0, 0)
    told = _number(_told(model, "LLAMA_ARG_CTX_CHECKPOINTS", "--ctx-checkpoints", "--swa-checkpoints", "-ctxcp"))
    kept = _told(model, "LLAMA_ARG_CACHE_RAM", "--cache-ram", "-cram")
    if model.spec.engine == "llama.cpp" and model.spec.adapters:
        kept = "0"  # the engine's own words say so
    if kept == "-1":
        return ours if told is None else told, LLAMA_SERVERS_PROMPTS_MIB  # no limit: what it would be by default
    number = _number(kept)
    return ours if told is None else told, prompts_mib if number is None else number


def _told(model: Model, variable: str, *flags: str) -> str:
    """The last value of a flag in its command line, else of the variable in its environment; empty: neither."""
    words = (*model.spec.command, *model.spec.args)
    for at in reversed(range(len(words))):
        flag, equals, value = words[at].partition("=")
        if flag in flags:
            return value if equals else next(iter(words[at + 1 : at + 2]), "")
    told = model.spec.env.get(variable)
    return told if isinstance(told, str) else ""


def _said(model: Model, variable: str, *flags: str) -> bool:
    """Whether a switch is in its command line, or its environment."""
    told = model.spec.env.get(variable)
    return told in {"1", "true", "on", "enabled"} or any(
        word in flags for word in (*model.spec.command, *model.spec.args)
    )


def _number(text: str) -> int | None:
    """A whole number as engines read it; None: it is none, and the engine will refuse it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
