"""Sync with a fake Link: it reconnects by itself, reports at the right times, and serves from its snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from autoscaler.contract import (
    HEARTBEAT_S,
    CatalogueDelta,
    GatewayId,
    ModelEntry,
    ModelName,
    ReplicaId,
    Report,
    ReportAnswer,
    Route,
    RoutesDelta,
)
from gateway.control import fault_containment, snapshot_file, sync
from gateway.control.sync import Link, LinkError, MessageTooLargeError, Sync
from tests.simulation.environment.virtual_loop import run
from tests.support.harness.faults.fault_injection import InjectedError
from tests.support.waiting import until

G = GatewayId("g1")
ENTRY = ModelEntry(name=ModelName("a"), served_name="a")
CATALOGUE = CatalogueDelta(epoch=1, version=1, full=True, models=(ENTRY,))
ROUTE = Route(replica=ReplicaId("r1"), model=ENTRY.name, state="ready", address="127.0.0.1:9", slots=4, hold=4)
ROUTES = RoutesDelta(epoch=1, version=1, full=True, replicas=(ROUTE,))


def in_virtual_time(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Run the test in virtual time, which is exact on a busy machine, too."""

    @functools.wraps(test)
    def signal() -> None:
        run(test())

    return signal


class PlayedLink:
    """A fake link to one autoscaler. Streams send `replies`, then wait; `cut` breaks them; all fails unless `up`."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.replies: dict[str, list[bytes]] = {"/v1/catalogue": [msgspec.json.encode(CATALOGUE)],
                                             "/v1/routes": [msgspec.json.encode(ROUTES)]}  # fmt: skip
        self.opened: list[str] = []
        self.reports: list[tuple[float, Report]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._cut = asyncio.Event()

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        self.opened.append(path)
        if not self.up:
            raise LinkError("refused")
        for line in self.replies[path.partition("?")[0]]:
            yield line
        await self._cut.wait()
        raise LinkError("broken")

    async def report(self, report: Report) -> ReportAnswer:
        if not self.up:
            raise LinkError("refused")
        self.reports.append((asyncio.get_running_loop().time(), report))
        await self.answers.wait()
        return ReportAnswer(epoch=1)

    def cut(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()

    async def close(self) -> None:
        """Nothing to close."""


class Front:
    """A fake follower that records what it receives."""

    def __init__(self) -> None:
        self.catalogues: list[CatalogueDelta] = []
        self.route_deltas: list[RoutesDelta] = []
        self.acknowledged: list[int] = []
        self.waits = self.faulty = False
        self.sequence = 0

    def catalogue(self, delta: CatalogueDelta) -> None:
        self.catalogues.append(delta)

    def routes(self, delta: RoutesDelta) -> None:
        self.route_deltas.append(delta)

    def restored(self, catalogue: CatalogueDelta, routes: RoutesDelta) -> None:
        self.catalogues.append(catalogue)
        self.route_deltas.append(routes)

    def report(self) -> Report:
        self.sequence += 1
        return Report(gateway=G, boot="b", sequence=self.sequence)

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        self.acknowledged.append(sequence)

    def busy(self) -> bool:
        return self.waits

    def has_faults(self) -> bool:
        return self.faulty


@contextlib.asynccontextmanager
async def following(*links: Link, kept_at: Path | None = None) -> AsyncIterator[tuple[Front, Sync]]:
    """Run a Sync without jitter."""
    front = Front()
    one = Sync(G, links, front, kept_at, lambda: 1.0, boot="b")
    running = asyncio.create_task(one.run())
    try:
        yield front, one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def gaps_s(reports: list[tuple[float, Report]]) -> list[float]:
    times = [at_s for at_s, _ in reports]
    return [after - before for before, after in pairwise(times)]


async def test_started_sync_receives_catalogue_and_routes_of_the_autoscaler() -> None:
    played = PlayedLink()
    async with following(played) as (front, _):
        await until("both came", lambda: front.catalogues and front.route_deltas)
    assert (front.catalogues, front.route_deltas) == ([CATALOGUE], [ROUTES])
    assert set(played.opened) == {"/v1/catalogue", "/v1/routes?gateway=g1&boot=b"}


async def test_reopening_a_broken_stream_triggers_a_report_at_once() -> None:
    played = PlayedLink()
    async with following(played) as (front, _):
        await until("the first report", lambda: played.reports)
        await until("it was acknowledged", lambda: front.acknowledged)
        known = len(played.reports)
        played.cut()
        await until("both came again", lambda: len(front.route_deltas) == len(front.catalogues) == 2)
        await until("a report after it", lambda: len(played.reports) > known, 0.5)


async def test_blank_lines_from_an_autoscaler_that_is_not_leader_are_ignored() -> None:
    leads, follows = PlayedLink(), PlayedLink()
    follows.replies["/v1/routes"] = [b"\n", b"\n", b"\n"]
    async with following(leads, follows) as (front, _):
        await until("all was sent", lambda: len(leads.opened) + len(follows.opened) == 4)
        await until("both report", lambda: leads.reports and follows.reports)
    assert front.route_deltas == [ROUTES]
    assert len(front.catalogues) == 2
    assert len(follows.opened) == 2, "its streams stay open"


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"epoch": "x"}',
        b"[]",
        b'{"epoch":1,"version":1,"models_gone":["\xff"]}',
        b'{"later":' + b"[" * 5000,
    ],
)
async def test_malformed_line_from_the_autoscaler_reopens_its_stream(line: bytes) -> None:
    played = PlayedLink()
    played.replies["/v1/routes"] = [line]
    async with following(played) as (front, _):
        await until("it was opened again", lambda: sum("routes" in path for path in played.opened) >= 2)
        played.replies["/v1/routes"] = [msgspec.json.encode(ROUTES)]
        await until("it is understood", lambda: front.route_deltas == [ROUTES])


async def test_reconnect_delay_to_the_autoscaler_doubles_from_50_ms_to_1_s(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def quick(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    monkeypatch.setattr("gateway.control.sync.asyncio.sleep", quick)
    played = PlayedLink(up=False)
    async with following(played):
        while len(slept) < 40:
            await sleep(0)
    routes_and_catalogue = [slept[0::2], slept[1::2]]
    for pauses in routes_and_catalogue:
        assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
        assert set(pauses[6:]) == {1.0}


@in_virtual_time
async def test_urgent_change_is_reported_at_once_but_at_most_every_10_ms() -> None:
    played = PlayedLink()
    async with following(played) as (_, one):
        await until("it is quiet", lambda: len(played.reports) >= 2 or played.reports)
        await asyncio.sleep(0.05)
        known, edge_s = len(played.reports), asyncio.get_running_loop().time()
        one.edge()
        await until("the report", lambda: len(played.reports) > known, every_s=0.001)
        assert played.reports[known][0] - edge_s < 0.001, "not with the next second's"
        for _ in range(100):
            one.edge()
            await asyncio.sleep(0.0005)
    assert min(gaps_s(played.reports)[known:]) >= 0.0095


@in_virtual_time
async def test_gateway_reports_every_50_ms_while_requests_wait() -> None:
    played = PlayedLink()
    async with following(played) as (front, one):
        await until("the first", lambda: played.reports)
        await asyncio.sleep(0.3)
        assert len(played.reports) <= 2, "one to begin with and one for the full Routes"
        front.waits = True
        one.edge()
        await asyncio.sleep(0.02)
        known = len(played.reports)
        await until("eight more", lambda: len(played.reports) >= known + 8)
    assert gaps_s(played.reports)[known:] == pytest.approx([0.05] * 7, abs=0.001)


@in_virtual_time
async def test_gateway_made_busy_by_a_routes_update_reports_before_its_heartbeat() -> None:
    """It does not wait for its next heartbeat: the leader may need its report that it applied a lower allocation."""
    played, reported = PlayedLink(), asyncio.Event()

    async def lines(path: str) -> AsyncIterator[bytes]:
        for line in played.replies[path.partition("?")[0]]:
            yield line
        if "routes" in path:
            await reported.wait()
            yield msgspec.json.encode(RoutesDelta(epoch=1, version=2))
        await asyncio.get_running_loop().create_future()

    played.lines = lines  # type: ignore[method-assign]  # this link sends another line later
    async with following(played) as (front, _):
        await until("it is quiet", lambda: len(played.reports) == 2)
        known, reported_s = len(played.reports), asyncio.get_running_loop().time()
        front.waits = True
        reported.set()
        await until("it reports", lambda: len(played.reports) > known)
        assert played.reports[known][0] - reported_s < HEARTBEAT_S / 2


async def test_unresponsive_autoscaler_does_not_delay_reports_to_others() -> None:
    slow, quick = PlayedLink(), PlayedLink()
    slow.answers.clear()
    async with following(slow, quick) as (front, _):
        front.waits = True
        await until("the responsive link gets the report", lambda: len(quick.reports) >= 4)
        assert len(slow.reports) == 1
        slow.answers.set()
        await until("it is sent to again", lambda: len(slow.reports) > 1)


async def test_report_sent_while_autoscaler_is_down_is_not_acknowledged() -> None:
    played = PlayedLink(up=False)
    async with following(played) as (front, _):
        await until("it tried", lambda: front.sequence >= 1)
        played.up = True
        await until("one is answered", lambda: front.acknowledged)
    assert front.acknowledged[0] > 1


async def test_flush_sends_the_last_report_to_reachable_autoscalers() -> None:
    up, down = PlayedLink(), PlayedLink(up=False)
    front = Front()
    await Sync(G, (up, down), front).flush()
    assert ([one.sequence for _, one in up.reports], front.acknowledged) == ([1], [1])


async def test_saved_snapshot_is_used_when_no_autoscaler_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "KEEP_S", 0.05)
    path = tmp_path / "g1.kept.json"
    async with following(PlayedLink(), kept_at=path):
        await until("it is written", path.exists)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    async with following(PlayedLink(up=False), kept_at=path) as (front, _):
        await until("it serves", lambda: front.catalogues and front.route_deltas)
        assert front.catalogues[0].models == (ENTRY,)
        assert [(route.replica, route.hold) for route in front.route_deltas[0].replicas] == [("r1", 0)]


async def test_first_complete_snapshot_is_saved_at_once_and_the_second_delayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a gateway is killed in its first second, its replacement still finds a file."""
    pace_s, written = 3600.0, list[snapshot_file.GatewaySnapshot]()
    monkeypatch.setattr(sync, "KEEP_S", pace_s)
    monkeypatch.setattr(snapshot_file, "save_snapshot", lambda _path, known: written.append(known))
    played = PlayedLink()
    routes, played.replies["/v1/routes"] = played.replies["/v1/routes"], []
    async with following(played, kept_at=tmp_path / "g1.kept.json") as (front, _):
        await until("the catalogue came", lambda: front.catalogues)
        assert not written, "half of it would take the place of the whole that an earlier process kept"
        played.replies["/v1/routes"] = routes
        played.cut()
        await until("it is kept", lambda: written)
        played.cut()
        await until("both came again", lambda: len(front.route_deltas) == 2 and len(front.catalogues) == 3)
    (known,) = written
    assert (known.catalogue.models, [route.replica for route in known.routes.replicas]) == ((ENTRY,), ["r1"])


async def test_snapshot_is_written_when_pending_delta_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "KEEP_S", 0.05)
    monkeypatch.setattr(sync, "UNFOLDED_MAX", 2)
    path = tmp_path / "g1.kept.json"
    async with following(PlayedLink(), kept_at=path):
        await until("it is written", path.exists)


async def test_saved_snapshot_is_not_used_when_an_autoscaler_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "KEEP_S", 0.05)
    path = tmp_path / "g1.kept.json"
    old = ModelEntry(name=ModelName("old"), served_name="old")
    snapshot_file.save_snapshot(
        path, snapshot_file.GatewaySnapshot(catalogue=CatalogueDelta(epoch=1, version=1, full=True, models=(old,)))
    )

    def models() -> list[str]:
        known = snapshot_file.load_snapshot(path)
        return [] if known is None else [model.name for model in known.catalogue.models]

    async with following(PlayedLink(), kept_at=path) as (front, _):
        await until("the file is true", lambda: models() == ["a"])
    assert front.catalogues == [CATALOGUE]


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), lambda path: path.mkdir()])
async def test_unreadable_snapshot_file_is_logged_and_sync_still_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(sync, "KEEP_S", 0.02)
    path = tmp_path / "g1.kept.json"
    spoil(path)
    played = PlayedLink(up=False)
    async with following(played, kept_at=path) as (front, _):
        await until("it is logged", lambda: "event=snapshot_read_failed" in caplog.text)
        played.up = True
        await until("it follows", lambda: front.route_deltas == [ROUTES])


def fail(*_: object) -> None:
    raise InjectedError


@in_virtual_time
async def test_exception_while_a_message_is_applied_reopens_only_its_stream() -> None:
    reported: list[tuple[str | None, str]] = []
    played = PlayedLink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_containment, "report_fault", lambda model, what, _: reported.append((model, what)))
        async with following(played) as (front, _):
            with pytest.MonkeyPatch.context() as fault:
                fault.setattr(front, "routes", fail)
                await until("the message failed twice", lambda: reported == [(None, "/v1/routes")] * 2)
            await until("the message is applied", lambda: front.route_deltas == [ROUTES])
            assert front.catalogues == [CATALOGUE]
            assert front.acknowledged, "reports are sent"


@pytest.mark.parametrize("kind", ["catalogue", "routes"])
async def test_deltas_are_applied_despite_an_exception_in_the_snapshot_merge(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[str | None, str]] = []
    monkeypatch.setattr(fault_containment, "report_fault", lambda model, what, _: reported.append((model, what)))
    for name, value in (("UNFOLDED_MAX", 1), ("PAUSE_S", 0.01), ("KEEP_S", 0.02)):
        monkeypatch.setattr(sync, name, value)
    path, played = tmp_path / "g1.kept.json", PlayedLink()

    async def lines(path: str) -> AsyncIterator[bytes]:
        yield played.replies[path.partition("?")[0]][0]
        while True:
            await asyncio.sleep(0.01)
            yield b"\n"

    played.lines = lines  # type: ignore[method-assign]  # this link sends heartbeats
    async with following(played, kept_at=path) as (front, _):
        with monkeypatch.context() as fault:
            fault.setattr(snapshot_file, f"with_{kind}", fail)
            await until("both messages are applied", lambda: front.catalogues and front.route_deltas)
            await until("the stream is reopened", lambda: len(front.catalogues) + len(front.route_deltas) > 3)
            assert reported == [(None, "snapshot")], "once"

        def is_complete() -> bool:
            known = snapshot_file.load_snapshot(path)
            return known is not None and bool(known.catalogue.models and known.routes.replicas)

        await until("the snapshot is complete", is_complete)


@in_virtual_time
async def test_exception_while_a_report_is_built_does_not_end_reports() -> None:
    reported: list[tuple[str | None, str]] = []
    played = PlayedLink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_containment, "report_fault", lambda model, what, _: reported.append((model, what)))
        async with following(played) as (front, _):
            with pytest.MonkeyPatch.context() as fault:
                fault.setattr(front, "report", fail)
                await until("the report failed", lambda: reported == [(None, "reports")])
            await until("a report is acknowledged", lambda: front.acknowledged)
            assert (front.catalogues, front.route_deltas) == ([CATALOGUE], [ROUTES])


@pytest.mark.parametrize("error", [msgspec.DecodeError(), MessageTooLargeError()])
def test_stream_with_an_unreadable_message_is_reopened_with_back_off(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def signal() -> None:
        played, opened_s = PlayedLink(), list[float]()

        async def lines(path: str) -> AsyncIterator[bytes]:
            if "routes" in path:
                opened_s.append(asyncio.get_running_loop().time())
                raise error
            yield played.replies["/v1/catalogue"][0]
            await asyncio.Event().wait()

        played.lines = lines  # type: ignore[method-assign]  # this link sends no Routes
        async with following(played):
            await until("it was reopened five times", lambda: len(opened_s) == 6)
        assert [round(after - before) for before, after in pairwise(opened_s)] == [1, 2, 4, 8, 9]

    run(signal())
    assert [one.getMessage().split()[0] for one in caplog.records] == ["event=message_unreadable"]


@in_virtual_time
async def test_streams_are_reopened_with_back_off_while_a_model_is_faulty() -> None:
    played, opened_s = PlayedLink(), list[float]()

    async def lines(path: str) -> AsyncIterator[bytes]:
        if "routes" in path:
            opened_s.append(asyncio.get_running_loop().time())
        yield played.replies[path.partition("?")[0]][0]
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            yield b"\n"

    played.lines = lines  # type: ignore[method-assign]  # this link sends heartbeats
    async with following(played) as (front, _):
        front.faulty = True
        await until("it was reopened three times", lambda: len(opened_s) == 4)
        front.faulty = False
        await asyncio.sleep(200.0)
    assert [round(after - before) for before, after in pairwise(opened_s)] == [2, 3, 5], (
        "1, 2 and 4 s, each until the next heartbeat"
    )
