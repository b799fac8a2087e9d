"""Contents and pace of a gateway's reports (interfaces, section 6): when to send, and the cumulative counts.

Pace determines when the next report is due, for the gateway and the simulation. Accounts holds the counts per (model,
tenant) since the gateway's boot. A change is included in every report until one that contains it is acknowledged, so a
lost report does no harm. There is one account per pair in use: the catalogue bounds them.
"""

from __future__ import annotations

import math

from autoscaler.contract import BUSY_PERIOD_S, HEARTBEAT_S, REPORT_GAP_S, ModelName, TenantName, Total
from gateway.exception_handling import reraise_memory_error


class Pace:
    """When the next report is due: at once on an edge, often while anything waits, else as a heartbeat."""

    __slots__ = ("_edge_s", "_sent_s")

    def __init__(self) -> None:
        self._edge_s = math.inf
        self._sent_s = -math.inf

    def edge(self, now_s: float) -> None:
        """Make a report due at once (monotonic seconds)."""
        self._edge_s = min(self._edge_s, now_s)

    def sent(self, now_s: float) -> None:
        """Record that a report was made now; it contains every edge so far."""
        self._edge_s = math.inf
        self._sent_s = now_s

    def due_s(self, now_s: float, *, busy: bool) -> float:
        """Return when to send the next report, never before `now_s`. `busy`: something waits, here or elsewhere."""
        period_s = BUSY_PERIOD_S if busy else HEARTBEAT_S
        wanted_s = min(self._edge_s, self._sent_s + period_s)
        return max(now_s, wanted_s, self._sent_s + REPORT_GAP_S)


class Account:
    """Cumulative counts of one (model, tenant). `waiting` and `running` are levels; the seconds are their integrals."""

    __slots__ = (
        "active_s", "admitted", "busy_s", "changed", "finished", "model", "refused_cold", "retry_after_s", "running",
        "since_s", "tenant", "tokens_in", "tokens_out", "waited_s", "waiting",
    )  # fmt: skip

    def __init__(self, model: ModelName, tenant: TenantName) -> None:
        self.model = model
        self.tenant = tenant
        self.admitted = self.refused_cold = self.finished = 0
        self.waiting = self.running = 0
        self.tokens_in = self.tokens_out = 0
        self.busy_s = self.waited_s = self.since_s = 0.0
        self.active_s = 0.0
        """When a request last arrived or finished."""
        self.retry_after_s = 0.0
        self.changed = False

    def total(self, now_s: float) -> Total:
        """Return the counts for a report."""
        return Total(
            model=self.model,
            tenant=self.tenant,
            admitted=self.admitted,
            refused_cold=self.refused_cold,
            finished=self.finished,
            busy_slot_us=round(self.busy_s * 1e6),
            waiting_call_us=round(self.waited_s * 1e6),
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            idle_s=max(0.0, now_s - self.active_s),
            retry_after_s=self.retry_after_s,
        )


class Accounts:
    """All accounts of one gateway, and which of them have unacknowledged changes."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[ModelName, TenantName], Account] = {}
        self._changed: list[Account] = []
        """Changed since the last report."""
        self._reported: dict[Account, int] = {}
        """Reported but not acknowledged -> the first report that contained all of its changes."""
        self._gone: dict[tuple[ModelName, TenantName], Account] = {}
        """Accounts of removed models until acknowledged; a model that is added again continues its account."""

    def of(self, model: ModelName, tenant: TenantName) -> Account:
        """Return the account of a pair; a new one starts at zero."""
        account = self._accounts.get((model, tenant))
        if account is None:
            account = self._gone.pop((model, tenant), None) or Account(model, tenant)
            self._accounts[model, tenant] = account
        return account

    def touch(self, account: Account, now_s: float) -> None:
        """Add up the time at the current levels and mark the account changed; call it before every change."""
        past_s = now_s - account.since_s
        if past_s > 0.0:
            account.busy_s += account.running * past_s
            if account.waiting:
                account.waited_s += account.waiting * past_s
            account.since_s = now_s
        if not account.changed:
            account.changed = True
            self._changed.append(account)

    def refused_cold(self, model: ModelName, tenant: TenantName, now_s: float, retry_after_s: float) -> None:
        """Count a request rejected by a cold model: demand for one start (interfaces, section 3, Cold Calls)."""
        account = self.of(model, tenant)
        self.touch(account, now_s)
        account.refused_cold += 1
        account.active_s = now_s
        account.retry_after_s = max(account.retry_after_s, retry_after_s)

    def cooled(self, model: ModelName) -> None:
        """The model became cold: drop the Retry-After values sent before its last start."""
        for account in self._accounts.values():
            if account.model == model:
                account.retry_after_s = 0.0

    def totals(self, now_s: float, sequence: int, faults: dict[ModelName, Exception]) -> tuple[Total, ...]:
        """Return the totals of report `sequence`: all accounts with unacknowledged changes. An account that raises an
        exception is left for the next report.
        """
        for account in self._changed:
            account.changed = False
            self._reported[account] = sequence
        self._changed.clear()
        totals: list[Total] = []
        for account in self._reported:
            try:
                if account.running or account.waiting:
                    self.touch(account, now_s)  # its seconds keep growing, so it is in the next report as well
                totals.append(account.total(now_s))
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[account.model] = error
                if not account.changed:
                    account.changed = True
                    self._changed.append(account)
        return tuple(totals)

    def acknowledged(self, sequence: int) -> None:
        """The leader has report `sequence`: accounts not changed since then need not be reported again."""
        self._reported = {account: at for account, at in self._reported.items() if at > sequence}
        if self._gone:
            self._gone = {pair: a for pair, a in self._gone.items() if a.changed or a in self._reported}

    def resend(self) -> None:
        """Report all accounts again, because an autoscaler does not know this boot."""
        for account in self._accounts.values():
            if not account.changed:
                account.changed = True
                self._changed.append(account)

    def forget(self, model: ModelName) -> None:
        """Remove the accounts of a removed model without requests; they are reported one last time."""
        for pair in [pair for pair in self._accounts if pair[0] == model]:
            self._gone[pair] = self._accounts.pop(pair)
