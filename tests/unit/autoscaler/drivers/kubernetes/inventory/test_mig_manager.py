"""A repartitioning order is retried while the API server is unable to answer, and rejected after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from autoscaler.drivers.kubernetes.inventory.mig_manager import FILE, RETRIED_S_MAX, SETTLE_S, NodeCutter
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.queries.mig_status import configs_of
from autoscaler.slicing.mig import CONFIG, PRODUCT, STATE
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import Cutting, NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.mig import CutOrder, CutRefused, CuttableSeen
from tests.simulation.environment import virtual_loop
from tests.support.fakes.kubernetes.api_server import Server

H100 = "NVIDIA-H100-80GB-HBM3"
CUTS = (("1g.10gb", "1g.10gb", "3g.40gb"),)
ORDER = CutOrder(node="n1", config=configs_of(CUTS)[0], cuts=CUTS, before="old")
DEVICE = NodeDevice(model=H100, memory_bytes=Bytes(80 << 30))
KIND = NodeKind(selector={PRODUCT: H100}, device=DEVICE, slicing=NodeSlicing(kind="mig", cut=True))
SETTINGS = Settings(nodes=(KIND,), cutting=Cutting(namespace="n", config_map="mig"))
BUSY = ApiError(500, "InternalError", "etcdserver: leader changed")


class Plane(Server):
    """One node. `errors` are raised by the next writes; the write before a timeout is executed."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        labels = {PRODUCT: H100, CONFIG: "old", STATE: "success"}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        meta = {"name": "n1", "uid": "u", "resourceVersion": "1", "labels": labels, "annotations": {}}
        self.node: Object = {"metadata": meta, "spec": {}, "status": ready}
        self.truth = {"n1": self.node}
        self.config_map: Object | None = None
        self.errors = list(errors)

    def _is_executed(self) -> bool:
        return not self.errors or isinstance(self.errors[0], UnreachableError)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    async def get(self, path: str, **query: str) -> Object:
        """The node or the ConfigMap."""
        found = self.node if path.endswith("/n1") else self.config_map
        if found is None:
            raise ApiError(404, "NotFound", path)
        return found

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        """There is no pod."""
        yield ListPage("1", "", [], [])

    async def create(self, path: str, body: Object) -> Object:
        """Create the ConfigMap, also if the answer is lost."""
        if self._is_executed():
            self.config_map = body
        self._fail()
        return body

    async def patch(self, path: str, body: Object) -> Object:
        """Patch the node, also if the answer is lost."""
        if self._is_executed():
            for key in ("labels", "annotations"):
                self.node["metadata"][key] |= body["metadata"][key]
        self._fail()
        return self.node


def give(plane: Plane) -> tuple[list[str], float]:
    """Give the order; return why it was rejected, and the seconds it took."""
    refused: list[str] = []

    async def order() -> float:
        clock = asyncio.get_running_loop().time
        api, known = cast("Api", plane), asyncio.Event()

        def observe(batch: tuple[CuttableSeen | CutRefused, ...]) -> None:
            refused.extend(one.reason for one in batch if isinstance(one, CutRefused))
            known.set()

        cutter = NodeCutter(api, api, observe, lambda: SETTINGS, clock, owner=Ownership("home-1"))
        running = asyncio.ensure_future(cutter.run())
        await known.wait()
        begun_s = clock()
        cutter.cut(ORDER)
        await asyncio.gather(*cutter._orders)
        took_s = clock() - begun_s
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return took_s

    return refused, virtual_loop.run(order())


def test_config_map_for_repartitioning_has_the_label_of_its_installation() -> None:
    plane = Plane()
    give(plane)
    assert plane.config_map is not None
    assert plane.config_map["metadata"]["labels"][INSTALLATION] == "home-1"


@pytest.mark.parametrize(
    "errors",
    [
        (BUSY,),
        (ApiError(503, "", ""), ApiError(429, "", "")),
        (UnreachableError("PATCH: TimeoutError"),),
        (ApiError(409, "AlreadyExists", ""),),
    ],
    ids=["one-500", "503-and-429", "one-timeout", "one-409"],
)
@pytest.mark.parametrize("has_config_map", [False, True], ids=["at-the-config-map", "at-the-node"])
def test_repartition_order_is_retried_while_the_server_cannot_write(
    errors: tuple[Exception, ...], has_config_map: bool
) -> None:
    plane = Plane(*errors)
    if has_config_map:
        known = Plane()
        give(known)
        assert known.config_map is not None
        assert FILE in known.config_map["data"]
        plane.config_map = known.config_map
    refused, took_s = give(plane)
    assert not refused
    assert not plane.errors
    assert plane.node["metadata"]["labels"][CONFIG] == ORDER.config
    assert took_s < SETTLE_S + 1.0


def test_repartition_order_is_rejected_after_a_minute_of_server_errors() -> None:
    refused, took_s = give(Plane(*[BUSY] * 50))
    assert refused == ["the API server rejected it: InternalError"]
    assert RETRIED_S_MAX <= took_s < RETRIED_S_MAX + 11.0


def test_repartition_order_is_rejected_at_once_after_a_403() -> None:
    refused, took_s = give(Plane(ApiError(403, "Forbidden", "")))
    assert len(refused) == 1
    assert took_s == 0.0
