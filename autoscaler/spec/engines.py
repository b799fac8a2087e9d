"""Engines as data: the form of an entry, and the engines that Pilotlight can start.

An entry has a template of the command line, how the engine reports that it is ready, and how it behaves. A template is
a tuple of words; a nested tuple is a group that is left out if a placeholder in it has no value.

Flags are those that the engines document. Every engine is told to serve the model under the Model's own name, so that
bodies need no change. Default slots are what an engine handles without tuning; `slots` of a Model overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

PLACEHOLDERS = frozenset({"host", "port", "model_path", "name", "memory_bytes", "slots", "context_tokens"})
"""What `command` of a Model may use. Engines' own templates also use `program`, `revision`, `gpus`, `cpu_only` and
`memory_fraction`, which is there where others share its Device and nothing else holds its memory, and
`shared_context_tokens`, where it is less than the model's own."""
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

Word = str | tuple[str, ...]
Artifacts = Literal["file", "file-or-hf", "optional-file"]
"""Which artifacts it takes: a file:// is needed; a file:// or hf:// is needed; a file:// may be given."""


class EngineError(Exception):
    """An engine cannot be started; the text is one line that names the fix."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program that can be the engine: found under `found` among what is available on the node, then started so."""

    found: str
    argv: tuple[Word, ...]
    env: dict[str, str] = {}
    """Added to the environment. What an older version does not know goes here: a variable is ignored, a flag is not."""
    for_gpus: str = ""
    """Not empty: as commonly installed it computes on the CPU. On GPUs others go before it, and this says what to
    install instead.
    """


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is told of a Model's adapters, and how a Call then chooses one.

    `each`, `joint` and `served_name` are filled with {name}, {adapter} and, but for the last, {adapter_path}.
    """

    words: tuple[str, ...] = ()
    """Before them on the command line."""
    each: str = ""
    """One adapter; empty: the Model's own `command` loads them."""
    joint: str = ""
    """What joins all of them in one word; empty: each is a word."""
    served_name: str = "{name}:{adapter}"
    """What a Call's `model` becomes."""
    by_lora: bool = False
    """Chosen by the body's `lora` (llama.cpp): a list of {id: position, scale}, on the paths that take it."""
    excludes: tuple[str, ...] = ()
    """Flags that a Model with adapters must not give, since they would mix adapters up."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as data. `programs` in order of preference; none means that the Model's `command` is the template."""

    name: str
    programs: tuple[Program, ...] = ()
    install: str = ""
    """What to do when none of the programs is there."""
    env: dict[str, Word] = {}
    """Added to the environment; a value in a tuple is left out when it has no value."""
    readiness_path: str = "/health"
    artifacts: Artifacts
    dialects: tuple[str, ...] = ("openai", "anthropic")
    slots: int
    """Calls at once when the Model does not say."""
    pages: bool = False
    """Its cache is paged: it takes a share of its Devices at its start, and its Calls share that."""
    sized_by: tuple[str, ...] = ()
    """Flags and variables that say how large its cache is: a Model that is elastic must not give them."""
    sizes_itself: bool = False
    """Nobody can tell it how large its cache is to be."""
    takes_cache_salt: bool = False
    """Its prefix cache is kept apart by the body's `cache_salt`."""
    adapters: Adapters | None = None
    """None: it takes none."""
    colon_in_name: bool = True
    """It may serve a model whose name has a `:` in it."""
    closes_after_stream: bool = False
    """It closes a connection after a streamed answer, whatever its header says."""


def fill_template(template: tuple[Word, ...], values: Mapping[str, str | None]) -> Iterator[str]:
    """The words of a template with their values. Raises EngineError for a missing value outside an optional group."""
    for word in template:
        if isinstance(word, tuple):
            if all(values.get(name) is not None for part in word for name in PLACEHOLDER.findall(part)):
                yield from fill_template(word, values)
            continue
        for name in PLACEHOLDER.findall(word):
            if values.get(name) is None:
                raise EngineError(f"its command line needs {{{name}}}, which the Model does not say")
        yield PLACEHOLDER.sub(lambda match: values[match[1]] or "", word)


CHECKPOINTS = 3
"""Of each slot llama.cpp keeps so many copies of what windows and recurrent states have forgotten, to go back to, in
the host's memory; by itself 32, which can be several times the memory of the model. Three were its first default."""

LLAMA_CPP = Engine(
    name="llama.cpp",
    programs=(
        Program(
            found="xllamacpp",  # a Python that can import it; {launcher} is our script beside this file
            argv=(
                *("{program}", "-I", "-u", "{launcher}", "--model", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--slots", "{slots}", "--alias", "{name}"),
                *("--ctx-checkpoints", str(CHECKPOINTS)),
                ("--context-tokens", "{context_tokens}"),
                ("--shared-context-tokens", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            for_gpus="put a llama-server that was built with CUDA on the PATH, or `pip install --force-reinstall "
            "xllamacpp --index-url https://xorbitsai.github.io/xllamacpp/whl/cu128`",  # its README; cu132 for CUDA 13
        ),
        Program(
            found="llama-server",
            argv=(
                *("{program}", "--model", "{model_path}", "--host", "{host}", "--port", "{port}", "--alias", "{name}"),
                *("--parallel", "{slots}", "--offline", "--metrics"),
                ("--ctx-size", "{all_context_tokens}"),  # of all slots together
                ("--ctx-size", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            # Prompts of earlier Calls would take up to 8 GiB of the host's memory, for which nobody planned.
            env={"LLAMA_ARG_CTX_CHECKPOINTS": str(CHECKPOINTS), "LLAMA_ARG_CACHE_RAM": "0"},
        ),
    ),
    install="pip install 'pilotlight[llama]', or put llama-server on the PATH",
    readiness_path="/health",  # 503 while it loads, 200 after
    artifacts="file",
    slots=4,
    sized_by=(
        *("--context-tokens", "--shared-context-tokens", "--ctx-size", "-c", "--slots", "--parallel", "-np"),
        *("LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL"),
    ),
    adapters=Adapters(
        # At scale 0, so that only a body's `lora` applies one: --lora-init-without-apply leaves them at 1
        # (ggml-org/llama.cpp#28674). Prompts kept in host memory are kept without their adapter: what was computed
        # with one would answer for another (#26207, #30129).
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
                ("--gpu-memory-utilization", "{memory_fraction}"),  # of all the device's memory, whoever else is there
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
                ("--mem-fraction-static", "{memory_fraction}"),  # of what is free when it starts: never more
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install sglang",
    artifacts="file-or-hf",
    slots=64,
    adapters=Adapters(words=("--enable-lora", "--lora-paths"), each="{adapter}={adapter_path}"),
    colon_in_name=False,  # it takes what follows one for an adapter
    pages=True,
    sized_by=("--mem-fraction-static", "--max-total-tokens"),
    takes_cache_salt=True,
)

OLLAMA = Engine(
    name="ollama",
    programs=(Program(found="ollama", argv=("{program}", "serve")),),
    install="install it from https://ollama.com/download",
    env={
        "OLLAMA_HOST": "[{host}]:{port}",  # in a pod the address may be IPv6; Go takes both in brackets
        "OLLAMA_NUM_PARALLEL": "{slots}",
        "OLLAMA_KEEP_ALIVE": "-1",  # when it ends is decided here, not by its own clock
        "OLLAMA_CONTEXT_LENGTH": ("{context_tokens}",),
        "OLLAMA_MODELS": ("{model_path}",),  # a file:// artifact is the folder of its store
    },
    readiness_path="/",  # the server; the model itself is read at the first Call
    artifacts="optional-file",
    slots=4,
    sizes_itself=True,
)

COMMAND = Engine(
    name="command",
    artifacts="optional-file",
    slots=4,
    dialects=EVERY_DIALECT,
    adapters=Adapters(served_name="{adapter}"),
)
"""Whatever the Model's `command` starts. Its dialects are not known, so none is ruled out; it loads its adapters
itself, and knows them by their own names."""

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LLAMA_CPP, VLLM, SGLANG, OLLAMA, COMMAND)}


def is_fetched_by_engine(artifact: str, engine: Engine) -> bool:
    """Whether the engine is told that name, and fetches the weights itself."""
    return artifact.startswith("hf://") and "?" not in artifact and engine.artifacts == "file-or-hf"


def default_slots(engine: str) -> int:
    """Calls at once on one Replica of a Model that does not say."""
    return ENGINES[engine].slots
