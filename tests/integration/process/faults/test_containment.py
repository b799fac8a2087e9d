"""A Model that makes the running autoscaler raise an exception does not affect the other Models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.process.commands.test_operator import pilotlight
from tests.support.harness.serve.serve import fake, serving, shot
from tests.support.waiting import until

FAULTY = Path(__file__).parents[3] / "support" / "harness" / "faults" / "faulty_model"


@pytest.mark.standard
async def test_internal_error_for_one_model_leaves_other_models_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAULTY))
    models = fake(tmp_path, "ada"), fake(tmp_path, "faulty")
    async with serving(tmp_path / "s", *models, start=False) as serve:
        serve.faults = True
        await serve.start()
        before = serve.autoscaler()
        faulty, ada = await serve.send(shot("faulty"), shot("ada"))
        assert (faulty.status, faulty.code, ada.code) == (503, "model_faulty", "")
        rows = serve.get("/api/v1/status")
        assert isinstance(rows, list)
        (row,) = [row for row in rows if row["model"] == "faulty"]
        assert row["state"] == "faulty"
        assert "LookupError in sitecustomize.py" in row["why"]
        assert serve.said().count("event=model_faulty model=faulty operation='plan'") == 1
        assert await pilotlight(serve, "wake", "faulty") == "retrying faulty now"
        await until("it was tried again", lambda: serve.said().count("event=model_faulty") == 2)
        assert (await serve.call("ada")).code == ""
        assert serve.autoscaler() == before
