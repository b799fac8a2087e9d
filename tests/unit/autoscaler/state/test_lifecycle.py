"""The state table: permitted transitions, rejected transitions, and its diagram."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.state.lifecycle import HOLDS_SLICE, TRANSITIONS, IllegalIntentError, next_state, render_state_diagram
from autoscaler.state.lifecycle import ReplicaState as S

VERBS = {verb for _, verb in TRANSITIONS}
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "replica-states.md"


@pytest.mark.parametrize("state", S)
def test_transition_not_in_the_state_table_raises_illegal_intent_error(state: S) -> None:
    for verb in VERBS:
        if (state, verb) in TRANSITIONS:
            assert next_state(state, verb) is TRANSITIONS[state, verb]
        else:
            with pytest.raises(IllegalIntentError, match=f"a replica that is {state} cannot {verb}"):
                next_state(state, verb)


def test_full_lifecycle_of_a_replica_ends_in_gone() -> None:
    state = S.PENDING
    for verb in ("place", "ready", "drain", "acknowledged", "gone", "memory-free"):
        state = next_state(state, verb)
    assert state is S.GONE


def test_gone_event_is_the_only_transition_out_of_the_stopping_state() -> None:
    assert [verb for state, verb in TRANSITIONS if state is S.STOPPING] == ["gone"]


def test_every_state_except_pending_is_reachable_and_only_gone_is_final() -> None:
    assert set(TRANSITIONS.values()) == set(S) - {S.PENDING}
    assert {state for state, _ in TRANSITIONS} == set(S) - {S.GONE}


def test_replica_occupies_its_slice_in_all_states_but_pending_and_gone() -> None:
    assert set(S) - HOLDS_SLICE == {S.PENDING, S.GONE}


def test_documented_state_diagram_matches_the_transitions() -> None:
    _, begin, rest = PAGE.read_text().partition("<!-- states -->")
    shown, end, _ = rest.partition("<!-- /states -->")
    assert (bool(begin), bool(end)) == (True, True), "the diagram stands between <!-- states --> and <!-- /states -->"
    fence, *lines, last = shown.strip().splitlines()
    assert (fence.startswith("```"), last) == (True, "```")
    assert lines == render_state_diagram().splitlines()
