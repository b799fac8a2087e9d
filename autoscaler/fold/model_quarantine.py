"""Quarantine of Models that cause exceptions: how long it lasts, and what ends it.

A quarantine lasts 1, 2, 4 ... 30 minutes. It ends early when an operator wakes the Model, its document changes, or its
document no longer raises the exception. The last two also clear the fault; otherwise the Model is then on trial:
another fault within TRIAL_S doubles the next quarantine, else the fault is forgotten. A fault of a Model that is
already quarantined changes nothing.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.demand.model_history import EPISODE_AFTER_S, EPISODE_AFTER_S_MAX
from autoscaler.fold.draft import Draft
from autoscaler.state.events import FaultSeen
from autoscaler.state.world import Fault, World

TRIAL_S: Final = EPISODE_AFTER_S_MAX


def list_quarantined_models(world: World) -> frozenset[ModelName]:
    """The Models that are quarantined now."""
    faults = world.learned.faults
    return frozenset(name for name, fault in faults.items() if fault.until_s) if faults else frozenset()


def quarantine_model(draft: Draft, fault: FaultSeen) -> None:
    """Quarantine the Model if the `World` has it and it is not quarantined yet; forget a fault that is over."""
    known = draft.world.learned.faults.get(fault.model)
    if fault.is_over:
        if known is not None and known.part == fault.part:
            _put(draft, {name: one for name, one in draft.world.learned.faults.items() if name != fault.model})
        return
    exists = fault.model in draft.world.models or fault.model in draft.by_model.now
    if not exists or (known is not None and known.until_s):
        return
    times = 1 if known is None else known.times + 1
    lasts_s = min(EPISODE_AFTER_S * 2.0 ** min(times - 1, 16), EPISODE_AFTER_S_MAX)
    until_s = draft.now_s + lasts_s
    made = Fault(reason=fault.reason, seen_s=draft.now_s, until_s=until_s, times=times, part=fault.part)
    _put(draft, {**draft.world.learned.faults, fault.model: made})


def expire_quarantines(draft: Draft) -> None:
    """End quarantines that are over, and forget faults whose trial is over."""
    faults = draft.world.learned.faults
    if not faults:
        return
    left = {name: _aged(fault, draft.now_s) for name, fault in faults.items()}
    kept = {name: fault for name, fault in left.items() if fault is not None}
    if kept != faults:
        _put(draft, kept)


def _aged(fault: Fault, now_s: float) -> Fault | None:
    if fault.until_s and now_s >= fault.until_s:
        return replace(fault, seen_s=now_s, until_s=0.0)
    return None if not fault.until_s and now_s >= fault.seen_s + TRIAL_S else fault


def end_quarantine(draft: Draft, name: ModelName) -> None:
    """End the quarantine of a Model that an operator woke; its fault still counts."""
    fault = draft.world.learned.faults.get(name)
    if fault is not None and fault.until_s:
        _put(draft, {**draft.world.learned.faults, name: replace(fault, seen_s=draft.now_s, until_s=0.0)})


def drop_outdated_faults(draft: Draft, before: World) -> None:
    """Forget the faults of Models whose document changed or was removed."""
    models = draft.world.models
    faults = draft.world.learned.faults
    kept = {
        name: fault for name, fault in faults.items()
        if name in models and name in before.models and models[name].spec == before.models[name].spec
    }  # fmt: skip
    if len(kept) < len(faults):
        _put(draft, kept)


def _put(draft: Draft, faults: dict[ModelName, Fault]) -> None:
    draft.change_learned(faults=faults)
    draft.news = True
