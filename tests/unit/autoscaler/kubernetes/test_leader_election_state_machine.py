"""Leader election: when the Lease is written and with which content, and candidates under arbitrary failures."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.agent_contract import NodeReport
from autoscaler.fold.fold import fold
from autoscaler.fold.leadership_and_operator_orders import list_reported_epochs
from autoscaler.kubernetes.leader_election_state_machine import (
    AHEAD_MAX,
    EPOCH_MAX,
    LOOK_S_MAX,
    ElectionCandidate,
    LeaseRecord,
    Write,
)
from autoscaler.state.events import NodeReported
from tests.support.builders.worlds import T0, world
from tests.support.example_budget import examples

ME, OTHER = "me", "other"
D = 10
"""Duration of the Lease in seconds: its holder writes every 2 s and may act for 8 s."""


def held(
    holder: str = OTHER, epoch: int = 3, renewed: str = "a", version: str = "7", duration_s: float = D
) -> LeaseRecord:
    return LeaseRecord(version, holder, epoch, duration_s, renewed)


def led(at_s: float = 0.0, epoch: int = 4) -> ElectionCandidate:
    """A candidate that acquired the Lease at `at_s`."""
    one = ElectionCandidate(ME, D)
    one.saw(held("", epoch - 1), at_s)
    write = one.write(at_s)
    assert write is not None
    one.wrote(write, held(ME, epoch, version="8"), at_s, at_s + 0.1)
    assert one.epoch(at_s + 0.1) == epoch
    return one


# --- acquiring --------------------------------------------------------------------------------------------------------


def test_candidate_does_not_write_the_lease_before_reading_it() -> None:
    one = ElectionCandidate(ME, D)
    assert one.write(100.0) is None
    assert one.must_look(100.0)


@pytest.mark.parametrize(
    ("record", "heard", "wanted"),
    [
        (None, 0, Write(None, ME, 1, D, acquires=True)),
        (held(""), 0, Write("7", ME, 4, D, acquires=True)),
        (held("", epoch=0), 0, Write("7", ME, 1, D, acquires=True)),
        (held(""), 9, Write("7", ME, 10, D, acquires=True)),
        (held(ME), 0, Write("7", ME, 4, D, acquires=True)),
        (held(OTHER), 0, None),
        (None, EPOCH_MAX, Write(None, ME, 1, D, acquires=True)),
    ],
    ids=["none", "released", "never-held", "gateways-know-more", "ours-of-before",
         "held", "no-epoch-of-a-lease"],
)  # fmt: skip
def test_only_a_free_or_own_lease_is_acquired_at_once_with_a_higher_epoch(
    record: LeaseRecord | None, heard: int, wanted: Write | None
) -> None:
    one = ElectionCandidate(ME, D)
    one.saw(record, 0.0)
    assert one.write(0.0, (heard,)) == wanted


def test_lease_not_renewed_for_its_duration_is_acquired_by_a_candidate() -> None:
    one = ElectionCandidate(ME, D)
    one.saw(held(duration_s=20), 100.0)
    one.saw(held(duration_s=20, version="9"), 110.0)  # another writer set a label: the holder did not renew
    assert one.write(119.9) is None
    assert one.due_s(119.5) == 120.0
    assert one.write(120.0) == Write("9", ME, 4, D, acquires=True)


def test_renewal_with_an_earlier_timestamp_still_restarts_lease_expiry() -> None:
    one = ElectionCandidate(ME, D)
    one.saw(held(renewed="2026-01-01T12:00:00Z"), 100.0)
    one.saw(held(renewed="2026-01-01T11:00:00Z"), 109.0)  # the time is an hour earlier
    assert one.write(118.9) is None
    assert one.write(119.0) is not None


def test_follower_polls_the_lease_at_least_once_per_second() -> None:
    one = ElectionCandidate(ME, 60)
    assert one.due_s(5.0) == 5.0 + LOOK_S_MAX
    one.saw(held(duration_s=60), 5.0)
    assert one.due_s(5.0) == 5.0 + LOOK_S_MAX
    assert ElectionCandidate(ME, 2).due_s(5.0) == 5.4


# --- holding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_s", "left_s"), [(0.1, 7.9), (5.0, 3.0), (7.9, 0.1), (8.0, 0.0), (3600.0, 0.0)])
def test_10_s_lease_gives_leadership_for_8_s_from_the_start_of_its_write(at_s: float, left_s: float) -> None:
    assert led().writes_s(at_s) == pytest.approx(left_s)


def test_renewal_keeps_the_epoch_and_extends_the_deadline() -> None:
    one = led()
    assert one.write(1.9) is None
    assert (one.due_s(0.5), one.must_look(0.5)) == (2.0, False)
    write = one.write(2.0)
    assert write == Write("8", ME, 4, D)
    one.wrote(write, held(ME, 4, version="9", renewed="b"), 2.0, 2.3)
    assert (one.epoch(9.9), one.epoch(10.0)) == (4, None)


def test_failed_renewal_is_retried_only_after_reading_the_lease() -> None:
    one = led()
    one.failed()
    assert one.must_look(3.0)
    assert one.write(3.0) is None
    assert one.due_s(7.5) == 8.0
    one.saw(held(ME, 4, version="9", renewed="b"), 3.0)  # the write had succeeded after all
    assert one.writes_s(3.0) == pytest.approx(5.0)
    assert one.write(3.0) == Write("9", ME, 4, D)


@pytest.mark.parametrize("found", [held(OTHER, 5), held("", 4), None], ids=["another's", "released", "deleted"])
def test_leadership_ends_when_the_lease_has_no_or_another_holder(found: LeaseRecord | None) -> None:
    one = led()
    one.saw(found, 1.0)
    assert (one.epoch(1.0), one.writes_s(1.0)) == (None, 0.0)


def test_paused_process_loses_leadership_and_acquires_a_new_epoch() -> None:
    """As with SIGSTOP: nothing ran since, and no other candidate took the Lease."""
    one = led()
    assert one.writes_s(60.0) == 0.0
    assert one.must_look(60.0)
    one.saw(held(ME, 4, version="8"), 60.0)
    assert one.write(60.0) == Write("8", ME, 5, D, acquires=True)


def test_lease_renewal_answered_after_its_deadline_ends_leadership() -> None:
    one = led()
    write = one.write(7.0)
    assert write is not None
    one.wrote(write, held(ME, 4, version="9", renewed="b"), 7.0, 8.5)
    assert one.epoch(8.5) is None
    again = one.write(8.6)
    assert again == Write("9", ME, 5, D, acquires=True)


def test_lease_acquisition_answered_after_its_deadline_gives_no_leadership() -> None:
    one = ElectionCandidate(ME, D)
    one.saw(held(""), 0.0)
    write = one.write(0.0)
    assert write is not None
    one.wrote(write, held(ME, 4), 0.0, 8.0)
    assert one.epoch(8.0) is None


def test_leader_with_a_lower_epoch_than_gateways_acquires_a_higher_epoch() -> None:
    """The Lease was deleted and created again: gateways ignore an epoch lower than theirs."""
    one = led(epoch=1)
    assert one.write(1.0, (2, 7)) is None
    assert one.epoch(1.0) is None
    one.saw(held(ME, 1, version="8"), 1.1)
    assert one.write(1.1, (2, 7)) == Write("8", ME, 8, D, acquires=True)


@pytest.mark.parametrize("lie", [EPOCH_MAX, EPOCH_MAX - 1, 3 + AHEAD_MAX + 1])
def test_implausibly_high_reported_epoch_is_ignored(lie: int) -> None:
    """The epoch is an int32: after one such report, no candidate could ever acquire the Lease again."""
    assert led(epoch=3).write(1.0, (lie,)) is None
    assert led(epoch=3).write(2.0, (lie,)) == Write("8", ME, 3, D), "it leads on"
    one = ElectionCandidate(ME, D)
    one.saw(held("", 3), 0.0)
    assert one.write(0.0, (lie, 9)) == Write("7", ME, 10, D, acquires=True)
    assert one.write(0.0, (3 + AHEAD_MAX,)) == Write("7", ME, 3 + AHEAD_MAX + 1, D, acquires=True)


# --- a deleted Lease --------------------------------------------------------------------------------------------------


def test_deleted_lease_is_acquired_only_after_last_holder_expired() -> None:
    """The holder may have renewed it just before the deletion and may not know of the deletion yet."""
    one = ElectionCandidate(ME, D)
    one.saw(held(duration_s=20), 100.0)
    one.saw(None, 110.0)
    one.saw(None, 125.0)
    assert one.write(129.9) is None
    assert one.due_s(129.5) == 130.0
    assert one.write(130.0) == Write(None, ME, 4, D, acquires=True)


def test_absent_lease_with_a_reported_epoch_is_acquired_after_its_duration() -> None:
    one = ElectionCandidate(ME, D)
    one.saw(None, 99.0)
    assert one.write(100.0, (6,)) is None
    assert one.write(109.9, (6,)) is None
    assert one.write(110.0, (6, 7)) is None, "another candidate led meanwhile"
    assert one.write(120.0, (6,)) == Write(None, ME, 8, D, acquires=True)


def test_leader_recreates_a_deleted_lease_at_once_only_before_its_deadline() -> None:
    one = led()
    one.failed()
    one.saw(None, 3.0)
    assert one.epoch(3.0) is None
    assert one.write(3.0) == Write(None, ME, 5, D, acquires=True)
    assert one.write(8.0) is None, "it was paused"
    assert one.write(13.0) == Write(None, ME, 5, D, acquires=True)
    late = led()
    late.saw(None, 8.0)
    assert late.write(8.0) is None


def test_new_lease_duration_applies_from_the_next_write() -> None:
    one = led()
    one.duration_s = 20
    assert one.writes_s(0.0) == pytest.approx(8.0)
    write = one.write(2.0)
    assert write == Write("8", ME, 4, 20)
    one.wrote(write, held(ME, 4, version="9"), 2.0, 2.1)
    assert one.writes_s(2.0) == pytest.approx(16.0)


def test_lease_release_keeps_the_epoch_and_ends_leadership() -> None:
    one = led()
    assert one.release(1.0) == Write("8", "", 4, D)
    assert one.epoch(1.0) is None
    assert one.release(1.0) is None
    assert led().release(9.0) is None, "an expired Lease is not released"
    assert ElectionCandidate(ME, D).release(0.0) is None


# --- three candidates under arbitrary failures ------------------------------------------------------------------------


class Server:
    """A fake Lease with optimistic concurrency."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self._version = 0

    def put(self, write: Write) -> LeaseRecord | None:
        """The record after the write, or None on a conflict."""
        if write.version != (None if self.record is None else self.record.version):
            return None
        self._version += 1
        version = str(self._version)
        self.record = LeaseRecord(version, write.holder, write.epoch, float(write.duration_s), version)
        return self.record


class Turn(NamedTuple):
    """One candidate's turn: its delay, the fate of its request (possibly after deleting the Lease), and the latency."""

    who: int
    after_s: float
    request: str
    takes_s: float


turns = st.lists(
    st.builds(
        Turn,
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 1.9, 2.0, 5.0, 8.0, 10.0, 25.0]),
        st.sampled_from(["ok", "ok", "ok", "lost", "answer lost", "deleted"]),
        st.sampled_from([0.0, 0.3, 2.0, 9.0]),
    ),
    min_size=1,
    max_size=60,
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(turns)
def test_random_failures_leave_at_most_one_leader_and_increasing_epochs(script: list[Turn]) -> None:
    """Random pauses, lost requests and responses, unrelated clocks, deletions, and gateways that know all epochs."""
    server, now_s, last_epoch = Server(), 0.0, 0
    clocks = (0.0, -3600.0, 1e6)
    all_of_them = [ElectionCandidate(f"c{n}", D) for n in range(3)]

    def leaders() -> list[int]:
        return [e for one, off in zip(all_of_them, clocks, strict=True) if (e := one.epoch(now_s + off)) is not None]

    for turn in script:
        one, off = all_of_them[turn.who], clocks[turn.who]
        now_s += turn.after_s
        if turn.request == "deleted":
            server.record = None
        if one.must_look(now_s + off):
            if turn.request == "lost":
                one.failed()
                continue
            one.saw(server.record, now_s + off)
        write = one.write(now_s + off, (last_epoch,))
        if write is not None and turn.request != "lost":
            started_s, made = now_s, server.put(write)
            now_s += turn.takes_s
            if made is None or turn.request == "answer lost":
                one.failed()
            else:
                one.wrote(write, made, started_s + off, now_s + off)
                if write.acquires:
                    assert write.epoch > last_epoch
                    last_epoch = write.epoch
        elif write is not None:
            one.failed()
        assert len(leaders()) <= 1
        assert all(epoch == last_epoch for epoch in leaders())


def test_new_leader_gets_a_higher_epoch_than_the_only_node_agent_reports() -> None:
    """The Lease was deleted and there is no gateway: otherwise the agent would ignore the new leader."""
    there = fold(world(gateways=()), [NodeReported(report=NodeReport(node="n1", boot="b", sequence=1, epoch=7))], T0)[0]
    assert list_reported_epochs(there) == {7}
    one = ElectionCandidate(ME, D)
    one.saw(None, 0.0)
    one.write(0.0, list_reported_epochs(there))
    write = one.write(100.0, list_reported_epochs(there))
    assert write is not None
    assert write.epoch == 8


@pytest.mark.parametrize(("reported", "believed"), [((7, 3), 3), ((7, 7, 3), 7), ((9, 8, 3), 8), ((7,), 7), ((), 0)])
def test_second_highest_epoch_reported_by_several_node_agents_is_used(reported: tuple[int, ...], believed: int) -> None:
    reports = [
        NodeReport(node=f"n{number}", boot="b", sequence=1, epoch=epoch) for number, epoch in enumerate(reported)
    ]
    there = fold(world(gateways=()), [NodeReported(report=one) for one in reports], T0)[0]
    assert max(list_reported_epochs(there), default=0) == believed
