"""Authentication of reports with an API server that answers, hangs or rejects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from autoscaler.kubernetes.api import Api, Object
from autoscaler.server import token_review as tokens_
from autoscaler.server.auth import AGENT, BOTH, GATEWAY, Authenticated, Roles
from autoscaler.server.token_review import AGAIN_MAX, ASKED_MAX, KEPT_MAX, KEPT_S, NODE, STANDS_S, Tokens

US = "system:serviceaccount:n:gateway"
AGENTS = "system:serviceaccount:n:agent"


class Server:
    """Accepts some tokens; while it `hangs`, reviews do not return."""

    def __init__(self) -> None:
        self.good: set[str] = set()
        self.hangs, self.node, self.user = False, "", US
        self.asked: list[str] = []
        self._goes_on = asyncio.Event()

    def go_on(self) -> None:
        self.hangs = False
        self._goes_on.set()

    async def create(self, path: str, body: Object) -> Object:
        """Answer a TokenReview."""
        assert path.endswith("/tokenreviews")
        token = body["spec"]["token"]
        self.asked.append(token)
        if self.hangs:
            await self._goes_on.wait()
        if token not in self.good:
            return {"status": {"authenticated": False}}
        user = {"username": self.user, **({"extra": {NODE: [self.node]}} if self.node else {})}
        return {"status": {"authenticated": True, "audiences": ["pilotlight"], "user": user}}


class House:
    def __init__(self, users: Mapping[str, Roles]) -> None:
        self.now_s = 0.0
        self.server = Server()
        self.tokens = Tokens(cast("Api", self.server), users, clock=lambda: self.now_s)

    async def let_in(self, *names: str) -> None:
        self.server.good.update(names)
        for name in names:
            assert await self.tokens.admits(name)

    async def settled(self) -> None:
        while self.tokens._again:
            await asyncio.sleep(0)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House({US: BOTH})
    yield made
    await made.tokens.close()


async def test_known_tokens_are_admitted_at_once_while_the_api_server_hangs(house: House) -> None:
    names = [f"g{n}" for n in range(AGAIN_MAX + 10)]
    await house.let_in(*names)
    house.now_s += KEPT_S
    house.server.hangs = True
    for _ in range(3):
        for name in names:
            report = house.tokens.admits(name)
            with pytest.raises(StopIteration) as reported:  # without waiting
                report.send(None)
            assert reported.value.value == Authenticated()
        await asyncio.sleep(0)
    assert len(house.server.asked) == len(names) + AGAIN_MAX, "one question for each, and not more than so many"
    house.now_s += STANDS_S
    house.server.go_on()
    await house.settled()


async def test_token_bound_to_a_pod_identifies_its_node(house: House) -> None:
    house.server.good.update(("ours", "unbound"))
    assert await house.tokens.admits("unbound") == Authenticated()
    house.server.node = "n1"
    assert await house.tokens.admits("ours") == await house.tokens.admits("ours") == Authenticated(node="n1")
    assert house.server.asked == ["unbound", "ours"]


async def test_a_token_has_the_roles_of_its_service_account() -> None:
    house = House({US: GATEWAY, AGENTS: AGENT})
    house.server.good.update(("gateway", "agent", "other"))
    found = []
    for shown, user in (("gateway", US), ("agent", AGENTS), ("other", "system:serviceaccount:n:other")):
        house.server.user = user
        found.append(await house.tokens.admits(shown))
    assert found == [Authenticated(roles=GATEWAY), Authenticated(roles=AGENT), None]
    await house.tokens.close()


async def test_unknown_tokens_do_not_evict_known_tokens_from_the_cache(house: House) -> None:
    await house.let_in("ours")
    for n in range(KEPT_MAX + 1):
        assert not await house.tokens.admits(f"bogus{n}")
    house.now_s += KEPT_S
    house.server.hangs = True
    strangers = [asyncio.create_task(house.tokens.admits(f"more{n}")) for n in range(ASKED_MAX)]
    await asyncio.sleep(0)
    assert not await house.tokens.admits("another"), "so many are asked about now"
    assert await house.tokens.admits("ours")
    await asyncio.sleep(0)
    assert house.server.asked[-1] == "ours", "and it is asked about nevertheless"
    house.server.go_on()
    assert await asyncio.gather(*strangers) == [None] * ASKED_MAX


async def test_revoked_token_is_rejected_after_its_next_token_review(house: House) -> None:
    await house.let_in("ours")
    house.server.good.clear()
    house.now_s += KEPT_S
    assert await house.tokens.admits("ours"), "asked about meanwhile"
    await house.settled()
    assert not await house.tokens.admits("ours")
    house.now_s += KEPT_S
    house.server.hangs = True
    later = asyncio.create_task(house.tokens.admits("ours"))
    await asyncio.sleep(0)
    assert not later.done(), "a stranger by now"
    house.server.go_on()
    assert not await later


async def test_cached_token_admission_expires_while_the_api_server_hangs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_, "ASK_S_MAX", 0.0)
    house.server.hangs = True
    house.server.good.add("new")
    assert not await house.tokens.admits("new")
    monkeypatch.setattr(tokens_, "ASK_S_MAX", 2.0)
    house.server.hangs = False
    await house.let_in("ours")
    house.server.hangs = True
    monkeypatch.setattr(tokens_, "ASK_S_MAX", 0.0)
    house.now_s += STANDS_S - 1.0
    assert await house.tokens.admits("ours")
    house.now_s += 1.0
    assert not await house.tokens.admits("ours")
