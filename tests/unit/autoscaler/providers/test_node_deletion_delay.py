"""Nodes with attached devices delay their deletion, from the first device until the last is detached."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine

import pytest
from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import list_leased_nodes
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.node_deletion_delay import DELAY, NODES, DeletionDelay, delay_annotation_key
from autoscaler.providers.reconciler import REST_S
from autoscaler.state.capacity import LeasesSeen
from autoscaler.state.world import World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.capacity import acted, arrived, cloud, listed, observe, offer, shown, surge
from tests.support.builders.worlds import T0, replace_fields
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import call_with

HOME = "pilotlight", "pilotlight"
KEY = delay_annotation_key(*HOME)
OTHERS = delay_annotation_key("elsewhere", "pilotlight")


class Bench:
    """Two nodes, and the `World` that `DeletionDelay` sees."""

    def __init__(self) -> None:
        self.server, self.writes, self.world = PlayedServer(lambda: 0.0), True, World(epoch=1)
        for name in ("w1", "w2"):
            self.server.put(f"{NODES}/{name}", {})
        self.one = DeletionDelay(self.server, lambda: self.world, lambda: self.writes, HOME)
        self.task = asyncio.create_task(self.one.run())

    async def looks(self, world: World) -> list[str]:
        """The nodes that delay their deletion after this `World` was seen."""
        self.world = world
        self.one.look()
        await asyncio.sleep(0.1)
        return self.saying(KEY)

    def saying(self, key: str) -> list[str]:
        """The nodes that have this annotation."""
        nodes = [one["metadata"] for _, one in sorted(self.server.objects.items())]
        return [one["name"] for one in nodes if key in (one.get("annotations") or {})]


def bench(scenario: Callable[[Bench], Coroutine[object, object, None]]) -> None:
    async def whole() -> None:
        one = Bench()
        await scenario(one)
        one.task.cancel()

    run(whole())


def attached() -> World:
    """A device is attached to w1."""
    at, _ = acted(surge(offer()))
    return arrived(at, T0 + 1)


def gone(at: World) -> World:
    """Two lists of the provider no longer contain the order."""
    for later_s in (2.0, 3.0):
        at = observe(at, LeasesSeen(provider="rack", leases=(), began_s=T0 + later_s), now_s=T0 + later_s)
    return at


def test_node_has_ordered_devices_from_commitment_until_removal() -> None:
    at, _ = acted(surge(offer()))
    assert not list_leased_nodes(at), "it was ordered, and nothing of it is there"
    assert list_leased_nodes(shown(at, T0 + 1, committed=True)) == {"w1"}
    here = arrived(at, T0 + 1)
    assert list_leased_nodes(here) == {"w1"}
    leaving = listed(here, phase="leaving", committed=True, node="w1")
    assert list_leased_nodes(
        observe(here, LeasesSeen(provider="rack", leases=leaving, began_s=T0 + 2), now_s=T0 + 2)
    ) == {"w1"}
    assert not list_leased_nodes(gone(here))
    added, _ = acted(surge(cloud()))
    assert not list_leased_nodes(shown(added, T0 + 1, "cloud", committed=True, node="w1")), (
        "the node itself is the Lease"
    )


@call_with(bench)
async def test_node_deletion_is_delayed_from_the_first_device_to_the_last(of: Bench) -> None:
    assert not await of.looks(surge(offer()))
    assert await of.looks(attached()) == ["w1"]
    writes = len(of.server.writes)
    assert await of.looks(attached()) == ["w1"]
    assert len(of.server.writes) == writes, "it is reported once"
    assert not await of.looks(gone(attached()))


@call_with(bench)
async def test_new_leader_removes_stale_annotations_once_orders_are_known(of: Bench) -> None:
    of.server.put(f"{NODES}/w2", {"metadata": {"annotations": {KEY: "true"}}})
    silent = attached()
    silent = replace(silent, capacity=replace(silent.capacity, listed_s={}))
    assert await of.looks(silent) == ["w1", "w2"], "known deletions are reported, and possible orders are kept"
    assert await of.looks(attached()) == ["w1"]


@call_with(bench)
async def test_deletion_delay_annotation_of_another_installation_is_kept(of: Bench) -> None:
    for name in ("w1", "w2"):
        of.server.put(f"{NODES}/{name}", {"metadata": {"annotations": {OTHERS: "true"}}})
    assert await of.looks(attached()) == ["w1"]
    assert not await of.looks(gone(attached()))
    assert of.saying(OTHERS) == ["w1", "w2"]


@call_with(bench)
async def test_legacy_annotation_is_removed_only_from_nodes_that_get_the_new_one(of: Bench) -> None:
    for name in ("w1", "w2"):
        of.server.put(f"{NODES}/{name}", {"metadata": {"annotations": {DELAY: "true"}}})
    assert await of.looks(attached()) == ["w1"]
    assert of.saying(DELAY) == ["w2"], "another installation may have something there"
    assert len(of.server.writes) == 1, "the reason is never empty"


def test_installations_with_long_names_have_valid_distinct_annotations() -> None:
    keys = {
        delay_annotation_key(home, lease)
        for home in ("a", "b" * 63, "b" * 62 + "c")
        for lease in ("pilotlight", "x" * 63)
    }
    assert len(keys) == 6
    for key in keys:
        prefix, _, name = key.partition("/")
        assert prefix == "delay-deletion.cluster-autoscaler.kubernetes.io"
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,61}[a-z0-9]", name)


@call_with(bench)
async def test_follower_writes_no_deletion_delay_annotation(of: Bench) -> None:
    assert not await of.looks(replace_fields(attached(), leads=False))
    of.writes = False
    assert not await of.looks(attached())
    assert not of.server.writes


@call_with(bench)
async def test_failed_annotation_write_is_retried_and_a_missing_node_is_skipped(
    of: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    of.server.refused["PATCH"] = AnswerError(403, "Forbidden", "nodes is forbidden")
    assert not await of.looks(attached())
    assert "nodes is forbidden" in caplog.text
    of.server.refused.clear()
    await asyncio.sleep(REST_S[0])
    assert await of.looks(attached()) == ["w1"]
    del of.server.objects[f"{NODES}/w1"]
    assert not await of.looks(gone(attached()))
    of.server.put(f"{NODES}/w1", {})
    assert await of.looks(attached()) == ["w1"]
