"""Logins that a node agent uses for a pull: those of pull secrets, selected as kubelets do."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
from aiohttp import web

from artifacts.credentials.docker_config import AuthConfig, Config, Login
from artifacts.http.transport import Site
from artifacts.registry.client import Client
from autoscaler.agent_contract import NodeWant, NodeWants
from autoscaler.contract import ReplicaId, WeightsReport
from pilotlight.agent.weights.keeper import WeightsKeeper
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.registry import FakeRegistry


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
