"""The states of a replica and the table of transitions.

Decisions (intents) that the table does not allow are bugs and raise. Observations are not checked: the fold moves the
replica to the state that they imply. `render_state_diagram()` generates the diagram in
docs/reference/replica-states.md from TRANSITIONS; a test keeps them equal.
"""

from __future__ import annotations

from enum import StrEnum


class ReplicaState(StrEnum):
    """The state of one replica."""

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

LIVE = frozenset({S.PENDING, S.STARTING, S.READY, S.UNREADY, S.WAKING})
"""States that count as supply: serving, or about to serve."""
BEGINNING = frozenset({S.PENDING, S.STARTING, S.WAKING})

STOP_GRACE_S = 10.0
"""The time between SIGTERM and SIGKILL, in seconds. No request runs on the replica, or its drain time is over."""

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
"""(state, verb) -> state. `unready`: probes fail, no new requests. `stopping`: the stop was ordered and is final."""

HOLDS_SLICE = frozenset(S) - {S.PENDING, S.GONE}
"""States in which a replica holds its slices. A sleeping replica holds the memory that its engine keeps."""
LEAVING = frozenset({S.DRAINING, S.STOPPING, S.SCRUBBING, S.FAILED})
"""States in which a replica will release its slices."""


class IllegalIntentError(Exception):
    """A decision that the table does not allow. This is always a bug."""


def next_state(state: ReplicaState, verb: str) -> ReplicaState:
    """Return the state after an intent. Raises IllegalIntentError if the table has no such row."""
    after = TRANSITIONS.get((state, verb))
    if after is None:
        raise IllegalIntentError(f"a replica that is {state} cannot {verb}")
    return after


def render_state_diagram() -> str:
    """Render the table as text, one line per target and verb, for docs/reference/replica-states.md."""
    rows: dict[tuple[str, ReplicaState], list[str]] = {}
    for (state, verb), after in TRANSITIONS.items():
        rows.setdefault((verb, after), []).append(state.value)
    return "\n".join(f"{', '.join(froms)} --{verb}--> {after}" for (verb, after), froms in rows.items())
