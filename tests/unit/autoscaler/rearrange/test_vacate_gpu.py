"""A model that needs a whole GPU of which parts are in use: all replicas on the parts are evicted, or none."""

from __future__ import annotations

from typing import Any

from autoscaler.planner.plan import plan
from autoscaler.slicing.slicer_protocol import Object
from autoscaler.spec.model import Model
from autoscaler.state.actions import DrainReplica, Plan, StartReplica, StopReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, Replica, Slice, World
from tests.support.builders.resource_slices import cut_name, partitionable, partitionables
from tests.support.builders.slices import NODE
from tests.support.builders.worlds import T0, drain, folded, gateway, level, model, replace_fields, replica, use, world
from tests.unit.autoscaler.placement.test_partitionable_gpus import there

A, B = cut_name("1g.10gb", 0), cut_name("3g.40gb", 4)
LARGE = model("large", 70)


def on(of: Model, entry: str, **fields: Any) -> Replica:
    """A replica that has been ready for a long time."""
    return replica(of, f"{of.name}-r", (f"{NODE}/{entry}",), **{"ready_s": T0 - 100, **fields})


def asked(
    slices: list[Slice], calls: tuple[str, ...], *there: Replica, models: tuple[Model, ...], busy: str = ""
) -> World:
    """One request is queued for each of `calls`, the first for longest, and one runs on `busy`. The others had their
    last request a second ago.
    """
    levels = [level(name, 1, wait_s=9.0 - at) for at, name in enumerate(calls)]
    levels += [level(busy, running=1)] if busy else []
    uses = [use(f"{busy}-r", 1)] if busy else []
    known = {one.name: one for one in (LARGE, *models)}
    histories = {str(one.model): History(last_activity_s=T0 - 1) for one in there}
    return world(known.values(), slices, there, [gateway(levels=levels, uses=uses)], histories)


def leave(made: Plan) -> set[str]:
    return {one.replica.removesuffix("-r") for one in made.actions if isinstance(one, DrainReplica | StopReplica)}


def start(made: Plan) -> dict[str, str]:
    found = (one.replica for one in made.actions if isinstance(one, StartReplica))
    return {one.model: one.resources.slices[0].rpartition("/")[2] for one in found}


def why(made: Plan, name: str = "large") -> str:
    return next(one.reason for one in made.unmet if one.model == name)


def parts(*kept: str, gpus: int = 1) -> list[Slice]:
    published: list[Object] = partitionables(NODE, gpus) if gpus > 1 else partitionable(NODE)
    return there(published, *kept)


def test_idle_replicas_on_slices_are_evicted_for_a_whole_gpu_replica() -> None:
    a, b = model("a", 5), model("b", 30)
    made = plan(asked(parts(A, B), ("large",), on(a, A), on(b, B), models=(a, b)), T0)
    assert leave(made) == {"a", "b"}
    assert {one.victim_of for one in made.actions if isinstance(one, DrainReplica)} == {"large"}
    assert why(made) == f"waits on {NODE}/gpu-0 for the eviction of a, b"


def test_no_replica_is_evicted_if_another_on_the_gpu_must_stay() -> None:
    """Within its minimum residency, kept by `replicas.min`, of higher priority, or starting for queued requests."""
    a = model("a", 5)
    for b, more in (
        (model("b", 30, residency_seconds=1000.0), {"busy": "b"}),
        (model("b", 30, low=1), {}),
        (model("b", 30, priority=1), {}),
    ):
        made = plan(asked(parts(A, B), ("large",), on(a, A), on(b, B), models=(a, b), **more), T0)
        assert leave(made) == set(), b
        assert "is whole again when all its parts are free" in why(made)
    b = model("b", 30)
    starting = on(b, B, state=S.STARTING, started_s=T0 - 1, since_s=T0 - 1, created_s=T0 - 1)
    assert leave(plan(asked(parts(A, B), ("large", "b"), on(a, A), starting, models=(a, b)), T0)) == set()


def test_busy_replica_is_evicted_only_if_no_idle_replica_can_leave() -> None:
    a, b = model("a", 30), model("b", 30)
    first, second = cut_name("3g.40gb", 0), cut_name("3g.40gb", 0, 1)
    at = asked(parts(first, second, gpus=2), ("large",), on(a, first), on(b, second), models=(a, b), busy="a")
    assert leave(plan(at, T0)) == {"b"}
    at = asked(parts(first), ("large",), on(a, first), models=(a,), busy="a")
    assert leave(plan(at, T0)) == {"a"}


def test_additional_replica_of_a_served_model_evicts_no_busy_replica() -> None:
    """For another replica of a model that is already served, busy replicas are not evicted."""
    a = model("a", 30)
    many = model("large", 70, low=2, high=2)
    here = replica(many, "there", ("elsewhere/gpu-0",))
    at = asked(parts(cut_name("3g.40gb", 0)), (), on(a, cut_name("3g.40gb", 0)), here, models=(a, many), busy="a")
    assert leave(plan(at, T0)) == set()


def test_no_replica_is_evicted_if_a_foreign_pod_uses_a_slice_of_the_gpu() -> None:
    a = model("a", 5)
    slices = parts(A, B)
    foreign = next(one for one in slices if one.id.endswith(B))
    at = asked(slices, ("large",), on(a, A), models=(a,))
    assert leave(plan(at, T0)) == {"a"}
    assert leave(plan(replace_fields(at, others={foreign.counted: 1}), T0)) == set()


def test_free_slices_of_a_gpu_being_vacated_get_no_new_replica() -> None:
    """A new replica goes to another GPU, or waits."""
    a, b = model("a", 5), model("b", 30)
    leaving = on(a, A, state=S.DRAINING, since_s=T0 - 1, drain=drain(T0 - 1, victim_of="large"))
    made = plan(asked(parts(A), ("large", "b"), leaving, models=(a, b)), T0)
    assert start(made) == {}
    assert "its GPU is being vacated for large, which needs a whole GPU" in why(made, "b")
    assert why(made).startswith(f"waits on {NODE}/gpu-0 until a has stopped")
    two = asked(parts(A, gpus=2), ("large", "b"), leaving, models=(a, b))
    assert start(plan(two, T0)) == {"large": "gpu-1", "b": B}, "which has the other GPU, so that nothing empties"


def test_vacated_gpu_is_reserved_until_it_is_listed_as_a_whole_device() -> None:
    """The last replica has left, and the ResourceSlices are not updated yet."""
    b = model("b", 30)
    made = plan(asked(parts(A), ("large", "b"), models=(b,)), T0)
    assert start(made) == {}
    assert start(plan(asked(parts(), ("large",), models=(b,)), T0)) == {"large": "gpu-0"}


def test_start_of_a_higher_priority_replica_on_a_slice_prevents_eviction() -> None:
    a, b = model("a", 5), model("b", 30, priority=5)
    made = plan(asked(parts(A), ("large", "b"), on(a, A), models=(a, b)), T0)
    assert start(made).keys() == {"b"}
    assert leave(made) == set()


def test_two_waiting_whole_gpu_replicas_vacate_two_different_gpus() -> None:
    first, second = cut_name("3g.40gb", 0), cut_name("3g.40gb", 0, 1)
    a, b, other = model("a", 30), model("b", 30), model("other", 70)
    at = asked(parts(first, second, gpus=2), ("large", "other"), on(a, first), on(b, second), models=(a, b, other))
    made = plan(at, T0)
    assert leave(made) == {"a", "b"}
    assert {why(made).split(" of ")[0], why(made, "other").split(" of ")[0]} == {
        f"waits on {NODE}/gpu-{at} for the eviction" for at in range(2)
    }


def test_next_plan_keeps_the_chosen_gpu_and_evicts_no_more_replicas() -> None:
    first, second = cut_name("3g.40gb", 0), cut_name("3g.40gb", 0, 1)
    a, b = model("a", 30), model("b", 30)
    at = asked(parts(first, second, gpus=2), ("large",), on(a, first), on(b, second), models=(a, b))
    made = plan(at, T0)
    (removed,) = leave(made)
    again = plan(folded(at, made.actions), T0)
    assert leave(again) == set()
    assert why(again) == why(made).replace(f"for the eviction of {removed}", f"until {removed} has stopped")


def test_gpu_with_idle_replicas_is_vacated_before_a_busy_gpu() -> None:
    """And vice versa: the cheaper GPU is emptied."""
    small, other = cut_name("3g.40gb", 0), model("other", 75)
    a = model("a", 30)
    slices = parts(small, "gpu-1", gpus=2)
    there_ = on(a, small), on(other, "gpu-1")
    assert leave(plan(asked(slices, ("large",), *there_, models=(a, other), busy="a"), T0)) == {"other"}
    at = asked(slices, ("large",), *there_, models=(a, other), busy="other")
    made = plan(at, T0)
    assert leave(made) == {"a"}
    again = plan(folded(at, made.actions), T0)
    assert leave(again) == set()
    assert why(again) == f"waits on {NODE}/gpu-0 until a has stopped"


def test_protected_replica_on_a_gpu_to_vacate_moves_to_another_gpu() -> None:
    """Two protected replicas, each on its own GPU: one moves, and then its former GPU is whole."""
    first, second = cut_name("3g.40gb", 0), cut_name("3g.40gb", 0, 1)
    a, b = model("a", 30, low=1), model("b", 30, low=1)
    at = asked(parts(first, second, gpus=2), ("large",), on(a, first), on(b, second), models=(a, b))
    made = plan(at, T0)
    (step,) = [one.replica for one in made.actions if isinstance(one, StartReplica)]
    assert step.move is not None
    assert (step.move.replica, step.move.room_for) == (f"{step.model}-r", "large")
    (home,) = step.resources.slices
    assert home.startswith(f"{NODE}/gpu-1-mig-" if step.model == "a" else f"{NODE}/gpu-0-mig-")
    assert leave(made) == set(), "it goes when the other is ready"
    assert f"moves {step.model} from" in why(made)


def test_no_move_if_the_gpu_cannot_be_emptied_completely() -> None:
    first, second, third = cut_name("3g.40gb", 0), cut_name("1g.10gb", 0, 1), cut_name("1g.10gb", 1, 1)
    slices, b = parts(first, second, third, gpus=2), model("b", 5, low=1)
    for a, c, movers in (
        (model("a", 35, low=1), model("c", 5, low=1, residency_seconds=1000.0), {"a"}),
        (model("a", 35, low=1, residency_seconds=1000.0), model("c", 5, low=1, residency_seconds=1000.0), set[str]()),
    ):
        at = asked(slices, ("large",), on(a, first), on(b, second), on(c, third), models=(a, b, c))
        assert {one.model for one in _begun(plan(at, T0))} == movers
    a = model("a", 35, low=1)
    alone = asked(parts(first), ("large",), on(a, first), models=(a,))
    assert _begun(plan(alone, T0)) == []
    assert "there is no other place for a" in why(plan(alone, T0))


def _begun(made: Plan) -> list[Replica]:
    return [one.replica for one in made.actions if isinstance(one, StartReplica)]
