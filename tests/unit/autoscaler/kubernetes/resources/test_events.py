"""Events on Models: reported transitions, their texts, and rate limits under which no transition goes uncounted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.fold.fold import Observation
from autoscaler.kubernetes.resources import events
from autoscaler.kubernetes.resources.events import MINUTE_MAX, PENDING_MAX, Book, ModelEvent, Regarding
from autoscaler.spec.model import Adopted
from autoscaler.state.actions import Action, DrainReplica, FailReplica, FailStart, StartReplica, StopReplica
from autoscaler.state.capacity import LeasesSeen
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import World
from tests.support.builders.capacity import acted, arrived, offer, shown, surge
from tests.support.builders.capacity import observe as observed
from tests.support.builders.fold import DOC, M, R, after, pending, seen
from tests.support.builders.worlds import T0, device, model, replica, world

ADA = Regarding("pilotlight.dev/v1alpha1", "Model", "default", "ada", "u1")
WOKEN = ModelEvent(ModelName("ada"), "Woken", "wake ada: 3 waiting")


def events_after(at: World, *batch: Observation | Action) -> tuple[World, list[tuple[str, str]]]:
    """The state after a batch, and the (reason, note) of each Event."""
    now, moves = after(at, *batch)
    actions = [one for one in batch if isinstance(one, FailStart)]
    return now, [(one.reason, one.note) for one in events.derive_step_events(moves, actions, at, now)]


def one_of(**fields: Any) -> World:
    return world([DOC], [device()], [replica(DOC, "r", **fields)])


# --- which Events are sent --------------------------------------------------------------------------------------------


def test_replica_start_records_a_woken_and_a_started_event() -> None:
    at = world([DOC], [device()])
    at, first = events_after(at, StartReplica(replica=pending(), reason="wake m: 3 waiting, tenant acme"))
    assert first == [("Woken", "r: wake m: 3 waiting, tenant acme")]
    at, nothing = events_after(at, seen(Seen.STARTING))
    assert nothing == []
    at, done = events_after(at, seen(Seen.READY))
    assert [reason for reason, _ in done] == ["Started"]
    assert events_after(at, seen(Seen.UNREADY))[1] == [], "nor when its probes fail for a moment"


def test_started_event_states_the_start_duration() -> None:
    at = one_of(state=S.STARTING, created_s=T0 - 21.4, started_s=T0 - 20, wanted_s=None)
    assert events_after(at, seen(Seen.READY))[1] == [("Started", "r is ready after 21 s")]


def test_failed_start_has_exactly_one_event() -> None:
    at = one_of(state=S.STARTING)
    at, failed = events_after(at, seen(Seen.EXITED, reason="ended with status 3"))
    assert failed == [("StartFailed", "r: ended with status 3")]
    at, ended = events_after(at, StopReplica(replica=R, grace_s=1.0, reason="ended with status 3"), seen(Seen.CLEAN))
    assert ended == []


def test_timed_out_or_impossible_start_has_start_failed_event() -> None:
    late = events_after(one_of(state=S.STARTING), FailReplica(replica=R, reason="not ready after 900 s"))[1]
    assert late == [("StartFailed", "r: not ready after 900 s")]
    never = events_after(world([DOC], [device()]), FailStart(model=M, reason="no engine vllm"))[1]
    assert never == [("StartFailed", "cannot start: no engine vllm")]


def test_serving_replica_that_exits_has_one_stopped_event() -> None:
    broke = [("Stopped", "r failed: was killed by SIGKILL")]
    assert events_after(one_of(), seen(Seen.EXITED, reason="was killed by SIGKILL"))[1] == broke
    at_once = seen(Seen.CLEAN, reason="was killed by SIGKILL", proof="exited")
    assert events_after(one_of(), at_once)[1] == broke, "and once, however soon it is deleted"


def test_drain_of_an_idle_replica_records_a_drained_and_a_stopped_event() -> None:
    at, begun = events_after(one_of(), DrainReplica(replica=R, reason="idle for 60 s"))
    assert begun == []
    at, ended = events_after(at, StopReplica(replica=R, grace_s=1.0, reason="idle for 60 s; nothing runs"))
    assert ended == [("Drained", "r: idle for 60 s; nothing runs")]
    assert events_after(at, seen(Seen.CLEAN, proof="exited"))[1] == [("Stopped", "r: idle for 60 s")]


def test_replica_drained_for_another_model_has_an_evicted_event() -> None:
    reason = "make room for ben: m was resident 40 s, 2 waiting"
    assert events_after(one_of(), DrainReplica(replica=R, reason=reason, victim_of=ModelName("ben")))[1] == [
        ("Evicted", f"r: {reason}")
    ]


def test_capacity_order_records_an_event_when_placed_and_when_delivered() -> None:
    begin = surge(offer())
    ordered, _ = acted(begin)
    here = arrived(shown(ordered, T0 + 1), T0 + 30)

    def between(before: World, now: World) -> list[tuple[str, str]]:
        return [(one.reason, one.note) for one in events.derive_step_events((), (), before, now)]

    assert between(begin, ordered) == [("CapacityRequested", "1 x A100 on w1 was ordered from rack")]
    assert between(ordered, here) == [("CapacityArrived", "rack delivered 1 x A100 on w1 after 30 s")]
    leases = tuple(one.listed for one in here.capacity.leases.values() if one.listed is not None)
    found = observed(begin, LeasesSeen(provider="rack", leases=leases, began_s=T0 + 1), now_s=T0 + 1)
    assert found.capacity.leases
    assert not between(begin, found), "another leader recorded that event"


def test_replicas_found_after_restart_cause_at_most_one_event() -> None:
    at = world([DOC], [device()])
    assert events_after(at, seen(Seen.STARTING), seen(Seen.READY, "r2"), seen(Seen.EXITED, "r3"))[1][1:] == []


def test_event_refers_to_a_model_object_only_if_the_cluster_has_one() -> None:
    ada = model("ada")
    assert events.find_involved_object(ada) is None, "of a file"
    assert events.find_involved_object(replace(ada, uid="u1")) == ADA
    elsewhere = replace(ada, uid="u2", namespace="team-a", name=ModelName("team-a/ada"), served_name="ada")
    assert events.find_involved_object(elsewhere) == ADA._replace(namespace="team-a", uid="u2")
    adopted = Adopted(kind="Deployment", namespace="default", name="ada")
    assert events.find_involved_object(replace(ada, uid="u1", adopted=adopted)) is None


# --- how many Events are sent -----------------------------------------------------------------------------------------


def test_repetitions_of_an_unsent_event_are_merged_into_one_with_a_count() -> None:
    book = Book()
    for number in range(5):
        book.note(ADA, WOKEN._replace(note=f"{number} waiting"), T0 + number)
    due = book.take(T0 + 5)
    assert due is not None
    assert (due.times, due.happening.note, due.first_s, due.last_s) == (5, "4 waiting", T0, T0 + 4)
    assert book.take(T0 + 5) is None


def test_events_within_ten_minutes_join_one_series() -> None:
    book = Book()
    book.note(ADA, WOKEN, T0)
    first = book.take(T0)
    assert first is not None
    assert book.series(first) is None
    book.sent(first, "ada.1", 1)
    assert book.series(first._replace(last_s=T0 + 599)) == events.Series("ada.1", 1, T0)
    assert book.series(first._replace(last_s=T0 + 600)) is None


def test_events_of_a_flapping_model_are_rate_limited_but_all_are_counted() -> None:
    book, other = Book(), ADA._replace(name="ben")
    times = requests = 0
    for tick in range(3000):  # ten times a second for five minutes
        now_s = T0 + tick / 10
        book.note(ADA, WOKEN._replace(reason=("Woken", "StartFailed")[tick % 2]), now_s)
        while (due := book.take(now_s)) is not None:
            requests, times = requests + 1, times + due.times
    assert MINUTE_MAX * 5 <= requests <= MINUTE_MAX * 6
    assert times + sum(book._pending[key].times for key in book._pending) == 3000
    book.note(other, WOKEN, T0 + 300)
    now = list(iter(lambda: book.take(T0 + 300), None))
    assert now[-1].regarding == other, "other events are recorded meanwhile"
    wait_s = book.wait_s(T0 + 300)
    assert wait_s is not None
    assert 0 < wait_s <= 60 / MINUTE_MAX
    assert book.take(T0 + 300 + wait_s + 0.01) is not None


def test_pending_events_are_bounded_and_dropped_ones_are_counted() -> None:
    book = Book()
    for number in range(PENDING_MAX + 7):
        book.note(ADA._replace(name=f"m{number}"), WOKEN, T0)
    assert (len(book), book.dropped) == (PENDING_MAX, 7)
    book.clear()
    assert (len(book), book.dropped) == (0, PENDING_MAX + 7)


def test_unsent_event_is_retried_first_with_newer_occurrences() -> None:
    book = Book()
    book.note(ADA, WOKEN, T0)
    book.note(ADA._replace(name="ben"), WOKEN, T0)
    first = book.take(T0)
    assert first is not None
    book.note(ADA, WOKEN._replace(note="newer"), T0 + 1)
    book.put_back(first)
    again = book.take(T0 + 2)
    assert again is not None
    assert (again.regarding, again.times, again.happening.note, again.first_s) == (ADA, 2, "newer", T0)
    book.put_back(again)
    assert book.take(T0 + 2) == again


@pytest.mark.parametrize("text", ["ä" * 900, "x" * 5000])
def test_event_note_is_truncated_to_api_server_limit(text: str) -> None:
    assert 990 < len(events.truncate_note(text).encode()) <= 1000
