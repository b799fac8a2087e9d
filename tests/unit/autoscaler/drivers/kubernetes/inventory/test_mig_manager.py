"""A repartitioning order is retried while the API server is unable to answer, and rejected after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest
import yaml
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.inventory.mig_manager import FILE, KEPT_MAX, RETRIED_S_MAX, SETTLE_S, NodeCutter
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.queries.mig_status import TRIES_MAX, config_of, configs_of
from autoscaler.slicing.mig import CONFIG, PRODUCT, STATE
from autoscaler.spec.installation_ownership import ANYBODYS, INSTALLATION, Ownership
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import Cutting, NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.mig import CutOrder, CutRefused, CuttableSeen, MigNode
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
            self.config_map = {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}
        self._fail()
        return body

    async def patch(self, path: str, body: Object) -> Object:
        """Patch the node or the ConfigMap, also if the answer is lost."""
        if path.endswith("/mig") and self._is_executed():
            assert self.config_map is not None
            metadata = self.config_map["metadata"]
            assert body["metadata"]["resourceVersion"] == metadata["resourceVersion"]
            version = str(int(metadata["resourceVersion"]) + 1)
            self.config_map = {**body, "metadata": {**metadata, **body["metadata"], "resourceVersion": version}}
        elif self._is_executed():
            for key in ("labels", "annotations"):
                self.node["metadata"][key] |= body["metadata"][key]
        self._fail()
        return self.node


OWNER, OTHER = Ownership("home-11111111"), Ownership("home-22222222")


def name_of(owner: Ownership, number: int = 1, cuts: tuple[tuple[str, ...], ...] = CUTS) -> str:
    """The name of a configuration of an installation in the ConfigMap."""
    return configs_of(cuts)[number - 1].replace("pilotlight-", f"pilotlight-{owner.suffix[1:]}-")


def entries(plane: Plane) -> dict[str, Any]:
    assert plane.config_map is not None
    found: dict[str, Any] = yaml.safe_load(plane.config_map["data"][FILE])["mig-configs"]
    return found


def give(
    plane: Plane, order: CutOrder = ORDER, owner: Ownership = OWNER, meanwhile: Callable[[], object] = list
) -> tuple[list[str], float]:
    """Give the order; return why it was rejected, and the seconds it took. `meanwhile` is called while it waits until
    mig-manager is sure to have read the ConfigMap.
    """
    refused: list[str] = []

    async def run() -> float:
        clock = asyncio.get_running_loop().time
        api, known = cast("Api", plane), asyncio.Event()

        def observe(batch: tuple[CuttableSeen | CutRefused, ...]) -> None:
            refused.extend(one.reason for one in batch if isinstance(one, CutRefused))
            known.set()

        cutter = NodeCutter(api, api, observe, lambda: SETTINGS, clock, owner=owner)
        running = asyncio.ensure_future(cutter.run())
        await known.wait()
        begun_s = clock()
        cutter.cut(order)
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(SETTLE_S / 2, meanwhile)
        await asyncio.gather(*cutter._orders)
        took_s = clock() - begun_s
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return took_s

    return refused, virtual_loop.run(run())


def test_config_map_for_repartitioning_has_the_label_of_its_installation() -> None:
    plane = Plane()
    give(plane)
    assert plane.config_map is not None
    assert plane.config_map["metadata"]["labels"][INSTALLATION] == OWNER.installation


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
    assert plane.node["metadata"]["labels"][CONFIG] == name_of(OWNER)
    assert took_s < SETTLE_S + 1.0


def test_repartition_order_is_rejected_after_a_minute_of_server_errors() -> None:
    refused, took_s = give(Plane(*[BUSY] * 50))
    assert refused == ["the API server rejected it: InternalError"]
    assert RETRIED_S_MAX <= took_s < RETRIED_S_MAX + 11.0


def test_repartition_order_is_rejected_at_once_after_a_403() -> None:
    refused, took_s = give(Plane(ApiError(403, "Forbidden", "")))
    assert len(refused) == 1
    assert took_s == 0.0


# --- two installations share the ConfigMap, since mig-manager reads only one ------------------------------------------


def filled(*names: str) -> Object:
    """A ConfigMap with these configurations, none of which a node names."""
    text = yaml.safe_dump({"version": "v1", "mig-configs": {name: [{"devices": "all"}] for name in names}})
    return {"metadata": {"name": "mig", "resourceVersion": "1"}, "data": {FILE: text}}


def many(owner: Ownership, count: int) -> list[str]:
    return [f"pilotlight-{owner.suffix[1:]}-{number:010x}-1" for number in range(count)]


def test_two_installations_add_their_own_configurations_of_the_same_layout() -> None:
    plane = Plane()
    for owner in (OWNER, OTHER):
        plane.node["metadata"]["labels"] |= {CONFIG: "old", STATE: "success"}
        assert give(plane, owner=owner)[0] == []
        assert plane.node["metadata"]["labels"][CONFIG] == name_of(owner)
    names = {name_of(owner, number) for owner in (OWNER, OTHER) for number in (1, 2, 3)}
    assert entries(plane).keys() == {"all-disabled", *names}


def test_full_config_map_loses_no_configuration_of_another_installation() -> None:
    """Each may be written minutes before a node names it. Own configurations that nothing names are removed."""
    theirs, foreign = [*many(OTHER, 2 * KEPT_MAX), name_of(OTHER)], ["all-7g.80gb", "pilotlight-by-hand"]
    ours, earlier = many(OWNER, KEPT_MAX), "pilotlight-0123456789-1"
    plane = Plane()
    plane.config_map = filled(*theirs, *foreign, *ours)
    give(plane)
    written = {name_of(OWNER, number) for number in (1, 2, 3)}
    assert entries(plane).keys() == {*theirs, *foreign, *ours, *written}, "as many as may be kept"
    plane.node["metadata"]["labels"] |= {CONFIG: "old", STATE: "success"}
    plane.config_map = filled(*theirs, *foreign, *ours, earlier)
    give(plane)
    assert entries(plane).keys() == {*theirs, *foreign, *written}


def test_pending_mig_config_survives_pruning_by_another_installation() -> None:
    """It happens between the write of the ConfigMap and that of the node."""
    plane, pruned = Plane(), list[int]()
    plane.config_map = filled(*many(OWNER, KEPT_MAX + 1))

    def prune() -> None:
        assert plane.node["metadata"]["labels"][CONFIG] == "old", "the order still waits"
        before = entries(plane)
        after = NodeCutter(
            cast("Api", plane), cast("Api", plane), lambda _: None, lambda: SETTINGS, owner=OWNER
        )._pruned(before)  # fmt: skip
        pruned.append(len(before) - len(after))
        plane.config_map = filled(*after)

    assert give(plane, owner=OTHER, meanwhile=prune)[0] == []
    assert pruned == [KEPT_MAX + 1]
    assert plane.node["metadata"]["labels"][CONFIG] == name_of(OTHER)
    assert name_of(OTHER) in entries(plane)


def observed_node(plane: Plane, owner: Ownership) -> MigNode:
    """The node as an installation reports it."""
    seen = list[CuttableSeen | CutRefused]()

    async def read() -> None:
        cutter = NodeCutter(cast("Api", plane), cast("Api", plane), seen.extend, lambda: SETTINGS, owner=owner)
        running = asyncio.ensure_future(cutter.run())
        while not seen or not isinstance(seen[-1], CuttableSeen) or not seen[-1].nodes:
            await asyncio.sleep(0.1)
        running.cancel()

    virtual_loop.run(read())
    assert isinstance(seen[-1], CuttableSeen)
    (node,) = seen[-1].nodes
    return node


@pytest.mark.parametrize(("owner", "tries"), [(OWNER, ORDER.tries), (OTHER, TRIES_MAX)], ids=["own", "foreign"])
def test_failed_mig_order_is_retried_only_by_its_own_installation(owner: Ownership, tries: int) -> None:
    """Its node stays closed, because its slices may change."""
    plane = Plane()
    give(plane)
    plane.node["metadata"]["labels"][STATE] = "failed"
    node = observed_node(plane, owner)
    assert node.order is not None
    assert (node.order.cuts, node.order.tries) == (CUTS, tries)


def test_failed_mig_order_of_an_earlier_version_is_retried() -> None:
    plane = Plane()
    give(plane, owner=ANYBODYS)
    plane.node["metadata"]["labels"][STATE] = "failed"
    node = observed_node(plane, OWNER)
    assert node.order is not None
    assert node.order.tries == ORDER.tries


def test_retried_mig_order_uses_another_name_than_the_current_config() -> None:
    """The planner knows names without the installation."""
    plane = Plane()
    give(plane)
    node = observed_node(plane, OWNER)
    assert node.order is not None
    assert (node.config, node.order.config, node.order.cuts) == (ORDER.config, ORDER.config, CUTS)
    again = config_of(CUTS, node.config)
    assert again == configs_of(CUTS)[1]
    plane.node["metadata"]["labels"][STATE] = "failed"
    assert give(plane, replace(ORDER, config=again, before=node.config, tries=2))[0] == []
    assert plane.node["metadata"]["labels"][CONFIG] == name_of(OWNER, 2)
