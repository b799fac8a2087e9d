"""The node filter finds the nodes that match all constraints, with the same result as a check of each Slice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement.index.node_filter import KEYS_MAX, Admitting
from autoscaler.placement.model.predicates import has_matching_labels, node_exclusion_reason
from autoscaler.placement.model.types import NodeConstraints
from autoscaler.spec.pod import Toleration
from autoscaler.state.node_labels_and_taints import PendingLabels, Taint
from autoscaler.state.world import NodeId, Slice
from tests.support.builders.worlds import device
from tests.support.example_budget import examples

NODES = tuple(NodeId(f"n{n}") for n in range(4))
VALUES = st.sampled_from(("a", "b", ""))
LABELS = st.dictionaries(st.sampled_from(("zone", "disk", "kubernetes.io/os", "nvidia.com/gpu.count")), VALUES)
TAINTS = st.lists(st.builds(Taint, st.sampled_from(("lab", "x")), VALUES, st.just("NoSchedule")), max_size=2)
SLICES = st.lists(
    st.builds(
        lambda node, labels, known, coming, taints: device(
            node=node, labels=labels, labels_known=known, labels_coming=coming, taints=tuple(taints)
        ),
        st.sampled_from(NODES[:3]), LABELS, st.booleans(), st.sampled_from(PendingLabels), TAINTS,
    ),
    max_size=8,
)  # fmt: skip
CHOICES = st.builds(
    NodeConstraints,
    LABELS.map(lambda labels: tuple(sorted(labels.items()))),
    st.lists(st.builds(Toleration, key=st.sampled_from(("lab", "x")), operator=st.just("Exists")), max_size=2).map(
        tuple
    ),
    st.sets(st.sampled_from(NODES)).map(lambda nodes: tuple(sorted(nodes))),
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(SLICES, st.lists(CHOICES, min_size=1, max_size=3))
def test_node_passes_the_filter_only_if_all_its_slices_match(
    slices: list[Slice], choices: list[NodeConstraints]
) -> None:
    slices = sorted(slices, key=lambda one: one.node)
    found = Admitting(slices, np.array([NODES.index(one.node) for one in slices], np.int64), NODES)
    for choice in choices:
        alone = [
            all(
                has_matching_labels(choice.selector, one) and not node_exclusion_reason(choice, one)
                for one in slices
                if one.node == node
            )
            for node in NODES
        ]
        assert found.nodes(choice).tolist() == alone


def test_node_filter_matches_label_keys_beyond_the_cached_maximum() -> None:
    there = device(node="n0", labels={f"k{n}": "v" for n in range(KEYS_MAX + 2)}, labels_known=True)
    found = Admitting([there], np.zeros(1, np.int64), NODES[:1])
    for n in range(KEYS_MAX + 3):
        assert found.nodes(NodeConstraints(((f"k{n}", "v"),), (), ())).tolist() == [n < KEYS_MAX + 2]
