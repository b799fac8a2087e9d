"""Records all reports that reached one leader, independently of how the leader uses them.

Checks derive from these reports what a leader may assume. The expiry time of a report (interfaces section 6) is
repeated here on purpose: a checker that read it from the code would agree with any value.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import GatewayId, Report

COUNTS_S = 10.0
"""Age at which a report expires: its demand is unknown then."""


class Heard(NamedTuple):
    """The newest report of one boot of a gateway, and its arrival time."""

    at_s: float
    report: Report


class ReceivedReports:
    """The reports to one leader whose leadership began at `since_s`."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._heard: dict[GatewayId, dict[str, Heard]] = {}

    def take(self, report: Report, now_s: float) -> None:
        """Record a report; ignore one that arrives after a newer report of its boot."""
        boots = self._heard.setdefault(report.gateway, {})
        known = boots.get(report.boot)
        if known is None or report.sequence > known.report.sequence:
            boots[report.boot] = Heard(now_s, report)

    def heard_s(self, gateway: GatewayId, boot: str | None = None) -> float | None:
        """When the gateway (or one boot of it) last reported something new; None: never."""
        boots = self._heard.get(gateway, {})
        return max((heard.at_s for name, heard in boots.items() if boot in {None, name}), default=None)

    def unheard_s(self, gateway: GatewayId, now_s: float) -> float:
        """Seconds since the last new report of the gateway."""
        heard_s = self.heard_s(gateway)
        return now_s - (self.since_s if heard_s is None else heard_s)

    def demand(self, model: str, now_s: float) -> int:
        """Maximum number of requests of a Model, waiting or running, that the leader may assume.
        For each gateway the boot with the highest demand counts.
        """
        believed = 0
        for boots in self._heard.values():
            fresh = (heard.report for heard in boots.values() if now_s - heard.at_s <= COUNTS_S)
            calls = (sum(one.waiting + one.running for one in report.levels if one.model == model) for report in fresh)
            believed += max(calls, default=0)
        return believed
