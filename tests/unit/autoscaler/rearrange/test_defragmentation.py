"""Defragmentation: which replica moves, for which model, and when none moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.explain.status_rows import list_status_rows
from autoscaler.fold.fold import fold
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bin_builder import build_bins
from autoscaler.placement.model.types import EvictionLevel, RestartCosts, Unplaced
from autoscaler.planner.plan import Planner, plan
from autoscaler.rearrange.defragmentation import EVERY_S, MOVES_MAX, Defragmented, defragment
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.rearrange.replica_migration import AGAIN_S, MigrationContext
from autoscaler.slicing.nvidia_device_plugin import TIMESLICE
from autoscaler.spec.model import Gpu, Model, Rollout
from autoscaler.state.actions import DrainReplica, StartReplica
from autoscaler.state.events import DisruptionsSeen, DocumentsSeen, Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.node_labels_and_taints import NodeBackoff
from autoscaler.state.world import Copy, History, Move, NodeId, Replica, Slice, World
from tests.support.builders.layouts import (
    BIG,
    DEVICES,
    NODES,
    Laid,
    asked,
    big,
    changed,
    free,
    laid,
    looked,
    moved,
    names,
    no_requests,
    node_of,
    reason,
    slices,
    wide,
)
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import (
    GI,
    T0,
    Scene,
    device,
    folded,
    gateway,
    kinds,
    level,
    model,
    replace_fields,
    replica,
    use,
    verb,
    world,
)
from tests.support.example_budget import examples
from tests.support.harness.driver_events import seen_of

# --- one move, step by step -------------------------------------------------------------------------------------------

TIGHT: Laid = {0: [2, 2], 1: [6], 2: [5], 3: [5]}


def test_move_starts_the_successor_before_draining_the_old_replica() -> None:
    at = laid(TIGHT)
    made = plan(at, T0)
    assert kinds(made) == ["start n0-a"]
    start = made.actions[0]
    assert isinstance(start, StartReplica)
    assert start.replica.move == Move(replica=ReplicaId("n0-a-r"), room_for=ModelName("big"))
    assert {at.nodes.slices[id].node for id in start.replica.resources.slices} == {"n1"}
    assert start.reason == "move n0-a: makes room for big"
    message = "needs 8 whole devices of 70Gi; 20 are free, at most 6 on one node; moves n0-a from n0 to n1 first"
    assert [unmet.reason for unmet in made.unmet] == [message]
    assert {str(row.model): row.why for row in list_status_rows(at, made, T0)}["big"] == message, (
        "explain and status show it"
    )
    scene = Scene(at, no_requests)
    scene.run(40)
    verbs = [(type(action).__name__, getattr(action, "replica", None)) for _, action in scene.actions]
    assert [name for name, _ in verbs] == ["StartReplica", "DrainReplica", "StopReplica", "StartReplica"]
    drain = scene.actions[1][1]
    assert isinstance(drain, DrainReplica)
    assert (drain.replica, drain.victim_of) == ("n0-a-r", "big")
    assert drain.reason == "replaced by another replica to make room for big"
    assert scene.ready("big")
    scene.run(3 * AGAIN_S, 60)
    assert len(moved(scene)) == 1, "and that was all"


def test_no_other_move_starts_while_one_is_pending() -> None:
    at = folded(laid(TIGHT), plan(laid(TIGHT), T0).actions)
    assert plan(at, T0 + EVERY_S).actions == ()
    assert reason(at).endswith("n0-a moves from n0 first")


def test_failed_successor_leaves_the_old_replica_unchanged() -> None:
    at = folded(laid(TIGHT), plan(laid(TIGHT), T0).actions)
    heir = next(one for one in at.replicas.values() if one.move is not None)
    broken, _ = fold(at, [seen_of(heir, Seen.EXITED, started_s=T0, proof="exited")], T0 + 2)
    made = plan(broken, T0 + 2)
    assert not any(isinstance(action, DrainReplica) for action in made.actions)
    assert broken.replicas[ReplicaId("n0-a-r")].state is S.READY
    assert "may move in 4 min 58 s" in reason(broken, T0 + 2)


def more(at: World, name: str, most: int) -> World:
    """Let this model have up to `most` replicas."""
    before = at.models[ModelName(name)]
    spec = replace(before.spec, replicas=replace(before.spec.replicas, max=most))
    return replace(at, models={**at.models, before.name: replace(before, spec=spec)})


def test_replica_and_its_successor_count_as_one_toward_replicas_min() -> None:
    at = more(laid(TIGHT), "n0-a", 3)
    scene = Scene(at, no_requests)
    scene.run(15)
    assert [verb(action) for _, action in scene.actions] == ["start", "drain", "stop", "start"], "it goes at once"
    half = folded(at, plan(at, T0).actions)
    on = [one for shelf in build_bins(half, T0) for one in shelf.incumbents if one.model == "n0-a"]
    assert len({one.replica for one in on}) == 2
    assert all(one.kept for one in on), "replicas.min is 1, and neither makes two of them"


def test_new_leader_drains_the_successor_of_an_unfinished_move() -> None:
    at = laid(TIGHT)
    half = folded(at, plan(at, T0).actions)
    heir = next(one for one in half.replicas.values() if one.move is not None)
    for state in (S.STARTING, S.READY):
        found = changed(half, heir.id, move=None, found=True, state=state, ready_s=T0 if state is S.READY else None)
        found = replace_fields(found, moved_s=None, leading_since_s=T0)
        assert kinds(plan(found, T0)) == [f"drain {heir.id}"]


def test_both_replicas_stay_if_demand_rises_during_a_move() -> None:
    many = [1]

    def demand(_now_s: float, scene: Scene) -> list[tuple[str, int, int]]:
        lack = many[0] - len(scene.ready("n0-a"))
        return [("n0-a", 4 * lack, 4 * len(scene.ready("n0-a")))] if many[0] > 1 else []

    scene = Scene(more(laid(TIGHT), "n0-a", 3), demand)
    scene.run(2)
    assert len(moved(scene)) == 1
    many[0] = 2
    scene.run(60)
    assert len(scene.ready("n0-a")) == 2
    assert not scene.verbs("drain"), "room is for Calls first"


# --- the choice of the moved replica ----------------------------------------------------------------------------------


def test_idle_and_quickly_starting_replicas_move_first() -> None:
    at = laid(TIGHT)
    assert names(looked(at, T0)) == ["n0-a"]
    calls = [gateway(levels=[level("n0-a", 0, 1)], uses=[use("n0-a-r", 1)])]
    assert names(looked(laid(TIGHT, gateways=calls), T0)) == ["n0-b"]
    assert names(looked(at, T0, starts={"n0-a": 90.0, "n0-b": 80.0, "n1-a": 200.0})) == ["n0-b"]


def test_no_move_if_the_cost_exceeds_the_gain_weighted_by_priority() -> None:
    slow = {f"n{node}-{letter}": 3000.0 for node in range(NODES) for letter in "ab"}
    at = laid(TIGHT)
    found = looked(at, T0, starts=slow)
    assert found.steps == ()
    assert found.unmet[0].reason.endswith("moving n0-a would cost more than it gains")
    above = looked(at, T0, asked(at, big(priority=1)), slow)
    assert names(above) == ["n0-a"], "each priority above doubles the gain"


def test_replica_that_fits_on_no_other_node_does_not_move() -> None:
    found = looked(laid({0: [5], 1: [5], 2: [3, 3], 3: [4]}), T0, asked(laid({}), wide("big", 9)))
    assert names(found) == ["n3-a"]
    full = laid({0: [4], 1: [7], 2: [7], 3: [7]})
    found = looked(full, T0, asked(full, wide("big", 7)))
    assert found.steps == ()
    assert found.unmet[0].reason.endswith("at most 6 on one node; there is no other place for n0-a")


def test_too_few_free_devices_are_not_reported_as_fragmentation() -> None:
    at = laid({0: [7], 1: [9], 2: [9], 3: [9]})
    assert looked(at, T0).unmet[0].reason == "no room"


def test_no_move_for_a_replica_with_promised_space_or_that_can_never_fit() -> None:
    at = laid(TIGHT)
    ground = MigrationContext(at, SliceIndex(build_bins(at, T0)), RestartCosts(), T0)
    for missing in (
        Unplaced(asked(at), "no", promised=True),
        Unplaced(asked(at), "no", never=True),
        Unplaced(change_request(asked(at), force=EvictionLevel.NONE), "no"),
    ):
        assert defragment([missing], ground) == Defragmented((missing,))


def settled(at: World, name: str, **spec: Any) -> World:
    """Change the spec of this model, and of its replicas."""
    before = at.models[ModelName(name)]
    after = replace(before, spec=replace(before.spec, **spec))
    at = replace(at, models={**at.models, after.name: after})
    return changed(at, f"{name}-r", spec_hash=after.spec_hash())


def test_recently_moved_or_started_or_unreplaceable_replica_does_not_move() -> None:
    at = laid(TIGHT)
    a, b = ReplicaId("n0-a-r"), ModelName("n0-a")
    measured = {b: History(starts_s=(30.0,))}
    others = {
        "another spec": changed(at, a, spec_hash="old"),
        "must go in order": changed(at, a, rank=1),
        "no surge": settled(at, b, rollout=Rollout(surge=0)),
        "within residency": replace_fields(changed(at, a, ready_s=T0 - 1), histories=measured),
        "moved lately": changed(at, a, move=Move(replica=ReplicaId("x"), room_for=b), created_s=T0 - AGAIN_S + 1),
        "failed lately": replace_fields(at, histories={b: History(tries=1)}),
        "cannot start": replace_fields(at, obstacles={b: "it cannot"}),
    }
    for why, one in others.items():
        assert names(looked(one, T0)) == ["n0-b"], why
    long_ago = changed(at, a, move=Move(replica=ReplicaId("x"), room_for=b), created_s=T0 - AGAIN_S)
    assert names(looked(long_ago, T0)) == ["n0-a"]


def test_defragmentation_waits_until_residency_or_move_interval_ends() -> None:
    at = laid(TIGHT)
    young = changed(at, "n0-a-r", ready_s=T0 - 1)
    young = replace_fields(young, histories={ModelName("n0-a"): History(starts_s=(30.0,))})
    assert T0 < looked(young, T0).next_s < T0 + 600
    paused = replace(at, moved_s=T0 - 100)
    found = looked(paused, T0)
    assert (found.steps, found.next_s) == ((), T0 + EVERY_S - 100)
    assert found.unmet[0].reason.endswith("the next replica may move in 3 min 20 s")
    assert looked(replace_fields(at, leading_since_s=T0 - 1), T0).next_s == T0 + EVERY_S - 1, (
        "who led before may have moved one"
    )


def test_no_move_from_or_to_a_node_where_another_replica_starts() -> None:
    at = changed(laid(TIGHT), "n1-a-r", state=S.STARTING)
    found = looked(at, T0)
    assert {node_of_slice(at, step.home.slices[0]) for step in found.steps} <= {"n2", "n3"}
    at = changed(at, "n0-b-r", state=S.STARTING)
    assert "n0-a" not in names(looked(at, T0))


def test_no_move_on_nodes_that_the_same_plan_changes() -> None:
    at = laid(TIGHT)
    yard = SliceIndex(build_bins(at, T0))

    def first(**fields: Any) -> str:
        found = defragment([Unplaced(asked(at), "no")], MigrationContext(at, yard, RestartCosts(), T0, **fields))
        return names(found)[0]

    assert first(changed_models={ModelName("n0-a")}) == "n0-b"
    assert first(going={ReplicaId("n0-a-r")})[:2] != "n0"
    assert first(taken=[at.replicas[ReplicaId("n0-b-r")].resources.slices[0]])[:2] != "n0"
    ended = laid({**TIGHT, 1: [5, 1]})
    paused = ended.models[ModelName("n1-b")]
    after = replace(paused, spec=replace(paused.spec, paused=True))
    ended = replace(ended, models={**ended.models, paused.name: after})
    begun = laid(TIGHT, others=[big(), wide("one", 1)])
    for there in (ended, begun):
        made = plan(there, T0)
        starts = [action.replica for action in made.actions if isinstance(action, StartReplica)]
        heir = next(one for one in starts if one.move is not None)
        old = there.replicas[ReplicaId(f"{heir.model}-r")]
        nodes = {node_of(there, heir), node_of(there, old)}
        stirring = {NodeId("n1")} if there is ended else {node_of(there, one) for one in starts if one is not heir}
        assert stirring
        assert not nodes & stirring


def node_of_slice(at: World, id: str) -> NodeId:
    return next(one.node for one in at.nodes.slices.values() if one.id == id)


def test_disruption_budget_prevents_the_move_of_its_replica() -> None:
    kept = replace_fields(laid(TIGHT), undisturbed={ReplicaId("n0-a-r"): "keep"})
    assert names(looked(kept, T0)) == ["n0-b"], "another in the way moves for it"
    all_ = replace_fields(kept, undisturbed=dict.fromkeys(kept.replicas, "keep"))
    found = looked(all_, T0)
    assert found.steps == ()
    assert found.unmet[0].reason.endswith("a PodDisruptionBudget forbids moving n0-a, n0-b, n1-a")
    assert not plan(all_, T0).actions
    assert plan(replace_fields(all_, undisturbed={}), T0).actions, "it is allowed, and so they move"


def test_disruption_budget_during_a_move_keeps_the_old_replica() -> None:
    at = folded(laid(TIGHT), plan(laid(TIGHT), T0).actions)
    heir = next(one for one in at.replicas.values() if one.move is not None)
    both = changed(at, heir.id, state=S.READY, ready_s=T0 + 5, since_s=T0 + 5)
    kept, _ = fold(both, [DisruptionsSeen(undisturbed={ReplicaId("n0-a-r"): "keep"})], T0 + 6)
    assert not [action for action in plan(kept, T0 + 6).actions if isinstance(action, DrainReplica)]
    free, _ = fold(kept, [DisruptionsSeen(undisturbed={})], T0 + 7)
    assert kinds(plan(free, T0 + 7)) == ["drain n0-a-r"]


def test_disruption_budget_does_not_prevent_an_idle_drain() -> None:
    at = world([model("ada", 20)], [device("g0", 80)], [replica(model("ada", 20), "r1", ["g0"])])
    scene = Scene(replace_fields(at, undisturbed={ReplicaId("r1"): "keep"}), no_requests)
    scene.run(3600, 60)
    assert [verb(action) for _, action in scene.actions] == ["drain", "stop"]


def test_no_move_while_a_gateway_is_silent() -> None:
    at = laid(TIGHT, gateways=[gateway(seen_s=T0 - 500, in_epoch=False, report=None)])
    assert looked(at, T0).unmet[0].reason.endswith("no replica moves while gateways do not report")


def test_fragmented_memory_of_shared_devices_is_joined_by_a_move() -> None:
    small = [model(name, 10, low=1) for name in "ab"]
    there = [replica(one, f"{one.name}-r", [f"g{at}"]) for at, one in enumerate(small)]
    at = world([*small, model("big", 20, low=1)], [device(f"g{at}", 24) for at in range(2)], there)
    made = plan(at, T0)
    assert kinds(made) == ["start a"]
    message = "needs 20Gi on one device; 28Gi is free, at most 14Gi on one device; moves a from g0 to g1 first"
    assert [unmet.reason for unmet in made.unmet] == [message]
    scene = Scene(at, no_requests)
    scene.run(40)
    assert scene.ready("big")
    assert scene.ready("a")


def test_spread_replica_moves_to_a_rack_without_replicas_of_its_model() -> None:
    """n1 is the tightest node, but another replica is in its rack; the moved replica's own rack counts as empty."""
    at = laid({0: [2, 2], 1: [6], 2: [5], 3: [5]})
    racks = {"n0": "a", "n1": "b", "n2": "b", "n3": "a"}
    slices = {
        id: replace(one, labels={"rack": racks[one.node]}, labels_known=True) for id, one in at.nodes.slices.items()
    }
    found = {}
    for label in (None, "rack"):
        of = wide("n0-a", 2, low=2, high=2, spread=label)
        other = replica(of, "n0-a-s", ["n1-g8", "n1-g9"])
        models, replicas = {**at.models, of.name: of}, {**at.replicas, other.id: other}
        (step,) = looked(
            rebuild_indices(replace_fields(at, slices=slices, models=models, replicas=replicas), T0), T0
        ).steps
        assert step.move.replica == "n0-a-r"
        found[label] = {at.nodes.slices[id].node for id in step.home.slices}
    assert found == {None: {"n1"}, "rack": {"n3"}}


def homes(at: World, name: str = "n0-a") -> set[str]:
    """The nodes that the replica moves to, if any."""
    starts = [one.replica for one in plan(at, T0).actions if isinstance(one, StartReplica)]
    return {str(node_of(at, one)) for one in starts if one.model == name and one.move is not None}


def test_no_move_to_a_node_in_backoff_for_the_model() -> None:
    at = laid(TIGHT)
    assert homes(at) == {"n1"}
    shuns = {(ModelName("n0-a"), NodeId("n1")): NodeBackoff(until_s=T0 + 60, times=1)}
    assert homes(replace_fields(at, backoffs=shuns)) <= {"n2", "n3"}
    assert homes(replace_fields(at, backoffs=shuns))
    over = {key: shun._replace(until_s=T0) for key, shun in shuns.items()}
    assert homes(replace_fields(at, backoffs=over)) == {"n1"}


def test_move_prefers_a_node_with_the_weights_to_a_tight_fit() -> None:
    at = settled(laid(TIGHT), "n0-a", artifact="oci://r.io/a")
    assert homes(at) == {"n1"}
    for node in ("n2", "n3"):
        assert homes(replace_fields(at, copies=frozenset({Copy(artifact="oci://r.io/a", node=NodeId(node))}))) == {node}


def shared_by(a: Model, b: Model, slices: list[Slice]) -> World:
    """Each is on one of two devices; a third model needs almost all of one."""
    there = [replica(one, f"{one.name}-r", [slices[at].id]) for at, one in enumerate((a, b))]
    return world([a, b, model("big", 20, low=1)], slices, there)


def test_elastic_replica_moves_only_to_a_device_with_its_full_memory() -> None:
    slices = [device("g0", 24), device("g1", 23)]
    small = model("a", 10, low=1, gpu=Gpu(elastic_percent=50))
    assert homes(shared_by(small, model("b", 13, low=1), slices), "a") == {"n0"}
    assert not homes(shared_by(small, model("b", 14, low=1), slices), "a"), "9Gi are left there"


def test_no_move_to_a_device_of_a_conflicting_tenant() -> None:
    slices = [device(f"g{at}", 24, f"n{at}", kind=TIMESLICE) for at in range(2)]
    for tenants, other in (("acme", "n1"), ("zeta", "")):
        a, b = (model(name, 10, low=1, tenants=(of,)) for name, of in (("a", tenants), ("b", "acme")))
        found = homes(shared_by(a, b, slices), "a")
        assert found == ({other} if other else set())


# --- the scenario -----------------------------------------------------------------------------------------------------


class Churn:
    """Starts and stops replicas one at a time."""

    def __init__(self, seed: int, begin: World, sizes: dict[str, int]) -> None:
        self.rng, self.sizes = Random(seed), sizes
        self.scene = Scene(begin, no_requests)
        self.on = {str(one.model) for one in begin.replicas.values()}
        self.big, self.step_s = False, 2.0

    def publish_documents(self) -> None:
        """Report the current documents."""
        models = [wide(name, size, int(name in self.on)) for name, size in self.sizes.items()]
        documents = DocumentsSeen(models=(*models, big(low=int(self.big))), settings=self.scene.world.settings)
        self.scene.world, _ = advance(self.scene.world, [documents], self.scene.now_s)

    def turn(self) -> None:
        """Add or remove one replica."""
        name = self.rng.choice(sorted(self.sizes))
        room = NODES * DEVICES - sum(self.sizes[one] for one in self.on)
        if name in self.on:
            self.on.discard(name)
        elif self.sizes[name] <= room:
            self.on.add(name)
        self.publish_documents()

    def seconds(self, many: float) -> Iterator[World]:
        """Yield the `World` at each step for `many` seconds."""
        for _ in range(int(many // self.step_s)):
            self.scene.run(self.step_s, self.step_s)
            yield self.scene.world


def placeable(at: World, now_s: float) -> bool:
    want = asked(at)
    return SliceIndex(build_bins(at, now_s)).choose(want.kind, want.choice, want.supplies) is not None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_equally_sized_replicas_are_packed_without_fragmentation_or_moves(seed: int, shared: bool) -> None:
    churn = Churn(seed, world([], slices(shared=shared)), {f"m{at}": 3 for at in range(6)})
    for at in range(6):  # one at a time, interleaved with stops and starts
        churn.on.add(f"m{at}")
        churn.publish_documents()
        for _ in range(3):
            for after in churn.seconds(churn.rng.choice((4, 10, 24))):
                assert sum(free(after).values()) < 20 or placeable(after, churn.scene.now_s)
            churn.turn()
    assert not moved(churn.scene), "equal replicas are packed so that none has to move"


TAKEN = range(DEVICES - BIG + 1, DEVICES + 1)
TOTALS = tuple(each for each in combinations_with_replacement(TAKEN, NODES) if sum(each) == NODES * DEVICES - 20)
"""Devices in use on each node when 20 are free, with at most seven free on one node."""


def in_pieces(rng: Random, most: int = 5) -> Laid:
    """A random layout of replicas of one to `most` devices."""
    totals = list(rng.choice(TOTALS))
    rng.shuffle(totals)
    at: Laid = {}
    for node, total in enumerate(totals):
        at[node] = []
        while sum(at[node]) < total:
            at[node].append(rng.randrange(1, min(most, total - sum(at[node])) + 1))
    return at


@settings(derandomize=True, deadline=None, max_examples=examples(25))
@given(st.integers(0, 1 << 30), st.booleans())
def test_defragmentation_makes_room_for_8_devices_while_replicas_serve(seed: int, shared: bool) -> None:
    """Replicas of one to five devices all stay ready, and one of eight is ready in bounded time."""
    scene = Scene(laid(in_pieces(Random(seed)), shared=shared), no_requests)
    begin = scene.world
    assert sum(free(begin).values()) == 20
    assert max(free(begin).values()) < BIG
    while not scene.ready("big"):
        scene.run(10, 5)
        for old in begin.replicas.values():
            assert scene.ready(old.model), f"{old.model} is not served"
        assert scene.now_s - T0 <= (MOVES_MAX - 1) * EVERY_S + 60, reason(scene.world, scene.now_s)
    times = [at_s for at_s, _ in moved(scene)]
    assert all(later - sooner >= EVERY_S for sooner, later in pairwise(times))
    assert 1 <= len(times) <= MOVES_MAX
    heirs = [after for _, after in moved(scene)]
    assert not any(node_of(scene.world, one) == node_of(scene.world, _first(begin, one)) for one in heirs)


def _first(begin: World, heir: Replica) -> Replica:
    """The replica that was replaced by this move; each model has one replica."""
    return begin.replicas[begin.by_model[heir.model][0]]


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> World:
    at = in_pieces(Random(draw(st.integers(0, 1 << 30))), draw(st.integers(1, 7)))
    for node, more in draw(st.dictionaries(st.integers(0, NODES - 1), st.integers(1, 3), max_size=2)).items():
        at[node] += [more] if sum(at[node]) + more <= DEVICES else []
    return laid(at, shared=draw(st.booleans()))


@settings(derandomize=True, deadline=None, max_examples=examples(120))
@given(layouts(), st.randoms(use_true_random=False))
def test_moves_are_the_fewest_possible_and_go_to_free_devices(at: World, rng: Random) -> None:
    found = looked(at, T0)
    there = list(at.replicas.items())
    rng.shuffle(there)
    assert found == looked(replace(at, replicas=dict(there)), T0)
    if not found.steps:
        assert max(free(at).values()) >= BIG or sum(free(at).values()) < 20, "free but fragmented"
        return
    homes = [id for step in found.steps for id in step.home.slices]
    assert len(homes) == len(set(homes))
    assert not any(at.by_slice.get(id) for id in homes), "free now, so that no move needs another's end"
    left = {step.move.replica for step in found.steps}
    for many in range(len(left) + 1):
        for few in combinations(sorted(left), many):
            here = replace(at, replicas={id: one for id, one in at.replicas.items() if id not in few})
            room = max(free(rebuild_indices(here, T0)).values()) >= BIG
            assert room == (many == len(left))


@settings(derandomize=True, deadline=None, max_examples=examples(8))
@given(st.integers(0, 1 << 30))
def test_no_replica_moves_again_within_the_minimum_interval(seed: int) -> None:
    rng = Random(seed)
    at = in_pieces(rng, 3)
    sizes = {f"n{node}-{letter}": one for node, on in at.items() for letter, one in zip("abcdefghij", on, strict=False)}
    churn = Churn(seed, laid(at, shared=bool(seed % 2)), sizes)
    churn.step_s = 5.0
    scene, were, served = churn.scene, dict[ModelName, list[float]](), set[str]()
    for _ in range(60):
        churn.turn()
        churn.big = rng.random() < 0.5
        churn.publish_documents()
        served &= churn.on
        for after in churn.seconds(rng.choice((20, 100, 400))):
            served |= {name for name in churn.on if scene.ready(name)}
            assert all(scene.ready(name) for name in served)
            under_way = [one for one in after.replicas.values() if one.move and one.move.replica in after.replicas]
            assert len(under_way) <= 1
    for at_s, heir in moved(scene):
        assert all(at_s - before_s >= AGAIN_S for before_s in were.get(heir.model, [])), "it moved again"
        were.setdefault(heir.model, []).append(at_s)


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(layouts())
def test_planner_with_caches_plans_the_same_moves_as_a_new_planner(begin: World) -> None:
    planner, at = Planner(), begin
    for now_s in (T0, T0 + 1, T0 + 400):
        at = replace(at, gateways={id: replace(one, seen_s=now_s) for id, one in at.gateways.items()})
        made = planner.plan(at, now_s)
        assert made == plan(at, now_s)
        at = folded(at, made.actions, now_s)
        claimed = {id: sum(at.replicas[one].resources.memory_bytes for one in on) for id, on in at.by_slice.items()}
        assert all(bytes_ <= 80 * GI for bytes_ in claimed.values())
