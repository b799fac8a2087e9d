"""Corrects memory estimates by measurements. Pure.

Estimates are corrected upwards at once: the plan never counts less than the measured use of a replica. They are
corrected downwards only after a replica has served for some time, and only to a margin above the maximum, since caches
fill over time. A size in `gpu.memory` and a whole device are never corrected. A correction does not affect running
replicas: memory is in a spec's hash only if the document requests it.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.spec.model import Model
from autoscaler.state.world import History, Used

SERVED_S = 600.0
"""A replica that was ready for this long, with requests in that time, has about reached its maximum use."""
MARGIN = 1.25
"""An estimate that is too large is corrected down to this multiple of the measured maximum."""
NOTICED_BYTES = 16 << 20
"""Smaller increases are ignored."""


def find_measured_memory(history: History, model: Model) -> Used | None:
    """Return the measurement for the model's current spec; None: there is none."""
    used = history.used
    if used is None or used.estimated_bytes != model.estimated_bytes or used.spec_hash != model.spec_hash():
        return None
    return used


def record_measured_memory(history: History, model: Model, used_bytes: int, *, served: bool) -> History:
    """Record that a replica of the current spec uses `used_bytes`. `served`: it has served for SERVED_S."""
    before = find_measured_memory(history, model)
    if before is None:
        before = Used(spec_hash=model.spec_hash(), estimated_bytes=model.estimated_bytes, bytes=0)
    grew = used_bytes >= before.bytes + NOTICED_BYTES or before.bytes == 0
    if model.estimated_bytes == 0 or not (grew or served > before.served):
        return history
    most = max(used_bytes, before.bytes)
    return replace(history, used=replace(before, bytes=most, served=served or before.served))


def correct_memory_estimate(model: Model, history: History) -> Model:
    """Return the model with the memory that the plan counts for its next replica."""
    if model.estimated_bytes == 0:
        return model
    memory_bytes, used = model.estimated_bytes, find_measured_memory(history, model)
    if used is not None:
        roomy = int(used.bytes * MARGIN) if used.served else memory_bytes
        memory_bytes = max(used.bytes, min(memory_bytes, roomy))
    return model if memory_bytes == model.memory_bytes else replace(model, memory_bytes=memory_bytes)
