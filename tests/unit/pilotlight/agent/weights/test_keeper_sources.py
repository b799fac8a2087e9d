"""Weights from the Hub and from buckets, pulled by the node agent with its own logins."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from autoscaler.agent_contract import NodeWant
from autoscaler.contract import ReplicaId
from autoscaler.spec.settings import Signatures
from tests.support.fakes.hub import TOKEN, FakeHub
from tests.support.fakes.s3 import FakeS3
from tests.support.harness.artifacts.weight_keeper import Kept

HUB, BUCKET = "hf://acme/tiny?include=*.gguf", "s3://models/tiny/a.gguf"
CONTENT = b"GGUF" * 100


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "store")


def want(artifact: str, *replicas: str, secret: str = "") -> NodeWant:
    return NodeWant(artifact=artifact, pull_secret=secret, replicas=tuple(map(ReplicaId, replicas)))


@pytest.mark.parametrize("artifact", [HUB, BUCKET])
async def test_hub_and_bucket_weights_are_downloaded_once_for_two_replicas(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, artifact: str
) -> None:
    s3 = FakeS3({"tiny/a.gguf": CONTENT})
    async with FakeHub({}, {"a.gguf": CONTENT, "b.bin": b"x"}).both() as hub, s3.serving(), kept.running():
        for name, value in (hub.env() | s3.env()).items():
            monkeypatch.setenv(name, value)
        kept.request(want(artifact, "r1"))
        await kept.until(lambda: kept.reports and (kept.reports[0].folder or kept.reports[0].failed))
        (message,) = kept.reports
        assert (message.replicas, message.ggufs, message.failed) == (("r1",), ("a.gguf",), "")
        assert (kept.root / message.folder / "a.gguf").read_bytes() == CONTENT
        await kept.until(lambda: kept.keeping.report()[0] == (artifact,))
        asked = len(hub.cdn.seen) + len(s3.seen)
        kept.request(want(artifact, "r1", "r2"))
        await kept.until(lambda: kept.reports[0].replicas == ("r1", "r2"))
        moved = [one for one in (*hub.cdn.seen, *s3.seen)[asked:] if one.method == "GET"]
        assert not moved, "its bytes came once"


@pytest.mark.parametrize("unsafe", [False, True])
async def test_restarted_agent_reports_stored_weights(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, unsafe: bool
) -> None:
    async with FakeHub({}, {"a.gguf": CONTENT}).both() as hub:
        for name, value in hub.env().items():
            monkeypatch.setenv(name, value)
        async with kept.running():
            kept.request(replace(want(HUB, "r1"), allow_unsafe=unsafe))
            await kept.until(lambda: kept.reports and kept.reports[0].folder)
        restarted = Kept(tmp_path / "store")
        async with restarted.running():
            restarted.request()
            await restarted.until(lambda: restarted.keeping.report()[0] == (HUB,))


async def test_private_hub_model_requires_the_token_of_the_agent(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeHub({}, {"a.gguf": CONTENT}).both() as hub, kept.running():
        hub.private = True
        for name, value in hub.env().items():
            monkeypatch.setenv(name, value)
        kept.request(want(HUB, "r1", secret="none"))
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        assert not kept.logins, "it is for registries, and for the engine's image"
        assert "HF_TOKEN" in kept.reports[0].failed
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        kept.request(want(HUB, "r2", secret="none"))
        await kept.until(lambda: kept.reports[0].folder)


async def test_enforced_signatures_reject_weights_outside_registries(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with FakeHub({}, {"a.gguf": CONTENT}).both() as hub, kept.running():
        for name, value in hub.env().items():
            monkeypatch.setenv(name, value)
        kept.request(want(HUB, "r1"), signatures=Signatures(policy="enforce"))
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        assert "only weights in a registry have signatures" in kept.reports[0].failed
