"""Creates providers from Settings `capacity` and connects them to the loop; recreates them when the Settings change.

`KINDS` has an entry for each of `autoscaler.spec.capacity.KINDS`. **To add a kind**: its Provider in
`autoscaler/providers/`, a function here that creates one from its entry and `Around`, one line in KINDS, its name in
`autoscaler.spec.capacity.KINDS`, its rights in `autoscaler.kubernetes.rbac` and the chart, and its test with
`tests/contracts/provider.py`. A Provider registers what it opens on `Around.stack`, which closes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click
from msgspec.structs import replace

from autoscaler.capacity import agent_device_requests
from autoscaler.capacity.attachable_nodes import count_devices_on_node, read_group_limits
from autoscaler.contract import ModelName
from autoscaler.placement.model.prices import Prices
from autoscaler.providers.cluster_autoscaler.provider import NodeGroup
from autoscaler.providers.cro.provider import CroFabric, NodeLock
from autoscaler.providers.karpenter.disruption_guard import DisruptionGuard
from autoscaler.providers.karpenter.provider import KarpenterNodes
from autoscaler.providers.kubernetes_access import ApiServer, Object
from autoscaler.providers.kueue.provider import KueuePlaces
from autoscaler.providers.lead_time_store import LeadTimeStore
from autoscaler.providers.machine_set_watcher import MachineGroupWatcher
from autoscaler.providers.node_deletion_delay import DeletionDelay
from autoscaler.providers.provider import Provider
from autoscaler.providers.provisioning_request.provider import ProvisioningProvider
from autoscaler.providers.redfish.attach_detach import Around as Alongside
from autoscaler.providers.redfish.client import Service
from autoscaler.providers.redfish.dra_publisher import DraPublisher
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.kubernetes_objects import SECRETS, ConfigMapNotes, OpenSites, RedfishCredentials
from autoscaler.providers.redfish.planning import FabricContext
from autoscaler.providers.redfish.provider import RedfishFabric
from autoscaler.providers.release_checks import find_device_user
from autoscaler.providers.runner import Observe, ProviderRunner
from autoscaler.provisioning.fabric_device_claims import Published, find_published_devices
from autoscaler.spec.capacity import ProviderSettings
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import AcquireOrder, ReleaseOrder
from autoscaler.state.world import World

if TYPE_CHECKING:  # commands that only check Settings start without the planner
    from autoscaler.controller.loop import LoopStep

Mode = Literal["machine", "namespace", "cluster"]
"""Where replicas run: as processes of this machine, or as pods, with rights in one namespace or the whole cluster."""


class Around(NamedTuple):
    """Dependencies for creating a Provider."""

    server: ApiServer
    """The cluster's API server; writes are rejected after leadership is lost."""
    world: Callable[[], World]
    """Returns the current `World` with its Settings, nodes and devices."""
    namespace: str
    """Namespace of the engine pods."""
    home: str
    """Namespace of the autoscaler."""
    stack: AsyncExitStack
    """Resources to close when Settings `capacity` changes, and at shutdown."""
    leads: Callable[[], bool] = lambda: True
    """Whether this process may still write; the server's writes check this themselves."""
    secrets: Path = SECRETS
    """Folder of the Secrets that the Settings name."""
    clock: Callable[[], float] = time.monotonic
    """The `World`'s clock."""
    turns: NodeLock | None = None
    """Lock shared by Providers that attach to the same nodes; None: there is only one."""


def build_cro_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of fabric GPUs through the composable resource operator."""
    if entry.cro is None:
        raise TypeError(entry.name)
    expected_s, turns = entry.expected_seconds, around.turns
    return CroFabric(entry.name, entry.cro.model, around.server, around.world, expected_s, turns=turns)


def build_karpenter_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of nodes that Karpenter adds to a NodePool."""
    if entry.karpenter is None:
        raise TypeError(entry.name)
    pool = entry.karpenter.node_pool
    return KarpenterNodes(entry.name, pool, around.server, around.world, expected_s=entry.expected_seconds)


def build_node_group_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of nodes that Cluster Autoscaler adds to a group."""
    group = entry.cluster_autoscaler
    if group is None:
        raise TypeError(entry.name)
    return NodeGroup(entry.name, group, around.server, around.namespace, around.world, entry.expected_seconds)


def build_redfish_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of fabric GPUs that are composed through Redfish."""
    if entry.redfish is None:
        raise TypeError(entry.name)
    redfish, server, world = entry.redfish, around.server, around.world
    access = RedfishCredentials(redfish.secret_ref, redfish.ca_file, around.secrets)

    async def busy(node: str, uuids: tuple[str, ...]) -> str:
        used = await find_device_user(server, node, uuids)
        return used or (
            agent_device_requests.explain_detach_block(world(), node, uuids, around.clock()) if redfish.agents else ""
        )

    service = Service(redfish.url, access.login, access.tls, may_write=around.leads)
    around.stack.push_async_callback(service.close)
    terms = FabricContext(
        entry.name,
        entry.expected_seconds,
        lambda product: Prices(world().settings.prices).at(product, "fabric"),
        lambda node: count_devices_on_node(world(), node),
        lambda ids: any(one.device in ids for one in world().nodes.slices.values()),
    )
    return RedfishFabric(
        Reading(service, redfish.systems, entry.name, ConfigMapNotes(server, around.home, entry.name)),
        Alongside(busy, time.monotonic, asyncio.sleep),
        terms,
        OpenSites(server, lambda: world().settings, lambda: read_group_limits(world())),
    )


def build_provisioning_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of nodes through ProvisioningRequests."""
    return ProvisioningProvider(entry, around.server, around.namespace, around.world, _template(around), around.clock)


def build_kueue_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Build a provider of capacity that a Kueue queue admits or provisions."""
    return KueuePlaces(entry, around.server, around.namespace, around.world, _template(around))


def _template(around: Around) -> Callable[[ModelName], Object | None]:
    """Return a function that builds a Model's pod template, or None for an unknown Model."""
    from autoscaler.drivers.kubernetes.objects.provisioning_pod_template import build_pod_template

    def of(name: ModelName) -> Object | None:
        world = around.world()
        model = world.models.get(name)
        return None if model is None else build_pod_template(model, world.settings)

    return of


KINDS: Mapping[str, Callable[[ProviderSettings, Around], Provider]] = {
    "clusterAutoscaler": build_node_group_provider,
    "cro": build_cro_provider,
    "karpenter": build_karpenter_provider,
    "redfish": build_redfish_provider,
    "kueue": build_kueue_provider,
    "provisioningRequest": build_provisioning_provider,
}
"""Creates a Provider from an entry, by the kind's name in `capacity`. All kinds need the rights of scope `cluster`."""


def check_provider_modes(settings: Settings, mode: Mode) -> None:
    """Raise click's usage error for the first provider if this mode supports none."""
    if settings.capacity and mode != "cluster":
        where = "a cluster (the chart with scope `cluster`)"
        name = settings.capacity[0].kinds[0]
        raise click.UsageError(f"Settings: capacity[0]: `{name}` is supported only in {where}: remove this entry")


def assign_fabric_systems(entries: Sequence[ProviderSettings], world: World) -> tuple[ProviderSettings, ...]:
    """Return the entries with their fabric systems assigned so that each system has one writer. An entry in Settings
    gets a system if no closing or removed entry has an order there, or if it has one there itself.
    """
    named = {one.name for one in world.settings.capacity if not one.closing}
    nodes = {(id.provider, one.offer.node) for id, one in world.capacity.leases.items()}
    nodes |= {(id.provider, one.listed.node) for id, one in world.capacity.leases.items() if one.listed is not None}
    wanted, kept = set[tuple[str, str]](), set[tuple[str, str]]()
    for entry in entries:
        for node, system in _places(entry).items():
            if entry.name in named:
                wanted.add(system)
            elif (entry.name, node) in nodes:
                kept.add(system)

    def part(entry: ProviderSettings) -> ProviderSettings:
        if entry.redfish is None:
            return entry
        others = kept if entry.name in named else wanted
        mine = {
            node: system[1]
            for node, system in _places(entry).items()
            if (entry.name, node) in nodes or system not in others
        }
        return replace(entry, redfish=replace(entry.redfish, systems=mine))

    return tuple(map(part, entries))


def _places(entry: ProviderSettings) -> dict[str, tuple[str, str]]:
    return {} if entry.redfish is None else entry.redfish.places


class Supplies:
    """The loop's Supplier (`autoscaler.providers.provider`) for the providers in Settings. A listener of the loop."""

    def __init__(
        self, server: ApiServer, places: tuple[str, str, str], world: Callable[[], World], observe: Observe,
        clock: Callable[[], float], *, leads: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`places`: the namespace of the engine pods, our own namespace, and the name of our Lease there. `leads`:
        whether this process may still write.
        """
        self._leads = leads
        self._server, self._places, self._world = server, places[:2], world
        self._observe, self._clock = observe, clock
        self._changed = asyncio.Event()
        self._entries: tuple[ProviderSettings, ...] = ()
        """Entries with a Provider: those in Settings, and removed ones with orders left."""
        self._parts: tuple[ProviderSettings, ...] = ()
        """The same with systems assigned, see `assign_fabric_systems`."""
        self._supplying = ProviderRunner({}, observe, clock)
        self._delaying = DeletionDelay(server, world, leads, places[1:])
        self._guarding = DisruptionGuard(server, places[0], world, leads)
        self._publishing = DraPublisher(server, places[1:], self._published, clock)
        self._remembering = LeadTimeStore(server, places[1:], world, observe, leads)
        self._turns = NodeLock()
        self._fabrics = set[str]()
        """Fabrics that are or were in Settings, whose published devices are withdrawn when they are no longer valid."""

    def acquire(self, order: AcquireOrder) -> None:
        """Order capacity, see `Supplier`."""
        self._supplying.acquire(order)

    def release(self, order: ReleaseOrder) -> None:
        """Release capacity, see `Supplier`."""
        self._supplying.release(order)

    def on_step(self, step: LoopStep) -> None:
        """Wake the tasks that depend on Settings, orders, nodes or replicas which this step may have changed."""
        self._delaying.look()
        self._guarding.look()
        self._remembering.look()
        if step.before.settings.capacity != step.after.settings.capacity or self._over(step.after):
            self._changed.set()
        if step.before.capacity is not step.after.capacity or step.before.settings is not step.after.settings:
            self._publishing.look()

    def _over(self, world: World) -> bool:
        """Return whether systems can be reassigned, or a closing or removed entry has no orders left."""
        entries = world.settings.capacity
        left = len(self._entries) > len(entries) or any(one.closing for one in entries)
        return left and assign_fabric_systems(self._named(world), world) != self._parts

    def _named(self, world: World) -> tuple[ProviderSettings, ...]:
        """Return the entries for which Providers are created."""
        entries = world.settings.capacity
        known, have = {one.name for one in entries}, {id.provider for id in world.capacity.leases}
        return (*entries, *(one for one in self._entries if one.name not in known and one.name in have))

    def _published(self) -> Published | None:
        """Return the fabric devices to publish now; None if there are none or this process does not lead."""
        world = self._world()
        self._fabrics |= {one.name for one in world.settings.capacity if one.redfish is not None}
        return find_published_devices(world, self._clock(), self._fabrics) if self._fabrics and self._leads() else None

    async def run(self) -> None:
        """Run until cancelled. Orders that are pending when the Settings change are given again by the loop."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._delaying.run())
            tasks.create_task(self._guarding.run())
            tasks.create_task(self._publishing.run())
            tasks.create_task(self._remembering.run())
            tasks.create_task(self._supply())

    async def _supply(self) -> None:
        while True:
            self._changed.clear()
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                world = self._world()
                self._entries = self._named(world)
                self._parts = assign_fabric_systems(self._entries, world)
                self._supplying = self._made(self._parts, len(world.settings.capacity), stack)
                growing = (
                    (MachineGroupWatcher(self._server, self._world, self._observe).run(),) if self._entries else ()
                )
                running = [tasks.create_task(one) for one in (self._supplying.run(), *growing)]
                await self._changed.wait()
                for one in running:
                    one.cancel()

    def _made(self, entries: tuple[ProviderSettings, ...], named: int, stack: AsyncExitStack) -> ProviderRunner:
        """Create the Providers. The first `named` entries are in Settings; others get no orders, like closing ones."""
        around = Around(
            self._server, self._world, *self._places, stack, self._leads, clock=self._clock, turns=self._turns
        )
        made = {entry.name: KINDS[entry.kinds[0]](entry, around) for entry in entries}
        hedges = frozenset(entry.name for entry in entries if entry.hedge)
        closing = {one.name for one in entries if one.closing} | {one.name for one in entries[named:]}
        return ProviderRunner(made, self._observe, self._clock, hedges, frozenset(closing))
