"""Dispatch as a script: events at one gateway, and the actions expected of it."""

from __future__ import annotations

from autoscaler.contract import Refusal, ReportAnswer, RoutesDelta, TenantEntry, TenantName
from gateway.dispatch.call import CallState
from gateway.errors import MAX_RETRY_AFTER_S
from tests.support.harness.gateway.dispatch_script import Script, call_of, warm

# --- scale from zero ----------------------------------------------------------------------------------------


def test_request_for_a_cold_model_waits_until_a_replica_is_ready() -> None:
    script = Script()
    assert script.arrive("c1") == ["report"]
    assert script.calls["c1"].cold
    assert script.arrive("c2") == [], "only 0 -> 1 is an edge"
    assert script.replica("r1", 1) == ["grant c1 r1", "report"]
    assert script.finish("c1") == ["grant c2 r1"]
    assert script.finish("c2") == ["report"], "the last request was removed"


def test_request_with_a_free_slot_is_dispatched_at_once() -> None:
    script = warm(1)
    assert script.arrive("c1") == ["grant c1 r1", "report"], "0 -> 1: its idle timeout is over"
    assert script.arrive("c2") == ["report"]
    assert not script.calls["c2"].cold


def test_request_arriving_after_its_deadline_gets_no_free_slot() -> None:
    script = warm(1)
    assert script.play(script.dispatch.arrive(call_of("c1", wait_s=1.0), 3.0)) == ["refuse c1 overloaded"]
    assert script.play(script.dispatch.arrive(call_of("c2", wait_s=3.0), 3.0)) == ["grant c2 r1", "report"]


def test_request_that_must_not_wait_gets_a_free_slot_after_its_check() -> None:
    script = warm(1)
    assert script.play(script.dispatch.arrive(call_of("c1", wait_s=0.0), 3.0)) == ["grant c1 r1", "report"]
    assert script.play(script.dispatch.arrive(call_of("c2", wait_s=0.0), 3.0)) == ["refuse c2 overloaded"]


def test_withdrawn_request_releases_its_slot_and_can_arrive_again() -> None:
    script = warm(1)
    script.arrive("c1")
    script.arrive("c2")
    assert script.play(script.dispatch.withdraw(script.calls["c1"], 1.0)) == ["grant c2 r1"]
    assert script.use("r1").in_use == 1
    assert script.play(script.dispatch.arrive(script.calls["c1"], 2.0)) == ["report"]
    assert script.finish("c2") == ["grant c1 r1"]
    assert script.finish("c1") == ["report"]
    assert script.use("r1").in_use == 0


def test_requests_of_unknown_or_removed_model_get_model_not_found() -> None:
    script = Script()
    assert script.arrive("c1", model="nobody") == ["refuse c1 model_not_found"]
    script.arrive("c2")
    assert script.model(removed=True) == ["refuse c2 model_not_found", "report"]
    assert script.arrive("c3") == ["refuse c3 model_not_found"]


def test_request_is_rejected_until_the_catalogue_lists_its_model() -> None:
    script = Script()
    script.replica("t1", 1, model="tiny")
    assert script.arrive("c1", model="tiny") == ["refuse c1 model_not_found"]
    script.model("tiny")
    assert script.arrive("c2", model="tiny") == ["grant c2 t1", "report"]


def test_paused_model_rejects_requests_without_counting_demand() -> None:
    script = Script()
    script.arrive("c1")
    assert script.model(paused=True) == ["refuse c1 no_capacity", "report"]
    assert script.arrive("c2") == ["refuse c2 no_capacity"]
    assert script.refused["c2"].error.retry_after_s == 60
    total = script.total()
    assert total.refused_cold == 0


def test_paused_model_with_an_internal_error_rejects_requests_as_faulty() -> None:
    script = Script()
    script.model(paused=True)
    script.say(state="failed", refusal=Refusal(code="model_faulty", message="internal error", retry_after_s=60.0))
    assert script.arrive("c1") == ["refuse c1 model_faulty"]
    script.say(refusal=Refusal(code="model_start_failed", message="exit code 1", retry_after_s=30.0))
    assert script.arrive("c2") == ["refuse c2 no_capacity"], "a start is not its next step"
    assert script.totals() == [], "no demand"


def test_requests_are_rejected_with_the_error_sent_by_the_autoscaler() -> None:
    script = Script()
    script.arrive("c1")
    why = Refusal(code="model_start_failed", message="exit code 1", retry_after_s=30.0)
    assert script.say(refusal=why) == ["refuse c1 model_start_failed", "report"]
    assert script.arrive("c2") == ["refuse c2 model_start_failed", "report"]
    assert script.refused["c2"].error.retry_after_s == 30.0
    total = script.total()
    assert (total.admitted, total.finished, total.refused_cold, total.retry_after_s) == (1, 1, 1, 30.0)
    script.say(state="starting")
    assert script.arrive("c3") == ["report"], "parked again"


# --- deadlines and limits -----------------------------------------------------------------------------------


def test_request_with_wait_0_gets_a_free_slot_or_is_rejected_at_once() -> None:
    script = warm(1)
    assert script.arrive("c1", wait_s=0) == ["grant c1 r1", "report"]
    assert script.arrive("c2", wait_s=0) == ["refuse c2 overloaded"]
    cold = Script()
    assert cold.arrive("c3", wait_s=0) == ["refuse c3 model_starting", "report"]
    total = cold.total()
    assert (total.admitted, total.refused_cold, total.retry_after_s) == (0, 1, 1.0)


def test_request_with_deadline_before_the_expected_start_is_rejected() -> None:
    """Case 5: a deadline that cannot be met is rejected at once; the others expire, and none is dispatched late."""
    script = Script()
    script.say(expected_s=90.0)
    assert script.arrive("c1", wait_s=1) == ["refuse c1 model_starting", "report"]
    assert "90 s" in script.refused["c1"].error.message
    script.say()
    assert script.arrive("c30", wait_s=30) == ["report"], "an unknown estimate never refuses"
    script.arrive("c600", wait_s=600)
    assert script.at(29.9) == []
    assert script.dispatch.next_s() == 30.0
    assert script.at(30.0) == ["refuse c30 model_starting", "report"]
    assert script.dispatch.next_s() == 600.0
    script.now_s = 90.0
    assert script.replica("r1", 1) == ["grant c600 r1"]
    assert script.dispatch.next_s() is None
    total = script.total()
    assert total.refused_cold == 2


def test_request_with_deadline_before_capacity_arrival_is_rejected_at_once() -> None:
    """Longer deadlines wait. The estimate counts down from when it was received; a known start is handled as usual."""
    script = Script()
    script.arrive("c30", wait_s=30)
    script.arrive("c600", wait_s=600)
    assert script.say(capacity_s=300.0, expected_s=5.0) == ["refuse c30 no_capacity", "report"]
    error = script.refused["c30"].error
    assert error.message == "capacity for the model is being added; expected in about 300 s; try again then"
    assert error.retry_after_s == min(300.0, MAX_RETRY_AFTER_S)
    assert script.arrive("c200", wait_s=200) == ["refuse c200 no_capacity", "report"]
    script.now_s = 150.0
    assert script.arrive("d200", wait_s=200) == []
    assert script.arrive("d100", wait_s=100) == ["refuse d100 no_capacity", "report"]
    total = script.total()
    assert total.refused_cold == 3, "who is refused is demand"
    script.now_s = 350.0
    assert script.at(350.0) == ["refuse d200 no_capacity", "report"]
    assert script.replica("r1", 1) == ["grant c600 r1"]
    assert script.arrive("e10", wait_s=10) == ["report"], "where one serves, Calls wait as ever"


def test_expired_request_does_not_get_a_free_slot() -> None:
    script = Script()
    script.arrive("c1", wait_s=10)
    script.arrive("c2", wait_s=50)
    script.now_s = 10.0
    assert script.replica("r1", 1) == ["refuse c1 overloaded", "grant c2 r1", "report"]


def test_request_that_expires_on_a_serving_model_gets_overloaded() -> None:
    script = warm(1)
    script.arrive("c1")
    script.arrive("c2", wait_s=5)
    assert script.at(5.0) == ["refuse c2 overloaded"]
    assert script.calls["c2"].state is CallState.ENDED


def test_retry_after_is_capped_for_long_estimates() -> None:
    script = Script()
    script.say(expected_s=900.0)
    script.arrive("c1", wait_s=10)
    assert script.refused["c1"].error.retry_after_s == MAX_RETRY_AFTER_S


def test_full_queue_rejects_only_the_surplus_and_keeps_order() -> None:
    """Case 3: capacity + 500 requests."""
    script = Script(calls_max=1000)
    script.say(expected_s=20.0)
    reported = script.arrive_many(1500, "c")
    assert reported == ["report", *(f"refuse c{n} queue_full" for n in range(1000, 1500))]
    error = script.refused["c1000"].error
    assert (error.status, error.retry_after_s) == (429, 20.0)
    assert script.replica("r1", 1000) == [f"grant c{n} r1" for n in range(1000)]


def test_request_that_exceeds_the_queue_byte_limit_is_rejected() -> None:
    script = Script(bytes_max=100)
    script.arrive("c1", body_bytes=60)
    assert script.arrive("c2", body_bytes=41) == ["refuse c2 queue_full"]
    assert script.refused["c2"].error.retry_after_s == 1.0, "nothing better is known"
    assert script.arrive("c3", body_bytes=40) == []


# --- disconnect and shutdown --------------------------------------------------------------------------------


def test_no_request_is_dispatched_after_all_clients_disconnect() -> None:
    """Case 4: the queue is empty at once, the next report shows it, and no disconnected client gets a slot."""
    script = Script()
    script.say(state="starting")
    script.arrive_many(200, "c")
    level = script.level()
    assert level.waiting == 200
    reported = [script.leave(f"c{n}") for n in range(200)]
    assert reported == [*([[]] * 199), ["report"]]
    assert script.report().levels == ()
    assert script.dispatch.next_s() is None
    assert script.replica("r1", 8) == []


def test_request_that_ends_twice_is_counted_once_in_slots_and_totals() -> None:
    script = warm(1)
    script.arrive("c1")
    script.arrive("c2")
    assert script.leave("c1") == ["grant c2 r1"]
    assert script.finish("c1") == script.leave("c1") == script.bounce("c1", "reset") == []
    use, total = script.use("r1"), script.total()
    assert use.in_use == 1
    assert (total.admitted, total.finished) == (2, 1)


def test_shutdown_rejects_waiting_requests_and_keeps_running_ones() -> None:
    script = warm(1)
    script.arrive_many(2, "c")
    assert script.play(script.dispatch.shutdown(0.0)) == ["refuse c1 shutting_down"]
    assert script.arrive("c2") == ["refuse c2 shutting_down"]
    assert script.finish("c0") == ["report"]


# --- order --------------------------------------------------------------------------------------------------


def test_second_tenant_gets_the_next_slot_despite_a_long_backlog() -> None:
    """Case 8: B gets the next free slot, and A's requests keep their order."""
    script = warm(1)
    script.arrive_many(500, "a", tenant="A")
    assert script.arrive("b", tenant="B") == ["report"], "0 -> 1 of this Tenant"
    assert script.finish("a0") == ["grant b r1"]
    assert script.finish("b") == ["grant a1 r1"]
    assert script.finish("a1") == ["grant a2 r1"]


def test_high_priority_request_is_granted_first_and_the_rest_by_weight() -> None:
    script = Script(weights={"A": 2.0, "B": 1.0})
    for n in range(4):
        script.arrive(f"a{n}", tenant="A")
        script.arrive(f"b{n}", tenant="B")
    script.arrive("top", tenant="C", priority=3)
    granted = [word.split()[1] for word in script.replica("r1", 7) if word != "report"]
    assert granted[0] == "top"
    assert [id[0] for id in granted[1:]].count("a") == 4
    assert [id for id in granted if id[0] == "a"] == ["a0", "a1", "a2", "a3"]


def test_raised_tenant_weight_applies_to_requests_already_waiting() -> None:
    script = Script()
    for n in range(6):
        script.arrive(f"a{n}", tenant="A")
        script.arrive(f"b{n}", tenant="B")
    script.model(tenants=(TenantEntry(name=TenantName("A"), weight=3.0),))
    granted = [word.split()[1][0] for word in script.replica("r1", 8) if word != "report"]
    assert granted.count("a") == 6


def test_request_goes_to_the_replica_with_most_free_slots() -> None:
    script = Script()
    script.replica("r1", 1)
    script.replica("r2", 3)
    assert script.arrive_many(4, "c") == ["grant c0 r2", "report", "grant c1 r2", "grant c2 r1", "grant c3 r2"]


# --- reports and notes --------------------------------------------------------------------------------------


def test_report_counts_waiting_and_running_per_tenant_and_priority() -> None:
    script = warm(1)
    script.arrive("c0", wait_s=60)
    script.now_s = 4.0
    script.arrive("c1", wait_s=30)
    script.arrive("c2", wait_s=20)
    script.arrive("b1", tenant="B", priority=2)
    script.now_s = 10.0
    level, other = script.level(), script.level("B", priority=2)
    assert (level.waiting, level.running, level.oldest_wait_s, level.soonest_deadline_s) == (2, 1, 6.0, 14.0)
    assert (other.waiting, other.running) == (1, 0)


def test_finished_request_adds_its_tokens_and_busy_time_to_report_totals() -> None:
    script = warm(1)
    script.arrive_many(2, "c")
    script.now_s = 3.0
    script.finish("c0", tokens_in=11, tokens_out=22)
    script.now_s = 5.0
    total = script.total()
    assert (total.admitted, total.finished, total.tokens_in, total.tokens_out) == (2, 1, 11, 22)
    assert (total.busy_slot_us, total.waiting_call_us, total.idle_s) == (5_000_000, 3_000_000, 2.0)


def test_only_the_current_leader_can_acknowledge_reported_totals() -> None:
    script = warm(1)
    script.arrive("c1")
    script.finish("c1")
    sequence = script.report().sequence
    script.dispatch.answered(sequence, ReportAnswer(epoch=1, leads=False))
    script.dispatch.answered(sequence, ReportAnswer(epoch=0))
    assert script.totals()
    script.dispatch.answered(sequence + 1, ReportAnswer(epoch=1))
    assert script.totals() == []
    script.dispatch.answered(sequence + 2, ReportAnswer(epoch=1, resend=True))
    assert script.totals()
    script.dispatch.answered(sequence + 3, ReportAnswer(epoch=1))
    assert script.totals() == []
    script.epoch, script.version = 2, 0
    assert script.routes(RoutesDelta(epoch=0, version=0)) == ["report"], "a new leader waits for every report"
    assert script.totals(), "and may have missed what the old one had"


def test_reported_retry_after_is_reset_when_the_last_replica_is_removed() -> None:
    script = Script()
    script.say(expected_s=30.0)
    script.arrive("c1", wait_s=5)
    script.replica("r1", 1)
    total = script.total()
    assert total.retry_after_s == 30.0
    script.remove_replica("r1")
    total = script.total()
    assert total.retry_after_s == 0.0


def test_report_contains_epoch_and_version_of_the_applied_routes() -> None:
    script = warm(1)
    report = script.report()
    assert (report.gateway, report.boot, report.epoch, report.version) == ("g1", "boot", 1, script.version)
    assert script.report().sequence == report.sequence + 1


def test_requests_of_a_removed_model_are_counted_until_they_end() -> None:
    script = warm(1)
    script.arrive("c1")
    script.model(removed=True)
    script.remove_replica("r1")
    assert list(script.dispatch.counts()) == [("llama", 0, 1)]
    script.finish("c1")
    assert script.report().levels == ()
    assert list(script.dispatch.counts()) == []


def test_waiting_request_of_a_starting_model_gets_position_and_wait_time() -> None:
    script = Script()
    script.say(state="starting", expected_s=12.0)
    script.arrive_many(3, "c")
    script.leave("c0")
    script.now_s = 2.0
    dispatch = script.dispatch
    assert dispatch.wait_note(script.calls["c2"], 2.0) == (2, 10.0)
    assert dispatch.wait_note(script.calls["c0"], 2.0) == (0, None)
    assert dispatch.model_state(script.calls["c1"].model) == "starting"
    assert dispatch.expected_wait_s(script.calls["c1"].model, 2.0) == 10.0
    assert dispatch.busy()
    script.replica("r1", 8)
    assert dispatch.expected_wait_s(script.calls["c1"].model, 2.0) == 0.0
    assert not dispatch.busy()
    script.say(others_wait=True)
    assert dispatch.busy()


def test_gateway_stays_busy_until_it_reports_an_empty_queue() -> None:
    script = Script()
    dispatch = script.dispatch
    script.arrive_many(3, "c")
    assert script.report().levels[0].waiting == 3
    script.replica("r1", 8)
    assert dispatch.busy(), "the last report contained three waiting requests"
    assert script.report().levels[0].waiting == 0
    assert not dispatch.busy()
