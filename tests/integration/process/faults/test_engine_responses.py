"""Case 41 with processes: engines start well but respond badly, behind a whole `serve`, seen by the load client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.result import Ending
from loadtest.run_verdict import judge_run
from tests.support.harness.serve.serve import Document, fake, serving, settings

FAULTS: dict[str, tuple[str, ...]] = {
    "chunks": ("--fail", "bad-chunk"), "short": ("--fail", "cl-mismatch"), "flood": ("--fail", "flood-1xx"),
    "drizzle": ("--fail", "flood-1xx:5"), "page": ("--fail", "error-500"), "busy": ("--fail", "busy-503"),
}  # fmt: skip


def models(folder: Path) -> list[Document]:
    """Return one Model for each fault, all on one device."""
    small = {"memory": "10Mi"}
    # The first engine that is ready must stay until the last one has started.
    return [
        fake(folder, name, "--tokens-per-s", "0", *knobs, gpu=small, idleSeconds=600) for name, knobs in FAULTS.items()
    ]


@pytest.mark.case("41")
@pytest.mark.standard
async def test_malformed_engine_response_fails_its_request_but_not_the_engine(tmp_path: Path) -> None:
    documents = [*models(tmp_path), fake(tmp_path, "good", "--tokens-per-s", "0", gpu={"memory": "10Mi"}), settings()]
    async with serving(tmp_path, *documents, options=("--gateways", "2")) as one:
        names = [*FAULTS, "good"]
        streams = dict(zip(names, await asyncio.gather(*(one.call(name) for name in names)), strict=True))
        wholes = dict(zip(names, await asyncio.gather(*(one.call(n, stream=False) for n in names)), strict=True))
        for name in ("chunks", "flood", "page", "busy"):
            result = streams[name]
            assert (result.ending, result.errors, result.saw_done) == (Ending.FAILED, 1, False), (name, result)
        assert (streams["chunks"].code, streams["flood"].status, wholes["flood"].status) == ("upstream_error", 502, 502)
        for result in (streams["page"], wholes["page"]):
            assert result.status == 500, "the engine's own page, which is no error object"
        for result in (streams["busy"], wholes["busy"]):
            assert (result.status, result.code, "retry-after" in result.headers) == (503, "overloaded", True)
        assert wholes["short"].ending is Ending.LOST, "a document that is cut cannot say so, but it does not end"
        fine = [streams[name] for name in ("short", "drizzle", "good")]
        fine += [wholes[name] for name in ("chunks", "drizzle", "good")]
        assert judge_run(len(fine), fine).completed == len(fine)
        assert one.starts("chunks") == one.starts("flood") == 1, "an engine with an unusual response has not failed"
