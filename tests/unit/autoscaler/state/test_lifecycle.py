"""The table of states: what it allows, what it refuses, and the picture of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.state.lifecycle import HOLDS_SLICE, TRANSITIONS, IllegalIntentError, next_state, render_state_diagram
from autoscaler.state.lifecycle import ReplicaState as S

VERBS = {verb for _, verb in TRANSITIONS}
ARCHITECTURE = Path(__file__).parents[4] / "ARCHITECTURE.md"


@pytest.mark.parametrize("state", S)
def test_an_intent_that_the_table_does_not_have_raises(state: S) -> None:
    for verb in VERBS:
        if (state, verb) in TRANSITIONS:
            assert next_state(state, verb) is TRANSITIONS[state, verb]
        else:
            with pytest.raises(IllegalIntentError, match=f"a Replica that is {state} cannot {verb}"):
                next_state(state, verb)


def test_a_life_from_zero_and_back() -> None:
    state = S.PENDING
    for verb in ("place", "ready", "drain", "acknowledged", "gone", "memory-free"):
        state = next_state(state, verb)
    assert state is S.GONE


def test_there_is_no_way_back_from_a_stop() -> None:
    assert [verb for state, verb in TRANSITIONS if state is S.STOPPING] == ["gone"]


def test_every_state_but_the_first_can_be_reached_and_every_state_but_the_last_can_be_left() -> None:
    assert set(TRANSITIONS.values()) == set(S) - {S.PENDING}
    assert {state for state, _ in TRANSITIONS} == set(S) - {S.GONE}


def test_a_slice_is_held_from_the_start_until_it_is_proven_clean() -> None:
    assert set(S) - HOLDS_SLICE == {S.PENDING, S.GONE}


def test_the_diagram_in_the_architecture_page_is_the_table() -> None:
    _, begin, rest = ARCHITECTURE.read_text().partition("<!-- states -->")
    shown, end, _ = rest.partition("<!-- /states -->")
    assert (bool(begin), bool(end)) == (True, True), "the diagram stands between <!-- states --> and <!-- /states -->"
    fence, *lines, last = shown.strip().splitlines()
    assert (fence.startswith("```"), last) == (True, "```")
    assert lines == render_state_diagram().splitlines()
