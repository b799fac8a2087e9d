"""What one leader was told, read off the wire: every report that reached it, whatever it makes of it.

Owns the reports as they came in, so that checks can say what a leader may believe. Its own bound of how long a report
counts (interfaces section 6) is written here anew: a checker that asked the code would agree with it whatever it says.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import GatewayId, Report

COUNTS_S = 10.0
"""A report that is older counts for nothing: its demand is unknown."""


class Heard(NamedTuple):
    """The newest report of one boot of a gateway, and when it came."""

    at_s: float
    report: Report


class Told:
    """The reports to one leader, who began at `since_s`."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._heard: dict[GatewayId, dict[str, Heard]] = {}

    def take(self, report: Report, now_s: float) -> None:
        """A report came in; one that an older one of its boot overtook says nothing."""
        boots = self._heard.setdefault(report.gateway, {})
        known = boots.get(report.boot)
        if known is None or report.sequence > known.report.sequence:
            boots[report.boot] = Heard(now_s, report)

    def heard_s(self, gateway: GatewayId, boot: str | None = None) -> float | None:
        """When the gateway (one boot of it) last said something new; None: never."""
        boots = self._heard.get(gateway, {})
        return max((heard.at_s for name, heard in boots.items() if boot in {None, name}), default=None)

    def unheard_s(self, gateway: GatewayId, now_s: float) -> float:
        """How long the leader has known nothing new of the gateway."""
        heard_s = self.heard_s(gateway)
        return now_s - (self.since_s if heard_s is None else heard_s)

    def demand(self, model: str, now_s: float) -> int:
        """The most Calls of a Model, waiting or running, that the leader may believe in: of each gateway, the boot
        that says most.
        """
        believed = 0
        for boots in self._heard.values():
            fresh = (heard.report for heard in boots.values() if now_s - heard.at_s <= COUNTS_S)
            calls = (sum(one.waiting + one.running for one in report.levels if one.model == model) for report in fresh)
            believed += max(calls, default=0)
        return believed
