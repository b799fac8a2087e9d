"""MIG packing: the incremental choice equals exhaustive search, used partitions stay, room is kept for later demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import fsum, inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.slicing.mig_geometry import (
    GEOMETRIES,
    Cut,
    Geometry,
    Layout,
    MigError,
    build_layout,
    count_free_cuts_by_profile,
    free_slices,
    has_conflict,
    list_starts,
)
from autoscaler.slicing.mig_placement import FILLING_EACH, FILLING_LEAST, NOW, WORK, Fleet, MigPlacement, MigRefusal
from autoscaler.state.world import DeviceId
from tests.support.example_budget import examples

H100, A30, H200 = GEOMETRIES["H100-80"], GEOMETRIES["A30"], GEOMETRIES["H200"]
MIX = {"1g.10gb": 3.0, "1g.20gb": 1.0, "2g.20gb": 2.0, "3g.40gb": 2.0, "4g.40gb": 1.0, "7g.80gb": 0.5}
PROFILES = sorted({profile.name for geometry in (H100, A30) for profile in geometry.profiles})
IDS = [DeviceId(f"gpu-{number}") for number in range(4)]
Seen = dict[DeviceId, tuple[Geometry, Layout, Layout, str]]
"""Device -> geometry, in use, idle, closed."""


def fleet(*devices: tuple[Geometry, list[tuple[str, int]]], shares: Mapping[str, float] = MIX) -> Fleet:
    """A fleet of devices gpu-0, gpu-1, ... with these partitions in use."""
    made = Fleet(shares)
    for number, (geometry, used) in enumerate(devices):
        made.add(DeviceId(f"gpu-{number}"), geometry, used)
    return made


def where(found: MigPlacement | MigRefusal) -> tuple[str, int]:
    assert isinstance(found, MigPlacement), found
    return found.device, found.start


# --- exhaustive search ----------------------------------------------------------------------------------------------


def hopes(geometry: Geometry, on: Layout) -> list[int]:
    """Free partitions now, weighted by NOW, plus those that the end of each partition would add."""
    now = count_free_cuts_by_profile(geometry, on)
    thens = [count_free_cuts_by_profile(geometry, tuple(other for other in on if other != cut)) for cut in on]
    return [NOW * had + sum(then[index] - had for then in thens) for index, had in enumerate(now)]


@lru_cache(maxsize=1 << 14)
def filling(geometry: Geometry, on: Layout, weights: tuple[tuple[str, float], ...]) -> float:
    """The expected work that fits when profiles arrive at random by demand, drawn among those that still fit."""
    shares = dict(weights)
    fit = {one: list_starts(geometry, on, one.name) for one in geometry.profiles if shares.get(one.name)}
    chance = fsum(shares[one.name] for one in fit if fit[one])
    works = [
        shares[one.name]
        * (one.compute**WORK + max(filling(geometry, after(on, Cut(one.name, start)), weights) for start in possible))
        for one, possible in fit.items()
        if possible
    ]
    return fsum(works) / chance if chance else 0.0


def after(on: Layout, cut: Cut) -> Layout:
    return tuple(sorted((*on, cut)))


def shared(seen: Seen, shares: Mapping[str, float]) -> dict[str, float]:
    """The demand normalized to 1; without demand, all profiles are equally likely."""
    total = fsum(shares.values())
    plain = {one.name for geometry, *_ in seen.values() for one in geometry.profiles if not one.media}
    return (
        {name: share / total for name, share in shares.items()} if total else {name: 1 / len(plain) for name in plain}
    )


def rooms(seen: Seen) -> Counter[str]:
    """Profile -> how many more of it fit."""
    counts = Counter[str]()
    for geometry, used, _, closed in seen.values():
        if not closed:
            counts.update(
                dict(
                    zip(
                        [one.name for one in geometry.profiles], count_free_cuts_by_profile(geometry, used), strict=True
                    )
                )
            )
    return counts


def careful(seen: Seen, shares: Mapping[str, float], profile: str) -> tuple[DeviceId, int, tuple[Cut, ...]] | None:
    """The expected result of `Fleet.find`, recomputed: every place on every device, scored over the whole fleet."""
    counts, wanted = rooms(seen), shared(seen, shares)
    left = FILLING_LEAST + FILLING_EACH * sum(not closed for *_, closed in seen.values())
    worth = 1 / (1 + left) ** 2
    choices = []
    for device, (geometry, used, idle, closed) in seen.items():
        if closed or not geometry.has(profile):
            continue
        for start in list_starts(geometry, used, profile):
            cut = Cut(profile, start)
            weights = tuple(wanted.items())
            prices = [worth * (filling(geometry, used, weights) - filling(geometry, after(used, cut), weights))]
            both = zip(geometry.profiles, hopes(geometry, used), hopes(geometry, after(used, cut)), strict=True)
            for one, had, has in both:
                weight = wanted.get(one.name, 0.0) * one.compute / (1 + counts[one.name]) ** 2 / NOW
                prices.append(weight * (had - has))
            undo = () if cut in idle else tuple(other for other in idle if has_conflict(geometry, cut, other))
            choices.append((fsum(prices), free_slices(geometry, used), len(undo), cut not in idle, start, device, undo))
    best = min(choices, default=None)
    return None if best is None else (best[5], best[4], best[6])


# --- single cases ---------------------------------------------------------------------------------------------------


def test_small_partitions_fill_slots_4_to_6_before_slots_0_to_3() -> None:
    on = fleet((H100, []))
    assert [where(on.start("1g.10gb"))[1] for _ in range(7)] == [6, 4, 5, 0, 1, 2, 3]


def test_empty_gpu_stays_free_while_a_used_gpu_fits_the_partition() -> None:
    assert where(fleet((H100, []), (H100, [("1g.10gb", 6)])).find("3g.40gb")) == ("gpu-1", 0)
    assert where(fleet((H100, []), (H100, [("4g.40gb", 0)])).find("3g.40gb")) == ("gpu-1", 4)


def test_space_is_not_kept_free_for_profiles_without_demand() -> None:
    """If only 3g is in demand, a 1g goes where it blocks no 3g, even if that is the device with the most free space."""
    on = fleet((H100, [("3g.40gb", 0)]), (H100, [("1g.10gb", 5)]), shares={"3g.40gb": 1})
    assert where(on.find("1g.10gb"))[0] == "gpu-1"
    on.learn({"7g.80gb": 1})
    assert where(on.find("1g.10gb")) == ("gpu-0", 4)


def test_small_partition_is_placed_where_it_blocks_no_larger_profile() -> None:
    """Blocking the last place for a 4g costs more than blocking one of many for a 7g."""
    devices = [(H100, [("1g.10gb", 6)]), *((H100, list[tuple[str, int]]()) for _ in range(9))]
    device, start = where(fleet(*devices, shares={"4g.40gb": 1, "7g.80gb": 1}).find("1g.10gb"))
    assert (device, start) == ("gpu-0", 4)


def test_idle_partition_is_reused_before_another_is_removed() -> None:
    on = Fleet(MIX)
    on.add(IDS[0], H100, idle=[("3g.40gb", 4)])
    on.add(IDS[1], H100, idle=[("1g.10gb", 4)])
    assert on.find("1g.10gb") == MigPlacement(IDS[1], "1g.10gb", 4, there=True)
    assert on.find("7g.80gb") == MigPlacement(IDS[0], "7g.80gb", 0, undo=(Cut("3g.40gb", 4),))


def test_partition_in_use_is_not_removed_to_place_another() -> None:
    on = Fleet(MIX)
    on.add(IDS[0], H100, used=[("1g.10gb", 0)], idle=[("1g.10gb", 4), ("1g.10gb", 6)])
    assert on.find("4g.40gb") == MigRefusal("4g.40gb", "1 of 1 devices with 4g.40gb has no room for it")
    found = on.start("3g.40gb")
    assert found == MigPlacement(IDS[0], "3g.40gb", 4, undo=(Cut("1g.10gb", 4), Cut("1g.10gb", 6)))
    assert (on.used(IDS[0]), on.idle(IDS[0])) == ((Cut("1g.10gb", 0), Cut("3g.40gb", 4)), ())
    with pytest.raises(MigError, match=r"3g\.40gb at memory slice 4 of gpu-0 is in use: only an idle MIG slice"):
        on.undo(IDS[0], Cut("3g.40gb", 4))
    on.stop(IDS[0], Cut("3g.40gb", 4))
    on.undo(IDS[0], Cut("3g.40gb", 4))
    assert on.idle(IDS[0]) == ()


def test_idle_partition_is_removed_to_free_its_media_engines() -> None:
    on = Fleet()
    on.add(IDS[0], A30, used=[("1g.6gb", 3)], idle=[("1g.6gb+me", 2)])
    assert on.find("2g.12gb+me") == MigPlacement(IDS[0], "2g.12gb+me", 0, undo=(Cut("1g.6gb+me", 2),))


def test_refused_partition_has_a_reason_that_counts_the_unsuitable_devices() -> None:
    on = fleet((H100, [("7g.80gb", 0)]), (H100, []), (A30, []))
    on.close(IDS[1], "reconfiguring failed: 3 tries")
    assert on.find("1g.18gb") == MigRefusal("1g.18gb", "no device has MIG profile 1g.18gb; there are A30, H100-80")
    reason = (
        "1 of 2 devices with 2g.20gb has no room for it, and 1 accepts no new replicas (reconfiguring failed: 3 tries)"
    )
    assert on.find("2g.20gb") == MigRefusal("2g.20gb", reason)
    assert on.find("2g.20gb", among=()) == MigRefusal("2g.20gb", "no device has MIG profile 2g.20gb; there are none")
    on.close(IDS[1], "")
    assert where(on.find("2g.20gb"))[0] == "gpu-1"


def test_partition_is_placed_only_on_the_permitted_devices() -> None:
    on = fleet((H100, [("4g.40gb", 0)]), (H100, []), (H200, []))
    assert where(on.find("3g.40gb", among={IDS[1]})) == ("gpu-1", 4)
    assert isinstance(on.find("3g.40gb", among={IDS[2]}), MigRefusal)


def test_partition_in_use_is_recorded_even_on_a_closed_device() -> None:
    on = Fleet(MIX)
    on.add(IDS[0], H100, idle=[("2g.20gb", 0), ("1g.10gb", 6)], closed="cordoned")
    on.use(IDS[0], Cut("3g.40gb", 0))
    assert (on.used(IDS[0]), on.idle(IDS[0])) == ((Cut("3g.40gb", 0),), (Cut("1g.10gb", 6),))
    on.remove(IDS[0])
    assert on.find("1g.10gb") == MigRefusal("1g.10gb", "no device has MIG profile 1g.10gb; there are none")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda on: on.add(IDS[0], H100), "gpu-0 exists already"),
        (lambda on: on.add("", H100), "a Device needs a name, not ''"),
        (lambda on: on.add(IDS[1], H100, [("1g.10gb", 0)], [("3g.40gb", 0)]), "3g.40gb at 0 conflicts with 1g.10gb"),
        (lambda on: on.add(IDS[1], H100, [("1g.10gb", 9)]), "1g.10gb cannot start at memory slice 9 of H100-80"),
        (lambda on: on.add(IDS[1], A30, [("1g.10gb", 0)]), "A30 has no MIG profile '1g.10gb'"),
        (lambda on: on.use(IDS[0], Cut("7g.80gb", 0)), "7g.80gb at 0 conflicts with 1g.10gb at 6"),
        (lambda on: on.stop(IDS[0], Cut("1g.10gb", 5)), "no MIG slice 1g.10gb at memory slice 5 of gpu-0 is in use"),
        (lambda on: on.undo(IDS[0], Cut("1g.10gb", 5)), "1g.10gb at memory slice 5 of gpu-0 does not exist"),
        (lambda on: on.remove(IDS[3]), "no MIG Device is named 'gpu-3'"),
        (lambda on: on.close(IDS[3], "x"), "no MIG Device is named 'gpu-3'"),
        (lambda on: on.used(IDS[3]), "no MIG Device is named 'gpu-3'"),
        *(
            (lambda on, share=share: on.learn({"1g.10gb": share}), "demand for '1g.10gb' is .*expected a number")
            for share in (nan, inf, -1.0, 2**54, True, "1", None)
        ),
    ],
)
def test_invalid_partition_operation_raises_an_error_and_changes_nothing(
    does: Callable[[Any], None], message: str
) -> None:
    on = fleet((H100, [("1g.10gb", 6)]))
    before = on.find("1g.10gb")
    with pytest.raises(MigError, match=message) as caught:
        does(on)
    assert "\n" not in str(caught.value)
    assert (on.find("1g.10gb"), on.used(IDS[0])) == (before, (Cut("1g.10gb", 6),))


# --- properties -----------------------------------------------------------------------------------------------------

deeds = st.tuples(st.sampled_from("ssssxxukotr"), st.integers(0, 1 << 30), st.sampled_from(PROFILES))
shares_ = st.dictionaries(st.sampled_from(PROFILES), st.floats(0, 10), max_size=5)


def played(
    shares: Mapping[str, float], steps: list[tuple[str, int, str]], look: Callable[[Fleet, Seen], None]
) -> Fleet:
    """A fleet and an independent record of it, through random starts, stops and other steps."""
    on, seen = Fleet(shares), Seen()
    for number, id in enumerate(IDS[:3]):
        on.add(id, (H100, A30, H100)[number])
        seen[id] = ((H100, A30, H100)[number], (), (), "")
    look(on, seen)
    for deed, number, profile in steps:
        _step(on, seen, deed, number, profile)
        look(on, seen)
    return on


def _step(on: Fleet, seen: Seen, deed: str, number: int, profile: str) -> None:
    used = [(id, cut) for id, known in seen.items() for cut in known[1]]
    idle = [(id, cut) for id, known in seen.items() for cut in known[2]]
    id = IDS[number % len(IDS)]
    if deed == "s":
        found = on.start(profile)
        if isinstance(found, MigPlacement):
            geometry, had, lay, closed = seen[found.device]
            rest = tuple(cut for cut in lay if cut not in {*found.undo, found.cut})
            seen[found.device] = (geometry, tuple(sorted((*had, found.cut))), rest, closed)
    elif deed == "x" and used:
        id, cut = used[number % len(used)]
        on.stop(id, cut)
        geometry, had, lay, closed = seen[id]
        seen[id] = (geometry, tuple(each for each in had if each != cut), tuple(sorted((*lay, cut))), closed)
    elif deed == "u" and idle:
        id, cut = idle[number % len(idle)]
        on.undo(id, cut)
        geometry, had, lay, closed = seen[id]
        seen[id] = (geometry, had, tuple(each for each in lay if each != cut), closed)
    elif deed in "ko" and id in seen:
        on.close(id, "" if deed == "o" else "broken")
        seen[id] = (*seen[id][:3], "" if deed == "o" else "broken")
    elif deed == "t" and id not in seen:
        on.add(id, H100)
        seen[id] = (H100, (), (), "")
    elif deed == "r" and id in seen and not seen[id][1]:
        on.remove(id)
        del seen[id]


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(shares_, st.lists(deeds, max_size=40))
def test_partition_choice_after_random_steps_equals_an_exhaustive_search(
    shares: dict[str, float], steps: list[tuple[str, int, str]]
) -> None:
    def look(on: Fleet, seen: Seen) -> None:
        assert Counter(on._room) == rooms(seen)
        assert on._open == sum(not closed for *_, closed in seen.values())
        for profile in PROFILES[:: max(1, len(PROFILES) // 4)]:
            found = on.find(profile)
            chosen = None if isinstance(found, MigRefusal) else (found.device, found.start, found.undo)
            assert chosen == careful(seen, shares, profile)

    played(shares, steps, look)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(shares_, st.lists(deeds, max_size=60))
def test_random_placements_never_overlap_and_keep_partitions_in_use(
    shares: dict[str, float], steps: list[tuple[str, int, str]]
) -> None:
    def look(on: Fleet, seen: Seen) -> None:
        for id, (geometry, used, idle, _) in seen.items():
            assert (on.used(id), on.idle(id)) == (used, idle)  # so partitions in use stay until they are stopped
            build_layout(geometry, (*used, *idle))  # raises if two overlap

    played(shares, steps, look)


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(shares_, st.lists(deeds, max_size=40), st.permutations(IDS))
def test_partition_choice_after_random_steps_equals_that_of_a_new_fleet(
    shares: dict[str, float], steps: list[tuple[str, int, str]], order: list[DeviceId]
) -> None:
    last = Seen()

    def look(_: Fleet, seen: Seen) -> None:
        last.clear()
        last.update(seen)

    on = played(shares, steps, look)
    again = Fleet(shares)
    for id in (id for id in order if id in last):
        again.add(id, *last[id])
    assert [on.find(profile) for profile in PROFILES] == [again.find(profile) for profile in PROFILES]


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(shares_, st.lists(deeds, max_size=40), st.sampled_from((H100, A30, H200)))
def test_adding_a_device_never_causes_a_refusal(
    shares: dict[str, float], steps: list[tuple[str, int, str]], more: Geometry
) -> None:
    on = played(shares, steps, lambda *_: None)
    had = {profile for profile in PROFILES if isinstance(on.find(profile), MigPlacement)}
    on.add(DeviceId("more"), more)
    assert had <= {profile for profile in PROFILES if isinstance(on.find(profile), MigPlacement)}


def test_first_placement_evaluates_each_set_of_slots_at_most_once() -> None:
    made = fleet((H100, []), shares=dict.fromkeys((one.name for one in H100.profiles), 1.0))
    assert isinstance(made.find("1g.10gb"), MigPlacement)
    assert len(made._fillings) <= 2 * 2**H100.size, "eight slices and the media engines, each taken or not"
