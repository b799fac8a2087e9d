"""Scaling signals of a model: how many replicas its engines' metrics and its Prometheus query require. Pure.

A signal is a total over the ready replicas, so the number of replicas that it requires is total / target, rounded up.
This depends only on the current value, neither on the number of replicas nor on starts in progress: replicas that are
starting count as supply, and if a signal returns to its former value, so does the number of replicas. Fewer replicas
are allowed only if they meet the peak of the last idle timeout. An unknown or old signal keeps the present number.
"""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from msgspec.structs import replace

from autoscaler.spec.model import Model
from autoscaler.state.world import Signal, SignalTotal, World

SCRAPE_S: Final = 5.0
"""Interval at which signals are read."""
SIGNAL_EXPIRY_S: Final = 3 * SCRAPE_S
"""A signal that was not read for this time is unknown."""
REPLICAS_MAX: Final = 1000
"""The maximum of `replicas.max`."""
EXCESS: Final = 1e-6
"""Relative excess over a whole number of targets that requires no further replica: sums of floats are not exact."""


class SignalNeed(NamedTuple):
    """The number of replicas that the signals of a model require, and why."""

    needed: int = 0
    """Required by the current values."""
    reason: str = ""
    kept: int = 0
    """The least number after a scale-down."""
    kept_reason: str = ""
    next_s: float | None = None
    """When this changes only because time passes."""


NO_NEED: Final = SignalNeed()


def record_signal(known: Signal | None, seen: SignalTotal, window_s: float, now_s: float) -> Signal:
    """Return the signal after an observation. A peak period lasts `window_s`; the one before it is remembered. After an
    interruption the peaks are unknown and begin again.
    """
    if known is None or now_s >= known.seen_s + SIGNAL_EXPIRY_S:
        return Signal(last=seen, seen_s=now_s, since_s=now_s, peak=seen.total)
    if now_s - known.since_s < window_s:
        return replace(known, last=seen, seen_s=now_s, peak=max(known.peak, seen.total))
    return Signal(last=seen, seen_s=now_s, since_s=now_s, peak=seen.total, peak_before=known.peak)


def compute_signal_need(world: World, model: Model, have: int, now_s: float) -> SignalNeed:
    """Return how many replicas the signals require; `have` replicas serve or are about to."""
    need, known = NO_NEED, world.learned.signals.get(model.name, {})
    for name, target in model.spec.scaling.targets().items():
        signal = known.get(name)
        if signal is None or now_s >= signal.seen_s + SIGNAL_EXPIRY_S:
            need = _keep(need, have, f"{name} is unknown, because it was not read recently")
            continue
        expires_s = signal.seen_s + SIGNAL_EXPIRY_S
        need = need._replace(next_s=expires_s if need.next_s is None else min(need.next_s, expires_s))
        total = signal.last.total
        count = _replicas(total, target)
        if count > need.needed:
            need = need._replace(needed=count, reason=f"{name} is {total:g} and needs {count} x {target:g}")
        if signal.last.unknown:
            need = _keep(need, have, f"{name} is unknown, because {signal.last.unknown}")
        elif signal.peak_before is None:
            need = _keep(need, have, f"{name} has not been read for a whole idle timeout yet")
        else:
            peak = max(signal.peak, signal.peak_before)
            kept = _replicas(peak, target)
            need = _keep(need, kept, f"{name} was {peak:g} recently and needs {kept} x {target:g}")
    return need


def _keep(need: SignalNeed, count: int, reason: str) -> SignalNeed:
    return need._replace(kept=count, kept_reason=reason) if count > need.kept else need


def _replicas(total: float, target: float) -> int:
    """Return total / target, rounded up."""
    return ceil(min(total / target * (1 - EXCESS), REPLICAS_MAX))
