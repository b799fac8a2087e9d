"""Inspection requests to a node agent: it reports the content and downloads no weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from artifacts.store.store import Store
from autoscaler.agent_contract import WeightsReport, read_weights_request
from autoscaler.contract import ReplicaId
from loadtest import tiny_gguf
from pilotlight.agent.weights import fetch, inspect
from pilotlight.agent.weights.fetch import LOOKS_MAX
from pilotlight.agent.weights.inspect import Fields, Headers
from pilotlight.agent.weights.keeper import LOOK_AGAIN_S
from pilotlight.agent.weights.report_limits import HEADERS_CHARS_MAX, REASON_CHARS_MAX
from pilotlight.models.weights_fetch import HEADERS
from tests.support.builders.artifacts import packed_models
from tests.support.harness.artifacts.weight_keeper import Kept, want


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "store")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    packed_models.packed(
        packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF", "LICENSE": b"x"}), tmp_path / "layout"
    )
    with packed_models.served(tmp_path / "layout") as found:
        yield found


async def test_inspection_reports_digest_and_files_without_a_download(kept: Kept, host: str) -> None:
    async with kept.running():
        look = replace(want(host, "r1"), look=True)
        kept.request(look)
        await kept.until(lambda: kept.reports and kept.reports[0].digest)
        (message,) = kept.reports
        assert (message.look, message.replicas, message.image, message.ggufs, message.folder) == (
            True,
            ("r1",),
            "",
            ("a.gguf",),
            "",
        )
        assert Store(kept.root).rows() == []
        kept.request(replace(look, replicas=(ReplicaId("r1"), ReplicaId("r2"))))
        await kept.until(lambda: kept.reports[0].replicas == ("r1", "r2"))
        kept.request()
        await kept.until(lambda: not kept.keeping._lines)


async def test_weight_headers_of_an_earlier_agent_are_removed_at_start(kept: Kept) -> None:
    left = kept.root / HEADERS / "ab" / "a.gguf"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"GGUF")
    async with kept.running():
        await kept.until(lambda: not (kept.root / HEADERS).exists())


async def test_twenty_wanted_inspections_run_only_up_to_the_concurrency_limit(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most, let = 0, 0, asyncio.Event()

    async def waits(report: WeightsReport, *_: object) -> WeightsReport:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await let.wait()
        at_once -= 1
        return replace(report, digest="sha256:aa", no_header="none")

    monkeypatch.setattr(fetch, "inspect_artifact", waits)
    async with kept.running():
        kept.request(*(replace(want("r", tag=f"v{number}"), look=True) for number in range(20)))
        await kept.until(lambda: at_once == LOOKS_MAX)
        let.set()
        await kept.until(lambda: sum(bool(one.digest) for one in kept.reports) == 20)
        assert most == LOOKS_MAX


async def test_headers_too_large_for_one_report_are_sent_in_several_reports(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(report: WeightsReport, *_: object) -> WeightsReport:
        return replace(report, digest="sha256:aa", header="x" * (HEADERS_CHARS_MAX // 3))

    def reported() -> set[str]:
        return {one.artifact for one in kept.reports if one.header}

    monkeypatch.setattr(fetch, "inspect_artifact", found)
    looks = [replace(want("r", tag=f"v{number}"), look=True) for number in range(5)]
    async with kept.running():
        kept.request(*looks)
        await kept.until(lambda: sum(one.looked is not None for one in kept.keeping._lines.values()) == 5)
        first = reported()
        assert len(first) == 3
        kept.request(*(one for one in looks if one.artifact not in first))
        await kept.until(lambda: reported() == {one.artifact for one in looks} - first)


async def test_failed_inspection_is_retried_after_an_interval(kept: Kept, host: str) -> None:
    async with kept.running():
        look = replace(want(host, tag="none"), look=True)
        kept.request(look)
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        first = kept.keeping._lines[read_weights_request(look)].again_s
        kept.now_s += LOOK_AGAIN_S
        kept.request(look, ca_file=None)
        await kept.until(lambda: kept.keeping._lines[read_weights_request(look)].again_s > first)


async def test_overlong_reason_of_a_failed_inspection_is_truncated(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(report: WeightsReport, *_: object) -> WeightsReport:
        return replace(report, digest="sha256:aa", no_image="x" * 1_000_000, no_header="x" * 1_000_000)

    monkeypatch.setattr(fetch, "inspect_artifact", found)
    async with kept.running():
        kept.request(replace(want("r"), look=True))
        await kept.until(lambda: kept.reports and kept.reports[0].digest)
        assert {len(kept.reports[0].no_image), len(kept.reports[0].no_header)} == {REASON_CHARS_MAX}


async def test_artifact_that_is_not_an_image_is_inspected_again_later(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    async def found(report: WeightsReport, *_: object) -> WeightsReport:
        seen.append(report.artifact)
        return replace(
            report, digest="sha256:aa", no_header="none", image="models" if report.artifact in seen[:-1] else None
        )

    monkeypatch.setattr(fetch, "inspect_artifact", found)
    look, other = replace(want("r"), look=True), replace(want("r", tag="v2"), look=True)
    async with kept.running():
        kept.request(look)
        await kept.until(lambda: kept.reports and kept.reports[0].digest)
        assert kept.reports[0].image is None
        kept.now_s += LOOK_AGAIN_S
        kept.request(look)
        await kept.until(lambda: kept.reports[0].image == "models")
        kept.now_s += LOOK_AGAIN_S
        kept.request(look, other)
        await kept.until(lambda: other.artifact in seen)
        assert seen == [look.artifact, look.artifact, other.artifact], "what is one is looked at once"


@pytest.fixture
def ada(tmp_path: Path) -> Path:
    """A layout of a model with a header."""
    (tmp_path / "in").mkdir()
    tiny_gguf.make_model(tmp_path / "in" / "ada.gguf", "Hello, I am Ada.")
    packed_models.packed(tmp_path / "in", tmp_path / "layout")
    return tmp_path / "layout"


async def test_weights_header_is_downloaded_once_for_several_inspections(kept: Kept, ada: Path) -> None:
    asked = list[str]()
    with packed_models.served(ada, asked) as host:
        async with kept.running():
            look = replace(want(host), look=True)
            kept.request(look, replace(look, pull_secret="one"), replace(look, pull_secret="two"))
            await kept.until(lambda: sum(bool(one.header) for one in kept.reports) == 3)
            assert len({one.header for one in kept.reports}) == 1
            kept.request()
            await kept.until(lambda: not kept.keeping._lines)
            kept.request(look, epoch=2)
            await kept.until(lambda: kept.reports and kept.reports[0].header)
    blobs = Counter(one for one in asked if "/blobs/" in one)
    configs = sum(one.endswith("/manifests/v1") for one in asked)
    (weights,) = [one for one, many in blobs.items() if many != configs // 2]
    assert configs == 8, "for each of the four looks, with its own login: what is an image, and what has names"
    assert blobs[weights] == 3, "names in the image's one layer, before and behind the weights; then the header"


async def test_next_leader_gets_cached_inspection_during_registry_outage(
    kept: Kept, ada: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "AWAY_WAIT_S", 0.01)
    async with kept.running():
        with packed_models.served(ada) as host:
            look = replace(want(host), look=True)
            kept.request(look)
            await kept.until(lambda: kept.reports and kept.reports[0].header)
            first = kept.reports
            kept.request()
            await kept.until(lambda: not kept.keeping._lines)
        for epoch in (2, 3):
            kept.request(look, epoch=epoch)
            await kept.until(lambda: kept.reports == first)
            kept.request(epoch=epoch)
            await kept.until(lambda: not kept.keeping._lines)


async def test_full_header_cache_drops_the_oldest_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "HEADERS_MAX", 2)
    headers, reads = Headers(), list[str]()

    def read(of: str) -> Awaitable[Fields]:
        async def found() -> Fields:
            reads.append(of)
            return {"no_header": "none"} if of == "bad" else {"header": of}

        return headers.cached(of, found)

    for of in ("a", "b", "b", "bad", "bad", "c", "a"):
        assert (await read(of)).get("header", "bad") == of
    assert reads == ["a", "b", "bad", "bad", "c", "a"]
