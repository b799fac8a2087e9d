"""The form of an engine's definition: `autoscaler.spec.engines` contains the engines. Pure.

An entry contains a template of the command line, the readiness check, and properties of the engine. A template is a
tuple of words; a nested tuple is a group that is omitted if one of its placeholders has no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, Literal

import msgspec

PLACEHOLDERS = frozenset({"host", "port", "model_path", "name", "memory_bytes", "slots", "context_tokens"})
"""Placeholders that `command` of a Model may use. Templates of built-in engines also use `program`, `revision`, `gpus`,
`cpu_only`, `memory_fraction` and `shared_context_tokens`. `memory_fraction` has a value if other replicas share the
device and nothing else limits the memory; `shared_context_tokens` if it is less than the model's own context.
"""
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

Word = str | tuple[str, ...]
Tests = Literal["run", "engines", "text"]
"""How the tests cover an engine: they run it in `make test`, or only in `make test-engines`, or they do not run it and
compare its command line as text.
"""
Artifacts = Literal["file", "file-or-hf", "optional-file"]
"""The artifacts that an engine accepts: file:// is required; file:// or hf:// is required; file:// is optional."""


class EngineError(Exception):
    """An engine cannot be started. The message is one line that includes the fix."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program that can be the engine: it is detected by the name `found` on the node and started with `argv`."""

    found: str
    argv: tuple[Word, ...]
    package: bool = False
    """Whether `found` is a Python package, so that the program is a Python that can import it."""
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


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Names of an engine's metrics, the newest name first. A metric without a name, or one that is missing in a
    response, is unknown and not zero.
    """

    path: str = "/metrics"
    on_request_port: bool = True
    """Whether `path` is on the port of the requests. Pilotlight reads no other port."""
    needs: str = ""
    """The setting without which the engine has no metrics. Empty: there is none."""
    flag: str = ""
    """The flag in `args` without which the engine has no metrics. Empty: there is none."""
    waiting: tuple[str, ...] = ()
    """Requests that wait in the engine's queue."""
    running: tuple[str, ...] = ()
    cache_use: tuple[str, ...] = ()
    """The used fraction of the KV cache, from 0 to 1."""
    tokens: tuple[str, ...] = ()
    """The counter of generated tokens."""
    queue_time_path: str = ""
    """The path on the port of the requests whose JSON has the total time of requests in the queue, as Triton's
    statistics. {name} is the name that the engine serves. Empty: there is none.
    """

    def metric_names(self, signal: str) -> tuple[str, ...]:
        """Return the readable metric names of a signal in `spec.scaling`, the newest first."""
        names = {"kvCachePercent": self.cache_use, "tokensPerSecond": self.tokens, "engineQueue": self.waiting}
        return names.get(signal, ()) if self.on_request_port else ()

    def is_readable(self, signal: str) -> bool:
        """Whether Pilotlight can read a signal in `spec.scaling` from the engine."""
        return bool(self.metric_names(signal)) or (signal == "engineQueue" and bool(self.queue_time_path))


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine frees device memory without a restart."""

    needs: str = ""
    """The setting without which the engine cannot sleep. Empty: there is none."""
    sleep: str
    wake: str
    state: str = ""
    """The request that reports whether the engine sleeps. Empty: there is none."""


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """An image of the same engine for devices of another maker."""

    name: str
    image: str
    env: dict[str, str] = {}
    """Variables to set in the Model's `env`."""
    source: str


class Behavior(msgspec.Struct, frozen=True, kw_only=True):
    """The behavior of a running engine, in words. docs/reference/engines.md is generated from it."""

    ready_when: str
    """The meaning of a 200 on the readiness path."""
    cancellation: str
    """How the engine learns that a client cancelled its request, and what it does then."""
    stop: str
    """The reaction of the engine to SIGTERM."""
    memory: str
    """How its use of device memory is limited."""
    adapter_loading: str = ""
    """How adapters are loaded on a running engine. Empty: not possible."""
    metrics: EngineMetrics | None = None
    sleep: Sleep | None = None
    native_paths: tuple[str, ...] = ()
    """Its own API that clients must not reach: administration, state of one process. A path may contain {id}."""
    notes: str = ""
    tests: Tests = "text"
    sources: tuple[str, ...]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of an engine.

    `programs` are in order of preference; without programs the Model's `command` is the template.
    """

    name: str
    programs: tuple[Program, ...] = ()
    install: str = ""
    """The program to install if none of the programs is available."""
    image: str = ""
    """An image with the program on its PATH, without a tag. Empty: none is known."""
    platforms: tuple[Platform, ...] = ()
    env: dict[str, Word] = {}
    """Variables to add to the environment. A value in a tuple is omitted if its placeholder has no value."""
    synonyms: dict[str, str] = {}
    """Other spellings of flags in the command line, with the placeholder that they set."""
    repeated_flags: tuple[str, ...] = ()
    """Flags that may occur several times with different values, so that Models may use them, too."""
    readiness_path: str = "/health"
    """The path that returns 200 if, and only if, the model is served. {name} is the name that the engine serves."""
    artifacts: Artifacts
    file_only: bool = False
    """Whether the artifact cannot be `oci://`, `hf://` or `s3://`: the engine has a store of its own, or serves the
    model under the path of its weights.
    """
    named_by_path: bool = False
    """Whether the engine serves the model under the path of its weights."""
    dialects: tuple[str, ...]
    """The APIs that the engine supports: `openai` (all of OpenAI's but Responses), `responses`, `anthropic`, `jina`
    (`/v1/rerank`), `cohere` (`/v2/rerank`), `score`, `vllm` (`/tokenize`), and `tei` and `sglang` for their own forms
    of rerank. Empty: none that the gateway forwards; it translates requests.
    """
    slots: int
    """Concurrent requests per replica if the Model does not set `slots`."""
    pages: bool = False
    """Whether the KV cache is paged: the engine reserves a share of its devices when it starts, and all requests share
    it.
    """
    sized_by: tuple[str, ...] = ()
    """Flags and variables that set the size of the cache. An elastic Model must not use them."""
    sizes_itself: bool = False
    """Whether the engine determines the memory that it uses itself and cannot be limited to a share of a device."""
    takes_cache_salt: bool = False
    """Whether `cache_salt` in the request body separates prefix caches."""
    takes_stream_options: bool = True
    """Whether streams may have `stream_options`. Servers that do not know it reject the whole request."""
    adapters: Adapters | None = None
    """None: the engine does not support adapters."""
    behavior: Behavior
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


def reserved_flags(engine: Engine) -> dict[str, str]:
    """Return flag -> placeholder for the flags that the command line of the engine sets, spelled with `-`.

    Flags that set a constant, the number of devices or the share of a device are not reserved: Models may override
    them.
    """
    flags = dict(engine.synonyms)
    for program in engine.programs:
        words = [part for word in program.argv for part in ((word,) if isinstance(word, str) else word)]
        for flag, value in pairwise([*words, ""]):
            if flag.startswith("--"):
                name, is_joined, joined = flag.partition("=")
                flags |= {
                    name.replace("_", "-"): found for found in PLACEHOLDER.findall(joined if is_joined else value)
                }
    return {flag: name for flag, name in flags.items() if name in RESERVED and flag not in engine.repeated_flags}


RESERVED: Final = {
    **dict.fromkeys(("host", "port"), "remove it"),
    "model_path": "use spec.artifact",
    "name": "use metadata.name or spec.aliases",
    "slots": "use spec.slots",
    "context_tokens": "use spec.contextTokens",
    "all_context_tokens": "use spec.contextTokens",
}
"""The placeholders whose flags a Model must not set, and what to use instead."""
