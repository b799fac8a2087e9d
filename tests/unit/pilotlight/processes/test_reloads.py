"""A reload of documents that fails keeps the documents in force and is reported, whatever the exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.documents.parse import Documents
from autoscaler.state.events import DocumentsSeen, FaultSeen
from autoscaler.state.world import World
from pilotlight.models.document_inputs import keep_artifact_location
from pilotlight.net.listen import Address
from pilotlight.processes import autoscaler
from tests.support.builders.worlds import model
from tests.support.harness.manual_loop import SteppedLoop


async def test_reload_reports_any_exception_until_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = autoscaler.AutoscalerOptions(
        state=tmp_path, documents=tmp_path / "d.yaml", contract_socket=None, ops=Address("127.0.0.1", 0)
    )
    loop, documents_seen = SteppedLoop(World(epoch=1)).loop, list[DocumentsSeen]()
    reloads = autoscaler.Reloads(options, loop, documents_seen.append, keep_artifact_location, again=asyncio.Event())

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


async def test_fault_of_a_document_follows_it_and_ends_with_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = autoscaler.AutoscalerOptions(
        state=tmp_path, documents=tmp_path / "d.yaml", contract_socket=None, ops=Address("127.0.0.1", 0)
    )
    loop = SteppedLoop(World(epoch=1)).loop
    fault = FaultSeen(model=model("ada").name, reason="KeyError")

    def read(_: object, faulty: Callable[[FaultSeen], None], *__: object) -> Documents:
        faulty(fault)
        return Documents(models=(model("ada"),))

    monkeypatch.setattr(autoscaler, "load_checked_documents", read)
    again = asyncio.Event()
    await autoscaler.Reloads(options, loop, lambda seen: loop.observe([seen]), keep_artifact_location, again=again)()
    assert loop.observed == [DocumentsSeen(models=(model("ada"),)), fault]
    for ended, reloaded in (("bob", False), ("ada", True)):
        for retry in loop.retries:
            retry(frozenset({ModelName(ended)}))
        assert again.is_set() == reloaded, "the document is read again when the Model's quarantine ends"
