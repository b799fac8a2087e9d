"""Eviction options on several devices of one node, compared with a slow search of every Slice that could hold one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from autoscaler.contract import ReplicaId, TenantName
from autoscaler.placement.eviction import EvictionOption
from autoscaler.placement.eviction_search import EvictionSearch
from autoscaler.placement.model.tenant_isolation import TenantSet
from autoscaler.placement.model.types import Bin, EvictionLevel, PlacementRequest
from autoscaler.state.world import SliceId
from tests.support.builders.worlds import T0, device
from tests.unit.autoscaler.placement import test_packer_hosts as hosts
from tests.unit.autoscaler.placement.test_packer import on, placed, run, shelf, victims, want

ACME, ZETA = (TenantName("acme"),), (TenantName("zeta"),)


def drawn(rng: Random, node: int, at: int) -> Bin:
    """A device with random occupants."""
    name = f"n{node}g{at}"
    there = [
        on(rng.choice("abcd"), rng.randrange(1, 9), replica=ReplicaId(f"{name}-{number}"),
           priority=rng.randrange(-1, 3), busy=rng.random() < 0.5, kept=rng.random() < 0.3,
           leaving=rng.random() < 0.3, evictable_s=rng.choice((0.0, T0, T0 + 1)),
           host_usage=hosts.cores(rng.randrange(3)),
           trust=rng.choice((TenantSet(), ACME, ZETA)))
        for number in range(rng.choice((0, 0, 1, 1, 2)))
    ]  # fmt: skip
    return shelf(device(name, 24, f"n{node}"), *there, locked=rng.random() < 0.1)


def everywhere(ways: EvictionSearch, asked: PlacementRequest) -> Iterator[SliceId]:
    """All Slices that could hold one of its devices if they were empty."""
    return map(ways._index.id_of, np.flatnonzero(ways._possible(asked)).tolist())


def test_multi_device_eviction_of_random_replicas_equals_a_full_search() -> None:
    seen = Counter[str]()
    for seed in range(400):
        rng = Random(seed)
        shelves = [drawn(rng, node, at) for node in range(rng.randrange(1, 5)) for at in range(rng.randrange(1, 5))]
        requests = [
            want(
                name,
                20,
                devices=rng.randrange(2, 5),
                priority=rng.randrange(-1, 3),
                force=rng.choice(list(EvictionLevel)),
                trust=rng.choice((TenantSet(), ACME)),
            )
            for name in rng.choice(("w", "wv", "wvu"))
        ]
        found = run(requests, shelves)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EvictionSearch, "_members", everywhere)
            assert run(requests, shelves) == found, seed
        seen.update(placed=bool(placed(found)), evicts=bool(victims(found)), unmet=bool(found.unmet))
    assert min(seen[what] for what in ("placed", "evicts", "unmet")) > 20, seen


def test_eviction_with_cached_failures_equals_eviction_without_a_cache() -> None:
    known = Counter[bool]()
    real = EvictionSearch._one

    def counted(ways: EvictionSearch, asked: PlacementRequest) -> EvictionOption | None:
        known[ways._alike(asked) in ways._none] += 1
        return real(ways, asked)

    for seed in range(600):
        rng = Random(seed)
        shelves = [drawn(rng, node, at) for node in range(rng.randrange(1, 3)) for at in range(rng.randrange(1, 3))]
        cores = {one.slice.node: rng.randrange(2, 9) for one in shelves}
        requests = [
            hosts.asks(
                f"w{at}",
                rng.choice((0, 2)),
                rng.choice((10, 16)),
                priority=rng.randrange(-1, 2),
                force=rng.choice((EvictionLevel.IDLE, EvictionLevel.BUSY)),
                trust=rng.choice((TenantSet(), ACME)),
            )
            for at in range(rng.randrange(2, 13))
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EvictionSearch, "_one", lambda ways, asked: ways._any(ways._alike(asked)))
            each_by_itself = hosts.run(requests, shelves, cores)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EvictionSearch, "_one", counted)
            assert hosts.run(requests, shelves, cores) == each_by_itself, seed
    assert known[True] > 100, known


def test_failed_eviction_search_is_repeated_after_another_eviction() -> None:
    requests = [want("a", 4, force=EvictionLevel.IDLE), want("b", 4), want("c", 4, force=EvictionLevel.IDLE)]
    there = shelf(device("g0", 24), on("x", 22, busy=True))
    found = run(requests, [there])
    assert victims(found) == ["x"]
    assert {one.want.model for one in found.unmet if one.promised} == {"b", "c"}
    assert [one.want.model for one in found.unmet if not one.promised] == ["a"]
