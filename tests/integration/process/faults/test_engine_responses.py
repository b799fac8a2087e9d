"""Case 41 with processes: engines start well but respond badly, behind a whole `serve`, seen by the load client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.support.harness.serve.serve import Document, fake, serving, settings

# All tests check one run.
pytestmark = [pytest.mark.case("41"), pytest.mark.standard, pytest.mark.xdist_group("engine responses")]

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


class Run(NamedTuple):
    """The results of one request per Model, by Model, and the number of engine starts."""

    streams: dict[str, Result]
    documents: dict[str, Result]
    starts: dict[str, int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run one installation for this module; send a streaming and a non-streaming request to each Model."""
    return asyncio.run(request_all(tmp_path_factory.mktemp("responses")))


async def request_all(folder: Path) -> Run:
    documents = [*models(folder), fake(folder, "good", "--tokens-per-s", "0", gpu={"memory": "10Mi"}), settings()]
    async with serving(folder, *documents, options=("--gateways", "2")) as one:
        names = [*FAULTS, "good"]
        streams = await asyncio.gather(*(one.call(name) for name in names))
        wholes = await asyncio.gather(*(one.call(name, stream=False) for name in names))
        starts = {name: one.starts(name) for name in names}
    return Run(dict(zip(names, streams, strict=True)), dict(zip(names, wholes, strict=True)), starts)


def has_failed(result: Result) -> bool:
    """Whether the client received exactly one error, and no end of the stream."""
    return (result.ending, result.errors, result.saw_done) == (Ending.FAILED, 1, False)


def are_complete(*results: Result) -> bool:
    return judge_run(len(results), results).completed == len(results)


def test_stream_with_an_invalid_chunk_ends_with_upstream_error(run: Run) -> None:
    assert has_failed(run.streams["chunks"])
    assert run.streams["chunks"].code == "upstream_error"
    assert are_complete(run.documents["chunks"]), "only streams have chunks"


def test_endless_informational_responses_end_the_request_with_502(run: Run) -> None:
    assert has_failed(run.streams["flood"])
    assert (run.streams["flood"].status, run.documents["flood"].status) == (502, 502)


def test_response_after_five_informational_responses_is_complete(run: Run) -> None:
    assert are_complete(run.streams["drizzle"], run.documents["drizzle"])


def test_error_page_of_an_engine_reaches_the_client_with_status_500(run: Run) -> None:
    assert has_failed(run.streams["page"])
    for result in (run.streams["page"], run.documents["page"]):
        assert result.status == 500, "the engine's own page, which is no error object"


def test_busy_engine_gives_503_overloaded_with_retry_after(run: Run) -> None:
    assert has_failed(run.streams["busy"])
    for result in (run.streams["busy"], run.documents["busy"]):
        assert (result.status, result.code, "retry-after" in result.headers) == (503, "overloaded", True)


def test_response_shorter_than_its_content_length_counts_as_lost(run: Run) -> None:
    assert run.documents["short"].ending is Ending.LOST
    assert are_complete(run.streams["short"]), "streams have no content-length"


def test_malformed_responses_neither_restart_an_engine_nor_affect_another(run: Run) -> None:
    assert (run.starts["chunks"], run.starts["flood"]) == (1, 1)
    assert are_complete(run.streams["good"], run.documents["good"])
