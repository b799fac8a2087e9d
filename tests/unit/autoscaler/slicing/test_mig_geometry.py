"""MIG geometry: each layout of a device is counted, impossible ones are rejected, results match NVIDIA's tables."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, pairwise

import pytest

from autoscaler.slicing.mig_geometry import (
    GEOMETRIES,
    Cut,
    Geometry,
    Layout,
    MigError,
    build_layout,
    count_free_cuts,
    count_free_cuts_by_profile,
    free_slices,
    geometry_of,
    has_conflict,
    list_starts,
)

H100, A100, A30 = GEOMETRIES["H100-80"], GEOMETRIES["A100-40"], GEOMETRIES["A30"]
PRINTED = {"H100-94": {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.47gb": 2, "4g.47gb": 1, "7g.94gb": 1}}
GIB = 1 << 30


def plain(geometry: Geometry) -> list[str]:
    """The profiles without media engines."""
    return [profile.name for profile in geometry.profiles if not profile.media]


def layouts(geometry: Geometry, profiles: Collection[str]) -> set[Layout]:
    """All layouts that result from adding one partition after another."""
    found: set[Layout] = {()}
    ends: list[Layout] = [()]
    while ends:
        on = ends.pop()
        for profile in profiles:
            for start in list_starts(geometry, on, profile):
                more = tuple(sorted((*on, Cut(profile, start))))
                if more not in found:
                    found.add(more)
                    ends.append(more)
    return found


def by_hand(geometry: Geometry, profiles: Collection[str]) -> set[Layout]:
    """All sets of partitions that do not overlap, by exhaustive search; shares no code with `list_starts`."""
    cuts = sorted((p.name, start, p.size) for p in geometry.profiles if p.name in profiles for start in p.starts)
    found: set[Layout] = set()

    def grow(chosen: Layout, rest: list[tuple[str, int, int]], taken: frozenset[int]) -> None:
        found.add(chosen)
        for index, (name, start, size) in enumerate(rest):
            slices = frozenset(range(start, start + size))
            if not slices & taken:
                grow((*chosen, Cut(name, start)), rest[index + 1 :], taken | slices)

    grow((), cuts, frozenset())
    return found


def test_h100_layouts_equal_those_of_an_exhaustive_search() -> None:
    five = [name for name in plain(H100) if name != "1g.20gb"]
    assert len(layouts(H100, five)) == 298
    assert len(layouts(H100, plain(H100))) == 723
    assert len(layouts(H100, [profile.name for profile in H100.profiles])) == 2319  # with media engines
    assert layouts(H100, plain(H100)) == by_hand(H100, plain(H100))


def test_a100_has_nvidias_nineteen_full_layouts() -> None:
    """Without 1g.10gb, which driver 525 added, the guide shows 19 ways to fill an A100."""
    five = [name for name in plain(A100) if name != "1g.10gb"]
    full = [on for on in layouts(A100, five) if not any(list_starts(A100, on, profile) for profile in five)]
    assert len(full) == 19


def test_a30_layouts_equal_those_of_an_exhaustive_search() -> None:
    assert len(layouts(A30, plain(A30))) == 26  # each half: empty, a 2g, or one of 3 ways with 1g; or a 4g on all
    assert layouts(A30, plain(A30)) == by_hand(A30, plain(A30))


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=lambda geometry: geometry.name)
def test_no_layout_exceeds_the_compute_of_the_device(geometry: Geometry) -> None:
    """If memory slices do not overlap, compute slices suffice, so only memory is counted."""
    for on in layouts(geometry, plain(geometry)):
        assert sum(geometry.profile(cut.profile).compute for cut in on) <= geometry.compute


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=lambda geometry: geometry.name)
def test_compute_and_memory_of_each_mig_profile_match_its_name(geometry: Geometry) -> None:
    for profile in geometry.profiles:
        compute, _, gigabytes = profile.name.removesuffix("+me").removesuffix("gb").partition("g.")
        assert int(compute) == profile.compute
        assert 0.85 * int(gigabytes) * 1e9 < profile.memory_bytes <= int(gigabytes) * GIB
        assert profile.media == profile.name.endswith("+me")
        assert all(start + profile.size <= geometry.size for start in profile.starts)
        assert build_layout(geometry, [(profile.name, start) for start in profile.starts[:1]])
    assert geometry.profiles[-1].size == geometry.size


def test_partition_counts_of_an_empty_gpu_match_nvidia_documentation() -> None:
    for name, counts in PRINTED.items():
        assert {profile: count_free_cuts(GEOMETRIES[name], (), profile) for profile in counts} == counts
    assert count_free_cuts_by_profile(H100, ()) == (7, 1, 4, 3, 2, 1, 1)
    assert count_free_cuts_by_profile(A30, ()) == (4, 1, 2, 1, 1)


def test_free_partition_count_is_the_largest_number_that_fits() -> None:
    """Compared with all sets of starts, for each layout."""
    for on in layouts(H100, plain(H100)):
        taken = {cut.start + index for cut in on for index in range(H100.profile(cut.profile).size)}
        assert free_slices(H100, on) == 8 - len(taken)
        for profile in plain(H100):
            one = H100.profile(profile)
            possible = [s for s in one.starts if not taken & set(range(s, s + one.size))]
            assert list(list_starts(H100, on, profile)) == possible
            best = max(
                count
                for count in range(len(possible) + 1)
                for some in combinations(possible, count)
                if all(later - sooner >= one.size for sooner, later in pairwise(some))
            )
            assert count_free_cuts(H100, on, profile) == best


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([("4g.40gb", 0), ("4g.40gb", 4)], "4g.40gb cannot start at memory slice 4 of H100-80, only at 0"),
        ([("3g.40gb", 2)], "only at 0, 4"),
        ([("3g.40gb", 3)], "only at 0, 4"),
        ([("1g.10gb", 7)], "1g.10gb cannot start at memory slice 7"),
        ([("2g.20gb", 6)], "2g.20gb cannot start at memory slice 6"),
        ([("2g.20gb", 1)], "only at 0, 2, 4"),
        ([("1g.20gb", 3)], "only at 0, 2, 4, 6"),
        ([("7g.80gb", 0), ("1g.10gb", 6)], "7g.80gb at 0 conflicts with 1g.10gb at 6"),
        ([("3g.40gb", 0), ("4g.40gb", 0)], "4g.40gb at 0 conflicts with 3g.40gb at 0"),
        ([("4g.40gb", 0), ("1g.10gb", 2)], "4g.40gb at 0 conflicts with 1g.10gb at 2"),
        ([("1g.10gb", 5), ("1g.10gb", 5)], "1g.10gb at 5 conflicts with 1g.10gb at 5"),
        ([("1g.10gb+me", 0), ("1g.10gb+me", 1)], "1g.10gb+me at 1 conflicts with 1g.10gb+me at 0"),
        ([("2g.35gb", 0)], "H100-80 has no MIG profile '2g.35gb'; it has 1g.10gb, "),
        ([("1g.10gb", True)], "a whole number"),
        ([("1g.10gb", -1)], "cannot start at memory slice -1"),
        ([("1g.10gb", 0.0)], "a whole number"),
    ],
)
def test_impossible_h100_layout_is_rejected(cuts: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(MigError, match=message.replace("+", r"\+")):
        build_layout(H100, cuts)


def test_free_partitions_of_example_h100_layouts_match_manual_counts() -> None:
    assert (
        count_free_cuts_by_profile(H100, build_layout(H100, [("4g.40gb", 0), ("3g.40gb", 4)])) == (0,) * 7
    )  # a full device
    two_halves = build_layout(H100, [("3g.40gb", 4), ("3g.40gb", 0)])
    assert count_free_cuts_by_profile(H100, two_halves) == (0,) * 7  # one compute slice is stranded
    assert count_free_cuts(H100, build_layout(H100, [("1g.10gb", start) for start in range(7)]), "1g.10gb") == 0
    one = build_layout(H100, [("1g.10gb", 6)])
    assert [count_free_cuts(H100, one, profile) for profile in ("3g.40gb", "4g.40gb", "7g.80gb")] == [1, 1, 0]
    assert [count_free_cuts(H100, build_layout(H100, [("1g.10gb", 0)]), p) for p in ("3g.40gb", "4g.40gb")] == [1, 0]


def test_only_one_partition_per_gpu_can_have_media_engines() -> None:
    assert list_starts(A30, build_layout(A30, [("1g.6gb+me", 0)]), "2g.12gb+me") == ()
    assert list_starts(A30, build_layout(A30, [("1g.6gb+me", 0)]), "2g.12gb") == (2,)
    assert has_conflict(A30, Cut("1g.6gb+me", 0), Cut("2g.12gb+me", 2))
    assert count_free_cuts(H100, (), "1g.10gb+me") == 1


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A30", "A30"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40"),
        ("A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA-A800-SXM4-80GB", "A100-80"),
        ("NVIDIA-H100-80GB-HBM3", "H100-80"),
        ("NVIDIA H100 PCIe", "H100-80"),
        ("NVIDIA-H800", "H100-80"),
        ("NVIDIA H100 NVL", "H100-94"),
        ("NVIDIA-H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA-B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("A100-SXM4-40GB-MIG-1g.5gb-SHARED", "A100-40"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me", "H100-80"),
        ("NVIDIA-H100-80GB-HBM3-SHARED", "H100-80"),
    ],
)
def test_gpu_with_a_known_product_name_has_its_mig_geometry(product: str, name: str) -> None:
    assert geometry_of(product) is GEOMETRIES[name]


@pytest.mark.parametrize(
    "product",
    [
        *("", "Tesla-T4", "NVIDIA-L40S", "NVIDIA-GH200-480GB", "NVIDIA-H100-96GB-HBM3", "NVIDIA A100-SXM-64GB"),
        *("NVIDIA H20", "GRID-A100-10C", "NVIDIA-A100", "NVIDIA-A300", "NVIDIA-H2000", "NVIDIA RTX PRO 6000"),
    ],
)
def test_unknown_or_ambiguous_product_name_has_no_mig_geometry(product: str) -> None:
    """A wrong geometry would create impossible partitions; without one the device only stays whole."""
    assert geometry_of(product) is None
