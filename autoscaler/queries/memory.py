"""What was measured of an engine's memory corrects what was estimated of it. Pure.

Owns the rule. Upwards at once: the plan never counts less than a Replica was seen to use. Downwards only when one had
served for a while, and only to a margin above the most that was seen, since caches fill as Calls come. A document that
says `gpu.memory` as a size is never corrected, and neither is a whole Device. What runs keeps what it was placed with,
and nothing is started anew for it: memory is no part of a spec's hash but where the document asks for it.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.spec.model import Model
from autoscaler.state.world import History, Used

SERVED_S = 600.0
"""Ready for so long, with Calls in that time: what it uses then is near what it will."""
MARGIN = 1.25
"""Above the most that was seen."""
NOTICED_BYTES = 16 << 20
"""More than before by less is no news."""


def known(history: History, model: Model) -> Used | None:
    """What was measured of the Model as it is now."""
    used = history.used
    if used is None or used.estimated_bytes != model.estimated_bytes or used.spec_hash != model.spec_hash():
        return None
    return used


def seen(history: History, model: Model, used_bytes: int, *, served: bool) -> History:
    """A Replica of the Model as it is now uses `used_bytes`; `served`: and has served for a while."""
    before = known(history, model)
    if before is None:
        before = Used(spec_hash=model.spec_hash(), estimated_bytes=model.estimated_bytes, bytes=0)
    grew = used_bytes >= before.bytes + NOTICED_BYTES or before.bytes == 0
    if model.estimated_bytes == 0 or not (grew or served > before.served):
        return history
    most = max(used_bytes, before.bytes)
    return replace(history, used=replace(before, bytes=most, served=served or before.served))


def corrected(model: Model, history: History) -> Model:
    """The Model with the memory that the plan counts for its next Replica."""
    if model.estimated_bytes == 0:
        return model
    memory_bytes, used = model.estimated_bytes, known(history, model)
    if used is not None:
        roomy = int(used.bytes * MARGIN) if used.served else memory_bytes
        memory_bytes = max(used.bytes, min(memory_bytes, roomy))
    return model if memory_bytes == model.memory_bytes else replace(model, memory_bytes=memory_bytes)
