"""The benchmarks' own tools: they count the received bytes, and never take a broken stream for a complete one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autoscaler.kubernetes.api import Object
from autoscaler.spec.installation_ownership import INSTALLATION
from bench import attacks, capacity, clients, clusterinstallations, engine, fabric, upstream, wrk
from bench.attackers import Crowd, Habit, attack, dribble, sip
from bench.calls import RATIOS
from bench.closedloop import Caller, Tally
from bench.clusterwebhook import require
from bench.dataplane import KEYS, PARTS
from bench.documents import ROOT, body
from bench.kit import BenchError, Figures
from bench.openloop import Line, Sender
from bench.parts import quick, run
from bench.peers import PEERS
from bench.streams import Stream
from tests.integration.cluster.support.control_plane import custom_resources
from tests.simulation import surges

CHUNKS = 3
WHOLE = engine.HEAD + engine.CHUNK * CHUNKS + engine.FINISH + engine.END


class Wire(asyncio.Transport):
    """Keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def abort(self) -> None:
        self.sent += b"aborted"


def stream_of(*pieces: bytes) -> Stream:
    """A stream that was requested and has received these pieces."""
    stream = Stream(CHUNKS)
    stream.connection_made(Wire())
    stream.ask(b"")
    for piece in pieces:
        stream.data_received(piece)
    return stream


def test_stream_split_at_any_byte_counts_as_complete() -> None:
    for at in range(len(WHOLE) + 1):
        stream = stream_of(WHOLE[:at], WHOLE[at:])
        assert (stream.chunks, stream.running, stream.broken) == (CHUNKS, False, ""), at


def test_chunks_in_one_read_are_counted_individually() -> None:
    assert stream_of(engine.HEAD + engine.CHUNK * 1000).chunks == 1000


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([WHOLE.replace(engine.CHUNK, b"", 1)], "2 chunks of 3"),
        ([WHOLE.replace(engine.END, engine.USAGE + engine.END)], "3 chunks of 3"),
        ([WHOLE.replace(b"200 OK", b"500 NO")], "3 chunks of 3"),
    ],
    ids=["a chunk is missing", "usage that the client did not request", "an error status"],
)
def test_benchmark_client_marks_an_invalid_stream_as_broken(pieces: list[bytes], why: str) -> None:
    stream = stream_of(*pieces)
    assert stream.broken.startswith(why)


def test_stream_closed_before_its_last_chunk_counts_as_broken() -> None:
    stream = stream_of(WHOLE.removesuffix(b"0\r\n\r\n"))
    assert (stream.running, stream.broken) == (True, "")
    stream.connection_lost(None)
    assert (stream.running, stream.broken[:21]) == (False, "closed after 3 chunks")


def test_benchmark_engine_sends_max_tokens_chunks_and_requested_usage(tmp_path: Path) -> None:
    head = b"POST / HTTP/1.1\r\nX-Request-Id: i\r\ncontent-length: %d\r\n\r\n"
    for more, usage in ((b"", b""), (b',"stream_options":{"include_usage":true}', engine.USAGE)):
        ask = b'{"model":"t","max_tokens":3%b}' % more
        connection, wire = engine.Connection(engine.Engine(tmp_path, "blast", 1)), Wire()
        connection.connection_made(wire)
        connection.data_received(head % len(ask) + ask)
        assert wire.sent == engine.HEAD + engine.CHUNK * CHUNKS + engine.FINISH + usage + engine.END


def test_token_delays_are_measured_the_same_at_any_read_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, wire = engine.Connection(engine.Engine(tmp_path, "stamped", 1)), Wire()
    connection.connection_made(wire)
    ask = b'{"max_tokens":2}'
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(ask) + ask)
    monkeypatch.setattr("bench.engine.time.monotonic", lambda: 100.25)
    connection.say()
    connection.say()
    monkeypatch.setattr("bench.engine.time.monotonic", lambda: 100.5)
    for at in range(len(wire.sent) + 1):
        stream = clients.Arrivals(b"")
        for piece in (wire.sent[:at], wire.sent[at:]):
            stream.data_received(piece)
        assert stream.delays_ms == [250.0, 250.0], at


def test_benchmark_engine_records_the_end_of_a_disconnected_request(tmp_path: Path) -> None:
    connection = engine.Connection(engine.Engine(tmp_path, "silent", 1))
    connection.connection_made(Wire())
    connection.data_received(b"POST / HTTP/1.1\r\nX-Request-Id: i\r\n\r\n")
    connection.connection_lost(None)
    notes = [line.split() for line in (tmp_path / engine.NOTES).read_text().splitlines()]
    assert [(what, id) for what, _, id in notes] == [("asked", "i"), ("ended", "i")]


def test_open_loop_reads_split_responses_and_records_broken_connections() -> None:
    for at in range(1, len(upstream.RESPONSE)):
        sender = Sender("http://127.0.0.1:1", b"ask")
        line, wire = Line(sender), Wire()
        line.connection_made(wire)
        line.send(b"ask")
        line.data_received(upstream.RESPONSE[:at])
        assert not sender.answers
        line.data_received(upstream.RESPONSE[at:])
        assert [answer.status for answer in sender.answers] == [200]
        assert (sender.idle, wire.sent) == ([line], b"ask")
    line.send(b"ask")
    line.connection_lost(None)
    assert [answer.status for answer in sender.answers] == [200, 0]


def test_benchmark_body_is_compact_json_of_at_least_the_requested_size() -> None:
    made = body("m", bytes_min=1024)
    assert 1024 <= len(made) < 1040
    assert json.dumps(json.loads(made), separators=(",", ":")).encode() == made


@pytest.mark.standard  # platform.platform() starts uname once per process
async def test_failed_benchmark_part_has_null_figures_in_the_result_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def works(place: Path, *, quick: bool) -> Figures:
        assert quick
        assert not list(place.iterdir())
        return {"a": 1.23456}

    async def breaks(place: Path, *, quick: bool) -> Figures:
        raise BenchError(f"no {place.name}, {quick}")

    failed: list[str] = []
    await run(("a", "b"), {"works": works, "breaks": breaks}, failed, quick=True)
    assert failed == ["breaks"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"a": 1.2346, "b": None}


@pytest.mark.parametrize(
    ("slow_s", "away_s", "etcd_s", "missed"),
    [
        (2.1, 4.0, 1.0, "cold start without the delay of a slow webhook: 2.10 s, at most 2"),
        (2.0, 4.1, 1.0, "cold start while the webhook is unavailable at first: 4.10 s, at most 4"),
        (2.0, 4.0, 1.1, "cold start with one error of etcd: 1.10 s, at most 1"),
    ],
)
def test_benchmark_fails_if_one_round_exceeds_a_time_limit(
    slow_s: float, away_s: float, etcd_s: float, missed: str
) -> None:
    require([2.0], [4.0], [1.0])
    with pytest.raises(BenchError, match=f"missed figures: {missed}$"):
        require([0.1, slow_s, 0.1], [2.1, away_s, 2.1], [0.1, etcd_s, 0.1])


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ((1, 0, 0, 0), "pods deleted: 1, at most 0"),
        ((0, 2, 0, 0), "Models served twice: 2, at most 0"),
        ((0, 0, 3, 0), "pods without an installation: 3, at most 0"),
        ((0, 0, 0, 3), "status writes of a Model when idle: 3, at most 2"),
        ((1, 0, 0, 3), "pods deleted: 1, at most 0; status writes of a Model when idle: 3, at most 2"),
    ],
)
def test_benchmark_of_installations_fails_above_each_limit(figures: tuple[int, int, int, int], missed: str) -> None:
    clusterinstallations.require(0, 0, 0, 2, 2)
    with pytest.raises(BenchError, match=f"missed figures: {missed}$"):
        clusterinstallations.require(*figures, 2)


def engine_pod(name: str, model: str, installation: str) -> Object:
    labels = {"pilotlight.dev/model": model} | ({INSTALLATION: installation} if installation else {})
    return {"metadata": {"name": name, "labels": labels}}


def test_installations_benchmark_counts_pods_without_installation_label() -> None:
    """They count as pods of a further installation, and their deletion counts as well."""
    first, second, unlabelled = engine_pod("a", "ada", "one"), engine_pod("b", "bob", "two"), engine_pod("c", "ada", "")
    seen = clusterinstallations.Seen()
    seen.look([first, second])
    assert (seen.twice, seen.gone, seen.unlabelled) == (0, 0, 0)
    seen.look([first, second, unlabelled])
    assert (seen.twice, seen.gone, seen.unlabelled) == (1, 0, 1)
    seen.look([first])
    assert (seen.twice, seen.gone, seen.unlabelled) == (1, 2, 1)


@pytest.mark.parametrize("quick", [True, False])
async def test_benchmark_of_installations_raises_if_a_pod_was_deleted(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of all combinations are compared with the limits."""

    @contextlib.asynccontextmanager
    async def bed(_: Path) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(api=None)

    async def nothing(*_: object) -> None: ...

    async def pair(*args: object) -> tuple[clusterinstallations.Seen, Counter[str], Counter[int]]:
        seen = clusterinstallations.Seen()
        if args[2] == clusterinstallations.PAIRS[-1]:
            seen.look([engine_pod("a", "ada", "one")])
            seen.look([])
        return seen, Counter({"ada": 1}), Counter({200: 1})

    monkeypatch.setattr(clusterinstallations, "bed", bed)
    monkeypatch.setattr(clusterinstallations, "make_namespace", nothing)
    monkeypatch.setattr(custom_resources, "install", nothing)
    monkeypatch.setattr(clusterinstallations, "_pair", pair)
    with pytest.raises(BenchError, match=r"missed figures: pods deleted: 1, at most 0$"):
        await clusterinstallations.measure(tmp_path, quick=quick)


def test_quick_mode_is_off_if_its_variable_is_0_empty_or_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, asked in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("QUICK", text)
        assert quick() is asked
    monkeypatch.delenv("QUICK")
    assert not quick()


def test_every_compared_proxy_has_a_ratio_in_the_results() -> None:
    assert {peer.name for peer in PEERS} == RATIOS.keys()
    assert set(RATIOS.values()) <= set(KEYS)
    assert len(PARTS) == len({id(part) for part in PARTS.values()})


async def stepped(crowd: Crowd, now_s: float, turns: int = 20) -> None:
    """Let the crowd and its target run for some event loop turns at one time."""
    for _ in range(turns):
        crowd.step(now_s, 0)
        await asyncio.sleep(0.001)


@pytest.mark.standard
async def test_attacking_clients_connect_at_their_rate_and_again_after_a_close() -> None:
    got = list[bytearray]()
    writers = list[asyncio.StreamWriter]()

    async def attacked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        got.append(mine)
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                mine += data

    async with await asyncio.start_server(attacked, "127.0.0.1", 0) as server:
        crowd = Crowd(server.sockets[0].getsockname()[:2], [Habit(2, b"a", dribble), Habit(1, b"b", sip)], per_s=2)
        await stepped(crowd, 0.0)
        assert got == []
        await stepped(crowd, 1.0)
        assert (sorted(bytes(content[:1]) for content in got), crowd.there) == ([b"a", b"b"], False)
        assert len({writer.get_extra_info("peername")[0] for writer in writers}) == 2
        await stepped(crowd, 1.5)
        assert (crowd.there, crowd.held, crowd.most) == (True, 3, 3)
        before = sum(map(len, got))
        for second in range(1, 4):
            await stepped(crowd, 1.5 + second)
        assert sum(map(len, got)) - before == 2 * 3, "a slow reader sends nothing more"
        writers[0].transport.abort()
        await stepped(crowd, 4.5)
        assert (crowd.cut, crowd.held, len(got)) == (1, 3, 4)
        crowd.leave()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def test_each_benchmark_attack_has_a_ratio_limit_and_a_result_key() -> None:
    assert attacks.RATIOS_MAX.keys() == attacks.ATTACKS.keys()
    assert {f"attack_{name}_p99_ratio" for name in attacks.ATTACKS} == set(ATTACK_KEYS)


def test_each_attack_scaled_to_10000_files_opens_at_most_8000_connections() -> None:
    for name in attacks.ATTACKS:
        habits, per_s = attack(name, "http://127.0.0.1:1", 10_000)
        assert sum(habit.clients for habit in habits) <= 8000
        assert per_s > 0


def test_built_in_load_client_counts_complete_responses() -> None:
    tally = Tally()
    caller, wire = Caller(b"ask ", tally), Wire()
    caller.connection_made(wire)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    for at in range(1, len(answer)):
        caller.data_received(answer[:at])
        assert tally.calls == at - 1
        caller.data_received(answer[at:])
    assert wire.sent == b"ask " * len(answer)
    caller.data_received(answer.replace(b"200 OK", b"503 No"))
    caller.connection_lost(None)
    assert (tally.calls, tally.bad) == (len(answer) + 1, 2)
    tally.running = False
    caller.data_received(answer)
    assert (tally.calls, wire.sent) == (len(answer) + 1, b"ask " * (len(answer) + 1)), "the time is over"


@pytest.mark.standard
async def test_throughput_is_measured_by_the_built_in_client_if_wrk_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrk, "there", lambda: False)
    sends = wrk.script(tmp_path / "call.lua", b"{}")
    server = await asyncio.get_running_loop().create_server(upstream.Connection, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await wrk.load(sends, url, 1, [psutil.Process()])
    assert wrk.name() == "our own client"
    assert found.per_s > 0
    assert found.bad == 0


ATTACK_KEYS = tuple(key for key in KEYS if key.startswith("attack_"))


@pytest.mark.parametrize("keys", [fabric.KEYS, capacity.KEYS, clients.KEYS, ATTACK_KEYS])
def test_fabric_capacity_client_and_attack_figures_are_on_interfaces_page(keys: tuple[str, ...]) -> None:
    page = (ROOT / "docs" / "development" / "interfaces.md").read_text()
    assert not [key for key in keys if f"`{key}`" not in page]


def test_capacity_benchmark_results_contain_the_required_figures() -> None:
    named = {"request_ms_p99", "redfish_overhead_s", "double_supply", "orphans", "cost_ratio_max", "energy_ratio"}
    assert named <= {*fabric.KEYS, *capacity.KEYS}


async def test_surge_violations_count_as_double_supply_orphans_or_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{surges.DOUBLE}: 2", f"{surges.ORPHAN}: one", "it was to detach by force"]
    one = surges.Result(broken=lines, orders=3, released=2, served=True, hedges=1)
    monkeypatch.setattr(capacity, "_surges", lambda many: iter([(seed, one) for seed in range(many)]))
    monkeypatch.setenv("SURGES", "2")
    found = await capacity.surged(tmp_path, quick=True)
    assert found == {"surges": 2, "double_supply": 2, "orphans": 2, "other": 2, "hedges": 2}
