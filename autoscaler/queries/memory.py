"""What was measured of an engine's memory corrects what was estimated of it. Pure.

Owns the rule. Upwards at once: the plan never counts less than a Replica was seen to use. Downwards only when one had
served for a while, and only to a margin above the most that was seen, since caches fill as Calls come. A document that
says `gpu.memory` as a size is never corrected, and neither is a whole Device. What runs keeps what it was placed with,
and nothing is started anew for it: memory is no part of a spec's hash but where the document asks for it.

How much less memory a Replica makes do with, of how much more it makes use, and what its engine is told. Pure.

Owns the way from granted bytes to a smaller or larger cache: a share of the Device for engines that page it, fewer or
more Slots of llama.cpp where the document says the context of each, else less or more context for all of them together.
Promises: what an engine is told fits what was granted, from the least to the most that is offered here. It grants
nothing; `autoscaler.placement.index.elastic` and `autoscaler.placement.growth` do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec.structs import replace

from autoscaler.spec.model import Model
from autoscaler.spec.quantity import SIZE_MAX
from autoscaler.state.resources import NO_GROWTH, Growth
from autoscaler.state.world import History, Replica, Used
from autoscaler.text import format_size

SERVED_S = 600.0
"""Ready for so long, with Calls in that time: what it uses then is near what it will."""
MARGIN = 1.25
"""Above the most that was seen."""
NOTICED_BYTES = 16 << 20
"""More than before by less is no news."""


def find_measured_memory(history: History, model: Model) -> Used | None:
    """What was measured of the Model as it is now."""
    used = history.used
    if used is None or used.estimated_bytes != model.estimated_bytes or used.spec_hash != model.spec_hash():
        return None
    return used


def record_measured_memory(history: History, model: Model, used_bytes: int, *, served: bool) -> History:
    """A Replica of the Model as it is now uses `used_bytes`; `served`: and has served for a while."""
    before = find_measured_memory(history, model)
    if before is None:
        before = Used(spec_hash=model.spec_hash(), estimated_bytes=model.estimated_bytes, bytes=0)
    grew = used_bytes >= before.bytes + NOTICED_BYTES or before.bytes == 0
    if model.estimated_bytes == 0 or not (grew or served > before.served):
        return history
    most = max(used_bytes, before.bytes)
    return replace(history, used=replace(before, bytes=most, served=served or before.served))


def correct_memory_estimate(model: Model, history: History) -> Model:
    """The Model with the memory that the plan counts for its next Replica."""
    if model.estimated_bytes == 0:
        return model
    memory_bytes, used = model.estimated_bytes, find_measured_memory(history, model)
    if used is not None:
        roomy = int(used.bytes * MARGIN) if used.served else memory_bytes
        memory_bytes = max(used.bytes, min(memory_bytes, roomy))
    return model if memory_bytes == model.memory_bytes else replace(model, memory_bytes=memory_bytes)


CELLS: Final = 256
"""llama.cpp rounds a context up to so many tokens."""
MIB: Final = 1 << 20
"""Steps in which engines that page their cache get more of it, and who is told by a placeholder."""
PAGED: Final = frozenset({"vllm", "sglang"})
"""Engines that page their cache: they use all that they are given."""
SLOTS_MAX: Final = 100_000
"""Of one Replica, as a document may say."""


class Given(NamedTuple):
    """What one Replica has of what its document asks for; each as the document says unless it is told here."""

    memory_fraction: float | None = None
    """So much of each Device its engine may take, where nothing else keeps it from the rest."""
    memory_bytes: int = 0
    slots: int = 0
    shared_context_tokens: int = 0
    """Of all Slots together."""


AS_ASKED: Final = Given()


def spare_bytes(model: Model) -> int:
    """With so much less than it asks for a Replica makes do; 0: with nothing less."""
    percent, asked = model.spec.gpu.elastic_percent, model.memory_bytes
    if not percent or not asked or model.spec.gpu.count != 1 or model.adopted is not None or is_memory_minimum(model):
        return 0
    return min(asked * percent // 100, _most(model), asked - 1)


def explain_rigid_memory(model: Model) -> str:
    """Why a Model that is to be elastic is not, in words; empty: it is, or is not to be."""
    if not model.spec.gpu.elastic_percent or spare_bytes(model):
        return ""
    if not model.memory_bytes:
        return "nobody knows how much it needs; say gpu.memory"
    if is_memory_minimum(model):
        return "gpu.memory: auto is what it needs; say a size that has more"
    if model.cache is None:
        return "its artifact is not a file that can be read here, so that nobody knows what less cache would save"
    if model.spec.context_tokens is not None:
        return "with contextTokens in force it could only have fewer slots, and it has one"
    return "its cache is too small to give any of it"


def compute_growth(model: Model) -> Growth:
    """How much more than it asks for a Replica makes use of."""
    percent, asked, cache = model.spec.gpu.growth_percent, model.memory_bytes, model.cache
    if not percent or not asked or model.spec.gpu.count != 1 or model.adopted is not None:
        return NO_GROWTH
    most, step = min(asked * percent // 100, SIZE_MAX), MIB
    if model.spec.engine == "llama.cpp":
        step = 0 if cache is None else cache.slot_bytes if _by_slots(model) else CELLS * cache.token_bytes
        most = min(most, _more(model))
    return Growth(most // step * step, step) if step and most >= step else NO_GROWTH


def explain_no_growth(model: Model) -> str:
    """Why a Model that may have more never does, in words; empty: it does, or may not."""
    if not model.spec.gpu.growth_percent or compute_growth(model).most_bytes:
        return ""
    if not model.memory_bytes:
        return "nobody knows how much it needs; say gpu.memory"
    if model.cache is None and model.spec.engine == "llama.cpp":
        return "its artifact is not a file that can be read here, so that nobody knows what more cache would take"
    if model.spec.engine == "llama.cpp" and not _by_slots(model) and not _more(model):
        return "its one slot has all of the model's own context"
    return "that is too little for one slot more" if _by_slots(model) else "that is too little to make use of"


def has_variable_memory(model: Model) -> bool:
    """Whether what its Replicas are granted may differ from what it asks for, so that engines are told."""
    return (is_memory_minimum(model) and model.spec.gpu.count == 1) or bool(
        spare_bytes(model) or compute_growth(model).most_bytes
    )


def is_memory_minimum(model: Model) -> bool:
    """Whether it is counted with what its artifact says, and its engine would take whatever there is (`gpu.memory:
    auto`).
    """
    return model.estimated_bytes > 0 and model.spec.engine in PAGED


def _outside(model: Model) -> int:
    """What an engine that pages was seen to use beside what it was told to take: that much less it is told."""
    return max(0, model.memory_bytes - model.estimated_bytes) if is_memory_minimum(model) else 0


def compute_engine_limits(model: Model, replica: Replica, memory_fraction: float | None = None) -> Given:
    """What its engine is told."""
    if not has_variable_memory(model):
        return Given(memory_fraction)
    memory_bytes = min(model.memory_bytes + compute_growth(model).most_bytes, replica.memory_bytes)
    if memory_fraction is not None and _outside(model) < memory_bytes:
        memory_fraction *= (memory_bytes - _outside(model)) / memory_bytes
    return Given(memory_fraction, memory_bytes, replica.slots, _shared_context_tokens(model, memory_bytes))


def compute_slots(model: Model, granted_bytes: int) -> int:
    """Of a Replica that was granted so much."""
    cache = model.cache
    if cache is None or not cache.slot_bytes or not _by_slots(model):
        return model.slots
    return max(1, model.slots + _beyond(model, granted_bytes) // cache.slot_bytes)


def has_shrunk(model: Model, replica: Replica) -> bool:
    """Whether it has less than its document asks for, also where that says nothing of `elastic` any more."""
    asked = model.memory_bytes if spare_bytes(model) else min(model.memory_bytes, _estimated(model))
    return _is_part(model, replica) and 0 < replica.memory_bytes <= asked - _within(spare_bytes(model))


def has_grown(model: Model, replica: Replica) -> bool:
    """Whether it has more than its document asks for, also where that says nothing of `compute_growth` any more."""
    more = compute_growth(model).most_bytes
    asked = model.memory_bytes if more else max(model.memory_bytes, _estimated(model))
    return _is_part(model, replica) and replica.memory_bytes >= asked + _within(more)


def _is_part(model: Model, replica: Replica) -> bool:
    """Whether it runs as its document says now, and that asks for a part of one Device, of some size."""
    same = model.adopted is None and replica.spec_hash == model.spec_hash()
    return same and model.spec.gpu.count == 1 and model.memory_bytes > 0


def _estimated(model: Model) -> int:
    """What it asked for before anything was measured: between that and what it asks for now nobody was granted it."""
    return model.estimated_bytes or model.memory_bytes


def _within(offered_bytes: int) -> int:
    """By how much it differs at the least: by no more than pods round it, where no document offers anything."""
    return 1 if offered_bytes else MIB


def describe_granted_memory(model: Model, replica: Replica) -> str:
    """`granted 9Gi of 10Gi, with 3 of 4 slots`, or `granted 14Gi where it asks for 10Gi, with 6 slots instead of 4`;
    empty: it has what it asks for.
    """
    if has_grown(model, replica):
        return _grown(model, replica)
    if not has_shrunk(model, replica):
        return ""
    words = f"granted {format_size(replica.memory_bytes)} of {format_size(model.memory_bytes)}"
    tokens = compute_engine_limits(model, replica).shared_context_tokens
    if tokens and model.cache is not None:
        return f"{words}, with {tokens} of {model.cache.context_tokens} tokens of context"
    return f"{words}, with {replica.slots} of {model.slots} slots" if replica.slots < model.slots else words


def _grown(model: Model, replica: Replica) -> str:
    words = f"granted {format_size(replica.memory_bytes)} where it asks for {format_size(model.memory_bytes)}"
    tokens = compute_engine_limits(model, replica).shared_context_tokens
    if tokens and model.cache is not None:
        return f"{words}, with {tokens} tokens of context instead of {model.cache.context_tokens}"
    return f"{words}, with {replica.slots} slots instead of {model.slots}" if replica.slots > model.slots else words


def _shared_context_tokens(model: Model, granted_bytes: int) -> int:
    cache, beyond = model.cache, _beyond(model, granted_bytes)
    if cache is None or not beyond or not cache.token_bytes or _by_slots(model):
        return 0
    return (cache.context_tokens + beyond // cache.token_bytes) // CELLS * CELLS


def _by_slots(model: Model) -> bool:
    """Whether each Slot has a context of its own, so that there are fewer or more of them."""
    return model.spec.context_tokens is not None


def _more(model: Model) -> int:
    """Of so much more llama.cpp makes use: as many Slots as may be, or all of the model's own context for each."""
    cache = model.cache
    if cache is None:
        return 0
    if _by_slots(model):
        return (SLOTS_MAX - model.slots) * cache.slot_bytes
    return (model.slots - 1) * cache.context_tokens * cache.token_bytes


def _most(model: Model) -> int:
    """So much its engine can do without."""
    cache = model.cache
    if model.spec.engine != "llama.cpp":
        return model.memory_bytes
    if cache is None:
        return 0
    slack = model.memory_bytes - _needed(model)
    if model.spec.context_tokens is not None:
        return slack + (model.slots - 1) * cache.slot_bytes
    half = -(-cache.context_tokens // (2 * CELLS)) * CELLS  # nobody said how much context there must be
    return slack + max(0, cache.context_tokens - half) * cache.token_bytes


def _needed(model: Model) -> int:
    """What it takes of what it asks for."""
    if model.estimated_bytes or model.cache is None:
        return model.memory_bytes
    return min(model.memory_bytes, model.cache.total_bytes)


def _beyond(model: Model, granted_bytes: int) -> int:
    """So much more than it asks for it may use; below 0: so much less than it needs."""
    if granted_bytes > model.memory_bytes:
        return min(granted_bytes - model.memory_bytes, compute_growth(model).most_bytes)
    return min(0, granted_bytes - _needed(model)) if spare_bytes(model) else 0
