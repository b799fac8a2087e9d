"""Binding conditions (KEP-5007) with the real scheduler: our interpretation of a claim matches its behavior.

ResourceSlices and conditions are written by hand, as a fabric's controller writes them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.slicing.dra import Dra
from autoscaler.slicing.dra_binding_conditions import Binding, apply_bindings, read_bindings
from autoscaler.slicing.dra_resource_slices import ATTACHED_FIRST
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.state.world import NodeId
from tests.integration.cluster.slicing.test_dra_claims import RESOURCE, WAIT_S_MAX, Bench, all_of, bench
from tests.support.builders.resource_slices import DRIVER, gpu, resource_slice

READY, FAILED = "FabricDeviceReady", "FabricDeviceFailed"
ASKED: dict[str, Any] = {"bindsToNode": True, "bindingConditions": [READY], "bindingFailureConditions": [FAILED]}
__all__ = ["bench"]
"""A fixture; pytest looks it up in this module."""


async def waiting(api: Api, path: str) -> Binding:
    """Waits until the claim has a device with binding conditions."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not (found := read_bindings(await api.get(path))):
            await asyncio.sleep(0.02)
    (one,) = found
    return one


async def write(bench: Bench, path: str, type: str, reason: str) -> None:
    """Writes a condition of gpu-0, as a controller does."""
    condition = {
        "type": type, "status": "True", "reason": reason, "message": "by hand",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    one = {"driver": DRIVER, "pool": bench.node, "device": "gpu-0", "conditions": [condition]}
    await bench.api.patch(f"{path}/status", {"status": {"devices": [one]}})


@pytest.mark.parametrize("works", [True, False])
async def test_pod_is_bound_only_when_its_device_binding_condition_is_ready(bench: Bench, works: bool) -> None:
    plain = gpu(0)
    await bench.publish(resource_slice(bench.node, "gpus", devices=[plain]))
    pinned = (await bench.slices(Dra()))["gpu-0"]
    (published,) = (await bench.api.get(f"{RESOURCE}/resourceslices", fieldSelector=f"spec.nodeName={bench.node}"))[
        "items"
    ]
    path = f"{RESOURCE}/resourceslices/{published['metadata']['name']}"
    await bench.api.patch(path, {"spec": {"devices": [gpu(0, **ASKED)]}})
    (closed,) = (await bench.slices(Dra())).values()
    assert closed.closed == f"{ATTACHED_FIRST} ({READY})"

    await bench.start("m-1", Dra().fields("m-1", all_of(pinned)))
    claim = f"{bench.claims}/m-1"
    one = await waiting(bench.api, claim)
    assert (one.entry, one.state, one.says) == (f"{DRIVER}/{bench.node}/gpu-0", "waiting", READY)
    assert "nodeName" not in (await bench.api.get(f"{bench.pods}/m-1"))["spec"], "it waits for the device"
    facts = NodeFacts(NodeId(bench.node), devices=[await bench.api.get(path)])
    (reported,) = apply_bindings(Dra().inventory(facts) or (), [one])
    assert reported.closed == f"it is being attached for claim {one.claim}, which waits for {READY}"

    if works:
        await write(bench, claim, READY, "Attached")
        await bench.bound("m-1")
        (one,) = read_bindings(await bench.api.get(claim))
        assert one.state == "ready"
        return
    await bench.api.patch(path, {"spec": {"devices": []}})  # no other device can be allocated
    await write(bench, claim, FAILED, "NoCable")
    async with asyncio.timeout(WAIT_S_MAX):
        while read_bindings(await bench.api.get(claim)):
            await asyncio.sleep(0.02)
    assert "nodeName" not in (await bench.api.get(f"{bench.pods}/m-1"))["spec"]
