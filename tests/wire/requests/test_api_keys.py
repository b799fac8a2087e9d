"""Guessed, revoked, expired and misplaced keys, on real sockets: case 46 of reliability, G."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Iterable
from hashlib import sha256
from pathlib import Path
from types import FrameType

import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, KeyEntry, TenantEntry, TenantName
from gateway.errors import CallError
from gateway.http.request_head import KNOWN_MAX, cached_head, parse_head
from gateway.memory import process_memory
from pilotlight.cli.main import COMPILED
from tests.support.fakes.engines.scripted_engine import HOLD, OK, STREAM_HEAD, ScriptedEngine, delta
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.net.canary import occurrences

GOOD, REVOKED, EXPIRED, READER = (
    "pl-" + word * 4 for word in ("good-key-09", "revoked-key", "expired-key", "reader-key1")
)
NOW_UNIX_S = 1_800_000_000.0
ROUNDS, PER_ROUND = 5, 2000
"""Random keys: 10,000, where the case has 100,000 a second."""
GROWTH_BYTES_MAX = 4 << 20
"""Memory must not grow after the first round; storing each key would add several MiB as text alone."""

CHAT = ("POST", "/v1/chat/completions")
PATHS = (
    CHAT, ("POST", "/v1/messages"), ("POST", "/v1/rerank"), ("POST", "/openai/deployments/m/chat/completions"),
    ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("GET", "/v1/models/nobody"),
)  # fmt: skip


def entry(key: str, *, expires_unix_s: float | None = None, role: str = "tenant") -> KeyEntry:
    """Return a key as in the catalogue."""
    return KeyEntry(sha256=sha256(key.encode()).hexdigest(), role=role, expires_unix_s=expires_unix_s)


def keys_are(one: Rig, version: int, *keys: KeyEntry) -> None:
    """Publish the keys of the one Tenant in the catalogue."""
    tenant = TenantEntry(name=TenantName("acme"), keys=keys)
    one.front.catalogue(CatalogueDelta(epoch=1, version=version, tenants=(tenant,)))


@contextlib.asynccontextmanager
async def guarded(*addresses: str, events: int | None = None) -> AsyncIterator[Rig]:
    """Start a gateway that requires keys: one valid, one expired, one that may only read, and one revoked."""
    async with rig(*addresses, settings=FrontSettings(keys_needed=True), events=events) as one:
        good, late = entry(GOOD), entry(EXPIRED, expires_unix_s=NOW_UNIX_S - 1)
        keys_are(one, 2, good, late, entry(READER, role="finance"), entry(REVOKED))
        keys_are(one, 3, good, late, entry(READER, role="finance"))
        yield one


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the wall clock, which determines when keys expire."""
    monkeypatch.setattr(time, "time", lambda: NOW_UNIX_S)


def asking(method: str, target: str, *lines: str, model: str = "m") -> bytes:
    """Return a request with these header lines."""
    body = f'{{"model":"{model}","messages":[]}}' if method == "POST" else ""
    head = [f"{method} {target} HTTP/1.1", "Host: gw", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join([*head, *lines, "", ""]) + body).encode()


def wrong(path: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return every way to present no valid key: (target, header lines)."""
    flipped = GOOD[:-1] + ("a" if GOOD[-1] != "a" else "b")
    lines = {
        "none": (),
        "unknown": ("Authorization: Bearer pl-nobody",),
        "last letter": (f"Authorization: Bearer {flipped}",),
        "first letter": (f"Authorization: Bearer x{GOOD[1:]}",),
        "longer": (f"Authorization: Bearer {GOOD}x",),
        "shorter": (f"Authorization: Bearer {GOOD[:-1]}",),
        "the hash": (f"Authorization: Bearer {entry(GOOD).sha256}",),
        "revoked": (f"Authorization: Bearer {REVOKED}",),
        "expired": (f"Authorization: Bearer {EXPIRED}",),
        "may only read": (f"Authorization: Bearer {READER}",),
        "another scheme": (f"Authorization: Basic {GOOD}",),
        "no scheme": (f"Authorization: {GOOD}",),
        "empty": ("Authorization: Bearer ",),
        "x-api-key": ("x-api-key: guess",),
        "api-key": ("api-key: guess",),
        "a Pilotlight header": (f"X-Pilotlight-Key: {GOOD}", "X-Tenant: acme"),
        "very long": (f"Authorization: Bearer {'k' * 60_000}",),
        "not ASCII": ("x-api-key: \u00ff\u00fe",),
    }
    found = {what: (path, given) for what, given in lines.items()}
    for name in ("key", "api_key", "api-key", "access_token", "Authorization"):
        found[f"in the query as {name}"] = (f"{path}?{name}={GOOD}", ())
    return found


async def shape(client: Client) -> bytes:
    """Return the next response, byte for byte, without the request id."""
    head = await client.reader.readuntil(b"\r\n\r\n")
    body = await client.reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
    return re.sub(rb"(?<=x-request-id: )[^\r]+", b"ID", head) + body


@pytest.mark.case("46")
@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_wrong_key_gets_an_identical_response(method: str, path: str) -> None:
    """Whatever is wrong with the key, and whether the target exists: one 401, and the connection stays open."""
    async with ScriptedEngine((OK,)) as engine, guarded(engine.address) as one:
        client, shapes = await one.client(), dict[bytes, str]()
        for what, (target, lines) in wrong(path).items():
            for model in ("m", "alias-m", "nobody"):
                client.send(asking(method, target, *lines, model=model))
                shapes[await shape(client)] = what
        assert len(shapes) == 1, shapes
        (answer,) = shapes
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        assert b'"code":"invalid_api_key"' in answer
        assert not engine.requests
        assert one.front.report().levels == (), "no model is started"
        client.send(asking(*CHAT, f"Authorization: Bearer {GOOD}"))
        assert (await client.answer())[0] == 200


class Steps:
    """Records the names of all functions that Python calls, its own and those in C, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        """A profile function (sys.setprofile)."""
        if event in ("call", "c_call"):
            self.names.append(frame.f_code.co_qualname if event == "call" else str(getattr(arg, "__qualname__", arg)))


@pytest.mark.case("46")
async def test_every_wrong_key_runs_the_same_function_calls() -> None:
    """It prevents timing probes: a key is hashed and looked up, and no step depends on how close a guess is."""
    async with guarded() as one:
        flipped = GOOD[:-1] + "a"
        keys = ["?" * len(GOOD), flipped, "x" + GOOD[1:], REVOKED, EXPIRED, READER]
        assert {len(key) for key in keys} == {len(GOOD)}
        done = []
        for key in keys:
            head, _ = parse_head(asking("GET", "/v1/models", f"Authorization: Bearer {key}")[:-4])
            steps = Steps()
            gc.disable()  # a collection would add the finalizers and callbacks that it runs
            sys.setprofile(steps.note)
            try:
                with contextlib.suppress(CallError):
                    one.front.tenant(head)
            finally:
                sys.setprofile(None)
                gc.enable()
            done.append(steps.names)
        assert all(names == done[0] for names in done)
        assert COMPILED or "openssl_sha256" in done[0], "the profile looks where the key is (compiled, it sees less)"


def guesses(seed: int) -> Iterable[bytes]:
    """Yield requests with random keys, pipelined in batches of 50; each has a new head."""
    chance = random.Random(seed)
    for _ in range(PER_ROUND // 50):
        keys = (f"Authorization: Bearer pl-{chance.randbytes(32).hex()}" for _ in range(50))
        yield b"".join(asking(*CHAT, key) for key in keys)


@pytest.mark.case("46")
async def test_random_keys_do_not_grow_memory_caches_or_metrics() -> None:
    """After the first 2,000, 8,000 more leave memory, caches and metrics unchanged."""
    async with guarded() as one:
        client, seen = await one.client(), list[tuple[int, int, int]]()
        for seed in range(ROUNDS):
            for batch in guesses(seed):
                client.send(batch)
                for _ in range(50):
                    assert (await shape(client)).startswith(b"HTTP/1.1 401")
            gc.collect()
            metrics = one.front.metrics()
            assert b'code="invalid_api_key",model="",outcome="failed"' in metrics
            seen.append((process_memory.resident_bytes() or 0, cached_head.cache_info().currsize, metrics.count(b"\n")))
        first, last = seen[0], seen[-1]
        assert last[0] - first[0] < GROWTH_BYTES_MAX
        assert last[1] <= KNOWN_MAX
        assert last[2] == first[2]
        assert one.front.report().totals == ()
        assert one.front.directory.names._resolved == {}


@pytest.mark.case("46")
async def test_revoked_key_is_rejected_at_once_on_an_open_connection() -> None:
    """The parsed head is cached (`cached_head`), the identity is not. Running requests continue."""
    scripts = [(OK,), (STREAM_HEAD + delta("a"), HOLD, delta("b")), (OK,)]
    async with ScriptedEngine(*scripts) as engine, guarded(engine.address) as one:
        kept, running = await one.client(), await one.client()
        request = asking(*CHAT, f"Authorization: Bearer {GOOD}")
        kept.send(request)
        assert (await kept.answer())[0] == 200
        running.call(stream=True, key=GOOD)
        await running.head()
        keys_are(one, 4, entry("pl-another"))
        kept.send(request)
        assert (await kept.answer())[0] == 401
        engine.release.set()
        assert b'"a"' in await running.chunk()
        assert b'"b"' in await running.chunk()
        keys_are(one, 5, entry(GOOD))
        kept.send(request)
        assert (await kept.answer())[0] == 200


@pytest.mark.case("46")
async def test_api_key_is_rejected_from_its_expiry_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine((OK,)) as engine, guarded(engine.address) as one:
        keys_are(one, 4, entry(GOOD, expires_unix_s=NOW_UNIX_S + 60))
        client, request = await one.client(), asking(*CHAT, f"Authorization: Bearer {GOOD}")
        for late_s, status in ((0, 200), (59.9, 200), (60.0, 401), (1e9, 401)):
            monkeypatch.setattr(time, "time", lambda late_s=late_s: NOW_UNIX_S + late_s)
            client.send(request)
            assert (await client.answer())[0] == status


@pytest.mark.case("46")
async def test_keys_never_appear_in_responses_events_metrics_or_upstream(tmp_path: Path) -> None:
    """In header, query, path or body, valid or not, keys are absent from responses, events, metrics and engines."""
    sink = os.open(tmp_path / "events", os.O_RDWR | os.O_CREAT)
    async with ScriptedEngine((OK,)) as engine:
        async with guarded(engine.address, events=sink) as one:
            client, answers = await one.client(), b""
            for target, lines in wrong(CHAT[1]).values():
                client.send(asking("POST", target, *lines))
                answers += await shape(client)
            client.send(asking("POST", f"{CHAT[1]}?api_key={GOOD}", f"Authorization: Bearer {GOOD}"))
            answers += await shape(client)
            for target in (f"/v1/{GOOD}", f"/v1/models/{GOOD}", f"/{GOOD}?{GOOD}"):
                client.send(asking("GET", target, f"Authorization: Bearer {GOOD}"))
                answers += await shape(client)
            client.send(asking("POST", CHAT[1], f"Authorization: Bearer {GOOD}", model=GOOD))
            answers += await shape(client)
            broken = await one.client()
            broken.send(f"GET /?key={GOOD} HTTP/1.1\r\nAuthorization : Bearer {GOOD}\r\n\r\n".encode())
            answers += await broken.rest()
            metrics = one.front.metrics()
        events = os.pread(sink, 1 << 20, 0)
        os.close(sink)
        assert answers.count(b"HTTP/1.1 200") == 1
        assert events.count(b"turned_away") > 20
        assert occurrences(answers + events + metrics + engine.requests[0], GOOD, REVOKED, EXPIRED, READER) == []
