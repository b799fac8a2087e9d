"""Weighted max-min fair sharing: the arithmetic of shares, without gateways or time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.demand.max_min_shares import Claimant, ShareDemand, max_min, split_share

claimants = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(Claimant, st.integers(0, 50), st.sampled_from([0.5, 1.0, 3.0]), st.floats(0.0, 100.0)),
    max_size=8,
)


@settings(derandomize=True, deadline=None)
@given(claimants, st.integers(0, 100))
def test_max_min_assigns_slots_up_to_the_demand_and_fairly_by_weight(wanted: dict[str, Claimant], slots: int) -> None:
    given_ = max_min(wanted, slots)
    assert sum(given_.values()) == min(slots, sum(claimant.wants for claimant in wanted.values()))
    assert all(0 <= given_[key] <= claimant.wants for key, claimant in wanted.items())
    for poor, claimant in wanted.items():
        if given_[poor] < claimant.wants:  # an unsatisfied claimant: none got more per weight, except for the remainder
            assert all(
                (given_[rich] - 1) / wanted[rich].weight < (given_[poor] + 1) / claimant.weight for rich in given_
            )


@settings(derandomize=True, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.builds(ShareDemand, st.integers(1, 30), st.floats(0.0, 10.0)), min_size=1
    ),
    st.integers(0, 60),
)
def test_split_share_is_proportional_to_the_demand_of_each_part(parts: dict[str, ShareDemand], share: int) -> None:
    given_ = split_share(parts, share)
    total = sum(part.wants for part in parts.values())
    assert sum(given_.values()) == min(share, total)
    assert all(given_[key] <= part.wants for key, part in parts.items())
    assert all(given_[key] >= part.wants * min(share, total) // total for key, part in parts.items())


def test_single_slot_is_assigned_to_the_least_served_claimant() -> None:
    both = {"a": Claimant(5, 1.0, 10.0), "b": Claimant(5, 1.0, 2.0)}
    assert max_min(both, 1) == {"a": 0, "b": 1}
    assert max_min(both, 5) == {"a": 2, "b": 3}
