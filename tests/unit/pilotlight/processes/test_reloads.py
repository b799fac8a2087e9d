"""A reload of documents that fails keeps the documents in force and is reported, whatever the exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from autoscaler.contract import GatewayId, ModelName, Report
from autoscaler.documents.document_quarantine import PART
from autoscaler.documents.document_types import Documents
from autoscaler.fold.fold import Observation
from autoscaler.routing import routes
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.events import DocumentsSeen, FaultSeen, ModelWoken, Reported
from autoscaler.state.world import World
from pilotlight.models.document_loading import keep_artifact_location
from pilotlight.net.listen import Address
from pilotlight.processes import autoscaler
from pilotlight.processes.serve import DOCUMENTS_FILE, forget_other_documents
from tests.support.builders.worlds import device, level, model, world
from tests.support.harness.faults.fault_injection import DOCUMENT_POINTS, concerns, inject
from tests.support.harness.manual_loop import SteppedLoop


async def test_reload_exception_is_reported_until_a_later_reload_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_model_of_a_faulty_document_does_not_start_until_a_read_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = autoscaler.AutoscalerOptions(
        state=tmp_path, documents=tmp_path / "d.yaml", contract_socket=None, ops=Address("127.0.0.1", 0)
    )
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    ada = model("ada", 10)
    fault = FaultSeen(model=ada.name, reason="KeyError", part=PART)
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


DECODE = DOCUMENT_POINTS[0]
HEAD = "apiVersion: pilotlight.dev/v1alpha1\n"


class FileRig:
    """The autoscaler's part of `serve` with a file of documents, in virtual time, from its start."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "d.yaml"
        self.options = autoscaler.AutoscalerOptions(
            state=folder, documents=self._path, contract_socket=None, ops=Address("127.0.0.1", 0)
        )
        self.again = asyncio.Event()

    def write(self, **idle_s: int | str) -> None:
        """Write the document of each Model, with its `idleSeconds`."""
        self._path.write_text(
            "---\n".join(
                f"{HEAD}kind: Model\nmetadata: {{name: {name}}}\n"
                f"spec: {{engine: command, command: ['{{port}}'], aliases: [also-{name}], idleSeconds: {idle}}}\n"
                for name, idle in idle_s.items()
            )
        )

    def start(self) -> None:
        """Read the documents as at the start of the process."""
        self.stepped, faults = SteppedLoop(world([], [device()])), list[FaultSeen]()
        loop = self.stepped.loop
        documents = autoscaler.load_checked_documents(self.options, faults.append)
        self.reloads = autoscaler.Reloads(
            self.options, loop, lambda seen, faults: loop.observe([seen, *faults]), keep_artifact_location,
            again=self.again, documents=documents, faults=faults,
        )  # fmt: skip
        self.stepped.step(autoscaler.build_documents_seen(documents), *faults)

    async def reload(self) -> None:
        """Read the documents again, and decide."""
        self.again.clear()
        await self.reloads()
        self.stepped.step()

    async def retry(self, *batch: Observation) -> bool:
        """Decide, and read the documents again if the loop requests it."""
        self.stepped.step(*batch)
        requested = self.again.is_set()
        if requested:
            await self.reload()
        return requested

    def state(self) -> tuple[dict[str, float | Literal["auto"]], dict[str, int]]:
        """Model -> `idleSeconds` in force, and -> number of its quarantines, of those quarantined now."""
        world = self.stepped.loop.world
        idle = {str(name): one.spec.idle_seconds or 0.0 for name, one in world.models.items()}
        return idle, {str(name): one.times for name, one in world.learned.faults.items() if one.until_s}

    def refusal(self, name: str) -> str:
        """The code with which requests for the Model are rejected; empty: they are not."""
        loop = self.stepped.loop
        route = routes.model_route(loop.world, ModelName(name), loop.now_s(), GatewayId("g1"))
        return "" if route is None or route.refusal is None else route.refusal.code


@pytest.fixture
def rig(tmp_path: Path) -> FileRig:
    return FileRig(tmp_path)


NO_DOCUMENT_S = ModelSpec(engine="command").idle_seconds or 0.0
"""`idleSeconds` of a stand-in."""


async def test_document_that_raises_at_start_quarantines_only_its_model(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(ada=901, bob=902)
    fault = inject(monkeypatch, DECODE, concerns("bob"))
    rig.start()
    assert rig.state() == ({"ada": 901.0, "bob": NO_DOCUMENT_S}, {"bob": 1})
    assert (rig.refusal("ada"), rig.refusal("bob")) == ("", "model_faulty")
    fault.stop()
    assert await rig.retry(ModelWoken(model=ModelName("bob")))
    assert rig.state() == ({"ada": 901.0, "bob": 902.0}, {})


async def test_document_that_raises_at_a_reload_keeps_only_its_model_unchanged(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(ada=901, bob=902)
    rig.start()
    fault = inject(monkeypatch, DECODE, concerns("bob"))
    rig.write(ada=903, bob=904, eve=905)
    await rig.reload()
    assert rig.reloads.view().problem == ""
    assert rig.state() == ({"ada": 903.0, "bob": 902.0, "eve": 905.0}, {"bob": 1})
    fault.stop()
    rig.write(ada=903, bob=902)
    await rig.reload()
    assert rig.state() == ({"ada": 903.0, "bob": 902.0}, {}), "the reverted document equals the one in force"


async def test_document_that_raises_is_retried_after_1_2_4_and_up_to_30_minutes(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(ada=901, bob=902)
    fault = inject(monkeypatch, DECODE, concerns("bob"))
    rig.start()
    for times, lasts_s in enumerate((60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0), 1):
        assert rig.state()[1] == {"bob": times}
        rig.write(ada=901 + times, bob=902)
        await rig.reload()
        assert rig.state()[1] == {"bob": times}, "the document that raises is the same"
        rig.stepped.now_s += lasts_s - 0.1
        assert not await rig.retry()
        rig.stepped.now_s += 0.2
        assert await rig.retry()
    rig.write(ada=901, bob=903)
    await rig.reload()
    assert rig.state()[1] == {"bob": 1}, "the document is another one"
    assert await rig.retry(ModelWoken(model=ModelName("bob")))
    assert rig.state()[1] == {"bob": 2}
    fault.stop()
    rig.write(ada=901, bob=904)
    await rig.reload()
    assert rig.state() == ({"ada": 901.0, "bob": 904.0}, {})


async def test_last_valid_document_loses_aliases_that_another_model_now_uses(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(bob=902)
    rig.start()
    inject(monkeypatch, DECODE, concerns("bob"))
    text = rig.options.documents.read_text().replace("also-bob", "other")
    rig.write(ada=901)
    rig.options.documents.write_text(f"{rig.options.documents.read_text().replace('also-ada', 'also-bob')}---\n{text}")
    await rig.reload()
    models = rig.stepped.loop.world.models
    assert {str(name): one.spec.aliases for name, one in models.items()} == {"ada": ("also-bob",), "bob": ()}
    assert rig.state()[0] == {"ada": 901.0, "bob": 902.0}


async def test_invalid_document_rejects_the_file_while_another_model_raises(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(ada=901, bob=902)
    rig.start()
    inject(monkeypatch, DECODE, concerns("bob"))
    rig.write(ada="long", bob=904, eve=905)
    await rig.reload()
    assert "Model ada: spec.idleSeconds: expected" in rig.reloads.view().problem
    assert rig.state() == ({"ada": 901.0, "bob": 902.0}, {})


def called(one: Model, now_s: float) -> Reported:
    """A report with one queued request for the Model."""
    levels = (level(one.name, 1, wait_s=1.0),)
    return Reported(report=Report(gateway=GatewayId("g1"), boot="b", sequence=int(now_s), epoch=1, levels=levels))


def test_saved_snapshot_is_deleted_if_the_documents_have_changed(tmp_path: Path) -> None:
    """A snapshot has models and keys, which are valid for the same documents only."""
    kept = tmp_path / "gateway-1.kept.json"
    for before, is_kept in ((None, False), (b"other", False), (b"same", True)):
        kept.write_text("{}")
        if before is not None:
            (tmp_path / DOCUMENTS_FILE).write_bytes(before)
        forget_other_documents(tmp_path, b"same")
        assert kept.exists() is is_kept
