"""Updates a model's `History`: start durations, failures, demand peaks, and how it scaled to zero. Pure.

Each function returns a new `History`. The fold calls them when a replica changes state or a gateway reports, and `plan`
reads the result. Back-off follows interfaces section 2 (`start`): retries at once and after 0.5 s within one episode,
then 1, 2, 4 ... minutes between episodes. All attempts of an episode share one start timeout (`start_deadline_s`).
"""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from autoscaler.demand.desired_replicas import PEAK_BUCKET_S
from autoscaler.demand.idle_timeout import idle_window_s
from autoscaler.spec.model import Model, StartLimits
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, ModelLoad, Replica, World

STARTS_MAX = 32
TRY_AFTER_S = (0.0, 0.5, 1.0)
"""Pause before the first, second and every later retry of an episode."""
EPISODE_AFTER_S = 60.0
EPISODE_AFTER_S_MAX = 1800.0
"""Pause after a failed episode: the first value, doubled each time up to the second."""
REGRETS_MAX = 4
PEAKS = 12
"""Peaks recorded per idle timeout, or one per PEAK_BUCKET_S if that is fewer."""
SAME_S = 0.010
"""Ages in reports jitter with network delay; smaller changes are ignored."""


def record_start(history: History, took_s: float | None) -> History:
    """A replica became ready for the first time, `took_s` after its process started (None if unknown).
    Earlier failures count until the replica has proven stable (`clear_failures`): an engine that crashes on its first
    request becomes ready each time.
    """
    starts_s = history.starts_s if took_s is None else (*history.starts_s, took_s)[-STARTS_MAX:]
    return replace(history, starts_s=starts_s, retry_at_s=0.0, refused_until_s=0.0, failure="", failed_hash="")


def clear_failures(history: History) -> History:
    """Reset all failures: a replica outlived its residency or was drained, or the model was changed."""
    return replace(
        history, tries=0, first_try_s=None, retry_at_s=0.0, episodes=0, refused_until_s=0.0, failure="", failed_hash=""
    )


def drop_stale_failures(history: History, model: Model) -> History:
    """Reset failures of another spec: the spec may have changed while no autoscaler ran."""
    other = bool(history.failed_hash) and history.failed_hash != model.spec_hash()
    return clear_failures(history) if other and history.failure else history


def is_new_episode(history: History, tried_s: float, seconds_max: float) -> bool:
    """Whether a try that began at `tried_s` starts a new episode: none is open, or its first try is too long ago."""
    return history.first_try_s is None or tried_s - history.first_try_s >= seconds_max


def record_failure(history: History, start: StartLimits, tried_s: float, now_s: float, reason: str) -> History:
    """A replica failed before it was ready, or before its residency ended; its process started at `tried_s`."""
    fresh = is_new_episode(history, tried_s, start.seconds_max)
    tries = 1 if fresh else history.tries + 1
    first_s = tried_s if fresh else min(history.first_try_s or tried_s, tried_s)
    pause_s = TRY_AFTER_S[min(tries, len(TRY_AFTER_S)) - 1]
    if tries <= start.retries and now_s + pause_s - first_s < start.seconds_max:  # a later try begins a new episode
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
    """A start would certainly fail and was not tried. Checking again is free, so the pause does not grow."""
    until_s = now_s + EPISODE_AFTER_S
    return replace(history, tries=0, first_try_s=None, refused_until_s=until_s, retry_at_s=until_s, failure=reason)


def start_deadline_s(world: World, replica: Replica) -> float | None:
    """Return when the start of a replica times out; None if it is not starting, or waits for room or an image.
    A retry has the time that is left of its episode. The start of an adopted replica is timed from its adoption.
    """
    if replica.state not in (S.STARTING, S.WAKING) or replica.runtime.waits:
        return None
    model, history = world.models.get(replica.model), world.learned.histories.get(replica.model)
    if model is None:
        return None
    began_s = replica.since_s if replica.times.started_s is None or replica.runtime.found else replica.times.started_s
    seconds_max = model.spec.start.seconds_max
    if history is not None and not is_new_episode(history, began_s, seconds_max):
        began_s = min(began_s, history.first_try_s or began_s)
    return began_s + seconds_max


def merge_leader_history(history: History, leaders: History) -> History:
    """Merge what the leader recorded into what a follower saw; the leader wins, since it knows the reasons."""
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
    """If the back-off of a failed episode is over, end it: requests are queued again instead of being rejected."""
    if not history.refused_until_s or now_s < history.refused_until_s:
        return history
    return replace(history, refused_until_s=0.0)


def record_activity(history: History, at_s: float) -> History:
    """A request arrived or finished at `at_s`."""
    if history.last_activity_s is not None and at_s <= history.last_activity_s + SAME_S:
        return history
    return replace(history, last_activity_s=at_s)


def record_cold_refusal(history: History, at_s: float, retry_after_s: float) -> History:
    """A request for a cold model was rejected. It counts as demand for one start, for twice the Retry-After sent."""
    return replace(
        history,
        refused_cold_s=max(at_s, history.refused_cold_s or at_s),
        hold_until_s=max(history.hold_until_s, at_s + 2.0 * retry_after_s),
    )


def record_serving_end(history: History, now_s: float) -> History:
    """The last ready replica stopped accepting requests."""
    return replace(history, served_until_s=now_s)


def record_idle_stop(history: History, now_s: float) -> History:
    """It scaled to zero because it was idle."""
    return replace(history, stopped_idle_s=now_s)


def record_start_decision(history: History, model: Model, now_s: float) -> History:
    """A start from zero was decided. Soon after an idle stop it counts as a regret; long after, regrets are reset."""
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
    """Record the most concurrent requests (waiting or running) in each twelfth of the last idle timeout.
    Its key is the number of its last bucket of PEAK_BUCKET_S, so that recorded peaks stay valid if the timeout changes.
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
