"""The states of a Replica and the one table of what may follow what.

Owns the table, nothing else. Our own decisions (intents) that the table does not allow are bugs and raise; what the
world reports (observations) is never judged here: the fold jumps to the state it implies.
The diagram in docs/reference/replica-states.md is generated from TRANSITIONS by `render_state_diagram()`; a test
keeps the two equal.
"""

from __future__ import annotations

from enum import StrEnum


class ReplicaState(StrEnum):
    """Where one Replica is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FALLING_ASLEEP = "falling-asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    SCRUBBING = "scrubbing"
    FAILED = "failed"
    GONE = "gone"


S = ReplicaState

STOP_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. No Call is left on the Replica, or its own grace is over."""

TRANSITIONS: dict[tuple[ReplicaState, str], ReplicaState] = {
    (S.PENDING, "place"): S.STARTING,
    (S.STARTING, "ready"): S.READY,
    (S.READY, "unready"): S.UNREADY,
    (S.UNREADY, "ready"): S.READY,
    **{(s, "drain"): S.DRAINING for s in (S.READY, S.UNREADY, S.STARTING)},
    (S.DRAINING, "revive-ready"): S.READY,
    (S.DRAINING, "revive-unready"): S.UNREADY,
    (S.DRAINING, "revive-starting"): S.STARTING,
    (S.DRAINING, "acknowledged"): S.STOPPING,
    (S.DRAINING, "acknowledged-sleep"): S.FALLING_ASLEEP,
    (S.FALLING_ASLEEP, "slept"): S.ASLEEP,
    (S.ASLEEP, "wake"): S.WAKING,
    (S.WAKING, "canary-ok"): S.READY,
    **{(s, "drop"): S.STOPPING for s in (S.PENDING, S.ASLEEP, S.FALLING_ASLEEP, S.WAKING, S.FAILED)},
    **{(s, "broke"): S.FAILED for s in (S.STARTING, S.WAKING, S.READY, S.UNREADY, S.DRAINING)},
    (S.STOPPING, "gone"): S.SCRUBBING,
    (S.SCRUBBING, "memory-free"): S.GONE,
}
"""(state, verb) -> state. `unready`: probes fail, no new Calls. `stopping`: the stop order is out, no way back."""

HOLDS_SLICE = frozenset(S) - {S.PENDING, S.GONE}
"""States in which a Replica's Slices are not free; asleep ones hold what their engine keeps."""
LEAVING = frozenset({S.DRAINING, S.STOPPING, S.SCRUBBING, S.FAILED})
"""States in which its room is coming."""


class IllegalIntentError(Exception):
    """A decision of ours that the table does not allow: a bug, never bad luck."""


def next_state(state: ReplicaState, verb: str) -> ReplicaState:
    """The state after an intent; raises IllegalIntentError where the table has no such row."""
    after = TRANSITIONS.get((state, verb))
    if after is None:
        raise IllegalIntentError(f"a Replica that is {state} cannot {verb}")
    return after


def render_state_diagram() -> str:
    """The table as text, one line per target and verb, for docs/reference/replica-states.md."""
    rows: dict[tuple[str, ReplicaState], list[str]] = {}
    for (state, verb), after in TRANSITIONS.items():
        rows.setdefault((verb, after), []).append(state.value)
    return "\n".join(f"{', '.join(froms)} --{verb}--> {after}" for (verb, after), froms in rows.items())
