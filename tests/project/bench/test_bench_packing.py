"""The packing benchmark on clusters of a few nodes: each policy's choice by hand, and the rules of the experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement.index.index import build_default_estimate
from bench.packing import openb
from bench.packing.arrivals import Round, arrange
from bench.packing.cluster import Cluster
from bench.packing.fgd import Fgd, typical
from bench.packing.lost import curve
from bench.packing.openb import MILLI, Kind, NodeRow
from bench.packing.ours import Packer
from bench.packing.peers import Anywhere, BestFit, DotProd, GpuPacking
from bench.packing.policy import Rows, Scorer
from bench.packing.replay import Outcome, replay
from tests.support.example_budget import examples

ANY: frozenset[str] = frozenset()


def node(name: str, gpus: int = 2, cpu: int = 64_000, model: str = "T4") -> NodeRow:
    return NodeRow(name, cpu, 262_144, gpus, model)


def share(milli: int, cpu: int = 1000, models: frozenset[str] = ANY) -> Kind:
    return Kind(cpu, 1024, 1, milli, models)


def whole(gpus: int, cpu: int = 1000) -> Kind:
    return Kind(cpu, 1024, gpus, MILLI, ANY)


def cluster(*lefts: Sequence[int], cpu: int = 64_000) -> Cluster:
    """Nodes with these amounts free on each GPU."""
    made = Cluster([node(f"n{number}", len(left), cpu) for number, left in enumerate(lefts)])
    for number, left in enumerate(lefts):
        made.left[number, : len(left)] = left
    return made


def chosen(scorer: Scorer, among: Cluster, kind: Kind) -> tuple[int, int] | None:
    return Rows(among, scorer).choose(kind)


# --- the trace --------------------------------------------------------------------------------------------------------


def test_pod_lists_of_five_or_more_columns_are_read_in_name_order(tmp_path: Path) -> None:
    long, short = tmp_path / "openb_pod_list_long.csv", tmp_path / "openb_pod_list_short.csv"
    long.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
        "p2,1000,5,1,460,T4|P100,LS\np1,2000,6,0,0,T4,LS\np3,1,1,2,1200,,LS\n"
    )
    short.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np1,2000,6,1,1000\n")
    found = openb.workloads(tmp_path)
    assert found["long"] == [
        Kind(2000, 6, 0, 0, ANY), Kind(1000, 5, 1, 460, frozenset({"T4", "P100"})), Kind(1, 1, 2, 1000, ANY),
    ]  # fmt: skip
    assert found["short"] == [Kind(2000, 6, 1, 1000, ANY)]


PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{PODS}p,nan,1,1,5\n", "line 2: cpu_milli: expected a whole number, 0 or more"),
        (f"{PODS}p,1,-1,1,5\n", "line 2: memory_mib: expected a whole number"),
        (f"{PODS}p,1,1,1,{10**40}\n", "line 2: gpu_milli: expected a whole number"),
        (f"{PODS}p,1,1,1,0\n", "p: gpu_milli is 0: expected 1 or more for a pod with GPUs"),
        (f"{PODS}p,1,1,,5\n", "line 2: num_gpu: expected a whole number"),
        (f"{PODS}p,1\n", "line 2: num_gpu: expected a whole number"),
        (f"{PODS}p,1,1,1,5\np,1,1,1,5\n", "line 3: name: expected a name, each once, got 'p'"),
        (f"{PODS},1,1,1,5\n", "line 2: name: expected a name, each once, got ''"),
        ("other,columns\n1,2\n", "line 2: name: expected a name"),
        (PODS, "the file is empty"),
        ("", "the file is empty"),
    ],
)
def test_invalid_pod_list_raises_a_one_line_error_that_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "openb_pod_list_odd.csv").write_text(text)
    with pytest.raises(ValueError, match="odd") as error:
        openb.workloads(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/openb_pod_list_odd.csv: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_invalid_node_list_raises_an_error_that_names_the_column(tmp_path: Path) -> None:
    path = tmp_path / openb.NODES
    for row, expected in (
        ("n,1,1,-1,T4", "gpu: expected"),
        ("n,1,1,1,T4\nn,1,1,1,T4", "sn: expected a name, each once"),
    ):
        path.write_text(f"sn,cpu_milli,memory_mib,gpu,model\n{row}\n")
        with pytest.raises(ValueError, match=expected):
            openb.read_nodes(path)


def test_arrivals_are_drawn_until_the_gpu_limit_is_reached() -> None:
    """As in the experiment, not all of its GPUs count. One pod of 8 GPUs on ten: 8, then 16 > 13, as 8 + 1 <= 13."""
    nodes = [node(f"n{number}", 1) for number in range(10)]
    assert len(arrange(nodes, [whole(8)], seed=1).arrivals) == 2
    assert len(arrange(nodes, [share(500)], seed=1).arrivals) == 26
    less = arrange(nodes, [share(500)] * 40, seed=1)
    assert len(less.arrivals) == 26, "too many are deleted"
    assert arrange(nodes, [share(500)], 1) == arrange(nodes, [share(500)], 1) != arrange(nodes, [share(500)], 2)


# --- policies by hand -------------------------------------------------------------------------------------------------


def test_best_fit_policy_chooses_the_node_and_gpu_with_least_free_share() -> None:
    assert chosen(BestFit(), cluster([1000, 1000], [300, 700], [1000, 500]), share(300)) == (1, 0)
    assert chosen(BestFit(), cluster([1000, 1000], [1000, 1000]), share(300)) == (0, 0), "of equals the first"


def test_dot_prod_chooses_the_node_with_least_free_resources() -> None:
    assert chosen(DotProd(), cluster([1000, 1000], [400, 700]), whole(1)) == (0, 0)
    assert chosen(DotProd(), cluster([1000] * 8, [400, 700]), share(300, cpu=0)) == (1, 0)


def test_gpu_packing_prefers_gpus_in_use_then_nodes_in_use_then_idle_nodes() -> None:
    among = cluster([1000, 1000], [1000, 0], [400, 1000])
    assert chosen(GpuPacking(), among, share(300)) == (2, 0)
    assert chosen(GpuPacking(), among, share(500)) == (1, 0)
    assert chosen(GpuPacking(), among, whole(2)) == (0, 0)
    assert chosen(GpuPacking(), among, Kind(1000, 1, 0, 0, ANY)) == (0, 0), "all score alike"


def test_random_policy_chooses_any_gpu_with_enough_free_share() -> None:
    among = cluster([100, 300], [1000, 1000], [299, 0])
    found = {Anywhere(among, seed).choose(share(300)) for seed in range(40)}
    assert found == {(0, 1), (1, 0), (1, 1)}
    assert Anywhere(among, 1).choose(whole(4)) is None


def test_typical_pods_of_a_list_are_the_fewest_kinds_covering_95_percent() -> None:
    pods = [share(500)] * 90 + [whole(1)] * 6 + [whole(8)] * 4
    assert typical(pods) == {(1000, 1, 500, ANY): pytest.approx(90 / 96), (1000, 1, 1000, ANY): pytest.approx(6 / 96)}


def test_fragment_size_is_the_gpu_share_that_typical_pods_cannot_use() -> None:
    """Half of the pods request 600, a quarter a whole GPU, a quarter CPU alone."""
    pods = [share(600)] * 2 + [whole(1)] + [Kind(1000, 1, 0, 0, ANY)]
    among = cluster([500, 700])
    fgd = Fgd(among, pods)
    at = np.array([0])
    left = among.left[at]
    assert fgd.fragments(among.cpu[at], among.model[at], left)[0] == 0.5 * 500 + 0.25 * 1200 + 0.25 * 1200
    assert fgd.fragments(np.array([999]), among.model[at], left)[0] == 1200, "no CPU: nothing can be used"


def test_fgd_scores_equal_a_hand_calculation_and_the_best_is_chosen() -> None:
    pods = [share(500)] * 2 + [whole(1)]
    among = cluster([1000, 500], [1000, 1000])
    fgd = Fgd(among, pods)
    scores, gpus = fgd.score(among, share(500), np.arange(2))
    before = [fgd.fragments(among.cpu[[i]], among.model[[i]], among.left[[i]])[0] for i in (0, 1)]
    after = [0.0, 500 / 3]  # the half is filled; a whole one is broken, and a pod that needs a whole one loses the rest
    expected = [int(100 / (1 + math.exp(-(b - a) / 1000))) for b, a in zip(before, after, strict=True)]
    assert (scores.tolist(), gpus.tolist()) == (expected, [1, 0])
    assert chosen(fgd, among, share(500)) == (0, 1)


class Fixed:
    """A policy that always makes the same choice."""

    def __init__(self, choice: tuple[int, int] | None) -> None:
        self._choice = choice

    def choose(self, kind: Kind) -> tuple[int, int] | None:
        return self._choice


@pytest.mark.parametrize(("choice", "message"), [((0, 0), "node 0 has no room"), (None, "there is room")])
def test_replay_raises_if_a_policy_overcommits_or_rejects_a_fitting_pod(
    choice: tuple[int, int] | None, message: str
) -> None:
    round = Round((node("n0", 1, cpu=20_000),), (share(600), share(600)), 1)
    with pytest.raises(AssertionError, match=message):
        replay(round, lambda _: Fixed(choice))


# --- all policies -----------------------------------------------------------------------------------------------------

KINDS = st.builds(
    lambda cpu, gpus, milli: Kind(cpu, 1, gpus, milli if gpus == 1 else MILLI * bool(gpus), ANY),
    st.integers(0, 9000), st.sampled_from([0, 1, 1, 1, 2, 4]), st.integers(10, 1000),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=60), st.sampled_from(["fgd", "best", "dot", "pack", "any"]))
def test_policies_never_overcommit_and_cached_choices_equal_fresh_ones(kinds: list[Kind], name: str) -> None:
    nodes = tuple(node(f"n{number}", 1 + number, cpu=20_000) for number in range(4))

    def scorer(among: Cluster) -> Scorer:
        made: dict[str, Scorer] = {"best": BestFit(), "dot": DotProd(), "pack": GpuPacking()}
        return made[name] if name in made else Fgd(among, kinds)

    class Checked:
        def __init__(self, among: Cluster) -> None:
            self._among = among
            self._rows = Rows(among, scorer(among))

        def choose(self, kind: Kind) -> tuple[int, int] | None:
            assert (self._among.left >= -1).all()
            assert (self._among.cpu >= 0).all()
            found = self._rows.choose(kind)
            assert found == Rows(self._among, scorer(self._among)).choose(kind)
            return found

    round = Round(nodes, tuple(kinds), 1)
    outcome = replay(round, (lambda among: Anywhere(among, 1)) if name == "any" else Checked)
    assert all(0 <= used <= 100 for used in outcome.used.values())


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(KINDS, st.sampled_from([ANY, frozenset({"a"}), frozenset({"a", "b"})])), min_size=1, max_size=60)
)
def test_packer_of_pilotlight_never_overcommits_or_refuses_a_fitting_pod(
    asked: list[tuple[Kind, frozenset[str]]],
) -> None:
    """`replay` does its own accounting and raises AssertionError."""
    nodes = tuple(node(f"n{number}", 1 + number, cpu=20_000, model="ab"[number % 2]) for number in range(4))
    kinds = [kind._replace(models=models if kind.gpus else ANY) for kind, models in asked]
    replay(Round(nodes, tuple(kinds), 1), lambda _: Packer(nodes, build_default_estimate()))


def test_lost_gpu_share_of_a_run_is_the_usable_but_unused_share() -> None:
    """Of ten GPUs five are in use after seven have arrived, and eight after thirteen; more than ten is impossible."""
    runs = [Outcome({70: 50.0, 130: 80.0, 100: 70.0}, 0, 0, 0.0, []), Outcome({70: 60.0, 130: 90.0}, 0, 0, 0.0, [])]
    assert curve(runs) == [(70, 15.0), (130, 15.0)]
