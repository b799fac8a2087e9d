"""An exception for one artifact, or in one part of the agent, does not affect the other ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autoscaler.agent_contract import ImageWant, NodeWant, NodeWants, WeightsRequest
from autoscaler.contract import ReplicaId
from autoscaler.drivers import resilient_tasks
from pilotlight.agent.reporter import Agent
from pilotlight.agent.weights import keeper as module
from pilotlight.agent.weights.inspect import list_loadable_files
from pilotlight.agent.weights.keeper import WeightsTask
from pilotlight.cli.agent import run_contained
from tests.support.harness.artifacts.weight_keeper import Kept

pytestmark = pytest.mark.standard

R1 = ReplicaId("r1")
log_fault = module.report_fault


@pytest.fixture(autouse=True)
def expected_faults(no_contained_faults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exceptions of these tests are injected, so they are logged as in production."""
    del no_contained_faults
    monkeypatch.setattr(module, "report_fault", log_fault)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "store")


def add_copy(kept: Kept, name: str) -> None:
    """Add a copy with one file that replica r1 got."""
    record = SimpleNamespace(laid=(SimpleNamespace(path=f"{name}.gguf"),), digest="sha256:" + "a" * 64, bytes=1)
    copy: Any = SimpleNamespace(folder=kept.root / "copies" / name / "files", record=record, close=lambda: None)
    kept.keeping._lines[WeightsRequest(f"oci://r/{name}:1")] = WeightsTask(copy=copy, replicas=(R1,), given=(R1,))


def raise_for_faulty(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def find(paths: list[str]) -> dict[str, tuple[str, ...]]:
        if any("faulty" in path for path in paths):
            raise error
        return list_loadable_files(paths)

    monkeypatch.setattr(module, "list_loadable_files", find)


def test_exception_in_a_report_row_fails_its_replicas_and_keeps_other_rows(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_copy(kept, "faulty")
    add_copy(kept, "healthy")
    raise_for_faulty(monkeypatch, LookupError("injected"))
    for _ in range(2):
        faulty, healthy = kept.reports
        assert (faulty.artifact, faulty.replicas, faulty.folder) == ("oci://r/faulty:1", (R1,), "")
        assert "LookupError in test_keeper_faults.py" in faulty.failed
        assert (healthy.artifact, healthy.ggufs, healthy.failed) == ("oci://r/healthy:1", ("healthy.gguf",), "")
    assert len(caplog.messages) == 1, "it is logged once"


def test_memory_error_while_a_weights_report_is_built_is_raised(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    add_copy(kept, "faulty")
    raise_for_faulty(monkeypatch, MemoryError())
    with pytest.raises(MemoryError):
        kept.keeping.report()


def test_exception_of_the_image_puller_does_not_stop_gpu_attach_requests(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise LookupError("injected")

    seen = list[object]()
    kept.keeping.images, kept.keeping.fabric = fail, seen.append
    for _ in range(2):
        kept.keeping.heard(msgspec.json.encode(NodeWants(epoch=1, images=(ImageWant(image="a"),))))
    assert seen == [(), ()]
    assert [line.partition(" error=")[0] for line in caplog.messages] == ["event=agent_fault part='images'"]


async def test_exception_in_a_keeper_cycle_is_logged_and_later_pulls_still_run(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("injected")

    async def refuse(*_: object) -> None:
        raise LookupError("away")

    monkeypatch.setattr(kept.keeping.fetching, "bring", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(module.WeightsKeeper, "_let_go", fail)
        async with kept.running():
            kept.request(NodeWant(artifact="oci://r/ada:1", replicas=(R1,)))
            await kept.until(lambda: kept.reports and kept.reports[0].failed)
            kept.request()
            await kept.until(lambda: caplog.messages and "LookupError" in caplog.messages[-1])
            patch.undo()
            kept.request(NodeWant(artifact="oci://r/bob:1", replicas=(R1,)))
            await kept.until(lambda: any(row.failed == "away" for row in kept.reports))
    assert any("LookupError in test_keeper_faults.py" in line for line in caplog.messages)


async def test_pull_that_runs_out_of_memory_ends_the_agent(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(kept.keeping.fetching, "bring", fail)
    kept.request(NodeWant(artifact="oci://r/ada:1", replicas=(R1,)))
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(60):
            await kept.keeping.run()
    assert raised.group_contains(MemoryError)


async def test_exception_in_a_read_ahead_does_not_stop_later_pulls(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def bring(request: WeightsRequest, *_: object) -> object:
        if "faulty" not in request.artifact:
            raise LookupError("away")
        record = SimpleNamespace(laid=(), digest="sha256:" + "a" * 64, bytes=1)
        copy = SimpleNamespace(folder=kept.root / "copies" / "x" / "files", record=record, close=lambda: None)
        return SimpleNamespace(copy=copy, was_here=True)

    async def fail(*_: object) -> None:
        raise LookupError("injected")

    monkeypatch.setattr(kept.keeping.fetching, "bring", bring)
    monkeypatch.setattr(module, "read_ahead", fail)
    async with kept.running():
        kept.request(NodeWant(artifact="oci://r/faulty:1", replicas=(R1,)))
        await kept.until(lambda: any("agent_fault" in line for line in caplog.messages))
        kept.request(NodeWant(artifact="oci://r/bob:1", replicas=(R1,)))
        await kept.until(lambda: any(row.failed == "away" for row in kept.reports))


async def test_report_whose_send_raises_is_retried_and_others_are_delivered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = dict[str, list[bytes]](a=[], b=[])

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        async def send(self, body: bytes) -> None:
            if self.name == "a" and not self.failed:
                self.failed = True
                raise LookupError("injected")
            sent[self.name].append(body)

        failed = False

    async def look() -> int:
        return 0

    agent = Agent(look, lambda *_: False, lambda *_: b"x", [Client("a"), Client("b")], 0.01)
    task = asyncio.create_task(agent.run())
    async with asyncio.timeout(60):
        while not (sent["a"] and sent["b"]):
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert [line for line in caplog.messages if "report_failed autoscaler=a reason='LookupError in" in line]


async def test_agent_task_that_raises_is_logged_and_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resilient_tasks, "PAUSE_S", 0.01)
    runs, again = list[int](), asyncio.Event()

    async def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise LookupError("injected")
        again.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_contained("weights", work))
        await again.wait()
        task.cancel()
    assert len(runs) == 2
    errors = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert [one.getMessage().partition(" error=")[0] for one in errors] == ["event=agent_part_failed part=weights"]
