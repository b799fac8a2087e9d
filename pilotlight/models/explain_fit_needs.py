"""Reads the memory needs of a Model's artifact for `pilotlight explain fit`, as `autoscaler.explain.fit` types. I/O."""

from __future__ import annotations

from collections.abc import Mapping

from artifacts.formats.gguf import GgufError
from artifacts.formats.hf_config import ConfigError
from autoscaler.agent_contract import OWN, WeightsReport, WeightsRequest, collect_weights_requests
from autoscaler.explain.fit import MemoryPart, Needs
from autoscaler.spec.model import Model
from pilotlight.models import header_report
from pilotlight.models.model_memory import (
    Known,
    estimate_memory,
    has_paged_cache,
    load_artifact_facts,
    read_device_share,
    read_serving_options,
)
from pilotlight.models.model_parts import local_path


def load_memory_needs(model: Model, known: Known | None = None, why: str = "", *, gpus: bool) -> Needs:
    """Return the needs, or why they are unknown. `known`: facts that an agent read; `why`: why it read none. `gpus`:
    devices have memory separate from the host's.
    """
    if known is None and local_path(model) is None:
        return Needs(problem=why or "its artifact is not a local file, so its memory needs are unknown")
    try:
        found = known or load_artifact_facts(model)
        made = estimate_memory(model, found)
    except (GgufError, ConfigError, OSError, ValueError) as error:
        return Needs(problem=f"its artifact cannot be read: {error}")
    if made is None or found is None:
        return Needs(problem="the format of its artifact does not state memory needs")
    return Needs(
        source=found.source,
        parts=tuple(
            MemoryPart(name=i.name, bytes=i.bytes, words=i.words, host=i.host) for i in made.items if gpus or not i.gpu
        ),
        slot_bytes=made.slot_bytes,
        token_bytes=made.token_bytes,
        context_tokens=read_serving_options(model).context_tokens or found.shape.context_tokens,
        share=read_device_share(model) if has_paged_cache(model) else 0.0,
    )


def read_reported_needs(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> Needs:
    """Return the needs of a Model whose artifact is not a local file, as reported by agents."""
    said = header_report.find_own_report(model, looked)
    why = "no agent has inspected its artifact yet"
    if said is not None and said.no_header:
        why = f"its artifact does not state its memory needs: {said.no_header}"
    facts = header_report.find_artifact_facts(model, looked)
    return load_memory_needs(model, facts, why if collect_weights_requests(model).get(OWN) else "", gpus=True)
