"""A rejected start blocks the next ones of its spec for a minute, or until a policy of the namespace changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.blocked_starts import Policies, RefusedStarts
from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.spec.model import Model, ModelSpec
from tests.support.fakes.kubernetes.api_server import Event, Server

ADA = Model(name=ModelName("ada"), spec=ModelSpec(engine="vllm"))
SAID = "its pod was refused: exceeded quota"


class Quotas(Server):
    """A server with one ResourceQuota and no LimitRanges."""

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], *, initial: bool = False, silent_s: float = 0
    ) -> AsyncIterator[Event]:
        """See Server."""
        if path != "/api/v1/namespaces/n/resourcequotas":
            raise ApiError(404, "NotFound", path)
        async for event in super().watch(path, version, query, initial=initial, silent_s=silent_s):
            yield event


def quota(pods: str, used: str, version: int) -> Object:
    metadata = {"name": "q", "namespace": "n", "uid": "u", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"hard": {"pods": pods}}, "status": {"used": {"pods": used}}}


def test_rejected_start_blocks_its_spec_for_sixty_seconds() -> None:
    refused = RefusedStarts()
    refused.note(ADA.name, ADA.spec_hash(), SAID, 5.0)
    assert [refused.reason(ADA, now_s) for now_s in (5.0, 64.9, 65.0)] == [SAID, SAID, ""]
    changed = Model(name=ADA.name, spec=ModelSpec(engine="sglang"))
    assert not refused.reason(changed, 5.0), "another spec may be accepted"


@pytest.mark.parametrize(
    ("pods", "used", "is_blocked"), [("9", "4", False), ("4", "3", True)], ids=["spec-changes", "status-changes"]
)
async def test_rejected_start_is_forgotten_only_when_a_quota_spec_changes(
    pods: str, used: str, is_blocked: bool
) -> None:
    server, refused = Quotas(), RefusedStarts()
    server.truth = {"q": quota("4", "4", 1)}
    calls: list[None] = []

    def changed() -> None:
        refused.forget()
        calls.append(None)
        if len(calls) == 1:  # the existing quotas are known
            refused.note(ADA.name, ADA.spec_hash(), SAID, 0.0)

    server.stream = [("MODIFIED", quota(pods, used, 2))]
    watching = asyncio.create_task(Policies(cast("Api", server), "n", changed).run())
    async with asyncio.timeout(60):
        await server.idle.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert bool(refused.reason(ADA, 1.0)) == is_blocked
