"""A pod is marked and deleted, whoever takes the mark away meanwhile: no stop is lost while we may write."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes import orders as orders_
from autoscaler.drivers.kubernetes import pods
from autoscaler.drivers.kubernetes.api import Api, ApiError, FencedError, Object
from autoscaler.drivers.kubernetes.orders import CONFLICTS_MAX, Hears, Orders
from autoscaler.drivers.kubernetes.pods import PodSeen
from autoscaler.drivers.kubernetes.watching import Watched
from autoscaler.states import ReplicaState as S
from autoscaler.world import Drain, Replica
from tests.kit.localrig import launch, replica

PATH = "/api/v1/namespaces/n/pods"
EPOCH = 7


class Server:
    """One pod. After each mark of ours somebody takes it away, `meddles` times; `writes` are those that are left."""

    def __init__(self, meddles: int = 0, writes: int = 1000) -> None:
        self.one, model = replica("r1", ("engine", "{port}"), ("n/gpu0",))
        self.one = replace(self.one, drain=Drain(since_s=0.0, reason="idle", came_from=S.READY, epoch=EPOCH, version=1))
        self.pod: Object | None = pods.manifest(self.one, model, launch(model, "", 1), "image")
        self.pod["metadata"] |= {"uid": "u1", "namespace": "n", "resourceVersion": "1"}
        self.meddles = meddles
        self.writes = writes
        self.contended = 0
        self.asked: list[str] = []

    def _wrote(self, metadata: Any) -> None:
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)

    def _write(self, what: str) -> Any:
        if not self.writes:
            raise FencedError(what)
        self.writes -= 1
        self.asked.append(what)
        if self.pod is None:
            raise ApiError(404, "NotFound", "")
        return self.pod["metadata"]

    async def get(self, path: str) -> Object:
        del path
        if self.pod is None:
            raise ApiError(404, "NotFound", "")
        return self.pod

    async def patch(self, path: str, body: Object, kind: str) -> Object:
        del path, kind
        metadata = self._write("mark")
        if self.contended:
            self.contended -= 1
            raise ApiError(409, "Conflict", "the object has been modified")
        metadata["annotations"] = metadata["annotations"] | body["metadata"]["annotations"]
        self._wrote(metadata)
        said = {"metadata": dict(metadata)}
        if self.meddles:
            self.meddles -= 1
            metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != pods.DRAIN}
            self._wrote(metadata)
        return said

    async def delete(self, path: str, *, uid: str, version: str, grace_s: int) -> Object:
        del path, grace_s
        metadata = self._write("delete")
        if uid != metadata["uid"] or version != metadata["resourceVersion"]:
            raise ApiError(409, "Conflict", "the precondition failed")
        assert metadata["annotations"][pods.DRAIN] == str(EPOCH)
        self.pod = None
        return {}


class Deaf:
    """Hears nothing that a stop would tell."""

    def __init__(self) -> None:
        self.items: dict[object, PodSeen] = {}
        self.gone: list[str] = []

    def is_gone(self, one: Replica) -> None:
        self.gone.append(one.id)

    def suspect(self) -> None:
        """Nothing to read anew."""

    def expect(self, version: str) -> None:
        """Nor to wait for."""


def orders(server: Server) -> Orders:
    deaf = Deaf()
    return Orders(cast("Api", server), PATH, cast("Watched[PodSeen]", deaf), cast("Hears", deaf))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are what they are for."""
    monkeypatch.setattr(orders_, "RETRY_S", 0.0)


async def test_a_mark_that_is_taken_away_is_made_again_and_the_pod_is_deleted() -> None:
    server = Server(meddles=1)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None
    assert server.asked == ["mark", "delete"] * 2


async def test_after_many_tries_it_is_tried_again_after_a_pause() -> None:
    server = Server(meddles=CONFLICTS_MAX + 3)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None
    assert server.asked == ["mark", "delete"] * (CONFLICTS_MAX + 4)


async def test_a_mark_that_came_too_late_for_a_busy_pod_is_made_again() -> None:
    server = Server()
    server.contended = 2
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
async def test_who_may_not_write_any_more_leaves_it_to_who_may(writes: int) -> None:
    server = Server(meddles=2, writes=writes)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is not None
    assert len(server.asked) == writes
