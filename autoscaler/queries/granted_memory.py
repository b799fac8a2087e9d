"""The memory that a replica is granted: its growth into free memory, and the limits of its engine. Pure.

Granted memory changes the size of the cache: the share of the device for engines with a paged cache, and the number of
slots of llama.cpp if the document sets the context per slot, else the total context. Invariant: the limits passed to an
engine fit the granted memory. `autoscaler.placement.index.elastic_requests` and `autoscaler.placement.memory_growth`
grant it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Model
from autoscaler.spec.quantity import SIZE_MAX
from autoscaler.state.resources import NO_GROWTH, Growth
from autoscaler.state.world import Replica
from autoscaler.text import format_size

CELLS: Final = 256
"""llama.cpp rounds a context up to a multiple of this many tokens."""


MIB: Final = 1 << 20
"""Step of growth for engines with a paged cache or a memory placeholder in their command."""


PAGED: Final = frozenset(name for name, engine in ENGINES.items() if engine.pages and not engine.sizes_itself)
"""Engines with a paged cache and a limit: they use all memory up to it."""


SLOTS_MAX: Final = 100_000
"""Maximum for one replica, as in a document."""


class Given(NamedTuple):
    """The limits passed to one engine. A default value means that its document decides."""

    memory_fraction: float | None = None
    """Fraction of each device that its engine may use, if nothing else limits it."""
    memory_bytes: int = 0
    slots: int = 0
    shared_context_tokens: int = 0
    """Context length of the engine in tokens, as the total over all slots."""


AS_ASKED: Final = Given()


def spare_bytes(model: Model) -> int:
    """Return by how many bytes the memory of a replica can be reduced; 0: not at all."""
    percent, asked = model.spec.gpu.elastic_percent, model.memory_bytes
    if not percent or not asked or model.spec.gpu.count != 1 or model.adopted is not None or is_memory_minimum(model):
        return 0
    return min(asked * percent // 100, _most(model), asked - 1)


def explain_rigid_memory(model: Model) -> str:
    """Explain why a model with `gpu.elastic` cannot be reduced; empty: it can, or it has no `gpu.elastic`."""
    if not model.spec.gpu.elastic_percent or spare_bytes(model):
        return ""
    if not model.memory_bytes:
        return "its memory requirement is unknown; set gpu.memory"
    if is_memory_minimum(model):
        return "gpu.memory is `auto`, which requests only the minimum that it needs; set a larger size"
    if model.cache is None:
        return "its artifact cannot be read here, so the saving of a smaller cache is unknown"
    if model.spec.context_tokens is not None:
        return "contextTokens is set, so only the number of slots could shrink, and it has one slot"
    return "its cache is too small to shrink"


def compute_growth(model: Model) -> Growth:
    """Return how much more than requested a replica can use."""
    percent, asked, cache = model.spec.gpu.growth_percent, model.memory_bytes, model.cache
    if not percent or not asked or model.spec.gpu.count != 1 or model.adopted is not None:
        return NO_GROWTH
    most, step = min(asked * percent // 100, SIZE_MAX), MIB
    if model.spec.engine == "llama.cpp":
        step = 0 if cache is None else cache.slot_bytes if _by_slots(model) else CELLS * cache.token_bytes
        most = min(most, _more(model))
    return Growth(most // step * step, step) if step and most >= step else NO_GROWTH


def explain_no_growth(model: Model) -> str:
    """Explain why a model with `gpu.growth` never grows; empty: it can, or it has no `gpu.growth`."""
    if not model.spec.gpu.growth_percent or compute_growth(model).most_bytes:
        return ""
    if not model.memory_bytes:
        return "its memory requirement is unknown; set gpu.memory"
    if model.cache is None and model.spec.engine == "llama.cpp":
        return "its artifact cannot be read here, so the cost of a larger cache is unknown"
    if model.spec.engine == "llama.cpp" and not _by_slots(model) and not _more(model):
        return "its only slot already has the full context of the model"
    return "the growth is too small for another slot" if _by_slots(model) else "the growth is too small to be useful"


def has_variable_memory(model: Model) -> bool:
    """Whether its replicas may be granted other amounts than requested, so that engines need explicit limits."""
    return (is_memory_minimum(model) and model.spec.gpu.count == 1) or bool(
        spare_bytes(model) or compute_growth(model).most_bytes
    )


def is_memory_minimum(model: Model) -> bool:
    """Whether only the memory that the model's artifact needs is counted, while its engine would use all memory
    (`gpu.memory: auto`).
    """
    return model.estimated_bytes > 0 and model.spec.engine in PAGED


def _outside(model: Model) -> int:
    """Return the measured use of a paged engine beyond its limit, by which its limit is lowered."""
    return max(0, model.memory_bytes - model.estimated_bytes) if is_memory_minimum(model) else 0


def compute_engine_limits(model: Model, replica: Replica, memory_fraction: float | None = None) -> Given:
    """Return the limits for the engine of a replica."""
    if not has_variable_memory(model):
        return Given(memory_fraction)
    memory_bytes = min(model.memory_bytes + compute_growth(model).most_bytes, replica.resources.memory_bytes)
    if memory_fraction is not None and _outside(model) < memory_bytes:
        memory_fraction *= (memory_bytes - _outside(model)) / memory_bytes
    return Given(memory_fraction, memory_bytes, replica.slots, _shared_context_tokens(model, memory_bytes))


def compute_slots(model: Model, granted_bytes: int) -> int:
    """Return the number of slots of a replica that was granted this much."""
    cache = model.cache
    if cache is None or not cache.slot_bytes or not _by_slots(model):
        return model.slots
    return max(1, model.slots + _beyond(model, granted_bytes) // cache.slot_bytes)


def has_shrunk(model: Model, replica: Replica) -> bool:
    """Whether the replica has less memory than its document requests, even if that document lacks `gpu.elastic` now."""
    asked = model.memory_bytes if spare_bytes(model) else min(model.memory_bytes, _estimated(model))
    return _is_part(model, replica) and 0 < replica.resources.memory_bytes <= asked - _within(spare_bytes(model))


def has_grown(model: Model, replica: Replica) -> bool:
    """Whether the replica has more memory than its document requests, even if that document lacks `gpu.growth` now."""
    more = compute_growth(model).most_bytes
    asked = model.memory_bytes if more else max(model.memory_bytes, _estimated(model))
    return _is_part(model, replica) and replica.resources.memory_bytes >= asked + _within(more)


def _is_part(model: Model, replica: Replica) -> bool:
    """Whether the replica runs its current document, and the document requests an amount of memory on one device."""
    same = model.adopted is None and replica.spec_hash == model.spec_hash()
    return same and model.spec.gpu.count == 1 and model.memory_bytes > 0


def _estimated(model: Model) -> int:
    """The request before any measurement. With an amount between this and the current request, a replica has neither
    shrunk nor grown.
    """
    return model.estimated_bytes or model.memory_bytes


def _within(offered_bytes: int) -> int:
    """Return the minimum difference that counts, in bytes: 1 if the document allows a difference, else 1 MiB, since the
    amounts of pods are rounded.
    """
    return 1 if offered_bytes else MIB


def describe_granted_memory(model: Model, replica: Replica) -> str:
    """Describe memory that differs from the request, such as `granted 9Gi of 10Gi, with 3 of 4 slots`; else empty."""
    if has_grown(model, replica):
        return _grown(model, replica)
    if not has_shrunk(model, replica):
        return ""
    words = f"granted {format_size(replica.resources.memory_bytes)} of {format_size(model.memory_bytes)}"
    tokens = compute_engine_limits(model, replica).shared_context_tokens
    if tokens and model.cache is not None:
        return f"{words}, with {tokens} of {model.cache.context_tokens} tokens of context"
    return f"{words}, with {replica.slots} of {model.slots} slots" if replica.slots < model.slots else words


def _grown(model: Model, replica: Replica) -> str:
    words = f"granted {format_size(replica.resources.memory_bytes)} instead of {format_size(model.memory_bytes)}"
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
    """Whether each slot has its own context, so that memory changes the number of slots."""
    return model.spec.context_tokens is not None


def _more(model: Model) -> int:
    """Return how much more llama.cpp can use: for SLOTS_MAX slots, or for the full context in each slot."""
    cache = model.cache
    if cache is None:
        return 0
    if _by_slots(model):
        return (SLOTS_MAX - model.slots) * cache.slot_bytes
    return (model.slots - 1) * cache.context_tokens * cache.token_bytes


def _most(model: Model) -> int:
    """Return by how much the memory of its engine can be reduced at most."""
    cache = model.cache
    if model.spec.engine != "llama.cpp":
        return model.memory_bytes
    if cache is None:
        return 0
    slack = model.memory_bytes - _needed(model)
    if model.spec.context_tokens is not None:
        return slack + (model.slots - 1) * cache.slot_bytes
    half = -(-cache.context_tokens // (2 * CELLS)) * CELLS  # no document says how much context is needed
    return slack + max(0, cache.context_tokens - half) * cache.token_bytes


def _needed(model: Model) -> int:
    """Return the part of its request that it needs."""
    if model.estimated_bytes or model.cache is None:
        return model.memory_bytes
    return min(model.memory_bytes, model.cache.total_bytes)


def _beyond(model: Model, granted_bytes: int) -> int:
    """Return the usable bytes above the request; below 0: the bytes missing from its need."""
    if granted_bytes > model.memory_bytes:
        return min(granted_bytes - model.memory_bytes, compute_growth(model).most_bytes)
    return min(0, granted_bytes - _needed(model)) if spare_bytes(model) else 0
