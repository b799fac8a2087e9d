"""Conditions of adopted workloads are written one at a time, and rejected writes do no harm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from autoscaler.drivers.kubernetes.adoption import status_writer
from autoscaler.drivers.kubernetes.adoption.objects import ReleasedWorkload, ShownCondition, WorkloadKey
from autoscaler.drivers.kubernetes.adoption.status_writer import Showing
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.resources.model_conditions import ConditionValue
from tests.support.builders.adoption_workload import annotated

SAID = ConditionValue("pilotlight.dev/Adopted", "True", "Scaled", "m")


class Server:
    """Fails writes with the given exceptions first, then accepts all."""

    def __init__(self, *answers: Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Object, str]] = []

    async def apply(self, path: str, body: Object, owner: str) -> Object:
        """Like `Api.apply`."""
        await asyncio.sleep(0)
        self.asked.append((path, body, owner))
        if self.answers:
            raise self.answers.pop(0)
        return {"metadata": {"resourceVersion": str(100 + len(self.asked))}}

    @staticmethod
    def unix_s() -> float:
        """Like `Api.unix_s`."""
        return 60.0

    async def until(self, count: int) -> None:
        """Wait until this many writes were requested."""
        async with asyncio.timeout(60):
            while len(self.asked) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def shows(server: Server) -> AsyncIterator[Showing]:
    one = Showing(cast("Api", server), time.monotonic)
    task = asyncio.create_task(one.run())
    yield one
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled(), "nothing ended it before"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the rate limit and shortens the retry delay."""
    monkeypatch.setattr(status_writer, "PER_S", 1000.0)
    monkeypatch.setattr(status_writer, "RETRY_S", 0.001)


def named(name: str) -> WorkloadKey:
    return WorkloadKey("Deployment", "default", name)


async def test_leader_writes_an_unchanged_condition_only_once() -> None:
    server = Server()
    async with shows(server) as one:
        one.see(annotated(), SAID)
        await asyncio.sleep(0.01)
        assert server.asked == [], "another leads"
        one.lead()
        await server.until(1)
        for version in (1, 101):
            one.see(annotated(version=version, shown=ShownCondition(SAID, "t") if version > 100 else None), SAID)
        one.see(annotated(key=named("bert"), uid="v"), SAID)
        await server.until(2)
    (path, body, owner), (other, _, _) = server.asked
    assert (path, owner) == ("/apis/apps/v1/namespaces/default/deployments/ada/status", "pilotlight")
    assert other.endswith("/bert/status")
    assert body["metadata"] == {"name": "ada", "uid": "u"}
    at = "1970-01-01T00:01:00Z"
    assert body["status"] == {"conditions": [
        {"type": "pilotlight.dev/Adopted", "status": "True", "reason": "Scaled", "message": "m",
         "lastTransitionTime": at, "lastUpdateTime": at}]}  # fmt: skip


@pytest.mark.parametrize("status", [403, 404, 409, 422])
async def test_rejected_condition_is_logged_once_and_does_not_block_others(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(ApiError(status, "No", "no"), ApiError(status, "No", "no"))
    async with shows(server) as one:
        one.lead()
        for name in ("ada", "bert", "carl"):
            one.see(annotated(key=named(name)), SAID)
        await server.until(3)
        one.see(annotated(key=named("ada"), version=2), SAID)
        await asyncio.sleep(0.01)
    assert [path.split("/")[-2] for path, _, _ in server.asked] == ["ada", "bert", "carl"]
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "Deployment default/ada" in caplog.text


async def test_condition_write_is_retried_after_server_errors(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(UnreachableError("no answer"), UnreachableError("no answer"), ApiError(503, "Busy", "later"))
    async with shows(server) as one:
        one.lead()
        one.see(annotated(), SAID)
        await server.until(4)
    assert len(caplog.records) == 2, "each problem is reported once"


async def test_writer_that_lost_leadership_writes_only_after_leading_again() -> None:
    server = Server(FencedError())
    async with shows(server) as one:
        one.lead()
        one.see(annotated(), SAID)
        await server.until(1)
        await asyncio.sleep(0.01)
        assert len(server.asked) == 1
        one.lead()
        await server.until(2)
        await one.follow()
        one.see(annotated(version=200, shown=ShownCondition(SAID, "t")), SAID._replace(message="other"))
        await asyncio.sleep(0.01)
        assert len(server.asked) == 2


async def test_condition_of_released_workload_is_removed() -> None:
    server = Server()
    async with shows(server) as one:
        one.see(ReleasedWorkload(named("ada"), "u", 1, ShownCondition(SAID, "t")), None)
        one.lead()
        await server.until(1)
    assert server.asked[0][1]["status"] == {}
