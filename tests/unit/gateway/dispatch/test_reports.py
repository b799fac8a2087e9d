"""When reports are due, and the counts in them."""

from __future__ import annotations

from autoscaler.contract import BUSY_PERIOD_S, HEARTBEAT_S, REPORT_GAP_S, ModelName, TenantName
from gateway.dispatch.reports import Accounts, Pace

LLAMA, TINY, ACME, LAB = ModelName("llama"), ModelName("tiny"), TenantName("acme"), TenantName("lab")


def test_first_report_of_a_gateway_is_due_immediately() -> None:
    assert Pace().due_s(5.0, busy=False) == 5.0


def test_idle_gateway_reports_every_heartbeat_and_busy_one_more_often() -> None:
    pace = Pace()
    pace.sent(10.0)
    assert pace.due_s(10.0, busy=False) == 10.0 + HEARTBEAT_S
    assert pace.due_s(10.0, busy=True) == 10.0 + BUSY_PERIOD_S


def test_urgent_report_is_due_at_once_but_not_before_the_minimum_gap() -> None:
    pace = Pace()
    pace.sent(10.0)
    pace.edge(10.002)
    assert pace.due_s(10.002, busy=True) == 10.0 + REPORT_GAP_S
    assert pace.due_s(10.2, busy=False) == 10.2
    pace.sent(10.2)
    assert pace.due_s(10.2, busy=False) == 10.2 + HEARTBEAT_S, "the report held the edge"


def test_many_urgent_changes_cause_one_report_per_minimum_gap() -> None:
    pace, sent = Pace(), 0
    for n in range(1000):
        now_s = n * 50e-6
        pace.edge(now_s)
        if pace.due_s(now_s, busy=True) <= now_s:
            pace.sent(now_s)
            sent += 1
    assert sent == 5, "50 ms at one per 10 ms"


def test_total_is_repeated_in_reports_until_acknowledged() -> None:
    accounts = Accounts()
    account = accounts.of(LLAMA, ACME)
    accounts.touch(account, 1.0)
    account.admitted += 1
    assert [total.admitted for total in accounts.totals(1.0, 1, {})] == [1]
    assert [total.admitted for total in accounts.totals(1.0, 2, {})] == [1], "report 1 may be lost"
    accounts.acknowledged(1)
    assert [total.admitted for total in accounts.totals(1.0, 3, {})] == []
    accounts.touch(account, 2.0)
    account.admitted += 1
    accounts.totals(2.0, 4, {})
    accounts.acknowledged(3)
    assert [total.admitted for total in accounts.totals(2.0, 5, {})] == [2], (
        "what changed after 3 is not acknowledged by it"
    )


def test_busy_and_waiting_times_grow_while_requests_run_or_wait() -> None:
    accounts = Accounts()
    account = accounts.of(LLAMA, ACME)
    accounts.touch(account, 0.0)
    account.running, account.waiting = 2, 1
    (first,) = accounts.totals(3.0, 1, {})
    assert (first.busy_slot_us, first.waiting_call_us) == (6_000_000, 3_000_000)
    accounts.acknowledged(1)
    (second,) = accounts.totals(4.0, 2, {})
    assert (second.busy_slot_us, second.waiting_call_us) == (8_000_000, 4_000_000)


def test_totals_of_a_removed_model_are_reported_until_acknowledged() -> None:
    accounts = Accounts()
    for model in (LLAMA, TINY):
        accounts.touch(accounts.of(model, ACME), 0.0)
    accounts.totals(0.0, 1, {})
    accounts.acknowledged(1)
    accounts.resend()
    accounts.forget(TINY)
    assert {total.model for total in accounts.totals(0.0, 2, {})} == {LLAMA, TINY}
    accounts.acknowledged(2)
    accounts.resend()
    assert {total.model for total in accounts.totals(0.0, 3, {})} == {LLAMA}


def test_totals_of_a_removed_model_restart_only_after_acknowledgement() -> None:
    """Two accounts of the same model and tenant in one report would be counted as growth again and again."""
    accounts = Accounts()
    accounts.refused_cold(LLAMA, ACME, 1.0, 5.0)
    accounts.totals(1.0, 1, {})
    accounts.forget(LLAMA)
    accounts.refused_cold(LLAMA, ACME, 2.0, 5.0)
    assert [total.refused_cold for total in accounts.totals(2.0, 2, {})] == [2]
    accounts.acknowledged(2)
    accounts.forget(LLAMA)
    accounts.acknowledged(2)
    accounts.refused_cold(LLAMA, ACME, 3.0, 5.0)
    assert [total.refused_cold for total in accounts.totals(3.0, 3, {})] == [1]


def test_longest_retry_after_is_reported_until_the_model_turns_cold() -> None:
    accounts = Accounts()
    for retry_after_s in (20.0, 5.0):
        accounts.refused_cold(LLAMA, ACME, 1.0, retry_after_s)
    accounts.refused_cold(TINY, LAB, 1.0, 7.0)
    assert [(total.refused_cold, total.retry_after_s) for total in accounts.totals(1.0, 1, {})] == [(2, 20.0), (1, 7.0)]
    accounts.cooled(LLAMA)
    assert [total.retry_after_s for total in accounts.totals(1.0, 2, {})] == [0.0, 7.0]
