"""The definitions of engines, as data: the form of an entry, and the engines that Pilotlight can start.

An entry contains a template of the command line, the readiness check, and properties of the engine. A template is a
tuple of words; a nested tuple is a group that is omitted if one of its placeholders has no value.

The flags are those that the engines document. Every engine serves the model under the Model's own name, so that request
bodies need no change. The default slots are what an engine handles without tuning; `slots` of a Model overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

PLACEHOLDERS = frozenset({"host", "port", "model_path", "name", "memory_bytes", "slots", "context_tokens"})
"""Placeholders that `command` of a Model may use. Templates of built-in engines also use `program`, `revision`, `gpus`,
`cpu_only`, `memory_fraction` and `shared_context_tokens`. `memory_fraction` has a value if other replicas share the
device and nothing else limits the memory; `shared_context_tokens` if it is less than the model's own context.
"""
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

Word = str | tuple[str, ...]
Artifacts = Literal["file", "file-or-hf", "optional-file"]
"""The artifacts that an engine accepts: file:// is required; file:// or hf:// is required; file:// is optional."""


class EngineError(Exception):
    """An engine cannot be started. The message is one line that includes the fix."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program that can be the engine: it is detected by the name `found` on the node and started with `argv`."""

    found: str
    argv: tuple[Word, ...]
    env: dict[str, str] = {}
    """Variables to add to the environment. Options that older versions do not know belong here: programs ignore unknown
    variables but reject unknown flags.
    """
    for_gpus: str = ""
    """Not empty: the usual installation computes on the CPU. On GPUs other programs are preferred; this text names
    the alternative to install.
    """


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine loads the adapters of a Model, and how a request selects one.

    `each`, `joint` and `served_name` are templates with {name}, {adapter} and, except in `served_name`, {adapter_path}.
    """

    words: tuple[str, ...] = ()
    """Words on the command line before the adapters."""
    each: str = ""
    """The template of one adapter. Empty: the Model's own `command` loads the adapters."""
    joint: str = ""
    """The separator that joins all adapters in one word. Empty: each adapter is a word."""
    served_name: str = "{name}:{adapter}"
    """The new value of `model` in the request body."""
    by_lora: bool = False
    """Whether a request selects the adapter with `lora` in the body (llama.cpp): a list of {id: position, scale}, on
    the paths that support it.
    """
    excludes: tuple[str, ...] = ()
    """Flags that a Model with adapters must not use, because they would mix up the adapters."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of an engine.

    `programs` are in order of preference; without programs the Model's `command` is the template.
    """

    name: str
    programs: tuple[Program, ...] = ()
    install: str = ""
    """The program to install if none of the programs is available."""
    env: dict[str, Word] = {}
    """Variables to add to the environment. A value in a tuple is omitted if its placeholder has no value."""
    readiness_path: str = "/health"
    artifacts: Artifacts
    dialects: tuple[str, ...] = ("openai", "anthropic")
    slots: int
    """Concurrent requests per replica if the Model does not set `slots`."""
    pages: bool = False
    """Whether the KV cache is paged: the engine reserves a share of its devices when it starts, and all requests share
    it.
    """
    sized_by: tuple[str, ...] = ()
    """Flags and variables that set the size of the cache. An elastic Model must not use them."""
    sizes_itself: bool = False
    """Whether the engine determines the size of its cache itself and cannot be configured."""
    takes_cache_salt: bool = False
    """Whether `cache_salt` in the request body separates prefix caches."""
    takes_stream_options: bool = True
    """Whether streams may have `stream_options`. Servers that do not know it reject the whole request."""
    adapters: Adapters | None = None
    """None: the engine does not support adapters."""
    colon_in_name: bool = True
    """Whether the engine can serve a model whose name contains `:`."""
    closes_after_stream: bool = False
    """Whether the engine closes a connection after a streamed response, regardless of its headers."""


def fill_template(template: tuple[Word, ...], values: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the words of a template with their values. Raises EngineError if a required value is missing."""
    for word in template:
        if isinstance(word, tuple):
            if all(values.get(name) is not None for part in word for name in PLACEHOLDER.findall(part)):
                yield from fill_template(word, values)
            continue
        for name in PLACEHOLDER.findall(word):
            if values.get(name) is None:
                raise EngineError(f"its command line requires {{{name}}}, which the Model does not set")
        yield PLACEHOLDER.sub(lambda match: values[match[1]] or "", word)


CHECKPOINTS = 3
"""The number of context checkpoints that llama.cpp keeps per slot in host memory, to restore what sliding windows and
recurrent states discard. Its own default is 32, which can be several times the memory of the model; its first default
was 3.
"""

LLAMA_CPP = Engine(
    name="llama.cpp",
    programs=(
        Program(
            found="xllamacpp",  # a Python that can import it; {launcher} is Pilotlight's script for it
            argv=(
                *("{program}", "-I", "-u", "{launcher}", "--model", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--slots", "{slots}", "--alias", "{name}"),
                *("--ctx-checkpoints", str(CHECKPOINTS)),
                ("--context-tokens", "{context_tokens}"),
                ("--shared-context-tokens", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            for_gpus="put a llama-server that was built with CUDA on the PATH, or `pip install --force-reinstall "
            # from its README; cu132 for CUDA 13
            "xllamacpp --index-url https://xorbitsai.github.io/xllamacpp/whl/cu128`",
        ),
        Program(
            found="llama-server",
            argv=(
                *("{program}", "--model", "{model_path}", "--host", "{host}", "--port", "{port}", "--alias", "{name}"),
                *("--parallel", "{slots}", "--offline", "--metrics"),
                ("--ctx-size", "{all_context_tokens}"),  # for all slots together
                ("--ctx-size", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            # By default cached prompts use up to 8 GiB of host memory, which the plan does not account for.
            env={"LLAMA_ARG_CTX_CHECKPOINTS": str(CHECKPOINTS), "LLAMA_ARG_CACHE_RAM": "0"},
        ),
    ),
    install="pip install 'pilotlight[llama]', or put llama-server on the PATH",
    readiness_path="/health",  # 503 while it loads, then 200
    artifacts="file",
    slots=4,
    sized_by=(
        *("--context-tokens", "--shared-context-tokens", "--ctx-size", "-c", "--slots", "--parallel", "-np"),
        *("LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL"),
    ),
    adapters=Adapters(
        # Adapters are loaded at scale 0, so that only `lora` in a body applies one: --lora-init-without-apply leaves
        # them at 1 (ggml-org/llama.cpp#28674). The prompt cache in host memory does not record the adapter, so a prompt
        # computed with one adapter would be reused for another (#26207, #30129).
        words=("--cache-ram", "0", "--lora-scaled"),
        each="{adapter_path}:0",
        joint=",",
        by_lora=True,
        excludes=("--cache-ram", "-cram", "--lora", "--lora-scaled"),
    ),
    closes_after_stream=True,  # although it answers Keep-Alive: timeout=5, max=100
)

EVERY_DIALECT = ("openai", "anthropic", "jina", "vllm")

VLLM = Engine(
    name="vllm",
    programs=(
        Program(
            found="vllm",
            argv=(
                *("{program}", "serve", "{model_path}", "--host", "{host}", "--port", "{port}"),
                *("--served-model-name", "{name}", "--max-num-seqs", "{slots}"),
                ("--max-model-len", "{context_tokens}"),
                ("--tensor-parallel-size", "{gpus}"),
                # a fraction of the device's whole memory, including what other processes use
                ("--gpu-memory-utilization", "{memory_fraction}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install vllm",
    artifacts="file-or-hf",
    slots=64,
    dialects=EVERY_DIALECT,  # rerank, score and tokenize, too
    adapters=Adapters(words=("--enable-lora", "--lora-modules"), each="{name}:{adapter}={adapter_path}"),
    pages=True,
    sized_by=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"),
    takes_cache_salt=True,
)

SGLANG = Engine(
    name="sglang",
    programs=(
        Program(
            found="sglang",  # a Python that can import it
            argv=(
                *("{program}", "-m", "sglang.launch_server", "--model-path", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--served-model-name", "{name}", "--max-running-requests", "{slots}"),
                ("--context-length", "{context_tokens}"),
                ("--tp-size", "{gpus}"),
                # a fraction of the memory that is free at the start, at most
                ("--mem-fraction-static", "{memory_fraction}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install sglang",
    artifacts="file-or-hf",
    slots=64,
    adapters=Adapters(words=("--enable-lora", "--lora-paths"), each="{adapter}={adapter_path}"),
    colon_in_name=False,  # it interprets the text after `:` as an adapter
    pages=True,
    sized_by=("--mem-fraction-static", "--max-total-tokens"),
    takes_cache_salt=True,
)

OLLAMA = Engine(
    name="ollama",
    programs=(Program(found="ollama", argv=("{program}", "serve")),),
    install="install it from https://ollama.com/download",
    env={
        "OLLAMA_HOST": "[{host}]:{port}",  # a pod's address may be IPv6; Go accepts both in brackets
        "OLLAMA_NUM_PARALLEL": "{slots}",
        "OLLAMA_KEEP_ALIVE": "-1",  # the autoscaler decides when it stops, not its own timer
        "OLLAMA_CONTEXT_LENGTH": ("{context_tokens}",),
        "OLLAMA_MODELS": ("{model_path}",),  # a file:// artifact is the models folder of Ollama
    },
    readiness_path="/",  # the server; the model itself is loaded by the first request
    artifacts="optional-file",
    slots=4,
    sizes_itself=True,
)

COMMAND = Engine(
    name="command",
    artifacts="optional-file",
    slots=4,
    dialects=EVERY_DIALECT,
    takes_stream_options=False,
    adapters=Adapters(served_name="{adapter}"),
)
"""The program that the Model's `command` starts. Its API dialects are unknown, so all are allowed. It loads its
adapters itself and serves them under their own names.
"""
_TAKES_STREAM_OPTIONS = re.compile(
    r"(?:^|[\s/.])(?:llama-server|llama\.cpp|xllamacpp|vllm|sglang|ollama|lmdeploy|text-generation-launcher|fake_engine)\b"
)
"""A program, module or image in a command line that is known to accept `stream_options`."""

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LLAMA_CPP, VLLM, SGLANG, OLLAMA, COMMAND)}


def takes_stream_options(engine: Engine, command: tuple[str, ...]) -> bool:
    """Return whether the engine accepts `stream_options`. `command` is the command line of engine `command`."""
    return engine.takes_stream_options or any(map(_TAKES_STREAM_OPTIONS.search, command))


def is_fetched_by_engine(artifact: str, engine: Engine) -> bool:
    """Return whether the engine fetches the weights itself, by this name."""
    return artifact.startswith("hf://") and "?" not in artifact and engine.artifacts == "file-or-hf"


def default_slots(engine: str) -> int:
    """Return the concurrent requests per replica of a Model that does not set `slots`."""
    return ENGINES[engine].slots
