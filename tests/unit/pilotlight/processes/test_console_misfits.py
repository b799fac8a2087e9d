"""What `serve` says of Models that fit on no device: once, at the start and when it changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.controller.loop import LoopStep
from autoscaler.provisioning.feasibility import Fitting
from autoscaler.spec.model import Model
from autoscaler.state.actions import Plan
from autoscaler.state.world import World
from pilotlight.processes.console import SAID_MAX, Misfits
from tests.kit.contained import raised
from tests.kit.recut import town
from tests.kit.worlds import device, model, world


def step(before: World, after: World) -> LoopStep:
    return LoopStep(before, after, Plan(), (), (), 0.0, 0.0, 0.0)


def test_misfit_is_reported_once_after_devices_are_listed() -> None:
    said: list[str] = []
    listener = Misfits(raised, said.append)
    begun, listed = world([model("huge", 30)], synced=False), world([model("huge", 30)], [device(memory_gi=4)])
    listener.on_step(step(begun, begun))
    assert said == []
    listener.on_step(step(begun, listed))
    assert said == [
        "Model huge fits on no device: needs 30Gi on one device; the largest has 4Gi; its calls get 503 no_capacity"
    ]
    listener.on_step(step(listed, listed))
    assert len(said) == 1


def test_misfit_is_reported_in_an_unchanged_first_step() -> None:
    said: list[str] = []
    made = world([model("huge", 30)], [device(memory_gi=4)])
    Misfits(raised, said.append).on_step(step(made, made))
    assert len(said) == 1


def test_new_device_updates_the_reported_misfits() -> None:
    said: list[str] = []
    listener = Misfits(raised, said.append)
    small = world([model("huge", 30), model("b", 50)], [device(memory_gi=4)])
    more = world([model("huge", 30), model("b", 50)], [device(memory_gi=4), device("gpu1", 40)])
    fewer = world([model("huge", 30)], [device(memory_gi=4), device("gpu1", 40)])
    listener.on_step(step(small, small))
    del said[:]
    listener.on_step(step(small, more))
    assert said == [
        "Model b fits on no device: needs 50Gi on one device; the largest has 40Gi; its calls get 503 no_capacity",
        "there is a device now for huge",
    ]
    listener.on_step(step(more, fewer))
    assert len(said) == 2, "a Model that is gone from the documents is no news"


def test_change_of_node_repartitioning_updates_misfits() -> None:
    """No Slice and no document is another by that."""
    said: list[str] = []
    listener = Misfits(raised, said.append)
    may = town()
    may_not = replace(may, cuttable={})
    listener.on_step(step(may_not, may_not))
    assert [line.partition(":")[0] for line in said] == ["Model big fits on no device"]
    listener.on_step(step(may_not, may))
    assert said[1:] == ["there is a device now for big"]
    listener.on_step(step(may, may_not))
    assert len(said) == 3


def test_number_of_misfit_lines_is_limited() -> None:
    said: list[str] = []
    listener = Misfits(raised, said.append)
    many = [model(f"m{number:03}", 30) for number in range(100)]
    none, large = world(many, [device(memory_gi=4)]), world(many, [device(memory_gi=40)])
    listener.on_step(step(none, none))
    assert len(said) == SAID_MAX + 1
    assert said[-1] == f"{100 - SAID_MAX} more models fit on no device: `pilotlight status` tells each"
    listener.on_step(step(none, large))
    assert said[-1].endswith(f"m009 and {100 - SAID_MAX} more")


def test_a_model_that_raises_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said, faults, never = list[str](), list[tuple[str, str, str]](), Fitting.never

    def raising(self: Fitting, of: Model) -> str:
        if of.name == "bad":
            raise ValueError("bad memory")
        return never(self, of)

    monkeypatch.setattr(Fitting, "never", raising)
    listener = Misfits(lambda *fault: faults.append((*fault[:2], str(fault[2]))), said.append)
    made = world([model("bad", 1), model("huge", 30)], [device(memory_gi=4)])
    listener.on_step(step(made, made))
    assert faults == [("bad", "misfits", "bad memory")]
    assert [line.partition(":")[0] for line in said] == ["Model huge fits on no device"]
