"""The idle timeout: how long a model without requests keeps its last replica. Pure.

It begins when the last request finishes. Times are in seconds of the `World`'s clock.
"""

from __future__ import annotations

from autoscaler.capacity.lead_times import WAIT_WORTH
from autoscaler.spec.model import IDLE_AUTO_S, Model
from autoscaler.state.world import History, World

START_WORTH, RENTED_S_MIN = 1.0 + WAIT_WORTH, 30.0
"""The idle timeout of a replica that causes capacity costs is limited to this many median start durations, but not to
less than RENTED_S_MIN. One duration is the cost of the next start; WAIT_WORTH is that of the requests that wait for it.
"""


def median_start_s(history: History) -> float | None:
    """Return the (upper) median of the recorded starts; None if there are none."""
    starts = sorted(history.starts_s)
    return starts[len(starts) // 2] if starts else None


def idle_window_s(model: Model, history: History) -> float:
    """Return the seconds between the last finished request and scaling to zero.
    `auto` doubles with each regret, up to its maximum.
    """
    window_s = model.idle_s(median_start_s(history))
    if model.spec.idle_seconds != "auto":
        return window_s
    return min(window_s * 2.0 ** min(history.regrets, 16), IDLE_AUTO_S[1])


def effective_idle_window(world: World, model: Model, history: History) -> tuple[float, bool]:
    """Return the current idle timeout, and whether it is shortened because the idle replica causes capacity costs."""
    window_s, start_s = idle_window_s(model, history), median_start_s(history)
    if start_s is None or model.spec.idle_seconds != "auto" or model.name not in world.rented.idlers:
        return window_s, False
    worth_s = max(RENTED_S_MIN, START_WORTH * start_s)
    return min(window_s, worth_s), worth_s < window_s
