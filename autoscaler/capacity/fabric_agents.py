"""Coordinates fabric devices with node agents: what agents are asked to do, and what they report. Pure.

Applies to providers for which the Settings enable agents (`redfish.agents`). If an order is attached and no slice shows
it yet, the node's agent is asked to take the devices; if an order is released, to let go of them. A device is detached
only after its agent reports this. `autoscaler.provisioning.release` decides what is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autoscaler.agent_contract import FabricWant
from autoscaler.contract import FabricReport
from autoscaler.queries.device_health import is_report_fresh
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity_orders import Lease
from autoscaler.state.operator_orders import NodeAgentStatus
from autoscaler.state.world import NodeId, World

UNHEARD = "its node's agent does not say that it has let go of it (the chart's agent.fabric.enabled)"


def list_agent_providers(settings: Settings) -> frozenset[str]:
    """Providers whose devices agents take and let go of."""
    return frozenset(one.name for one in settings.capacity if one.redfish is not None and one.redfish.agents)


def build_fabric_wants(world: World) -> dict[NodeId, tuple[FabricWant, ...]]:
    """What the agent of each node is asked to do with devices; nodes without any are left out."""
    by, found = list_agent_providers(world.settings), dict[NodeId, dict[str, FabricWant]]()
    for lease in sorted(world.capacity.leases.values(), key=lambda one: one.id):
        if lease.id.provider in by and lease.listed is not None and (lease.leaving or lease.here_s is None):
            told = found.setdefault(NodeId(lease.listed.node), {})
            told.update((one, FabricWant(device=one, leave=lease.leaving)) for one in _devices(lease))
    return {node: tuple(told[one] for one in sorted(told)) for node, told in found.items() if told}


def explain_attach_failure(lease: Lease, nodes: Mapping[str, NodeAgentStatus], settings: Settings) -> str:
    """Why a node lacks what was attached to it, by its agent; empty: it has it, or may have it yet."""
    if lease.listed is None or lease.leaving or lease.id.provider not in list_agent_providers(settings):
        return ""
    said = _said(nodes.get(lease.listed.node), _devices(lease))
    return next((f"{one.device} was attached, and {one.says}" for one in said if one.failed and not one.leave), "")


def explain_detach_block(world: World, node: str, uuids: Iterable[str], now_s: float) -> str:
    """Why devices must not be detached from a node yet, by its agent; empty: it has let go of all of them."""
    sought = [one for one in uuids if one]
    heard = world.nodes.agents.get(node)
    there = NodeId(node) in world.nodes.hosts or any(one.node == node for one in world.nodes.slices.values())
    if not sought or (heard is None and not there):
        return ""  # no device that a driver would name, or no node
    if heard is None or not is_report_fresh(heard, now_s) or not heard.report.attaches:
        return UNHEARD
    said = {one.device: one for one in _said(heard, sought) if one.leave}
    for device in sought:
        one = said.get(device)
        if one is None or not one.done:
            return f"its node's agent: {one.says}" if one is not None and one.says else UNHEARD
    return ""


def _devices(lease: Lease) -> tuple[str, ...]:
    """Names of its devices, as drivers use them."""
    ids = () if lease.listed is None else lease.listed.device_ids
    return tuple(name for name in (one.rpartition("/")[2] for one in ids) if name)


def _said(heard: NodeAgentStatus | None, devices: Iterable[str]) -> Iterator[FabricReport]:
    sought = frozenset(devices)
    yield from (one for one in heard.report.fabric if one.device in sought) if heard is not None else ()
