"""Dispatch and its slots: rising and falling allocations, a silent leader, failing replicas, retried requests."""

from __future__ import annotations

import pytest

from autoscaler.contract import LEADER_SILENT_S, Clocks, RoutesDelta
from gateway.dispatch.call import CallState
from gateway.dispatch.model_dispatcher import RETRIES_MAX, Bounce
from gateway.dispatch.slots import SUSPECT_S
from tests.support.harness.gateway.dispatch_script import Script, warm

# --- allocations --------------------------------------------------------------------------------------------


def test_lowered_slot_allocation_does_not_abort_running_requests() -> None:
    script = warm(3)
    script.arrive_many(4, "c")
    assert script.replica("r1", 1) == ["report"]
    assert script.finish("c0") == ["report"], "a Slot above the hold came free"
    assert script.finish("c1") == ["report"]
    assert script.finish("c2") == ["grant c3 r1"]


def test_unused_slots_are_returned_while_requests_wait_at_other_gateways() -> None:
    script = warm(4)
    script.arrive_many(2, "c")
    assert script.say(others_wait=True) == ["report"]
    use = script.use("r1")
    assert (use.hold, use.in_use) == (2, 2)
    assert script.finish("c0") == ["report"]
    assert script.arrive("c2") == ["report"], "it has to ask for a Slot again"
    use = script.use("r1")
    assert (use.hold, use.in_use) == (1, 1)
    assert script.replica("r1", 2) == ["grant c2 r1"]


def test_draining_replica_gets_no_new_requests_until_it_is_ready_again() -> None:
    script = warm(2)
    script.arrive_many(2, "c")
    assert script.replica("r1", 0, state="draining") == ["report"]
    assert script.arrive("late") == ["report"]
    assert script.calls["late"].cold
    assert script.finish("c0") == ["report"]
    assert script.finish("c1") == ["report"]
    assert script.replica("r1", 1) == ["grant late r1"], "revived"


def test_end_of_the_last_request_of_a_draining_replica_is_reported() -> None:
    script = warm(1)
    script.replica("r2", 1)
    script.arrive_many(2, "c")
    script.replica("r1", 1, state="draining")
    assert script.finish("c0") == ["report"]
    assert script.calls["c1"].state is CallState.RUNNING


def test_request_of_a_removed_replica_stays_in_reports_until_it_ends() -> None:
    script = warm(2)
    script.arrive("c1")
    assert script.remove_replica("r1") == ["report"]
    use = script.use("r1")
    assert (use.hold, use.in_use) == (0, 1)
    assert script.finish("c1") == ["report"]
    assert [use.replica for use in script.report().replicas] == []


def test_routes_of_an_older_leader_are_ignored() -> None:
    script = warm(1)
    script.arrive_many(2, "c")
    assert script.dispatch.routes(RoutesDelta(epoch=0, version=99, full=True), 0.0) == []
    assert script.finish("c0") == ["grant c1 r1"]


def test_gateway_without_slots_grants_its_share_once_the_leader_is_silent() -> None:
    script = Script()
    script.replica("r1", 0, slots=4, gateways=2)
    script.arrive_many(3, "c")
    assert script.dispatch.next_s() == LEADER_SILENT_S
    assert script.at(LEADER_SILENT_S) == ["grant c0 r1", "grant c1 r1"], "floor(4 / 2)"
    assert script.replica("r1", 1, slots=4, gateways=2) == ["report"]
    assert script.finish("c0") == ["report"]
    assert script.finish("c1") == ["grant c2 r1"]


def test_request_gets_a_slot_at_once_while_the_leader_is_silent() -> None:
    script = Script()
    script.replica("r1", 0, slots=1, gateways=3)
    script.now_s = 60.0
    assert script.arrive("c1") == ["grant c1 r1", "report"]


# --- retries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "code"), [("reset", "upstream_error"), ("busy", "overloaded")])
def test_failed_request_is_retried_once_on_another_replica(reason: Bounce, code: str) -> None:
    script = Script()
    script.replica("r1", 2)
    script.replica("r2", 1)
    assert script.arrive("c1") == ["grant c1 r1", "report"]
    assert script.bounce("c1", reason) == ["grant c1 r2"]
    assert script.calls["c1"].moves == 1
    assert script.bounce("c1", reason) == [f"refuse c1 {code}", "report"]


def test_reset_by_a_stopping_replica_does_not_use_up_the_retry() -> None:
    """A rolling update stops one replica after another, each with the request retried from the one before."""
    script = Script()
    for replica in ("r1", "r2", "r3"):
        script.replica(replica, 1)
    assert script.arrive("c1") == ["grant c1 r1", "report"]
    script.replica("r1", 1, state="stopping")
    assert script.bounce("c1", "reset") == ["grant c1 r2", "report"]
    script.replica("r2", 1, state="draining")
    script.remove_replica("r2")
    assert script.bounce("c1", "reset") == ["grant c1 r3", "report"], "it ended after its stop was ordered"
    assert script.bounce("c1", "reset") == ["grant c1 r3"], "its stop was not ordered: the one move that counts"
    assert script.bounce("c1", "reset") == ["refuse c1 upstream_error", "report"]


def test_reset_request_of_a_paused_model_fails_with_no_capacity() -> None:
    """An operator scales to zero: the replica stops with requests in flight, and no other replica may take them."""
    script = Script()
    script.replica("r1", 2)
    script.arrive("c1")
    script.arrive("c2")
    assert script.bounce("c2", "reset") == ["grant c2 r1"]
    script.model(paused=True)
    assert script.bounce("c1", "reset") == ["refuse c1 no_capacity"]
    assert script.bounce("c2", "reset")[0] == "refuse c2 upstream_error"


def test_reset_just_before_a_replica_is_reported_stopping_uses_no_retry() -> None:
    """The connection breaks before Routes report the reason."""
    script = Script()
    script.replica("r1", 1)
    script.replica("r2", 1)
    script.arrive("c1")
    assert script.bounce("c1", "reset") == ["grant c1 r2"]
    script.replica("r1", 1, state="stopping")
    assert script.bounce("c1", "reset") == ["grant c1 r2"]
    assert script.bounce("c1", "reset") == ["refuse c1 upstream_error", "report"]


def test_reset_by_a_replica_removed_before_it_stops_uses_the_retry() -> None:
    """Otherwise one request that crashes engines could crash them all."""
    script = Script()
    script.replica("r1", 1)
    script.replica("r2", 1)
    script.arrive("c1")
    assert script.bounce("c1", "reset") == ["grant c1 r2"]
    script.remove_replica("r1")
    script.replica("r1", 0, state="stopping")
    assert script.bounce("c1", "reset") == ["refuse c1 upstream_error", "report"]


def test_request_that_reached_its_time_limit_is_not_sent_again() -> None:
    """On the same replica, or on another one, it would wait as long again (interfaces, section 3, 504)."""
    script = Script()
    script.replica("r1", 2)
    script.replica("r2", 1)
    script.arrive("c1")
    assert script.bounce("c1", "timeout") == ["refuse c1 upstream_timeout", "report"]


def test_request_is_retried_on_the_same_replica_if_it_is_the_only_one() -> None:
    script = warm(1)
    script.arrive("c1")
    assert script.bounce("c1", "reset") == ["grant c1 r1"]


def test_retried_request_without_a_free_slot_waits_at_the_queue_head() -> None:
    script = warm(2)
    script.arrive_many(4, "c")
    script.replica("r1", 1)
    assert script.bounce("c0", "reset") == ["report"]
    assert script.dispatch.wait_note(script.calls["c0"], 0.0) == (1, None)
    assert script.dispatch.wait_note(script.calls["c2"], 0.0) == (2, None)
    assert script.finish("c1") == ["grant c0 r1"]
    assert script.finish("c0") == ["grant c2 r1"]


def test_refused_connection_makes_replica_suspect_until_a_probe_succeeds() -> None:
    script = warm(2)
    script.arrive_many(2, "c")
    assert script.bounce("c0", "connect") == ["report"], "parked: nowhere else to go"
    assert script.arrive("c2") == []
    use = script.use("r1")
    assert use.connect_failures == 1
    assert script.dispatch.next_s() == SUSPECT_S
    assert script.at(0.9) == []
    script.finish("c1")
    assert script.at(SUSPECT_S) == ["grant c0 r1"], "one probe, at the head"
    assert script.finish("c0") == ["grant c2 r1"], "it answered: no longer suspect"


def test_suspect_replica_is_probed_with_a_waiting_request_before_a_new_one() -> None:
    script = warm(1)
    script.arrive("c1")
    script.bounce("c1", "connect")
    script.now_s = SUSPECT_S
    assert script.arrive("c2") == ["grant c1 r1", "report"]
    assert script.calls["c2"].state is CallState.PARKED


def test_first_response_byte_makes_a_suspect_replica_usable_again() -> None:
    script = warm(2)
    script.arrive_many(3, "c")
    script.bounce("c0", "connect")
    script.finish("c1")
    assert script.at(SUSPECT_S) == ["grant c0 r1"]
    assert script.heard("c0") == ["grant c2 r1"]


def test_suspect_replica_is_used_again_after_unready_then_ready() -> None:
    script = warm(1)
    script.arrive("c1")
    script.bounce("c1", "connect")
    assert script.replica("r1", 2) == ["report"]
    assert script.replica("r1", 1, state="unready") == ["report"]
    assert script.replica("r1", 1) == ["grant c1 r1"]


def test_reports_contain_time_since_last_byte_of_a_replica() -> None:
    script = warm(2)
    script.arrive_many(2, "c")
    script.now_s = 4.0
    use = script.use("r1")
    assert use.last_byte_age_s is None, "two Calls, and no byte yet"
    assert script.heard("c0") == []
    script.now_s = 6.0
    use = script.use("r1")
    assert use.last_byte_age_s == 2.0
    script.leave("c0")
    script.finish("c1")
    script.now_s = 7.0
    use = script.use("r1")
    assert use.last_byte_age_s == 1.0, "the end of an answer is a byte, a client that left is none"
    assert script.heard("c1") == [], "it has ended"


def test_response_to_an_older_request_leaves_the_replica_suspect() -> None:
    script = warm(2)
    script.arrive("old")
    script.now_s = 5.0
    script.arrive("new")
    script.bounce("new", "connect")
    script.finish("old")
    assert script.dispatch.next_s() == 5.0 + SUSPECT_S


def test_retries_after_busy_responses_stay_within_the_retry_budget() -> None:
    script = warm(1)
    moved = 0
    for n in range(100):
        script.arrive(f"c{n}")
        moved += script.bounce(f"c{n}", "busy") == [f"grant c{n} r1"]
        script.finish(f"c{n}")
    assert moved <= RETRIES_MAX + 0.1 * 100
    assert moved >= RETRIES_MAX


def test_all_requests_of_a_failed_replica_are_retried() -> None:
    """Case 16: a crash is not an overload, so the retry budget for busy engines does not apply."""
    script = warm(64)
    for n in range(64):
        script.arrive(f"c{n}")
    for n in range(64):
        assert f"refuse c{n} upstream_error" not in script.bounce(f"c{n}", "reset")


def test_refused_connection_does_not_consume_the_retry() -> None:
    """After a reset, the dead replica is tried again before Routes report its end; the request still waits."""
    script = warm(1)
    script.arrive("c1")
    assert script.bounce("c1", "reset") == ["grant c1 r1"]
    assert script.bounce("c1", "connect") == ["report"], "parked again, not refused"
    assert script.dispatch.busy()


def test_request_past_its_deadline_is_not_retried() -> None:
    script = warm(1)
    script.arrive("c1", wait_s=5)
    script.now_s = 6.0
    assert script.bounce("c1", "reset") == ["refuse c1 upstream_error", "report"]


@pytest.mark.parametrize(
    "clocks",
    [
        Clocks(first_byte_seconds_max=1800, stall_seconds_max=590, response_seconds_max=600),
        Clocks(first_byte_seconds_max=590, stall_seconds_max=1800, response_seconds_max=600),
        Clocks(first_byte_seconds_max=590, stall_seconds_max=590, response_seconds_max=1800),
    ],
)
def test_replica_is_stalled_after_the_longest_limit_of_its_requests(clocks: Clocks) -> None:
    script = warm(2)
    script.model(clocks=clocks)
    script.arrive_many(2, "c")
    script.heard("c0")
    script.at(1799.0)
    assert not script.use("r1").stalled
    script.at(1800.0)
    assert script.use("r1").stalled
