"""Weights that autoscalers request on a node: the agent pulls, holds, reports and releases them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from artifacts.credentials.docker_config import AuthConfig, Config, Login
from artifacts.fetch import registry
from artifacts.fetch.registry import Came
from artifacts.http.transport import Site
from artifacts.pack import oci_layout
from artifacts.peers.client import Peering
from artifacts.peers.selection import Peer
from artifacts.reference import Reference
from artifacts.registry.client import Client
from artifacts.store.copies import Copy
from artifacts.store.store import Store
from autoscaler.agent_contract import NodeWant, NodeWants, WeightsReport
from autoscaler.contract import ReplicaId
from autoscaler.spec.settings import Signatures
from pilotlight.agent.weights import keeper
from pilotlight.agent.weights.fetch import NoSecretError, PullSecrets
from pilotlight.agent.weights.keeper import LINGER_S, WeightsKeeper, report_fault
from pilotlight.agent.weights.report_limits import REASON_CHARS_MAX
from pilotlight.cli.weights.pack import plan_artifact
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.registry import FakeRegistry
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


async def test_wanted_weights_are_pulled_reported_and_locked_in_the_store(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        (message,) = kept.reports
        assert (message.replicas, message.ggufs, message.failed) == (("r1",), ("a.gguf",), "")
        assert (kept.root / message.folder / "a.gguf").read_bytes() == b"GGUF"
        assert kept.in_use() == [True]
        await kept.until(lambda: kept.keeping.report()[0] == (want(host).artifact,))
        metrics = kept.keeping.metrics.text().decode()
        assert 'pilotlight_pull_seconds_count{result="done"} 1.0' in metrics
        assert "pilotlight_pull_bytes_total 0.0" not in metrics
    assert kept.in_use() == [False], "who ends holds nothing"


async def test_page_cache_read_ahead_runs_only_for_weights_already_stored(
    kept: Kept, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[list[str]]()

    async def noted(name: str, files: Callable[[], Sequence[Path]]) -> None:
        assert name == want(host).artifact
        read.append(sorted(path.name for path in files()))

    monkeypatch.setattr(keeper, "read_ahead", noted)
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].replicas == ("r1",))
        assert read == []
        kept.request(want(host, "r2"))
        await kept.until(lambda: read)
        assert kept.reports[0].replicas == ("r2",), "it is reported first"
    assert read == [["LICENSE", "a.gguf"]]


async def test_bytes_received_from_peers_are_counted_in_a_metric(kept: Kept, host: str) -> None:
    """The counter is set before the pull; this pull itself receives nothing from peers."""

    async def alone(artifact: str) -> Peering:
        assert artifact == want(host).artifact
        return Peering(tuple, own="n1", given=Counter(n2=5, n3=2))

    kept.keeping.fetching.peering = alone
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
    assert "pilotlight_pull_peer_bytes_total 7.0" in kept.keeping.metrics.text().decode()


async def test_pulled_adapter_files_are_not_listed_among_base_model_files(kept: Kept, tmp_path: Path) -> None:
    files = {"base.gguf": b"GGUF", "adapter-x.gguf": b"GGUF"}
    packed_models.packed(packed_models.model(tmp_path / "model", files), tmp_path / "layout")
    with packed_models.served(tmp_path / "layout") as host:
        async with kept.running():
            kept.request(want(host, "r1"))
            await kept.until(lambda: kept.reports and kept.reports[0].folder)
            assert (kept.reports[0].ggufs, kept.reports[0].adapters) == (("base.gguf",), ("adapter-x.gguf",))


async def test_weights_with_code_are_pulled_only_with_allow_unsafe(kept: Kept, tmp_path: Path) -> None:
    files = {"a.gguf": b"GGUF", "modeling.py": b"pass"}
    plan = plan_artifact(packed_models.model(tmp_path / "model", files), allow_unsafe=True)
    oci_layout.write_layout(tmp_path / "layout", plan, "modelpack", "v1")
    with packed_models.served(tmp_path / "layout") as host:
        async with kept.running():
            bold = replace(want(host, "r1"), allow_unsafe=True)
            kept.request(bold, want(host, "r2"))
            await kept.until(lambda: len(kept.reports) == 2 and all(one.replicas for one in kept.reports))
            found = {one.allow_unsafe: one for one in kept.reports}
            assert (found[True].replicas, found[True].failed) == (("r1",), "")
            assert (kept.root / found[True].folder / "modeling.py").read_bytes() == b"pass"
            assert found[False].replicas == ("r2",)
            assert "modeling.py" in found[False].failed or "code" in found[False].failed
            kept.request(bold, want(host, "r2", "r3"))  # present by now
            await kept.until(lambda: any("r3" in one.replicas for one in kept.reports))
            assert not {one.allow_unsafe: one for one in kept.reports}[False].folder


async def test_failed_pull_is_attempted_again_for_each_new_replica(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1", tag="none"))
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        assert "there is no manifest none" in kept.reports[0].failed
        kept.request(want(host, "r1", tag="none"), ca_file=None)
        assert kept.reports[0].replicas == ("r1",)
        kept.request(want(host, "r2", tag="none"))
        await kept.until(lambda: kept.reports[0].replicas == ("r2",))


async def test_pull_failure_for_a_second_replica_is_reported_after_a_success(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1", secret="mine"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        kept.refuses = "pull secret mine: NotFound"
        kept.request(want(host, "r1", "r2", secret="mine"))
        await kept.until(lambda: any("r2" in one.replicas for one in kept.reports))
        found = {str(id): one for one in kept.reports for id in one.replicas}
        assert (found["r1"].failed, found["r2"].failed) == ("", "pull secret mine: NotFound")
        assert found["r1"].folder, "it is the one's who had it"
        assert not found["r2"].folder
        assert kept.in_use() == [True]


async def test_copy_that_cannot_be_locked_is_logged_once_and_others_are_locked(
    kept: Kept, host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = WeightsKeeper._found

    def found(one: WeightsKeeper, folder: str) -> Copy | None:
        if folder == "copies/faulty/files":
            raise OSError(errno.EIO, "Input/output error")
        return real(one, folder)

    monkeypatch.setattr(keeper, "report_fault", report_fault)
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        folder = kept.reports[0].folder
        monkeypatch.setattr(WeightsKeeper, "_found", found)
        for replica in ("r2", "r3"):
            kept.request(want(host, replica), held=("copies/faulty/files", "copies/" + "x" * 5000, folder))
            await kept.until(lambda: kept.reports[0].replicas == (replica,) and kept.reports[0].folder)  # noqa: B023
        assert [*kept.keeping._held] == [folder]
    assert len([line for line in caplog.messages if "copies/faulty" in line]) == 1
    assert all(len(line) < 3000 for line in caplog.messages)


async def test_model_start_fails_if_its_pull_secret_is_missing(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1", secret="mine"), want(host, "r2", secret="none"))
        await kept.until(lambda: len(kept.reports) == 2 and all(one.replicas for one in kept.reports))
        found = {one.pull_secret: one for one in kept.reports}
        assert found["mine"].folder
        assert (found["none"].failed, found["none"].folder) == ("pull secret none: NotFound", "")
        assert sorted(kept.logins) == ["mine", "none"]


async def test_unwanted_weights_are_released_after_a_delay_unless_in_use(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        folder = kept.reports[0].folder
        kept.request(held=(folder,))
        await kept.until(lambda: not kept.reports)
        kept.now_s += LINGER_S
        kept.request(held=(folder, "copies/../../etc"))
        await kept.until(lambda: not kept.keeping._lines)
        assert kept.in_use() == [True], "a pod uses it"
        kept.request()
        await kept.until(lambda: all(since_s is not None for _, since_s in kept.keeping._held.values()))
        assert kept.in_use() == [True], "leaders change"
        kept.now_s += LINGER_S
        kept.request()
        await kept.until(lambda: kept.in_use() == [False])


async def test_pull_survives_leader_change_and_ends_when_unwanted(
    kept: Kept, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = list[str](), list[str]()

    async def hangs(of: Reference, *_: object, **__: object) -> Copy:
        began.append(of.repository)
        try:
            never: asyncio.Future[Copy] = asyncio.get_running_loop().create_future()
            return await never
        finally:
            ended.append(of.repository)

    monkeypatch.setattr(registry, "fetch_from_registry", hangs)
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: began)
        kept.request(epoch=2)
        await kept.until(lambda: not kept.reports)
        kept.request(want(host, "r2"), epoch=2)
        await kept.until(lambda: kept.reports)
        assert (len(began), ended) == (1, []), "the next leader's start finds it under way"
        kept.request(epoch=2)
        await kept.until(lambda: not kept.reports)
        kept.now_s += LINGER_S
        kept.request(epoch=2)
        await kept.until(lambda: ended)


async def test_wanted_weights_from_a_leader_of_an_older_epoch_are_ignored(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r2"), epoch=5)
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        kept.request(want(host, "r1", tag="none"), epoch=4)
        kept.keeping.heard(b"{")
        await asyncio.sleep(0)
        assert [one.replicas for one in kept.reports] == [("r2",)]


async def test_missing_signature_key_file_fails_only_pulls_that_require_it(kept: Kept, host: str) -> None:
    async with kept.running():
        kept.request(want(host, "r1"), signatures=Signatures(policy="enforce", keys=("/nowhere.pub",)))
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        assert "weights.signatures.keys[0]" in kept.reports[0].failed
        kept.request(want(host, "r2"))
        await kept.until(lambda: kept.reports[0].folder)


async def test_starts_fail_while_the_store_is_unreadable_but_the_agent_runs(
    kept: Kept, host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept.running():
        with monkeypatch.context() as broken:
            broken.setattr(Store, "rows", failing)
            broken.setattr(Store, "open", failing)
            for number in range(3):
                kept.request(want(host, f"r{number}"))
                await kept.until(lambda: kept.reports and kept.reports[0].failed == "Input/output error")
            await kept.until(lambda: "event=store_failed" in caplog.text)
        assert [record.getMessage() for record in caplog.records].count(
            "event=store_failed reason='Input/output error'"
        ) == 1, "once"
        kept.request(want(host, "r9"))
        await kept.until(lambda: kept.reports[0].folder)


def failing(*_: object) -> NoReturn:
    raise OSError("Input/output error")


async def test_overlong_reason_of_a_failed_pull_is_truncated(kept: Kept, host: str) -> None:
    kept.refuses = "x" * (1 << 20)
    async with kept.running():
        kept.request(want(host, "r1", secret="mine"))
        await kept.until(lambda: kept.reports and kept.reports[0].failed)
        assert len(kept.reports[0].failed) == REASON_CHARS_MAX


async def test_pull_secret_lookup_without_namespace_names_the_missing_option() -> None:
    with pytest.raises(NoSecretError, match="--pull-secrets NAMESPACE"):
        await PullSecrets(None)("mine")


def test_progress_of_a_pull_is_reported_at_most_once_a_second(kept: Kept) -> None:
    line, changes = keeper.WeightsTask(), list[int]()
    kept.keeping.changed = lambda: changes.append(1)
    for bytes_, after_s in ((1, 0.0), (2, 0.5), (3, 0.6)):
        kept.now_s += after_s
        kept.keeping._came(line, Came(bytes_, 10, 1.0))
    assert len(changes) == 2
    assert line.came == Came(3, 10, 1.0)


def test_higher_epoch_of_a_new_leader_is_reported_immediately(kept: Kept) -> None:
    epochs = list[int]()
    kept.keeping.changed = lambda: epochs.append(kept.keeping.epoch)
    assert kept.keeping.epoch == 0
    for epoch in (3, 3, 2, 4):
        kept.request(epoch=epoch)
    assert epochs == [3, 4]


async def test_peers_are_queried_for_a_pull_but_not_for_stored_weights(kept: Kept, host: str) -> None:
    asked, requested = list[str](), list[int]()

    def no_peers() -> tuple[Peer, ...]:
        requested.append(1)
        return ()

    async def peering(artifact: str) -> Peering:
        asked.append(artifact)
        return Peering(no_peers)

    kept.keeping.fetching.peering = peering
    async with kept.running():
        kept.request(want(host, "r1"))
        await kept.until(lambda: kept.reports and kept.reports[0].folder)
        assert (asked, requested) == ([want(host).artifact], [1])
        kept.request(want(host, "r1", "r2"))
        await kept.until(lambda: kept.reports[0].replicas == ("r1", "r2"))
        assert len(asked) == 1


# --- logins from pull secrets -----------------------------------------------------------------------------------------


async def brought(keeping: WeightsKeeper, want: NodeWant, epoch: int) -> WeightsReport:
    """The report once the weights are present or the pull failed."""
    keeping.heard(msgspec.json.encode(NodeWants(epoch=epoch, wants=(want,))))
    async with asyncio.timeout(60):
        while True:
            (message,) = keeping.report()[1] or (None,)
            if message is not None and message.replicas == want.replicas:
                return message
            await asyncio.sleep(0.01)


async def test_next_login_is_tried_if_the_registry_rejects_the_first_one(tmp_path: Path) -> None:
    layout = packed_models.packed(packed_models.model(tmp_path / "model", {"a.gguf": b"GGUF"}), tmp_path / "layout")
    right = Login("right", "pw").basic

    def judge(request: web.Request) -> web.StreamResponse | None:
        requested = {"WWW-Authenticate": 'Basic realm="x"'}
        shown = request.headers.get("Authorization")
        if shown is None:
            return web.Response(status=401, headers=requested)
        return None if shown == right else web.Response(status=404)  # as registries hide what a client may not read

    async with FakeRegistry().serving() as fake:
        async with Client(Site(fake.host)) as client:
            await packed_models.push(client, layout)
        fake.judge = judge
        secrets = {
            "good": Config(
                {f"{fake.host}/team": AuthConfig("", "wrong", "pw"), fake.host: AuthConfig("", "right", "pw")}
            ),
            "bad": Config({fake.host: AuthConfig("", "wrong", "pw")}),
        }

        async def secret_of(name: str) -> Config:
            return secrets[name]

        keeping = WeightsKeeper(tmp_path / "store", secret_of)
        running = asyncio.create_task(keeping.run())
        try:
            for epoch, (name, replica) in enumerate([("good", "a"), ("good", "b"), ("bad", "c")], 1):
                want = NodeWant(f"oci://{fake.host}/{packed_models.NAME}:v1", name, (ReplicaId(replica),))
                report = await brought(keeping, want, epoch)
                assert bool(report.folder) == (name == "good"), report
                assert bool(report.failed) == (name == "bad")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
