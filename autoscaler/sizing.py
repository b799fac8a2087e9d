"""How much less memory a Replica makes do with, and what its engine is told of what it was granted. Pure.

Owns the way from granted bytes to a smaller cache: a share of the Device for engines that page it, fewer Slots of
llama.cpp where the document says the context of each, else less context for all of them together. Promises: what an
engine is told fits what was granted, down to the least that is offered here. It grants nothing; `autoscaler.elastic`
does.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from autoscaler.model import Model
from autoscaler.words import size
from autoscaler.world import Replica

CELLS: Final = 256
"""llama.cpp rounds a context up to so many tokens."""


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
    if not percent or not asked or model.spec.gpu.count != 1 or model.adopted is not None:
        return 0
    return min(asked * percent // 100, _most(model), asked - 1)


def why_rigid(model: Model) -> str:
    """Why a Model that is to be elastic is not, in words; empty: it is, or is not to be."""
    if not model.spec.gpu.elastic_percent or spare_bytes(model):
        return ""
    if not model.memory_bytes:
        return "nobody knows how much it needs; say gpu.memory"
    if model.cache is None:
        return "its artifact is not a file that can be read here, so that nobody knows what less cache would save"
    if model.spec.context_tokens is not None:
        return "with contextTokens in force it could only have fewer slots, and it has one"
    return "its cache is too small to give any of it"


def given(model: Model, replica: Replica, memory_fraction: float | None = None) -> Given:
    """What its engine is told."""
    if not spare_bytes(model):
        return Given(memory_fraction)
    memory_bytes = min(model.memory_bytes, replica.memory_bytes)
    return Given(memory_fraction, memory_bytes, replica.slots, _shared_context_tokens(model, memory_bytes))


def slots(model: Model, granted_bytes: int) -> int:
    """Of a Replica that was granted so much."""
    cache, lack = model.cache, _lack(model, granted_bytes)
    if cache is None or not cache.slot_bytes or model.spec.context_tokens is None:
        return model.slots
    return max(1, model.slots + -lack // cache.slot_bytes)


def is_cut(model: Model, replica: Replica) -> bool:
    """Whether it has less than its document, as it is now, asks for."""
    same = replica.spec_hash == model.spec_hash() and bool(spare_bytes(model))
    return same and 0 < replica.memory_bytes < model.memory_bytes


def granted(model: Model, replica: Replica) -> str:
    """`granted 9Gi of 10Gi, with 3 of 4 slots`; empty: it has all."""
    if not is_cut(model, replica):
        return ""
    words = f"granted {size(replica.memory_bytes)} of {size(model.memory_bytes)}"
    tokens = given(model, replica).shared_context_tokens
    if tokens and model.cache is not None:
        return f"{words}, with {tokens} of {model.cache.context_tokens} tokens of context"
    return f"{words}, with {replica.slots} of {model.slots} slots" if replica.slots < model.slots else words


def _shared_context_tokens(model: Model, granted_bytes: int) -> int:
    cache, lack = model.cache, _lack(model, granted_bytes)
    if cache is None or not lack or not cache.token_bytes or model.spec.context_tokens is not None:
        return 0
    return (cache.context_tokens + -lack // cache.token_bytes) // CELLS * CELLS


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


def _lack(model: Model, granted_bytes: int) -> int:
    return max(0, _needed(model) - granted_bytes) if spare_bytes(model) else 0
