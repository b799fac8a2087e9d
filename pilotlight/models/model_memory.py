"""Estimates a Model's device memory from its artifact and its engine's options. I/O: reads the artifact.

Knows which arguments and environment variables affect llama.cpp's memory, and which engines allocate what they need
(llama.cpp) or all they are given (vLLM and SGLang, which page their cache). `artifacts.formats.memory_estimate` does
the arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from artifacts import file_kinds as kinds
from artifacts.formats import hf_config, memory_estimate
from artifacts.formats.memory_estimate import Estimate, Item, ServingOptions, Shape
from autoscaler.engines import ENGINES
from autoscaler.spec.engines import CHECKPOINTS
from autoscaler.spec.model import Cache, Model
from pilotlight.models.gguf_check import load_gguf_header
from pilotlight.models.model_parts import adapter_paths, local_path

LLAMA_SERVERS_CHECKPOINTS = 32
LLAMA_SERVERS_PROMPTS_MIB = 8192
"""Defaults of llama-server, used if a `command` starts it."""
PAGED_SHARE = 0.9
"""Default share of a device that vLLM takes; SGLang takes about as much."""
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes per element of llama.cpp's cache types (bytes per block divided by elements per block)."""
MIB = 1 << 20


class Known(NamedTuple):
    """Memory-related facts of an artifact."""

    source: str
    """Description of the source."""
    shape: Shape
    adapters_bytes: int
    projector_bytes: int = 0


def load_artifact_facts(model: Model) -> Known | None:
    """Return the facts in local files; None if they contain none. Raises GgufError, ConfigError and OSError."""
    found = load_shape(model)
    if found is None:
        return None
    projector = _option(model, "LLAMA_ARG_MMPROJ", "--mmproj", "-mm")
    projector_bytes = Path(projector).stat().st_size if projector.startswith("/") else 0
    return Known(*found, sum(map(_weighs, adapter_paths(model))), projector_bytes)


def _weighs(adapter: Path) -> int:
    """Return the size of a GGUF file or of a PEFT adapter's folder. Raises OSError."""
    if not adapter.is_dir():
        return adapter.stat().st_size
    return kinds.adapter_bytes({one.name: one.stat().st_size for one in adapter.iterdir()}, "")


def estimate_memory(model: Model, known: Known | None = None) -> Estimate | None:
    """Return the memory need of one replica by part; None if it is unknown. `known`: facts of the artifact; None: read
    local files. Raises as `load_artifact_facts` does.
    """
    found = known or load_artifact_facts(model)
    if found is None:
        return None
    make = memory_estimate.estimate_paged_engine if has_paged_cache(model) else memory_estimate.estimate_llama_cpp
    made = make(found.shape, read_serving_options(model))
    items = made.items
    if found.adapters_bytes:
        items = (*items, Item(name="adapters", bytes=found.adapters_bytes, words="their files"))
    if found.projector_bytes:
        items = (*items, Item(name="projector", bytes=found.projector_bytes, words="its file, for images"))
    if has_auto_sized_cache(model):
        items = (*_of_each(items, model.spec.gpu.count), _reserve(items, model.spec.gpu.count))
    return Estimate(items=items, slot_bytes=made.slot_bytes, token_bytes=made.token_bytes)


def _of_each(items: tuple[Item, ...], devices: int) -> tuple[Item, ...]:
    """Return each device's part under tensor parallelism: activation and overhead are needed on every device."""
    kept = {"activation", "overhead"}
    if devices <= 1:
        return items
    on = f"on each of {devices} devices"
    return tuple(
        i if i.name in kept else replace(i, bytes=-(-i.bytes // devices), words=f"{i.words}; {on}") for i in items
    )


def _reserve(items: tuple[Item, ...], devices: int) -> Item:
    """Return the memory to add to these items, so that PAGED_SHARE of the sum is enough for them."""
    taken = sum(item.bytes for item in _of_each(items, devices))
    words = f"an engine that has its devices alone uses only {PAGED_SHARE:.0%} of their memory"
    return Item(name="reserve", bytes=int(taken / PAGED_SHARE) + 1 - taken, words=words)


def estimate_cache(model: Model, made: Estimate, known: Known | None = None, *, gpus: bool) -> Cache | None:
    """Return how the memory of a llama.cpp Model varies with its cache. `made` is its estimate. Raises as
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
    """Return (source, shape), or None if no local file has it. Raises GgufError, ConfigError and OSError."""
    path = local_path(model)
    if path is None:
        return None
    if has_paged_cache(model) and path.suffix != ".gguf":
        config = hf_config.load_config_info(path)
        return f"Its config.json ({config.architecture})", config.shape
    if path.suffix != ".gguf" and model.spec.engine != "llama.cpp":
        return None  # its format is unknown
    info = load_gguf_header(path)
    return f"Its GGUF header ({info.architecture})", info.shape


def has_paged_cache(model: Model) -> bool:
    """Return whether its engine pages its cache, and so takes a share of its devices whatever the Model needs."""
    return ENGINES[model.spec.engine].pages


def has_auto_sized_cache(model: Model) -> bool:
    """Return whether its engine pages its cache and is given the estimated need (`gpu.memory: auto`)."""
    return has_paged_cache(model) and model.spec.gpu.memory_bytes == 0


def has_fixed_memory(model: Model) -> bool:
    """Return whether the artifact is irrelevant: the engine takes all memory, or the amount in the document."""
    return has_paged_cache(model) and not has_auto_sized_cache(model)


def read_device_share(model: Model) -> float:
    """Return the share of each device that a paging engine takes, as in the document or by default."""
    flags = ("--gpu-memory-utilization", "--mem-fraction-static")
    try:
        share = float(_option(model, "", *flags))
    except ValueError:
        return PAGED_SHARE
    return share if 0.0 < share <= 1.0 else PAGED_SHARE


def read_serving_options(model: Model) -> ServingOptions:
    """Return the serving options that the document passes to the engine."""
    context, slots = model.spec.context_tokens, model.slots
    if has_paged_cache(model):
        element = 1.0 if _option(model, "", "--kv-cache-dtype").startswith("fp8") else 2.0
        limit = _number(_option(model, "", "--max-model-len", "--context-length"))
        spec, tokens = model.spec, limit or context
        calls = slots if has_auto_sized_cache(model) and tokens and spec.slots is not None else 1
        return ServingOptions(
            slots=slots, context_tokens=tokens, key_bytes=element, value_bytes=element, whole_calls=calls
        )
    together = _number(_option(model, "LLAMA_ARG_CTX_SIZE", "--ctx-size", "-c"))
    each = _number(_option(model, "", "--context-tokens"))
    if together:
        context = -(-together // slots)
    checkpoints, prompts_mib = _host(model)
    key = _option(model, "LLAMA_ARG_CACHE_TYPE_K", "--cache-type-k", "-ctk")
    value = _option(model, "LLAMA_ARG_CACHE_TYPE_V", "--cache-type-v", "-ctv")
    return ServingOptions(
        slots=slots,
        context_tokens=each or context,
        key_bytes=ELEMENT_BYTES.get(key, 2.0),
        value_bytes=ELEMENT_BYTES.get(value, 2.0),
        batch_tokens=_number(_option(model, "LLAMA_ARG_UBATCH", "--ubatch-size", "-ub")) or 512,
        checkpoints=checkpoints,
        prompts_bytes=prompts_mib * MIB,
        whole_windows=_said(model, "LLAMA_ARG_SWA_FULL", "--swa-full"),
        scores=_option(model, "LLAMA_ARG_FLASH_ATTN", "--flash-attn", "-fa") in {"off", "0", "false", "disabled"},
    )


def _host(model: Model) -> tuple[int, int]:
    """Return checkpoints per slot, and MiB of cached prompts, which llama.cpp keeps in host memory."""
    ours, prompts_mib = CHECKPOINTS, 0
    if model.spec.engine == "command":
        server = "llama-server" in Path(next(iter(model.spec.command), "")).name
        ours, prompts_mib = (LLAMA_SERVERS_CHECKPOINTS, LLAMA_SERVERS_PROMPTS_MIB) if server else (0, 0)
    given = _number(_option(model, "LLAMA_ARG_CTX_CHECKPOINTS", "--ctx-checkpoints", "--swa-checkpoints", "-ctxcp"))
    kept = _option(model, "LLAMA_ARG_CACHE_RAM", "--cache-ram", "-cram")
    if model.spec.engine == "llama.cpp" and model.spec.adapters:
        kept = "0"  # as in the engine's command line
    if kept == "-1":
        return ours if given is None else given, LLAMA_SERVERS_PROMPTS_MIB  # no limit: use the default
    number = _number(kept)
    return ours if given is None else given, prompts_mib if number is None else number


def _option(model: Model, variable: str, *flags: str) -> str:
    """Return the last value of a flag on the command line, else of the environment variable, else an empty string."""
    words = (*model.spec.command, *model.spec.args)
    for at in reversed(range(len(words))):
        flag, equals, value = words[at].partition("=")
        if flag in flags:
            return value if equals else next(iter(words[at + 1 : at + 2]), "")
    from_env = model.spec.env.get(variable)
    return from_env if isinstance(from_env, str) else ""


def _said(model: Model, variable: str, *flags: str) -> bool:
    """Return whether a switch is set on the command line or in the environment."""
    from_env = model.spec.env.get(variable)
    return from_env in {"1", "true", "on", "enabled"} or any(
        word in flags for word in (*model.spec.command, *model.spec.args)
    )


def _number(text: str) -> int | None:
    """Return a whole number as engines parse it, or None for a value that the engine will reject."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
