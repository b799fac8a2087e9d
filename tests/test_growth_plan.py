"""Growth in a plan: what it leaves to others of whom it is only known what may become of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import autoscaler.growth
from autoscaler.actions import DrainReplica, StartReplica
from autoscaler.contract import ModelName
from autoscaler.lanes import Kind, Lane, Room
from autoscaler.model import Gpu
from autoscaler.outlook import yet
from autoscaler.plan import plan
from autoscaler.slicing.hami import Hami
from autoscaler.states import ReplicaState as S
from autoscaler.world import World
from tests.kit.sliced import card, hami_node
from tests.kit.worlds import GI, T0, device, drain, gateway, level, model, replica, world
from tests.test_growth import grants, growing, run, want
from tests.test_packer import on, shelf

A = growing("a", context_tokens=2048)


def got_gi(at: World) -> list[float]:
    return [one.replica.memory_bytes / GI for one in plan(at, T0).actions if isinstance(one, StartReplica)]


def drained(at: World) -> list[str]:
    return [one.replica for one in plan(at, T0).actions if isinstance(one, DrainReplica)]


# --- who leaves may be asked for again --------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [1, 2])
def test_who_goes_for_another_by_the_same_plan_may_come_back_beside(high: int) -> None:
    """V makes room for w on the one card that w may have; the other one has room for a and for v."""
    v, w = model("v", 12, high=high, idle_seconds=9e5), model("w", 20, priority=5, gpu=Gpu(models=("*H100*",)))
    cards = [device("gpu0", 24, "n0", product="L4"), device("gpu1", 24, "n1", product="NVIDIA-H100")]
    calls = [level(ModelName("a"), 1), level(ModelName("w"), 1)]
    at = world([A, v, w], cards, [replica(v, "rv", on=["gpu1"])], [gateway(levels=calls)])
    assert (drained(at), got_gi(at)) == (["rv"], [12])


def test_who_is_drained_idle_or_was_before_may_come_back_beside() -> None:
    b = model("b", 7, idle_seconds=9e5)
    for one, of, leaves in (
        (replica(b, "rb", on=["gpu1"]), b, []),
        (replica(b, "rb", on=["gpu1"]), replace(b, spec=replace(b.spec, idle_seconds=1.0)), ["rb"]),
        (replica(b, "rb", on=["gpu1"], state=S.DRAINING, drain=drain()), b, []),
    ):
        at = world([A, of], [device("gpu0", 24), device("gpu1", 7)], [one], [gateway(levels=[level(A.name, 1)])])
        stays = one.state is S.READY and not leaves
        assert (drained(at), got_gi(at)) == (leaves, [20 if stays else 16])


def test_yet_counts_who_is_revived_and_not_who_goes() -> None:
    b = model("b", 4, high=3)
    there = [replica(b, "r1"), replica(b, "r2"), replica(b, "r3", state=S.DRAINING, drain=drain())]
    at = world([b], [device()], there)
    (kind,) = yet(at)
    assert yet(at) == {kind: 1}
    assert yet(at, leaving=[there[0].id]) == {kind: 2}
    assert yet(at, staying=[there[2].id]) == {}
    assert yet(at, leaving=[there[0].id], staying=[there[2].id]) == {kind: 1}


# --- each is asked once -----------------------------------------------------------------------------------------------


def test_who_waits_or_may_come_is_asked_once_per_sort_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Kind, Lane]] = []
    ask = autoscaler.growth._room

    def counted(kind: Kind, lane: Lane) -> Room | None:
        asked.append((kind, lane))
        return ask(kind, lane)

    monkeypatch.setattr("autoscaler.growth._room", counted)
    cards = [shelf(device(f"g{at}", 24 if at % 2 else 23, product="L4")) for at in range(20)]
    waiting = [want(f"w{at}", 25 + at % 3, 0, products=("l4", "h100")) for at in range(200)]
    cards.append(shelf(device("h0", 80, product="H100"), on("x", 75)))
    made = run([*(want(f"a{at}") for at in range(20)), *waiting], cards, {Kind(memory_bytes=GI): 1})
    assert (len(made.placements), len(made.unmet)) == (20, 200)
    assert len(asked) == len(set(asked)) == (3 + 1) * 2


def test_who_waits_keeps_what_is_left_only_where_its_labels_let_it_be() -> None:
    zones = [device(f"g{at}", 24, f"n{at}", labels={"zone": zone}, labels_known=True) for at, zone in enumerate("xyx")]
    full = [shelf(zones[0], on("b0", 14)), shelf(zones[1], on("b1", 14)), shelf(zones[2], on("b2", 14))]
    waits = want("w", 20, 0, unserved_since_s=9.0, selector=(("zone", "x"),))
    grown = grants(run([want(f"a{at}", 5) for at in range(3)] + [waits], full))
    assert sorted(gi for _, gi in grown) == [5, 5, 10]


# --- memory that is nobody's ------------------------------------------------------------------------------------------


def test_on_a_card_of_which_more_is_given_out_than_it_has_nothing_grows() -> None:
    a = growing(percent=400, memory_gi=30, context_tokens=2048)
    for devmem, gi in ((163840, 30), (81920, 80)):
        labels = {"nvidia.com/gpu.memory": "81920"}
        (one,) = Hami().inventory(hami_node(card(devmem=devmem), labels=labels)) or ()
        assert one.overcommitted == (devmem > 81920)
        assert got_gi(world([a], [one], [], [gateway(levels=[level(a.name, 1)])])) == [gi]
