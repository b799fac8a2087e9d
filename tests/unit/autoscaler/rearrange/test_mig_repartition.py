"""When an idle node is cut anew, and how: for what fits no cut that is there, and never under anybody's feet."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.fold.fold import fold
from autoscaler.fold.mig import REFUSED_S
from autoscaler.planner.plan import plan
from autoscaler.provisioning.feasibility import list_unplaceable_models
from autoscaler.queries.cordons import explain_closed_slice
from autoscaler.queries.mig_status import CUT_S_MAX, RETRY_S, TRIES_MAX, config_of, configs_of, list_profiles
from autoscaler.rearrange.mig_repartition import EVERY_S, NODE_EVERY_S, WAIT_S, allocate_profiles
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.state.actions import Acted
from autoscaler.state.events import LeadingSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.mig import CutRefused, CuttableSeen, MigNode
from autoscaler.state.operator_orders import Cordon, CordonTarget
from autoscaler.state.world import History, SliceId
from tests.kit.recut import CONFIG, H100, asked, cuttable, order, slices, town, why
from tests.kit.worlds import T0, device, gateway, level, model, replica, world


def test_an_idle_node_is_cut_for_what_fits_no_cut_that_is_there() -> None:
    action = order(town())
    assert action is not None
    (gpu,) = action.order.cuts
    assert "3g.40gb" in gpu
    assert Counter(gpu)["1g.10gb"] >= 3, "what is there stays as far as it fits"
    assert (action.order.node, action.order.before, action.order.tries) == ("n1", CONFIG, 1)
    assert "1 Replica fit then, big first" in action.reason
    assert "node n1 is being cut anew" in why(town())


def test_nobody_cuts_what_settings_do_not_let_us_cut() -> None:
    at = replace(town(), cuttable={})
    (unmet,) = plan(at, T0).unmet
    assert (order(at), unmet.never) == (None, True)


def test_what_could_be_cut_is_not_called_impossible() -> None:
    assert list_unplaceable_models(town()) == {}
    assert list_unplaceable_models(replace(town(), cuttable={})).keys() == {"big"}
    assert list_unplaceable_models(town(want_gi=90.0)).keys() == {"big"}, "no profile is so large"


@pytest.mark.parametrize("state", list(S))
def test_no_node_is_cut_while_a_replica_has_anything_there_in_whatever_state(state: S) -> None:
    other = model("small", 5)
    there = slices(_1g_10gb="7")
    one = replica(other, "r1", on=[there[3].id], state=state)
    at = town(there=there, held=[one])
    assert order(at) is None
    assert "could be cut anew for it, once it is idle" in why(at)


def test_no_node_is_cut_that_somebody_else_uses() -> None:
    at = town(others={"n1 nvidia.com/mig-1g.10gb": 1})
    assert order(at) is None
    assert "once it is idle" in why(at)
    assert order(town(others={"n2 nvidia.com/mig-1g.10gb": 1})) is not None


def test_a_replica_on_a_cut_that_is_no_slice_any_more_keeps_its_node() -> None:
    one = replica(model("small", 5), "r1", on=["n1/mig-2g.20gb-0"])
    assert order(town(held=[one])) is None


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (cuttable(state="pending"), "does mig-manager run there?"),
        (cuttable(state=""), "does mig-manager run there?"),
        (cuttable(state="failed"), "does mig-manager run there?"),
        (cuttable(usable=False), "when its turn comes"),
    ],
)
def test_a_node_that_cannot_be_cut_now_is_left_alone_and_why_is_said(node: MigNode, said: str) -> None:
    assert order(town(node)) is None
    assert said in why(town(node))


def test_where_all_cuts_must_be_alike_none_is_possible_and_why_is_said() -> None:
    at = town(cuttable(strategy="single"))
    (unmet,) = plan(at, T0).unmet
    assert (order(at), unmet.never) == (None, True)
    assert "takes MIG strategy mixed" in unmet.reason
    assert list_unplaceable_models(at).keys() == {"big"}


def test_a_cordoned_node_is_left_alone() -> None:
    place = CordonTarget("node", "n1")
    assert order(town(cordons={place: Cordon(place=place, node="n1", since_s=T0)})) is None


def test_a_product_of_which_nothing_is_known_is_never_cut() -> None:
    at = town(cuttable(product="NVIDIA-T4"))
    assert (order(at), plan(at, T0).unmet[0].never) == (None, True)


def test_a_want_waits_a_little_before_anything_is_cut_for_it() -> None:
    at = town(wait_s=0.0)
    assert order(at) is None
    due_s = plan(at, T0).next_s
    assert due_s is not None
    assert due_s <= T0 + WAIT_S
    assert order(at, T0 + WAIT_S) is not None


def test_what_is_on_its_way_is_closed_and_serves_who_waits_for_it() -> None:
    """No second node is cut for the same PlacementRequest."""
    two = [*slices(_1g_10gb="7"), *slices("n2", _1g_10gb="7")]
    at = town(cuttable(), cuttable("n2"), there=two)
    action = order(at)
    assert action is not None
    after, _ = fold(at, [Acted(action=action)], T0)
    assert order(after, T0 + EVERY_S) is None
    assert "node n1 is being cut anew, and it fits there then" in why(after)
    shut = {one.node for one in after.slices.values() if explain_closed_slice(after, one)}
    assert shut == {"n1"}
    shown = cuttable(state="pending", config=action.order.config, order=action.order)
    after, _ = fold(after, [CuttableSeen(nodes=(shown, cuttable("n2")))], T0 + 1)
    assert not after.cutting, "its node shows it"
    assert order(after, T0 + EVERY_S) is None
    assert {one.node for one in after.slices.values() if explain_closed_slice(after, one)} == {"n1"}
    done = replace(shown, state="success")
    after, _ = fold(after, [CuttableSeen(nodes=(done, cuttable("n2")))], T0 + 2)
    assert order(after, T0 + EVERY_S) is None, "its device plug-in does not show the cuts yet"
    assert not any(explain_closed_slice(after, one) for one in after.slices.values())


def test_what_is_left_of_a_node_is_cut_as_it_was_wanted_lately() -> None:
    """Nobody waits for these, and no cut of theirs is there."""
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
    assert set(neither) == {"3g.40gb"}, "of which nobody knows anything else"


def test_an_order_that_is_refused_is_not_given_again_at_once_and_why_is_said() -> None:
    at = town()
    action = order(at)
    assert action is not None
    at, _ = fold(at, [Acted(action=action)], T0)
    at, _ = fold(at, [CutRefused(node="n1", reason="pod a/b has a device of it")], T0)
    assert order(at, T0 + REFUSED_S - 0.1) is None
    assert "but pod a/b has a device of it" in why(at)
    assert not any(explain_closed_slice(at, one) for one in at.slices.values())
    assert order(at, T0 + REFUSED_S) is not None


def test_what_failed_is_tried_again_so_often_then_the_node_is_out_and_others_go_on() -> None:
    for tries in range(1, TRIES_MAX):
        at = town(cuttable(state="failed", **asked(tries)))
        assert all(explain_closed_slice(at, one) for one in at.slices.values())
        assert order(at) is None
        action = order(at, T0 - 1 + RETRY_S[tries - 1])
        assert action is not None
        assert action.order.tries == tries + 1
        assert action.order.config != at.cuttable["n1"].config, "mig-manager does nothing when it is told the same"
    at = town(cuttable(state="failed", **asked(TRIES_MAX)))
    assert order(at, T0 + 10 * CUT_S_MAX) is None
    assert "could not be cut anew in 3 tries" in plan(at, T0).unmet[0].reason
    assert all("could not be cut anew in 3 tries" in explain_closed_slice(at, one) for one in at.slices.values())
    both = town(cuttable(state="failed", **asked(TRIES_MAX)), cuttable("n2"))
    action = order(both, T0 + EVERY_S)
    assert action is not None
    assert action.order.node == "n2"


def test_whoever_tells_the_node_something_else_takes_it_up_again() -> None:
    at = town(cuttable(state="success", config="all-disabled", order=None))
    assert order(at) is not None


def test_what_is_pending_for_ever_has_failed() -> None:
    at = town(cuttable(state="pending", **asked(1, T0 - CUT_S_MAX)))
    action = order(at)
    assert action is not None
    assert action.order.tries == 2
    assert order(town(cuttable(state="rebooting", **asked(1, T0 - CUT_S_MAX + 1)))) is None


def test_a_node_is_not_cut_again_and_again() -> None:
    shown = slices(_2g_20gb="3")
    fields = asked(1, T0 - NODE_EVERY_S + 1, (("2g.20gb",) * 3,))
    assert order(town(cuttable(**fields), there=shown)) is None
    assert order(town(cuttable(**fields), there=shown), T0 + 1) is not None


def test_a_new_leader_reads_what_is_on_its_way_from_the_nodes() -> None:
    at = town()
    action = order(at)
    assert action is not None
    at, _ = fold(at, [Acted(action=action)], T0)
    at, _ = fold(at, [LeadingSeen(epoch=2)], T0)
    assert not at.cutting
    shown = cuttable(state="pending", config=action.order.config, order=action.order)
    at, _ = fold(at, [CuttableSeen(nodes=(shown,))], T0)
    assert order(replace(at, synced=True), T0 + EVERY_S) is None


def test_the_node_on_which_most_find_a_place_is_cut() -> None:
    big, whole = model("big", 30), model("whole", 70)
    waits = gateway(levels=[level("big", waiting=1, wait_s=WAIT_S), level("whole", waiting=1, wait_s=WAIT_S)])
    a30 = cuttable("n1", product="NVIDIA-A100-SXM4-40GB")
    at = world([big, whole], [], [], [waits], cuttable={"n1": a30, "n2": cuttable("n2", gpus=2)})
    action = order(at)
    assert action is not None
    assert action.order.node == "n2"
    assert {"7g.80gb", "3g.40gb"} <= {*list_profiles(action.order.cuts)}


def test_who_gets_a_place_there_now_keeps_its_node_from_being_cut() -> None:
    small, big = model("small", 5), model("big", 30)
    waits = gateway(levels=[level(name, waiting=1, wait_s=WAIT_S) for name in ("big", "small")])
    at = world([small, big], slices(_1g_10gb="7"), [], [waits], cuttable={"n1": cuttable()})
    assert [type(one).__name__ for one in plan(at, T0).actions] == ["StartReplica"]


def test_between_two_orders_there_is_a_while_whatever_they_are_about() -> None:
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


def test_one_that_failed_comes_after_those_that_did_not() -> None:
    action = order(town(cuttable(state="failed", **asked(1, T0 - CUT_S_MAX)), cuttable("n2")))
    assert action is not None
    assert action.order.node == "n2"


def test_a_layout_is_never_called_what_its_node_was_told_last() -> None:
    cuts = (("3g.40gb", "3g.40gb"), ("7g.80gb",))
    told, names = CONFIG, configs_of(cuts)
    for _ in range(5):
        assert config_of(cuts, told) != told
        told = config_of(cuts, told)
        assert told in names
        assert len(told) <= 63, "it is the value of a label"


Cuts = st.lists(st.sampled_from([one.name for one in H100.profiles if not one.media]), max_size=12)


@settings(deadline=None)
@given(
    Cuts, Cuts, st.integers(1, 4), st.dictionaries(st.sampled_from(["1g.10gb", "3g.40gb", "7g.80gb"]), st.floats(0, 9))
)
def test_what_is_laid_out_is_possible_and_what_is_wanted_comes_first(
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
def test_no_node_is_ever_cut_on_which_anybody_has_anything(
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
