"""Coordinates fabric devices with node agents: requests to agents, and their reports. Pure.

Applies to providers for which the Settings enable agents (`redfish.agents`). If an order is attached but no slice shows
it yet, the node's agent is requested to add the devices to the operating system; if an order is released, to remove
them. A device is detached only after its agent reports the removal. `autoscaler.provisioning.release` decides what is
released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autoscaler.agent_contract import FabricReport, FabricWant
from autoscaler.queries.agent_reports import is_report_fresh
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import Lease
from autoscaler.state.world import NodeAgentStatus, NodeId, World

UNHEARD = (
    "the agent of its node has not reported that it removed the device from the node (this requires chart value "
    "agent.fabric.enabled)"
)


def list_agent_providers(settings: Settings) -> frozenset[str]:
    """Providers whose devices are added and removed by agents."""
    return frozenset(one.name for one in settings.capacity if one.redfish is not None and one.redfish.agents)


def build_fabric_wants(world: World) -> dict[NodeId, tuple[FabricWant, ...]]:
    """Requests to agents to add or remove devices, by node; nodes without requests are omitted."""
    by, found = list_agent_providers(world.settings), dict[NodeId, dict[str, FabricWant]]()
    for lease in sorted(world.capacity.leases.values(), key=lambda one: one.id):
        if lease.id.provider in by and lease.listed is not None and (lease.leaving or lease.here_s is None):
            wants = found.setdefault(NodeId(lease.listed.node), {})
            wants.update((one, FabricWant(device=one, leave=lease.leaving)) for one in _devices(lease))
    return {node: tuple(wants[one] for one in sorted(wants)) for node, wants in found.items() if wants}


def explain_attach_failure(lease: Lease, nodes: Mapping[str, NodeAgentStatus], settings: Settings) -> str:
    """The agent's reason why a node does not show an attached device; empty: no failure is reported."""
    if lease.listed is None or lease.leaving or lease.id.provider not in list_agent_providers(settings):
        return ""
    said = _said(nodes.get(lease.listed.node), _devices(lease))
    return next((f"{one.device}: {one.says}" for one in said if one.failed and not one.leave), "")


def explain_detach_block(world: World, node: str, uuids: Iterable[str], now_s: float) -> str:
    """Why devices must not be detached from a node yet; empty: its agent has removed all of them."""
    sought = [one for one in uuids if one]
    heard = world.nodes.agents.get(node)
    there = NodeId(node) in world.nodes.hosts or any(one.node == node for one in world.nodes.slices.values())
    if not sought or (heard is None and not there):
        return ""  # no device with a known name, or the node does not exist
    if heard is None or not is_report_fresh(heard, now_s) or not heard.report.attaches:
        return UNHEARD
    said = {one.device: one for one in _said(heard, sought) if one.leave}
    for device in sought:
        one = said.get(device)
        if one is None or not one.done:
            return f"its node's agent: {one.says}" if one is not None and one.says else UNHEARD
    return ""


def _devices(lease: Lease) -> tuple[str, ...]:
    """UUIDs of the order's devices."""
    ids = () if lease.listed is None else lease.listed.device_ids
    return tuple(name for name in (one.rpartition("/")[2] for one in ids) if name)


def _said(heard: NodeAgentStatus | None, devices: Iterable[str]) -> Iterator[FabricReport]:
    sought = frozenset(devices)
    yield from (one for one in heard.report.fabric if one.device in sought) if heard is not None else ()
