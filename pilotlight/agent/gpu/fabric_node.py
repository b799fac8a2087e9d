"""Implements `hotplug_loop.Node` for a real node: its bus, its pods with GPUs, and its daemon pods. I/O.

`look` observes all three. If a part cannot be read, `Seen.trouble` is set, so that no step is executed blindly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import click

from autoscaler.agent_contract import PodDevices
from autoscaler.kubernetes.api import Api, UnreachableError
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from pilotlight.agent.gpu.device_plugin_pods import Daemons, parse_pod_selector
from pilotlight.agent.gpu.hotplug import Job, Seen, Step
from pilotlight.agent.gpu.hotplug_loop import Attaching
from pilotlight.agent.gpu.pci_bus import Bus, StepError
from pilotlight.provider_kubernetes_client import Objects


class FabricNode:
    """See `hotplug_loop.Node`. `table` returns the pods with devices of the agent's latest observation."""

    def __init__(self, bus: Bus, daemons: Daemons, table: Callable[[], Sequence[PodDevices]]) -> None:
        self._bus, self._daemons, self._table = bus, daemons, table

    async def look(self, jobs: Sequence[Job]) -> Seen:
        """Return what is seen of the node."""
        seen = await self._bus.look([one.bus for one in jobs if one.leave and one.bus])
        pods = {
            device: f"{one.namespace}/{one.name}" if one.name else one.pod_uid
            for one in self._table()
            for device in one.devices
        }
        leaving = [one.device for one in jobs if one.leave]
        try:
            daemons, tainted = await self._daemons.there(), await self._daemons.tainted(leaving)
        except (AnswerError, UnreachableError, OSError) as error:
            return seen._replace(pods=pods, trouble=f"the API server: {error}")
        return seen._replace(pods=pods, daemons=daemons, tainted=tainted)

    async def act(self, step: Step) -> None:
        """Execute a step. Raises StepError."""
        try:
            match step.does, step.of:
                case "restart", uids:
                    await self._daemons.restart(uids)
                case "taint", (device,):
                    await self._daemons.taint(device)
                case "untaint", (device,):
                    await self._daemons.untaint(device)
                case _:
                    await self._bus.act(step)
        except (AnswerError, UnreachableError, OSError) as error:
            raise StepError(f"the API server: {error}") from None


@asynccontextmanager
async def open_gpu_attachment(
    node: str, restart: Sequence[str], kubeconfig: Path | None, table: Callable[[], Sequence[PodDevices]],
    owner: Ownership = ANYBODYS,
) -> AsyncIterator[Attaching]:  # fmt: skip
    """Open GPU attachment for this node. `restart`: see `parse_pod_selector`. `owner`: the agent's installation. Raises
    click's usage error if no API server access is configured.
    """
    from autoscaler.kubernetes.kubeconfig import ApiAccessError, load_api_access  # imported here: an optional extra

    try:
        way = await load_api_access(kubeconfig)
    except ApiAccessError as error:
        raise click.UsageError(f"--fabric: {error}") from None
    async with Api(way, agent="pilotlight-agent") as api:
        daemons = Daemons(Objects(api, api, owner), node, [parse_pod_selector(one) for one in restart])
        yield Attaching(FabricNode(Bus(), daemons, table))
