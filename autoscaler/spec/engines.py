"""What an engine is: data. A template of its command line, where it says that it is ready, and its manners.

Owns the form of that data, its placeholders and how they are filled. It decides nothing and starts nothing. A template
is a tuple of words; a nested tuple is a group that is left out when a placeholder in it has no value.
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


def fill(template: tuple[Word, ...], values: Mapping[str, str | None]) -> Iterator[str]:
    """The words of a template with their values. Raises EngineError for a missing value outside an optional group."""
    for word in template:
        if isinstance(word, tuple):
            if all(values.get(name) is not None for part in word for name in PLACEHOLDER.findall(part)):
                yield from fill(word, values)
            continue
        for name in PLACEHOLDER.findall(word):
            if values.get(name) is None:
                raise EngineError(f"its command line needs {{{name}}}, which the Model does not say")
        yield PLACEHOLDER.sub(lambda match: values[match[1]] or "", word)
