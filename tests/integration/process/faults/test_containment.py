"""A Model that makes the running autoscaler raise an exception does not affect the other Models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.integration.process.commands.test_operator import pilotlight
from tests.support.harness.serve.serve import Document, Serving, fake, serving, settings, shot, transcript
from tests.support.waiting import until

FAULTY = Path(__file__).parents[3] / "support" / "harness" / "faults" / "faulty_model"


def inject(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file whose existence makes the Model `faulty` raise."""
    monkeypatch.setenv("PYTHONPATH", str(FAULTY), prepend=os.pathsep)
    monkeypatch.setenv("FAULT", str(folder / "fault"))
    return folder / "fault"


def status(serve: Serving) -> dict[str, str]:
    """What `status` reports about the Model `faulty`."""
    rows = serve.get("/api/v1/status")
    assert isinstance(rows, list)
    (row,) = [row for row in rows if row["model"] == "faulty"]
    assert isinstance(row, dict)
    return row


@pytest.mark.standard
async def test_internal_error_for_one_model_leaves_other_models_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(tmp_path, monkeypatch).touch()
    models = fake(tmp_path, "ada"), fake(tmp_path, "faulty")
    async with serving(tmp_path / "s", *models, start=False) as serve:
        serve.faults = True
        await serve.start()
        before = serve.autoscaler()
        faulty, ada = await serve.send(shot("faulty"), shot("ada"))
        assert (faulty.status, faulty.code, ada.code) == (503, "model_faulty", "")
        assert faulty.headers["x-should-retry"] == "false"
        row = status(serve)
        assert row["state"] == "faulty"
        assert "LookupError in sitecustomize.py" in row["why"]
        assert serve.output().count("event=model_faulty model=faulty operation='plan'") == 1
        assert await pilotlight(serve, "wake", "faulty") == "retrying faulty now"
        await until("it was tried again", lambda: serve.output().count("event=model_faulty") == 2)
        assert (await serve.call("ada")).code == ""
        assert serve.autoscaler() == before


async def test_ready_replica_serves_after_an_internal_error_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = inject(tmp_path, monkeypatch)
    async with serving(tmp_path / "s", fake(tmp_path, "faulty"), start=False) as serve:
        serve.faults = True
        await serve.start()
        assert (await serve.call("faulty")).code == ""
        fault.touch()
        during = await serve.call("faulty")  # the changed demand is a new decision
        await until("the Model is quarantined", lambda: "event=model_faulty model=faulty" in serve.output())
        after = await serve.call("faulty")
        assert [(one.status, one.code) for one in (during, after)] == [(200, ""), (200, "")]
        assert len({one.pid for one in transcript(tmp_path, "faulty")}) == 1, "the same engine"


async def reload(serve: Serving, *models: Document) -> None:
    """Replace the documents, and wait until `serve` has read them."""
    before = serve.output().count("documents reloaded")
    serve.config.write_text(yaml.safe_dump_all((*models, settings())))
    assert serve.process is not None
    serve.process.send_signal(signal.SIGHUP)
    await until("the documents are read", lambda: serve.output().count("documents reloaded") > before)


async def test_exception_in_decoding_a_document_quarantines_only_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = inject(tmp_path, monkeypatch)
    fault.write_text("document")
    ada, faulty = fake(tmp_path, "ada"), fake(tmp_path, "faulty")
    async with serving(tmp_path / "s", ada, faulty, start=False) as serve:
        serve.faults = True
        await serve.start()
        rejected, served = await serve.send(shot("faulty"), shot("ada"))
        assert (rejected.status, rejected.code, served.code) == (503, "model_faulty", "")
        assert "documents.yaml: Model faulty: internal error (LookupError in sitecustomize.py" in serve.output()
        assert serve.output().count("event=model_faulty model=faulty operation='documents'") == 1
        fault.unlink()
        assert await pilotlight(serve, "wake", "faulty") == "retrying faulty now"
        await until("it is decoded", lambda: status(serve)["state"] != "faulty")
        assert (await serve.call("faulty")).code == ""
        fault.write_text("document")
        await reload(serve, ada, fake(tmp_path, "faulty", idleSeconds=31), fake(tmp_path, "eve"))
        await until("it is quarantined", lambda: "quarantined" in status(serve)["why"])
        assert status(serve)["state"] == "ready", "its replica serves"
        results = await serve.send(shot("faulty"), shot("ada"), shot("eve"))
        assert [(one.status, one.code) for one in results] == [(200, "")] * 3
        assert len({one.pid for one in transcript(tmp_path, "faulty")}) == 1, "the same engine"
        await reload(serve, faulty, fake(tmp_path, "eve"))
        rejected, served = await serve.send(shot("ada"), shot("eve"))
        assert (rejected.status, served.code) == (404, "")
