"""How much memory one Replica of an architecture takes: weights, cache, state, checkpoints, activation, overhead. Pure.

Owns the arithmetic for everything that reads artifacts (`artifacts.formats.gguf`, `artifacts.formats.hf_config`). Every
number is an upper estimate: what is not known is counted as if all layers kept all tokens. Attention that sees a window
keeps the window; latent attention (MLA) keeps one narrow row for a token; recurrent layers keep a state for a slot,
however long its context is.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

CELLS = 256
"""llama.cpp rounds the tokens of a cache up to a multiple of this."""
OVERHEAD_BYTES = 256 << 20
"""llama.cpp's process, its libraries and small buffers."""
PAGED_OVERHEAD_BYTES = 3 << 29
"""vLLM's and SGLang's process on a GPU: its context, its libraries, captured graphs."""
PAGED_BATCH_TOKENS = 8192
"""They read at most about so many tokens of prompts in one step."""
BYTES_MAX = 1 << 60
"""No estimate is larger: a file may claim anything."""


Count = Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)]
"""Where a shape comes as a text: an agent may say anything, too, and what is negative would make room."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one block keeps: elements of keys and values for each token, and a state for each slot."""

    key_elements: Count = 0
    value_elements: Count = 0
    window_tokens: Count = 0
    """It keeps only so many of the last tokens; 0: all."""
    state_bytes: Count = 0


P = TypeVar("P", bound=msgspec.Struct)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What an artifact says of itself, as far as memory depends on it."""

    weights_bytes: Count
    layers: tuple[LayerShape, ...]
    context_tokens: Count
    """What the model was trained for: the most that a slot can use."""
    vocabulary: Count
    width: Count
    inner: Count
    """Width of the feed-forward layers that one token goes through."""
    heads: Count = 0


def clamp_shape(shape: Shape) -> Shape:
    """The shape with numbers of at most BYTES_MAX, as readers of its JSON require."""
    return _bounded(shape, layers=tuple(map(_bounded, shape.layers)))


def _bounded(part: P, **known: object) -> P:
    cut = {name: BYTES_MAX for name in part.__struct_fields__ if name not in known and getattr(part, name) > BYTES_MAX}
    return msgspec.structs.replace(part, **cut, **known) if cut or known else part


class ServingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How it is served."""

    slots: int
    context_tokens: int | None = None
    """Of each slot. None: of llama.cpp all slots share the model's own."""
    key_bytes: float = 2.0
    """Of one element in the cache: float16 unless told otherwise."""
    value_bytes: float = 2.0
    batch_tokens: int = 512
    """llama.cpp's ubatch: so many tokens are computed at once."""
    checkpoints: int = 0
    """Of each slot: copies of its windows and states to which llama.cpp can go back."""
    prompts_bytes: int = 0
    """What llama.cpp may keep of prompts of earlier Calls."""
    whole_windows: bool = False
    """Layers with a window keep all tokens, too."""
    whole_calls: int = 1
    """Of engines that page their cache: so many Calls may fill the context at once."""
    scores: bool = False
    """No flash attention: the scores of a batch over the whole context are written down."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an estimate. `host`: it is in the host's memory, wherever the rest is."""

    name: str
    bytes: int
    words: str
    host: bool = False


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one Replica takes, part by part."""

    items: tuple[Item, ...]
    slot_bytes: int
    """What one more slot would take."""
    token_bytes: int
    """What one more token in the context of one slot would take."""

    def total_bytes(self, *, gpus: bool) -> int:
        """All of it; of GPUs only what is not in the host's memory."""
        return min(BYTES_MAX, sum(item.bytes for item in self.items if not (gpus and item.host)))


def estimate_llama_cpp(shape: Shape, serving: ServingOptions) -> Estimate:
    """What llama.cpp takes at its start, and what grows in the host's memory while it serves."""
    shared = serving.context_tokens is None
    context = shape.context_tokens if serving.context_tokens is None else serving.context_tokens
    cells = _padded(max(1, context))
    caches = 1 if shared else serving.slots

    def kept(layer: LayerShape, slots: int) -> int:
        """Tokens that a cache of so many slots keeps of a layer."""
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
            Item(name="weights", bytes=shape.weights_bytes, words="all of its files"),
            Item(name="cache", bytes=cache, words=_cache_words(shape, serving, context)),
            _states(shape, state, serving.slots),
            Item(
                name="checkpoints", bytes=serving.slots * back, host=True,
                words=f"{serving.checkpoints} of each slot, to go back to: what windows and states have forgotten",
            ),
            Item(name="prompts", bytes=serving.prompts_bytes, host=True, words="of earlier Calls, up to its bound"),
            _activation(shape, serving.batch_tokens, cells if serving.scores else 0, _outputs(shape, serving)),
            Item(name="overhead", bytes=OVERHEAD_BYTES, words="the process and its libraries"),
        ),
        slot_bytes=min(BYTES_MAX, state + back + (0 if shared else alone)),
        token_bytes=min(BYTES_MAX, sum(row for layer, row in rows if kept(layer, 1) == cells)),
    )  # fmt: skip


def estimate_paged_engine(shape: Shape, serving: ServingOptions) -> Estimate:
    """The least that vLLM or SGLang needs: with one Call that may fill the context it starts. They use all that they
    are given.
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
        return f"one Call of {context} tokens, the least to start"
    return f"{serving.whole_calls} Calls of {context} tokens at once"


def _token_bytes(layer: LayerShape, serving: ServingOptions) -> int:
    return int(layer.key_elements * serving.key_bytes + layer.value_elements * serving.value_bytes)


def _padded(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


def _outputs(shape: Shape, serving: ServingOptions) -> int:
    """Rows of logits that one batch may write: one for each of its tokens."""
    return serving.batch_tokens if shape.vocabulary else 0


def _states(shape: Shape, state: int, slots: int) -> Item:
    many = sum(layer.state_bytes > 0 for layer in shape.layers)
    return Item(name="state", bytes=slots * state, words=f"{many} recurrent layers, for each of {slots} slots")


def _activation(shape: Shape, batch: int, scored_tokens: int, outputs: int) -> Item:
    """float32 for one batch: what goes through one layer at a time, the logits, and scores where they are kept."""
    rows = batch * (4 * shape.width + 3 * shape.inner + shape.heads * scored_tokens)
    words = f"one batch of {batch} tokens, logits over {shape.vocabulary} words"
    return Item(name="activation", bytes=4 * (rows + outputs * shape.vocabulary), words=words)


def _cache_words(shape: Shape, serving: ServingOptions, context: int) -> str:
    """`24 layers keep all of 4 x 4096 tokens, 20 the last 1024`."""
    keeping = [layer for layer in shape.layers if layer.key_elements or layer.value_elements]
    short = [] if serving.whole_windows else [layer for layer in keeping if layer.window_tokens]
    tokens = f"{context} tokens together" if serving.context_tokens is None else f"{serving.slots} x {context} tokens"
    whole = len(keeping) - len(short)
    said = [f"{whole} {'layer keeps' if whole == 1 else 'layers keep'} all of {tokens}"] if whole else []
    window = max((layer.window_tokens for layer in short), default=0)
    said += [f"{len(short)} {'' if whole else 'layers keep '}the last {window}"] if short else []
    return ", ".join(said)


def _some(*items: Item) -> tuple[Item, ...]:
    """Those that take anything, and none beyond all bounds."""
    return tuple(msgspec.structs.replace(one, bytes=min(BYTES_MAX, one.bytes)) for one in items if one.bytes)
