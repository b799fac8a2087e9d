"""Estimates the memory of one replica: weights, cache, state, checkpoints, activation and overhead. Pure.

Contains the arithmetic for all artifact readers (`artifacts.formats.gguf`, `artifacts.formats.hf_config`). Every number
is an upper bound: unknown layers count as keeping all tokens. Sliding-window attention keeps its window; latent
attention (MLA) keeps one narrow row per token; recurrent layers keep a state per slot, however long its context is.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

CELLS = 256
"""llama.cpp rounds the tokens of a cache up to a multiple of this."""
OVERHEAD_BYTES = 256 << 20
"""llama.cpp's process, libraries and small buffers in host memory."""
CONTEXT_BYTES = 512 << 20
"""The memory of a GPU that its driver, the code of the kernels and cuBLAS take for each process: measurements of
different GPUs and drivers give 107 to 555 MiB.
"""
PAGED_OVERHEAD_BYTES = 3 << 29
"""The GPU process of vLLM or SGLang: its context, libraries and captured graphs."""
PAGED_BATCH_TOKENS = 8192
"""Approximate limit of prompt tokens that they process in one step."""
BYTES_MAX = 1 << 60
"""Upper limit of any estimate, since a file may claim any number."""


Count = Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)]
"""Validates shapes received as text: an agent may send anything, and a negative number would free memory."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one block: elements of keys and values per token, and a state per slot."""

    key_elements: Count = 0
    value_elements: Count = 0
    window_tokens: Count = 0
    """Size of the attention window in tokens; 0: all tokens are kept."""
    state_bytes: Count = 0


P = TypeVar("P", bound=msgspec.Struct)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an artifact that determine its memory."""

    weights_bytes: Count
    embedding_bytes: Count = 0
    """The part of the weights that only looks up the embedding of a token. llama.cpp keeps it in host memory. 0: it
    also computes the output, or its size is unknown.
    """
    layers: tuple[LayerShape, ...]
    context_tokens: Count
    """Trained context length: the most that a slot can use."""
    vocabulary: Count
    width: Count
    inner: Count
    """Width of the feed-forward layers that one token passes through."""
    heads: Count = 0


def clamp_shape(shape: Shape) -> Shape:
    """Clamp all numbers to BYTES_MAX, as the decoder of its JSON requires."""
    return _bounded(shape, layers=tuple(map(_bounded, shape.layers)))


def _bounded(part: P, **known: object) -> P:
    cut = {name: BYTES_MAX for name in part.__struct_fields__ if name not in known and getattr(part, name) > BYTES_MAX}
    return msgspec.structs.replace(part, **cut, **known) if cut or known else part


class ServingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Serving parameters."""

    slots: int
    context_tokens: int | None = None
    """Context of each slot. None: with llama.cpp all slots share the model's context."""
    key_bytes: float = 2.0
    """Bytes per key element in the cache; float16 by default."""
    value_bytes: float = 2.0
    batch_tokens: int = 512
    """llama.cpp's ubatch: the number of tokens computed at once."""
    checkpoints: int = 0
    """Per slot: snapshots of windows and states to which llama.cpp can return."""
    prompts_bytes: int = 0
    """Limit of llama.cpp's cache of earlier prompts."""
    whole_windows: bool = False
    """Whether layers with a window keep all tokens, too."""
    whole_calls: int = 1
    """For engines with a paged cache: number of requests that may fill the context concurrently."""
    scores: bool = False
    """Without flash attention: the scores of a batch over the whole context are stored."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an estimate. `host`: it is in host memory, wherever the rest is. `gpu`: it is needed on GPUs only."""

    name: str
    bytes: int
    words: str
    host: bool = False
    gpu: bool = False


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one replica, part by part."""

    items: tuple[Item, ...]
    slot_bytes: int
    """Memory of one more slot."""
    token_bytes: int
    """Memory of one more context token in one slot."""

    def total_bytes(self, *, gpus: bool) -> int:
        """Return the sum; for GPUs without the parts in host memory."""
        return min(BYTES_MAX, sum(item.bytes for item in self.items if not (item.host if gpus else item.gpu)))


def estimate_llama_cpp(shape: Shape, serving: ServingOptions) -> Estimate:
    """Estimate llama.cpp's memory at startup, plus what grows in host memory while it serves."""
    shared = serving.context_tokens is None
    context = shape.context_tokens if serving.context_tokens is None else serving.context_tokens
    cells = _padded(max(1, context))
    caches = 1 if shared else serving.slots

    def kept(layer: LayerShape, slots: int) -> int:
        """Return the tokens that a cache with this many slots keeps of a layer."""
        if not layer.window_tokens or serving.whole_windows:
            return cells
        return min(cells, _padded(layer.window_tokens * slots + serving.batch_tokens))

    rows = [(layer, _token_bytes(layer, serving)) for layer in shape.layers]
    cache = caches * sum(row * kept(layer, serving.slots if shared else 1) for layer, row in rows)
    alone = sum(row * kept(layer, 1) for layer, row in rows)
    windows = 0 if serving.whole_windows else sum(row * kept(layer, 1) for layer, row in rows if layer.window_tokens)
    state = sum(layer.state_bytes for layer in shape.layers)
    back = serving.checkpoints * (windows + state)
    return Estimate(
        items=_some(
            Item(name="weights", bytes=max(0, shape.weights_bytes - shape.embedding_bytes), words="all of its files"),
            Item(
                name="embedding", bytes=shape.embedding_bytes, host=True,
                words="the layer of its files that looks up the input tokens",
            ),
            Item(name="cache", bytes=cache, words=_cache_words(shape, serving, context)),
            _states(shape, state, serving.slots),
            Item(
                name="checkpoints", bytes=serving.slots * back, host=True,
                words=f"{serving.checkpoints} per slot, copies of attention windows and states of earlier tokens",
            ),
            Item(
                name="prompts", bytes=serving.prompts_bytes, host=True,
                words="cached prompts of earlier requests, up to the limit of this cache",
            ),
            _activation(shape, serving.batch_tokens, cells if serving.scores else 0, serving.batch_tokens),
            Item(name="overhead", bytes=OVERHEAD_BYTES, host=True, words="the process and its libraries"),
            Item(name="context", bytes=CONTEXT_BYTES, gpu=True, words="the driver, kernels and libraries on the GPU"),
        ),
        slot_bytes=min(BYTES_MAX, state + back + (0 if shared else alone)),
        token_bytes=min(BYTES_MAX, sum(row for layer, row in rows if kept(layer, 1) == cells)),
    )  # fmt: skip


def estimate_paged_engine(shape: Shape, serving: ServingOptions) -> Estimate:
    """Estimate the minimum with which vLLM or SGLang starts: one request may fill the context. They use all memory
    that they are given.
    """
    context = serving.context_tokens or shape.context_tokens
    row = sum(_token_bytes(layer, serving) for layer in shape.layers)
    state = sum(layer.state_bytes for layer in shape.layers)
    batch = min(PAGED_BATCH_TOKENS, max(1, context))
    return Estimate(
        items=_some(
            Item(name="weights", bytes=shape.weights_bytes, words="all of its files"),
            Item(name="cache", bytes=row * context * serving.whole_calls, words=_paged_words(serving, context)),
            _states(shape, state, serving.slots),
            _activation(shape, batch, 0, serving.slots),
            Item(name="overhead", bytes=PAGED_OVERHEAD_BYTES, words="the process, its libraries and captured graphs"),
        ),
        slot_bytes=min(BYTES_MAX, state + 4 * shape.vocabulary),
        token_bytes=min(BYTES_MAX, row),
    )  # fmt: skip


def _paged_words(serving: ServingOptions, context: int) -> str:
    if serving.whole_calls == 1:
        return f"one request of {context} tokens, the minimum to start"
    return f"{serving.whole_calls} requests of {context} tokens at once"


def _token_bytes(layer: LayerShape, serving: ServingOptions) -> int:
    return int(layer.key_elements * serving.key_bytes + layer.value_elements * serving.value_bytes)


def _padded(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


def _states(shape: Shape, state: int, slots: int) -> Item:
    many = sum(layer.state_bytes > 0 for layer in shape.layers)
    return Item(name="state", bytes=slots * state, words=f"{many} recurrent layers, for each of {slots} slots")


def _activation(shape: Shape, batch: int, scored_tokens: int, outputs: int) -> Item:
    """float32 for one batch: the data of one layer at a time, the logits, and attention scores if stored. llama.cpp
    also converts the scores of a layer to float16, to multiply them by the values.
    """
    rows = batch * (4 * shape.width + 3 * shape.inner)
    scores = 6 * batch * shape.heads * scored_tokens
    words = f"one batch of {batch} tokens, logits over {shape.vocabulary} words"
    return Item(name="activation", bytes=4 * (rows + outputs * shape.vocabulary) + scores, words=words)


def _cache_words(shape: Shape, serving: ServingOptions, context: int) -> str:
    """Example: `24 layers keep all of 4 x 4096 tokens, 20 the last 1024`."""
    keeping = [layer for layer in shape.layers if layer.key_elements or layer.value_elements]
    short = [] if serving.whole_windows else [layer for layer in keeping if layer.window_tokens]
    tokens = f"{context} tokens together" if serving.context_tokens is None else f"{serving.slots} x {context} tokens"
    whole = len(keeping) - len(short)
    said = [f"{whole} {'layer keeps' if whole == 1 else 'layers keep'} all of {tokens}"] if whole else []
    window = max((layer.window_tokens for layer in short), default=0)
    said += [f"{len(short)} {'' if whole else 'layers keep '}the last {window}"] if short else []
    return ", ".join(said)


def _some(*items: Item) -> tuple[Item, ...]:
    """Return the nonempty items, each clamped to BYTES_MAX."""
    return tuple(msgspec.structs.replace(one, bytes=min(BYTES_MAX, one.bytes)) for one in items if one.bytes)
