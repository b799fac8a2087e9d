"""Devices allocated to claims before they are attached: their conditions, and the state of their slices."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.slicing.dra import Dra
from autoscaler.slicing.dra_binding_conditions import Binding, apply_bindings, read_bindings
from autoscaler.slicing.dra_resource_slices import ATTACHED_FIRST
from autoscaler.slicing.slicer_protocol import NodeFacts, Object
from autoscaler.state.world import NodeId
from tests.support.builders.resource_slices import DRIVER, gpu, resource_slice

NODE = "w1"
READY, FAILED, AGAIN = "FabricDeviceReady", "FabricDeviceFailed", "FabricDeviceReschedule"
ENTRY = f"{DRIVER}/{NODE}/gpu-0"
ASKED = {"bindsToNode": True, "bindingConditions": [READY], "bindingFailureConditions": [AGAIN, FAILED]}


def claim(*conditions: Object, asked: Object = ASKED, **status: Any) -> Object:
    """A claim that was allocated gpu-0, with these conditions; `status`: other status fields."""
    device = {"driver": DRIVER, "pool": NODE, "device": "gpu-0"}
    results = [{"request": "gpu", **device, **{key: one for key, one in asked.items() if key != "bindsToNode"}}]
    written = {"devices": [{**device, "conditions": [*conditions]}]} if conditions else {}
    return {
        "metadata": {"namespace": "team", "name": "job"},
        "status": {"allocation": {"devices": {"results": results}}, **written, **status},
    }


def condition(type: str, *, status: str = "True", reason: str = "", message: str = "") -> Object:
    return {"type": type, "status": status, "reason": reason, "message": message}


@pytest.mark.parametrize(
    ("of", "state", "message"),
    [
        (claim(), "waiting", READY),
        (claim(devices=[{"driver": DRIVER, "pool": NODE, "device": "gpu-0"}]), "waiting", READY),
        (claim(devices=[{"driver": DRIVER, "pool": NODE, "device": "gpu-0", "conditions": None}]), "waiting", READY),
        (claim(condition(READY, status="False", reason="Attaching")), "waiting", f"{READY} (Attaching)"),
        (claim(condition(READY)), "ready", ""),
        (claim(condition(READY), condition(FAILED, message="no cable")), "failed", f"{FAILED} (no cable)"),
        (claim(condition(AGAIN, reason="Attached")), "failed", f"{AGAIN} (Attached)"),
        (claim(condition("Other")), "waiting", READY),
    ],
)
def test_claim_waits_for_all_conditions_and_failure_takes_precedence(of: Object, state: str, message: str) -> None:
    (one,) = read_bindings(of)
    assert (one.entry, one.claim, one.state, one.says) == (ENTRY, "team/job", state, message)


@pytest.mark.parametrize(
    "of",
    [{}, {"status": None}, {"status": {"allocation": None}}, claim(asked={}), {"status": {"devices": "x"}},
     {"status": {"allocation": {"devices": {"results": [None, {"bindingConditions": None}]}}}}],
)  # fmt: skip
def test_claim_without_binding_conditions_yields_no_bindings(of: Object) -> None:
    assert read_bindings(of) == ()


def test_slice_being_attached_for_a_claim_is_unavailable_with_a_reason() -> None:
    devices = [gpu(0, **ASKED), gpu(1, **ASKED), gpu(2)]
    published = [resource_slice(NODE, "gpus", devices=devices)]
    slices = Dra().inventory(NodeFacts(NodeId(NODE), devices=published))
    assert slices is not None

    def closed(*of: Binding) -> list[str]:
        return [one.closed for one in apply_bindings(slices or (), of)]

    first = f"{ATTACHED_FIRST} ({READY})"
    assert closed() == [first, first, ""]
    words = "it is being attached for claim team/job, which waits for FabricDeviceReady"
    assert closed(*read_bindings(claim())) == [words, first, ""]
    words = "it could not be attached for claim team/job: FabricDeviceFailed (no cable)"
    assert closed(*read_bindings(claim(condition(FAILED, message="no cable")))) == [words, first, ""]
    attached = "it is attached and allocated to claim team/job"
    assert closed(*read_bindings(claim(condition(READY)))) == [attached, first, ""]
    open_one = read_bindings(claim())[0]._replace(entry=f"{DRIVER}/{NODE}/gpu-2")
    assert closed(open_one) == [first, first, ""], "it needs nothing first"


def test_claim_with_binding_conditions_is_read_with_a_waiting_binding() -> None:
    seen = resource_claims.read_claim(claim(), "pilotlight-engines")
    assert seen is not None
    assert [one.state for one in seen.bindings] == ["waiting"]
