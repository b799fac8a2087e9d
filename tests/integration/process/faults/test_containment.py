"""A Model that makes the running autoscaler raise an exception does not affect the other Models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.process.commands.test_operator import pilotlight
from tests.support.harness.serve.serve import fake, serving, shot, transcript
from tests.support.waiting import until

FAULTY = Path(__file__).parents[3] / "support" / "harness" / "faults" / "faulty_model"


def inject(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file whose existence makes the Model `faulty` raise."""
    monkeypatch.setenv("PYTHONPATH", str(FAULTY))
    monkeypatch.setenv("FAULT", str(folder / "fault"))
    return folder / "fault"


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
        rows = serve.get("/api/v1/status")
        assert isinstance(rows, list)
        (row,) = [row for row in rows if row["model"] == "faulty"]
        assert row["state"] == "faulty"
        assert "LookupError in sitecustomize.py" in row["why"]
        assert serve.output().count("event=model_faulty model=faulty operation='plan'") == 1
        assert await pilotlight(serve, "wake", "faulty") == "retrying faulty now"
        await until("it was tried again", lambda: serve.output().count("event=model_faulty") == 2)
        assert (await serve.call("ada")).code == ""
        assert serve.autoscaler() == before


async def test_ready_replica_of_a_model_goes_on_serving_after_a_fault(
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
