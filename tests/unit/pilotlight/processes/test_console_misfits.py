"""The report of `serve` about Models that fit on no device: once at startup, and when it changes."""

from __future__ import annotations

import pytest

from autoscaler.controller.loop import LoopStep
from autoscaler.provisioning.unplaceable_models import Fitting
from autoscaler.spec.model import Model
from autoscaler.state.actions import Plan
from autoscaler.state.world import World
from pilotlight.processes.console import SAID_MAX, Misfits
from tests.support.builders.mig_nodes import town
from tests.support.builders.worlds import device, model, replace_fields, world
from tests.support.harness.faults.contained_faults import raised


def step(before: World, after: World) -> LoopStep:
    return LoopStep(before, after, Plan(), (), (), 0.0, 0.0, 0.0)


def test_model_that_fits_no_listed_device_is_printed_exactly_once() -> None:
    messages: list[str] = []
    listener = Misfits(raised, messages.append)
    begun, listed = world([model("huge", 30)], synced=False), world([model("huge", 30)], [device(memory_gi=4)])
    listener.on_step(step(begun, begun))
    assert messages == []
    listener.on_step(step(begun, listed))
    assert messages == [
        "Model huge fits on no device: needs 30Gi on one device; the largest has 4Gi; its requests get 503 no_capacity"
    ]
    listener.on_step(step(listed, listed))
    assert len(messages) == 1


def test_model_that_fits_no_device_is_printed_in_the_first_loop_step() -> None:
    messages: list[str] = []
    made = world([model("huge", 30)], [device(memory_gi=4)])
    Misfits(raised, messages.append).on_step(step(made, made))
    assert len(messages) == 1


def test_added_device_updates_the_printed_models_that_fit_no_device() -> None:
    messages: list[str] = []
    listener = Misfits(raised, messages.append)
    small = world([model("huge", 30), model("b", 50)], [device(memory_gi=4)])
    more = world([model("huge", 30), model("b", 50)], [device(memory_gi=4), device("gpu1", 40)])
    fewer = world([model("huge", 30)], [device(memory_gi=4), device("gpu1", 40)])
    listener.on_step(step(small, small))
    del messages[:]
    listener.on_step(step(small, more))
    assert messages == [
        "Model b fits on no device: needs 50Gi on one device; the largest has 40Gi; its requests get 503 no_capacity",
        "a device is now available for huge",
    ]
    listener.on_step(step(more, fewer))
    assert len(messages) == 2, "a Model that was removed from the documents is not reported"


def test_model_is_reported_to_fit_once_its_node_becomes_repartitionable() -> None:
    """Neither a slice nor a document changes."""
    messages: list[str] = []
    listener = Misfits(raised, messages.append)
    may = town()
    may_not = replace_fields(may, cuttable={})
    listener.on_step(step(may_not, may_not))
    assert [line.partition(":")[0] for line in messages] == ["Model big fits on no device"]
    listener.on_step(step(may_not, may))
    assert messages[1:] == ["a device is now available for big"]
    listener.on_step(step(may, may_not))
    assert len(messages) == 3


def test_models_that_fit_no_device_are_summarized_beyond_the_line_limit() -> None:
    messages: list[str] = []
    listener = Misfits(raised, messages.append)
    many = [model(f"m{number:03}", 30) for number in range(100)]
    none, large = world(many, [device(memory_gi=4)]), world(many, [device(memory_gi=40)])
    listener.on_step(step(none, none))
    assert len(messages) == SAID_MAX + 1
    assert messages[-1] == f"{100 - SAID_MAX} more models fit on no device: `pilotlight status` lists them"
    listener.on_step(step(none, large))
    assert messages[-1].endswith(f"m009 and {100 - SAID_MAX} more")


def test_failed_fit_check_of_one_model_leaves_others_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, faults, never = list[str](), list[tuple[str, str, str]](), Fitting.never

    def raising(self: Fitting, of: Model) -> str:
        if of.name == "bad":
            raise ValueError("bad memory")
        return never(self, of)

    monkeypatch.setattr(Fitting, "never", raising)
    listener = Misfits(lambda *fault: faults.append((*fault[:2], str(fault[2]))), messages.append)
    made = world([model("bad", 1), model("huge", 30)], [device(memory_gi=4)])
    listener.on_step(step(made, made))
    assert faults == [("bad", "misfits", "bad memory")]
    assert [line.partition(":")[0] for line in messages] == ["Model huge fits on no device"]
