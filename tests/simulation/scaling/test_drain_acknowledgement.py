"""Reliability section 5, case 10, in virtual time: gateways acknowledge a drain before the stop is ordered."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.contract import Report, ReportAnswer, RoutesDelta
from autoscaler.controller.loop import Loop
from autoscaler.server.gateways import accept_report
from autoscaler.state.lifecycle import ReplicaState as S
from gateway.dispatch.effects import Grant
from tests.simulation.case_harness import Stage, model, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.environment.network import Rates
from tests.simulation.installations import gateway as sim_gateway
from tests.simulation.installations.gateway import SimGateway
from tests.simulation.installations.installation import Town
from tests.support.fakes.driver import FakeEngine


class Acknowledgements:
    """Notified and acknowledged drains, derived from the messages alone: arriving Routes and arriving reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draining: set[tuple[str, str]] = set()
        """(gateway, replica) of Routes that have arrived in which it drains."""
        self.heard: set[tuple[str, str]] = set()
        """The same pairs of reports that have arrived and were made later."""
        self.late: list[tuple[str, str]] = []
        """Grants by a gateway that had been notified."""
        self._said: dict[tuple[str, int], set[tuple[str, str]]] = {}
        routes, report, granted = SimGateway.routes, SimGateway.report, Town.granted

        def on_routes(gateway: SimGateway, delta: RoutesDelta) -> None:
            for route in delta.replicas:
                if route.state == S.DRAINING:
                    self.draining.add((gateway.id, route.replica))
                else:
                    self.draining.discard((gateway.id, route.replica))
                    self.heard.discard((gateway.id, route.replica))
            routes(gateway, delta)

        def on_report(gateway: SimGateway) -> Report:
            made = report(gateway)
            used = {use.replica for use in made.replicas if use.in_use}
            self._said[gateway.id, made.sequence] = {
                (g, replica) for g, replica in self.draining if g == gateway.id and replica not in used
            }
            return made

        def on_taken(loop: Loop, report: Report) -> ReportAnswer:
            self.heard |= self._said[report.gateway, report.sequence] & self.draining
            return accept_report(loop, report)

        def on_granted(town: Town, grant: Grant, gateway: SimGateway) -> None:
            if (gateway.id, grant.replica) in self.draining:
                self.late.append((gateway.id, grant.replica))
            granted(town, grant, gateway)

        monkeypatch.setattr(SimGateway, "routes", on_routes)
        monkeypatch.setattr(SimGateway, "report", on_report)
        monkeypatch.setattr(sim_gateway, "accept_report", on_taken)
        monkeypatch.setattr(Town, "granted", on_granted)


@pytest.mark.case("10")
@simulated(
    model(slots=20, replicas=4, memory_gib=4, idle_s=2.0),
    gateways=3,
    manners=Manners(start_s=(0.5, 0.5), serve_s=(8.0, 20.0), stop_s=(0.0, 0.0)),
    rates=Rates(delay_s=(0.05, 0.5)),
    strict=False,
)
async def test_stop_waits_until_every_gateway_has_acknowledged_the_drain(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From four replicas to one over a slow network: seen from the wire and the machine, not from the `World`."""
    seen = Acknowledgements(monkeypatch)
    town = stage.town
    await asyncio.sleep(3.0)  # the gateways have received the Model
    stopped: list[tuple[str, set[str]]] = []

    def on_change(engine: FakeEngine, what: str) -> None:
        if what == "stop":
            replica = engine.replica.id
            stopped.append((replica, {g.id for g in town.gateways if (g.id, replica) not in seen.heard}))

    stage.watcher.listen(on_change)
    calls = [town.call("a") for _ in range(80)]
    await stage.until(lambda: sum(e.ready for e in town.machine.engines.values()) == 4, within_s=30)
    for _ in range(80):  # 8 to 20 s each: fewer than 20 at once keep one replica wanted
        calls.append(town.call("a"))
        await asyncio.sleep(1.25)
    assert len(stopped) == 3
    assert await stage.answered(calls) == {"completed": 160}
    await stage.until(lambda: stage.replicas() == 0, within_s=60)
    assert len(stopped) == 4
    assert not [(replica, missing) for replica, missing in stopped if missing], "not all had acknowledged"
    assert not seen.late, "granted by a gateway that knew of the drain"
