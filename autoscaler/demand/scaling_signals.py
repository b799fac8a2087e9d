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
    unknown: str = ""
    """Which signals are unknown, and why. Then all replicas are kept."""
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
    unknown: list[str] = []
    for name, target in model.spec.scaling.targets().items():
        signal = known.get(name)
        if signal is None or now_s >= signal.seen_s + SIGNAL_EXPIRY_S:
            unknown.append(f"{name} is unknown, because it was not read recently")
            continue
        expires_s = signal.seen_s + SIGNAL_EXPIRY_S
        need = need._replace(next_s=expires_s if need.next_s is None else min(need.next_s, expires_s))
        total, peak = signal.last.total, max(signal.peak, signal.peak_before or 0.0)
        needed, kept = _replicas(total, target), _replicas(peak, target)
        if needed > need.needed:
            need = need._replace(needed=needed, reason=f"{name} is {total:g} and needs {needed} x {target:g}")
        if signal.peak_before is None:
            kept, why = max(kept, have), f"{name} has not been read for a whole idle timeout yet"
        else:
            why = f"{name} was {peak:g} recently and needs {kept} x {target:g}"
        if kept > need.kept:
            need = need._replace(kept=kept, kept_reason=why)
        if signal.last.unknown:
            unknown.append(f"{name} is unknown, because {signal.last.unknown}")
    return need._replace(kept=max(have, need.kept), unknown="; ".join(unknown)) if unknown else need


def _replicas(total: float, target: float) -> int:
    """Return total / target, rounded up."""
    return ceil(min(total / target * (1 - EXCESS), REPLICAS_MAX))
