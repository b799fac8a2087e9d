"""What is learnt of each Model: durations and failures of its starts, its peaks of demand, and how it went to zero.

Owns every change of a `History`. Pure functions from an old one to a new one; the fold calls them when a Replica moves
or a gateway reports, and `plan` reads the result. Owns also how long a start may take, since a retry has what its
episode left. Back-off follows interfaces section 2 (`start`): tries at once and
after 0.5 s within one episode, then 1, 2, 4 ... minutes between episodes.
"""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from autoscaler.demand.desired_replicas import PEAK_BUCKET_S, idle_window_s
from autoscaler.spec.model import Model, Start
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, ModelLoad, Replica, World

STARTS_MAX = 32
TRY_AFTER_S = (0.0, 0.5, 1.0)
"""Pause before the first, second and every later retry of an episode."""
EPISODE_AFTER_S = 60.0
EPISODE_AFTER_S_MAX = 1800.0
"""Pause after a failed episode: the first, doubled each time up to the second."""
REGRETS_MAX = 4
PEAKS = 12
"""The idle window is remembered in so many peaks, or one per PEAK_BUCKET_S where that is fewer."""
SAME_S = 0.010
"""Ages that a report tells jitter by its travel: less than this is no news."""


def record_start(history: History, took_s: float | None) -> History:
    """A Replica became ready for the first time, `took_s` after its process started (None where that is not known).

    Its failures still count until it has shown that it stays (`clear_failures`): an engine that dies at its first Call
    is ready each time.
    """
    starts_s = history.starts_s if took_s is None else (*history.starts_s, took_s)[-STARTS_MAX:]
    return replace(history, starts_s=starts_s, retry_at_s=0.0, refused_until_s=0.0, failure="", failed_hash="")


def clear_failures(history: History) -> History:
    """No failure counts any more: a Replica outlived its residency or was drained, or the Model was changed."""
    return replace(
        history, tries=0, first_try_s=None, retry_at_s=0.0, episodes=0, refused_until_s=0.0, failure="", failed_hash=""
    )


def drop_stale_failures(history: History, model: Model) -> History:
    """What is remembered, of this Model: failures that another spec of it had while nobody looked count no more."""
    other = bool(history.failed_hash) and history.failed_hash != model.spec_hash()
    return clear_failures(history) if other and history.failure else history


def is_new_episode(history: History, tried_s: float, seconds_max: float) -> bool:
    """Whether a try that began at `tried_s` belongs to no earlier failure: none counts, or it is too long ago."""
    return history.first_try_s is None or tried_s - history.first_try_s >= seconds_max


def record_failure(history: History, start: Start, tried_s: float, now_s: float, reason: str) -> History:
    """A Replica failed before it was ready, or before its residency was over; its process had started at `tried_s`."""
    fresh = is_new_episode(history, tried_s, start.seconds_max)
    tries = 1 if fresh else history.tries + 1
    first_s = tried_s if fresh else min(history.first_try_s or tried_s, tried_s)
    pause_s = TRY_AFTER_S[min(tries, len(TRY_AFTER_S)) - 1]
    if tries <= start.retries and now_s + pause_s - first_s < start.seconds_max:  # later it would begin an episode anew
        return replace(history, tries=tries, first_try_s=first_s, retry_at_s=now_s + pause_s, failure=reason)
    pause_s = min(EPISODE_AFTER_S * 2.0 ** min(history.episodes, 16), EPISODE_AFTER_S_MAX)
    until_s = now_s + pause_s
    return replace(
        history,
        tries=0,
        first_try_s=None,
        episodes=history.episodes + 1,
        refused_until_s=until_s,
        retry_at_s=until_s,
        failure=reason,
    )


def record_impossible_start(history: History, now_s: float, reason: str) -> History:
    """A start would surely fail and was not tried. To look again costs nothing, so the pause does not grow."""
    until_s = now_s + EPISODE_AFTER_S
    return replace(history, tries=0, first_try_s=None, refused_until_s=until_s, retry_at_s=until_s, failure=reason)


def start_deadline_s(world: World, replica: Replica) -> float | None:
    """When its start takes too long; None: it is not starting, or waits for something else than itself (room, an
    image). A retry has what is left of its episode; one that was found is only timed since.
    """
    if replica.state not in (S.STARTING, S.WAKING) or replica.waits:
        return None
    model, history = world.models.get(replica.model), world.histories.get(replica.model)
    if model is None:
        return None
    began_s = replica.since_s if replica.started_s is None or replica.found else replica.started_s
    seconds_max = model.spec.start.seconds_max
    if history is not None and not is_new_episode(history, began_s, seconds_max):
        began_s = min(began_s, history.first_try_s or began_s)
    return began_s + seconds_max


def merge_leader_history(history: History, leaders: History) -> History:
    """What the leader wrote down goes before what a follower saw, who does not know why things happened."""
    active = [at_s for at_s in (history.last_activity_s, leaders.last_activity_s) if at_s is not None]
    return replace(
        history,
        starts_s=leaders.starts_s,
        tries=leaders.tries,
        first_try_s=leaders.first_try_s,
        retry_at_s=leaders.retry_at_s,
        episodes=leaders.episodes,
        refused_until_s=leaders.refused_until_s,
        failure=leaders.failure,
        failed_hash=leaders.failed_hash,
        used=leaders.used or history.used,
        last_activity_s=max(active, default=None),
    )


def end_backoff(history: History, now_s: float) -> History:
    """The back-off of a failed episode is over: Calls wait again for the next try."""
    if not history.refused_until_s or now_s < history.refused_until_s:
        return history
    return replace(history, refused_until_s=0.0)


def record_activity(history: History, at_s: float) -> History:
    """A Call arrived or finished at `at_s`."""
    if history.last_activity_s is not None and at_s <= history.last_activity_s + SAME_S:
        return history
    return replace(history, last_activity_s=at_s)


def record_cold_refusal(history: History, at_s: float, retry_after_s: float) -> History:
    """A cold Call was refused: demand for one start, which is then held for twice the Retry-After that was given."""
    return replace(
        history,
        refused_cold_s=max(at_s, history.refused_cold_s or at_s),
        hold_until_s=max(history.hold_until_s, at_s + 2.0 * retry_after_s),
    )


def record_serving_end(history: History, now_s: float) -> History:
    """The last ready Replica stopped taking Calls."""
    return replace(history, served_until_s=now_s)


def record_idle_stop(history: History, now_s: float) -> History:
    """It went to zero for idleness."""
    return replace(history, stopped_idle_s=now_s)


def record_start_decision(history: History, model: Model, now_s: float) -> History:
    """A start from zero was decided. Soon after an idle stop that stop is regretted; long after, all is forgotten."""
    if history.stopped_idle_s is None:
        return history
    away_s, window_s = now_s - history.stopped_idle_s, idle_window_s(model, history)
    regrets = history.regrets
    if away_s <= 2.0 * window_s:
        regrets = min(regrets + 1, REGRETS_MAX)
    elif away_s > 10.0 * window_s:
        regrets = 0
    return replace(history, regrets=regrets, stopped_idle_s=None)


def record_peak(history: History, model: Model, load: ModelLoad, now_s: float) -> History:
    """Remembers the most Calls at once (waiting or running) in each twelfth of the idle window.

    A twelfth is written down as its last bucket of PEAK_BUCKET_S, so that it means the same when the window changes.
    """
    calls, window_s = load.waiting + load.running, idle_window_s(model, history)
    width = max(1, ceil(window_s / PEAKS / PEAK_BUCKET_S))
    bucket = (int(now_s / PEAK_BUCKET_S) // width + 1) * width - 1
    peaks = history.peaks
    if peaks and peaks[-1][0] == bucket:
        if peaks[-1][1] >= calls:
            return history
        return replace(history, peaks=(*peaks[:-1], (bucket, calls)))
    since = now_s - window_s
    kept = [peak for peak in peaks if (peak[0] + 1) * PEAK_BUCKET_S > since and peak[0] < bucket]
    return replace(history, peaks=(*kept, (bucket, calls)))
