"""A reload of documents that fails keeps the documents in force and is reported, whatever the exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from autoscaler.contract import GatewayId, Report
from autoscaler.documents.parse import Documents
from autoscaler.spec.model import Model
from autoscaler.state.events import DocumentsSeen, FaultSeen, Reported
from autoscaler.state.world import World
from pilotlight.models.document_inputs import keep_artifact_location
from pilotlight.net.listen import Address
from pilotlight.processes import autoscaler
from tests.support.builders.worlds import device, level, model, world
from tests.support.harness.faults.fault_injection import inject
from tests.support.harness.manual_loop import SteppedLoop


async def test_reload_reports_any_exception_until_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = autoscaler.AutoscalerOptions(
        state=tmp_path, documents=tmp_path / "d.yaml", contract_socket=None, ops=Address("127.0.0.1", 0)
    )
    loop, documents_seen = SteppedLoop(World(epoch=1)).loop, list[DocumentsSeen]()
    reloads = autoscaler.Reloads(
        options, loop, lambda seen, _: documents_seen.append(seen), keep_artifact_location, again=asyncio.Event()
    )

    def broken(*_: object) -> Documents:
        raise KeyError("x")

    monkeypatch.setattr(autoscaler, "load_checked_documents", broken)
    await reloads()
    problem = reloads.view().problem
    assert problem.startswith("KeyError in test_reloads.py:")
    assert problem.endswith("; the last valid documents stay in force")
    assert documents_seen == []
    monkeypatch.setattr(autoscaler, "load_checked_documents", lambda *_: Documents(models=(model("ada"),)))
    await reloads()
    assert (reloads.view().problem, [seen.models[0].name for seen in documents_seen]) == ("", ["ada"])


async def test_fault_of_a_document_follows_it_and_nothing_starts_before_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = autoscaler.AutoscalerOptions(
        state=tmp_path, documents=tmp_path / "d.yaml", contract_socket=None, ops=Address("127.0.0.1", 0)
    )
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    ada = model("ada", 10)
    fault = FaultSeen(model=ada.name, reason="KeyError")
    faults = [fault]

    def read(_: object, faulty: Callable[[FaultSeen], None], *__: object) -> Documents:
        for one in faults:
            faulty(one)
        return Documents(models=(ada,))

    monkeypatch.setattr(autoscaler, "load_checked_documents", read)
    stepped, again = SteppedLoop(world([], [device()])), asyncio.Event()
    loop = stepped.loop
    reloads = autoscaler.Reloads(
        options, loop, lambda seen, faults: loop.observe([seen, *faults]), keep_artifact_location, again=again
    )
    await reloads()
    assert loop.observed == [DocumentsSeen(models=(ada,)), fault]
    for times, lasts_s in ((1, 60.0), (2, 120.0), (3, 240.0)):
        for _ in range(2):
            stepped.step(called(ada, now_s=stepped.now_s))
            assert not again.is_set()
            assert loop.world.learned.faults[ada.name].times == times
        stepped.now_s += lasts_s
        stepped.step(called(ada, now_s=stepped.now_s))
        assert again.is_set(), "the document is read again when the Model's quarantine ends"
        again.clear()
        if times == 3:
            faults.clear()
        await reloads()
    assert stepped.driver.started == []
    stepped.step(called(ada, now_s=stepped.now_s))
    assert loop.world.learned.faults == {}
    assert [one.model for one in stepped.driver.started] == ["ada"]


def called(one: Model, now_s: float) -> Reported:
    """A report with one queued request for the Model."""
    levels = (level(one.name, 1, wait_s=1.0),)
    return Reported(report=Report(gateway=GatewayId("g1"), boot="b", sequence=int(now_s), epoch=1, levels=levels))
