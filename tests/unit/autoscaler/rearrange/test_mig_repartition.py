"""MIG repartitioning of idle nodes: when, into what, only for models that fit no partition, and never while in use."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.fold.fold import fold
from autoscaler.fold.mig import REFUSED_S
from autoscaler.planner.plan import plan
from autoscaler.provisioning.unplaceable_models import list_unplaceable_models
from autoscaler.queries.mig_status import CUT_S_MAX, RETRY_S, TRIES_MAX, config_of, configs_of, list_profiles
from autoscaler.queries.operator_orders import explain_closed_slice
from autoscaler.rearrange.mig_repartition import EVERY_S, NODE_EVERY_S, WAIT_S, allocate_profiles
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.state.actions import Acted
from autoscaler.state.events import LeadingSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.mig import CutRefused, CuttableSeen, MigNode
from autoscaler.state.world import Cordon, CordonTarget, History, SliceId
from tests.support.builders.mig_nodes import CONFIG, H100, asked, cuttable, order, slices, town, why
from tests.support.builders.worlds import T0, device, gateway, level, model, replace_fields, replica, world


def test_idle_node_is_repartitioned_for_a_model_that_fits_no_slice() -> None:
    action = order(town())
    assert action is not None
    (gpu,) = action.order.cuts
    assert "3g.40gb" in gpu
    assert Counter(gpu)["1g.10gb"] >= 3, "what is there stays as far as it fits"
    assert (action.order.node, action.order.before, action.order.tries) == ("n1", CONFIG, 1)
    assert "1 replica will fit, the first of Model big; devices: " in action.reason
    assert "node n1 is being repartitioned" in why(town())


def test_node_not_enabled_in_settings_is_never_repartitioned() -> None:
    at = replace_fields(town(), cuttable={})
    (unmet,) = plan(at, T0).unmet
    assert (order(at), unmet.never) == (None, True)


def test_model_that_fits_after_a_repartition_is_not_unplaceable() -> None:
    assert list_unplaceable_models(town()) == {}
    assert list_unplaceable_models(replace_fields(town(), cuttable={})).keys() == {"big"}
    assert list_unplaceable_models(town(want_gi=90.0)).keys() == {"big"}, "no profile is so large"


@pytest.mark.parametrize("state", list(S))
def test_node_with_a_replica_in_any_state_is_not_repartitioned(state: S) -> None:
    other = model("small", 5)
    there = slices(_1g_10gb="7")
    one = replica(other, "r1", on=[there[3].id], state=state)
    at = town(there=there, held=[one])
    assert order(at) is None
    assert "could be repartitioned for it, once it is idle" in why(at)


def test_node_used_by_foreign_pods_is_not_repartitioned() -> None:
    at = town(others={"n1 nvidia.com/mig-1g.10gb": 1})
    assert order(at) is None
    assert "once it is idle" in why(at)
    assert order(town(others={"n2 nvidia.com/mig-1g.10gb": 1})) is not None


def test_replica_on_a_removed_slice_prevents_a_repartition() -> None:
    one = replica(model("small", 5), "r1", on=["n1/mig-2g.20gb-0"])
    assert order(town(held=[one])) is None


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (cuttable(state="pending"), "check mig-manager on the node"),
        (cuttable(state=""), "check mig-manager on the node"),
        (cuttable(state="failed"), "check mig-manager on the node"),
        (cuttable(usable=False), "but not now"),
    ],
)
def test_unavailable_node_is_not_repartitioned_and_the_reason_is_given(node: MigNode, message: str) -> None:
    assert order(town(node)) is None
    assert message in why(town(node))


def test_mig_strategy_single_prevents_a_repartition_with_a_reason() -> None:
    at = town(cuttable(strategy="single"))
    (unmet,) = plan(at, T0).unmet
    assert (order(at), unmet.never) == (None, True)
    assert "has MIG strategy single" in unmet.reason
    assert list_unplaceable_models(at).keys() == {"big"}


def test_cordoned_node_is_not_repartitioned() -> None:
    place = CordonTarget("node", "n1")
    assert order(town(cordons={place: Cordon(place=place, node="n1", since_s=T0)})) is None


def test_node_with_a_gpu_product_without_mig_is_never_repartitioned() -> None:
    at = town(cuttable(product="NVIDIA-T4"))
    assert (order(at), plan(at, T0).unmet[0].never) == (None, True)


def test_repartition_starts_only_after_requests_waited_a_minimum_time() -> None:
    at = town(wait_s=0.0)
    assert order(at) is None
    due_s = plan(at, T0).next_s
    assert due_s is not None
    assert due_s <= T0 + WAIT_S
    assert order(at, T0 + WAIT_S) is not None


def test_no_second_repartition_starts_while_one_is_pending() -> None:
    """For the same placement request, no second node is repartitioned."""
    two = [*slices(_1g_10gb="7"), *slices("n2", _1g_10gb="7")]
    at = town(cuttable(), cuttable("n2"), there=two)
    action = order(at)
    assert action is not None
    after, _ = fold(at, [Acted(action=action)], T0)
    assert order(after, T0 + EVERY_S) is None
    assert "node n1 is being repartitioned and will have room for it" in why(after)
    shut = {one.node for one in after.nodes.slices.values() if explain_closed_slice(after, one)}
    assert shut == {"n1"}
    shown = cuttable(state="pending", config=action.order.config, order=action.order)
    after, _ = fold(after, [CuttableSeen(nodes=(shown, cuttable("n2")))], T0 + 1)
    assert not after.nodes.cutting, "its node shows it"
    assert order(after, T0 + EVERY_S) is None
    assert {one.node for one in after.nodes.slices.values() if explain_closed_slice(after, one)} == {"n1"}
    done = replace(shown, state="success")
    after, _ = fold(after, [CuttableSeen(nodes=(done, cuttable("n2")))], T0 + 2)
    assert order(after, T0 + EVERY_S) is None, "its device plug-in does not show the cuts yet"
    assert not any(explain_closed_slice(after, one) for one in after.nodes.slices.values())


def test_remaining_gpu_space_is_partitioned_for_recently_used_models() -> None:
    """No requests are queued for these models, and no existing partition fits them."""
    models = [model("big", 30), model("mid", 18), model("small", 9)]
    waits = gateway(levels=[level("big", waiting=1, wait_s=WAIT_S)])

    def cut_for(*called: str) -> Counter[str]:
        known = {name: History(last_activity_s=T0) for name in called}
        at = world(models, [], [], [waits], histories=known, cuttable={"n1": cuttable(gpus=2)})
        action = order(at)
        assert action is not None
        return Counter(list_profiles(action.order.cuts))

    small, mid, neither = cut_for("small"), cut_for("mid"), cut_for()
    assert small["1g.10gb"] > mid["1g.10gb"] == neither["1g.10gb"]
    middle = [sum(many for name, many in one.items() if name[1:] == "g.20gb") for one in (mid, small, neither)]
    assert middle[0] > max(middle[1:])
    assert all(one["3g.40gb"] for one in (small, mid)), "what waits comes first"
    assert set(neither) == {"3g.40gb"}, "nothing else about it is known"


def test_rejected_repartition_is_retried_after_a_delay_with_a_reason() -> None:
    at = town()
    action = order(at)
    assert action is not None
    at, _ = fold(at, [Acted(action=action)], T0)
    at, _ = fold(at, [CutRefused(node="n1", reason="pod a/b uses its devices")], T0)
    assert order(at, T0 + REFUSED_S - 0.1) is None
    assert "but pod a/b uses its devices" in why(at)
    assert not any(explain_closed_slice(at, one) for one in at.nodes.slices.values())
    assert order(at, T0 + REFUSED_S) is not None


def test_node_is_excluded_after_three_failed_repartitions() -> None:
    for tries in range(1, TRIES_MAX):
        at = town(cuttable(state="failed", **asked(tries)))
        assert all(explain_closed_slice(at, one) for one in at.nodes.slices.values())
        assert order(at) is None
        action = order(at, T0 - 1 + RETRY_S[tries - 1])
        assert action is not None
        assert action.order.tries == tries + 1
        assert action.order.config != at.nodes.cuttable["n1"].config, "mig-manager does nothing for the same value"
    at = town(cuttable(state="failed", **asked(TRIES_MAX)))
    assert order(at, T0 + 10 * CUT_S_MAX) is None
    assert "could not be repartitioned in 3 attempts" in plan(at, T0).unmet[0].reason
    assert all(
        "could not be repartitioned in 3 attempts" in explain_closed_slice(at, one) for one in at.nodes.slices.values()
    )
    both = town(cuttable(state="failed", **asked(TRIES_MAX)), cuttable("n2"))
    action = order(both, T0 + EVERY_S)
    assert action is not None
    assert action.order.node == "n2"


def test_node_with_an_externally_set_mig_config_is_repartitioned() -> None:
    at = town(cuttable(state="success", config="all-disabled", order=None))
    assert order(at) is not None


def test_repartition_pending_beyond_its_time_limit_counts_as_failed() -> None:
    at = town(cuttable(state="pending", **asked(1, T0 - CUT_S_MAX)))
    action = order(at)
    assert action is not None
    assert action.order.tries == 2
    assert order(town(cuttable(state="rebooting", **asked(1, T0 - CUT_S_MAX + 1)))) is None


def test_node_is_not_repartitioned_again_within_the_minimum_interval() -> None:
    shown = slices(_2g_20gb="3")
    fields = asked(1, T0 - NODE_EVERY_S + 1, (("2g.20gb",) * 3,))
    assert order(town(cuttable(**fields), there=shown)) is None
    assert order(town(cuttable(**fields), there=shown), T0 + 1) is not None


def test_new_leader_starts_no_repartition_if_a_node_reports_one_pending() -> None:
    at = town()
    action = order(at)
    assert action is not None
    at, _ = fold(at, [Acted(action=action)], T0)
    at, _ = fold(at, [LeadingSeen(epoch=2)], T0)
    assert not at.nodes.cutting
    shown = cuttable(state="pending", config=action.order.config, order=action.order)
    at, _ = fold(at, [CuttableSeen(nodes=(shown,))], T0)
    assert order(replace_fields(at, synced=True), T0 + EVERY_S) is None


def test_node_that_fits_the_most_waiting_models_is_repartitioned() -> None:
    big, whole = model("big", 30), model("whole", 70)
    waits = gateway(levels=[level("big", waiting=1, wait_s=WAIT_S), level("whole", waiting=1, wait_s=WAIT_S)])
    a30 = cuttable("n1", product="NVIDIA-A100-SXM4-40GB")
    at = world([big, whole], [], [], [waits], cuttable={"n1": a30, "n2": cuttable("n2", gpus=2)})
    action = order(at)
    assert action is not None
    assert action.order.node == "n2"
    assert {"7g.80gb", "3g.40gb"} <= {*list_profiles(action.order.cuts)}


def test_node_that_gets_a_replica_is_not_repartitioned_in_the_same_plan() -> None:
    small, big = model("small", 5), model("big", 30)
    waits = gateway(levels=[level(name, waiting=1, wait_s=WAIT_S) for name in ("big", "small")])
    at = world([small, big], slices(_1g_10gb="7"), [], [waits], cuttable={"n1": cuttable()})
    assert [type(one).__name__ for one in plan(at, T0).actions] == ["StartReplica"]


def test_repartitions_of_two_nodes_are_spaced_by_a_minimum_interval() -> None:
    big, whole = model("big", 30), model("whole", 70)
    waits = gateway(levels=[level("whole", waiting=1, wait_s=WAIT_S)])
    order_s = T0 - EVERY_S + 5
    first = cuttable(state="pending", **asked(1, order_s))
    at = world([big, whole], [], [], [waits], cuttable={"n1": first, "n2": cuttable("n2")})
    assert order(at) is None
    assert plan(at, T0).next_s == order_s + EVERY_S
    action = order(at, order_s + EVERY_S)
    assert action is not None
    assert action.order.node == "n2"


def test_failed_node_is_repartitioned_after_other_nodes() -> None:
    action = order(town(cuttable(state="failed", **asked(1, T0 - CUT_S_MAX)), cuttable("n2")))
    assert action is not None
    assert action.order.node == "n2"


def test_repeated_mig_layout_gets_another_config_name_each_time() -> None:
    cuts = (("3g.40gb", "3g.40gb"), ("7g.80gb",))
    config, names = CONFIG, configs_of(cuts)
    for _ in range(5):
        assert config_of(cuts, config) != config
        config = config_of(cuts, config)
        assert config in names
        assert len(config) <= 63, "it is the value of a label"


Cuts = st.lists(st.sampled_from([one.name for one in H100.profiles if not one.media]), max_size=12)


@settings(deadline=None)
@given(
    Cuts, Cuts, st.integers(1, 4), st.dictionaries(st.sampled_from(["1g.10gb", "3g.40gb", "7g.80gb"]), st.floats(0, 9))
)
def test_mig_layout_is_valid_and_contains_the_first_wanted_profile(
    wanted: list[str], there: list[str], gpus: int, shares: dict[str, float]
) -> None:
    cuts = allocate_profiles(H100, gpus, wanted, Counter(there), shares)
    assert cuts == allocate_profiles(H100, gpus, wanted, Counter(there), shares), "same input, same answer"
    assert len(cuts) == gpus
    for gpu in cuts:
        fleet = Fleet()
        fleet.add(device("gpu").device, H100)
        large = sorted(gpu, key=lambda name: -H100.profile(name).size)
        made = [fleet.start(name) for name in large]
        assert all(isinstance(one, MigPlacement) for one in made), f"{gpu} is no layout"
    if wanted:
        assert wanted[0] in list_profiles(cuts)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=3), st.sampled_from(["success", "failed", "pending", "rebooting", ""]),
    st.sampled_from(list(S)), st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), st.integers(0, 2)),
    st.floats(0, 4000),
)  # fmt: skip
def test_node_in_use_is_never_repartitioned(
    on: list[int], state: str, stands: S, others: dict[str, int], later_s: float
) -> None:
    there = [one for number in range(3) for one in slices(f"n{number}", _1g_10gb="7")]
    small = model("small", 5)
    held = [replica(small, f"r{i}", on=[SliceId(f"n{n}/mig-1g.10gb-{i}")], state=stands) for i, n in enumerate(on)]
    nodes = [cuttable("n0"), cuttable("n1", state=state), cuttable("n2", state=state, **asked(2))]
    foreign = {f"{name} nvidia.com/mig-1g.10gb": many for name, many in others.items()}
    at = town(*nodes, there=there, held=held, others=foreign)
    action = order(at, T0 + later_s)
    assert action == order(at, T0 + later_s)
    if action is not None:
        assert action.order.node not in {f"n{number}" for number in on}
        assert not others.get(action.order.node)
