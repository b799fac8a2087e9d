"""Composes the Settings' `capacity:` into Providers, and them into the loop's Supplier; anew when the Settings change.

Owns the table of kinds: for each of `autoscaler.spec.capacity.KINDS` where it works and how one is made. **To add a
kind**: its Provider in `autoscaler/capacity/`, a function here that makes one of its entry and what is Around it, one
line in KINDS, its name in those, its rights in `autoscaler.kubernetes.rbac` and the chart, and its test
with `tests/contracts/provider.py`. What a Provider opens it puts on `Around.stack`, which ends with it.
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

from autoscaler.capacity import fabric_agents
from autoscaler.capacity.attachable_nodes import count_devices_on_node
from autoscaler.capacity.machine_groups import read_group_limits
from autoscaler.contract import ModelName
from autoscaler.placement.model.prices import Prices
from autoscaler.providers.cluster_autoscaler.provider import NodeGroup
from autoscaler.providers.cro.provider import CroFabric, NodeLock
from autoscaler.providers.deletion_delay import DeletionDelay
from autoscaler.providers.device_usage import find_device_user
from autoscaler.providers.karpenter.disruption_guard import DisruptionGuard
from autoscaler.providers.karpenter.provider import KarpenterNodes
from autoscaler.providers.kube import Object, Server
from autoscaler.providers.kueue.provider import KueuePlaces
from autoscaler.providers.lead_time_store import LeadTimeStore
from autoscaler.providers.machine_groups import MachineGroupWatcher
from autoscaler.providers.provider import Provider
from autoscaler.providers.provisioning_request.provider import ProvisioningProvider
from autoscaler.providers.redfish.client import Service
from autoscaler.providers.redfish.cluster import SECRETS, ConfigMapNotes, OpenSites, RedfishCredentials
from autoscaler.providers.redfish.dra_publisher import DraPublisher
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.planning import FabricContext
from autoscaler.providers.redfish.provider import RedfishFabric
from autoscaler.providers.redfish.system_writer import Around as Alongside
from autoscaler.providers.runner import Observe, ProviderRunner
from autoscaler.provisioning.device_claims import Published, find_published_devices
from autoscaler.spec.capacity import ProviderSettings
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity_orders import AcquireOrder, ReleaseOrder
from autoscaler.state.world import World

if TYPE_CHECKING:  # commands that only check Settings start without the planner
    from autoscaler.controller.loop import LoopStep

Mode = Literal["machine", "namespace", "cluster"]
"""Where Replicas are: processes of this machine, or pods, with rights in one namespace or in the whole cluster."""


class Around(NamedTuple):
    """What a Provider may be made with."""

    server: Server
    """The cluster's; writes end with our leadership."""
    world: Callable[[], World]
    """As it is now: its Settings, and what of nodes and Devices is seen."""
    namespace: str
    """Of the engines' pods."""
    home: str
    """Of the autoscaler itself."""
    stack: AsyncExitStack
    """What is put here ends when the Settings' `capacity` changes, and at the end."""
    leads: Callable[[], bool] = lambda: True
    """Whether this process may still write; the server's writes see to it themselves."""
    secrets: Path = SECRETS
    """Where those are that the Settings name."""
    clock: Callable[[], float] = time.monotonic
    """The World's."""
    turns: NodeLock | None = None
    """Of Providers that attach to the same nodes; None: there is but one."""


class Kind(NamedTuple):
    """One way to more capacity."""

    make: Callable[[ProviderSettings, Around], Provider]
    """Of one entry."""
    modes: frozenset[Mode]
    """Where it works."""


def build_cro_provider(entry: ProviderSettings, around: Around) -> Provider:
    """GPUs of a fabric, by the composable resource operator."""
    if entry.cro is None:
        raise TypeError(entry.name)
    expected_s, turns = entry.expected_seconds, around.turns
    return CroFabric(entry.name, entry.cro.model, around.server, around.world, expected_s, turns=turns)


def build_karpenter_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Nodes that Karpenter adds to a NodePool."""
    if entry.karpenter is None:
        raise TypeError(entry.name)
    pool = entry.karpenter.node_pool
    return KarpenterNodes(entry.name, pool, around.server, around.world, expected_s=entry.expected_seconds)


def build_node_group_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Nodes of a group that Cluster Autoscaler adds."""
    group = entry.cluster_autoscaler
    if group is None:
        raise TypeError(entry.name)
    return NodeGroup(entry.name, group, around.server, around.namespace, around.world, entry.expected_seconds)


def build_redfish_provider(entry: ProviderSettings, around: Around) -> Provider:
    """GPUs of a fabric that is composed by Redfish."""
    if entry.redfish is None:
        raise TypeError(entry.name)
    told, server, world = entry.redfish, around.server, around.world
    access = RedfishCredentials(told.secret_ref, told.ca_file, around.secrets)

    async def busy(node: str, uuids: tuple[str, ...]) -> str:
        used = await find_device_user(server, node, uuids)
        return used or (fabric_agents.explain_detach_block(world(), node, uuids, around.clock()) if told.agents else "")

    service = Service(told.url, access.login, access.tls, may_write=around.leads)
    around.stack.push_async_callback(service.close)
    terms = FabricContext(
        entry.name,
        entry.expected_seconds,
        lambda product: Prices(world().settings.prices).at(product, "fabric"),
        lambda node: count_devices_on_node(world(), node),
        lambda ids: any(one.device in ids for one in world().slices.values()),
    )
    return RedfishFabric(
        Reading(service, told.systems, entry.name, ConfigMapNotes(server, around.home, entry.name)),
        Alongside(busy, time.monotonic, asyncio.sleep),
        terms,
        OpenSites(server, lambda: world().settings, lambda: read_group_limits(world())),
    )


def build_provisioning_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Nodes, by ProvisioningRequests."""
    return ProvisioningProvider(entry, around.server, around.namespace, around.world, _template(around), around.clock)


def build_kueue_provider(entry: ProviderSettings, around: Around) -> Provider:
    """Room that a queue of Kueue gives, or has made."""
    return KueuePlaces(entry, around.server, around.namespace, around.world, _template(around))


def _template(around: Around) -> Callable[[ModelName], Object | None]:
    """What the pods of a Model ask of a node; None: there is no such Model (any more)."""
    from autoscaler.drivers.kubernetes.objects.pod_template import build_pod_template

    def of(name: ModelName) -> Object | None:
        world = around.world()
        model = world.models.get(name)
        return None if model is None else build_pod_template(model, world.settings)

    return of


KINDS: Mapping[str, Kind] = {
    "clusterAutoscaler": Kind(build_node_group_provider, frozenset({"cluster"})),
    "cro": Kind(build_cro_provider, frozenset({"cluster"})),
    "karpenter": Kind(build_karpenter_provider, frozenset({"cluster"})),
    "redfish": Kind(build_redfish_provider, frozenset({"cluster"})),
    "kueue": Kind(build_kueue_provider, frozenset({"cluster"})),
    "provisioningRequest": Kind(build_provisioning_provider, frozenset({"cluster"})),
}
"""As `capacity` names them."""
_WHERE: Mapping[Mode, str] = {
    "machine": "a process of one machine",
    "namespace": "one namespace (the chart with scope `namespace`)",
    "cluster": "a cluster (the chart with scope `cluster`)",
}


def check_provider_modes(settings: Settings, mode: Mode) -> None:
    """Raises click's usage error for a Provider that cannot work here."""
    for position, entry in enumerate(settings.capacity):
        for name in entry.kinds:
            works = KINDS[name].modes
            if mode not in works:
                where = " or ".join(_WHERE[one] for one in ("cluster", "namespace", "machine") if one in works)
                raise click.UsageError(
                    f"Settings: capacity[{position}]: `{name}` works in {where} only: leave this entry out"
                )


def assign_fabric_systems(entries: Sequence[ProviderSettings], world: World) -> tuple[ProviderSettings, ...]:
    """As they are made: a system of a fabric has one writer. Who is named for it now gets it when nothing is there any
    more of an entry that closes or was taken out, unless it has something there, too.
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
    """The loop's Supplier (`autoscaler.providers.provider`), for whatever the Settings name. A listener of the loop."""

    def __init__(
        self, server: Server, places: tuple[str, str, str], world: Callable[[], World], observe: Observe,
        clock: Callable[[], float], *, leads: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`places`: the namespaces of the engines' pods, and our own; our Lease of leadership there. `leads`: whether
        this process may still write.
        """
        self._leads = leads
        self._server, self._places, self._world = server, places[:2], world
        self._observe, self._clock = observe, clock
        self._changed = asyncio.Event()
        self._entries: tuple[ProviderSettings, ...] = ()
        """Of which Providers are made now: those that the Settings name, and those with Leases still."""
        self._parts: tuple[ProviderSettings, ...] = ()
        """The same as they are made, see `assign_fabric_systems`."""
        self._supplying = ProviderRunner({}, observe, clock)
        self._delaying = DeletionDelay(server, world, leads, places[1:])
        self._guarding = DisruptionGuard(server, places[0], world, leads)
        self._publishing = DraPublisher(server, places[1:], self._published, clock)
        self._remembering = LeadTimeStore(server, places[1:], world, observe, leads)
        self._turns = NodeLock()
        self._fabrics = set[str]()
        """That the Settings name, or did: what was published of them is withdrawn, and who was given it is told."""

    def acquire(self, order: AcquireOrder) -> None:
        """See Supplier."""
        self._supplying.acquire(order)

    def release(self, order: ReleaseOrder) -> None:
        """See Supplier."""
        self._supplying.release(order)

    def on_step(self, step: LoopStep) -> None:
        """Others may be named now, other nodes may have what is lent, and others may start or drain."""
        self._delaying.look()
        self._guarding.look()
        self._remembering.look()
        if step.before.settings.capacity != step.after.settings.capacity or self._over(step.after):
            self._changed.set()
        if step.before.capacity is not step.after.capacity or step.before.settings is not step.after.settings:
            self._publishing.look()

    def _over(self, world: World) -> bool:
        """Whether one that closes, or is not named any more, has nothing left, or nothing where another is named."""
        entries = world.settings.capacity
        left = len(self._entries) > len(entries) or any(one.closing for one in entries)
        return left and assign_fabric_systems(self._named(world), world) != self._parts

    def _named(self, world: World) -> tuple[ProviderSettings, ...]:
        """Of which Providers are to be made."""
        entries = world.settings.capacity
        known, have = {one.name for one in entries}, {id.provider for id in world.capacity.leases}
        return (*entries, *(one for one in self._entries if one.name not in known and one.name in have))

    def _published(self) -> Published | None:
        """What is to be shown of fabrics now, where that is ours to do."""
        world = self._world()
        self._fabrics |= {one.name for one in world.settings.capacity if one.redfish is not None}
        return find_published_devices(world, self._clock(), self._fabrics) if self._fabrics and self._leads() else None

    async def run(self) -> None:
        """Until cancelled. An order that was not performed yet when the Settings changed is given anew by the loop."""
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
        """`named`: so many are in the Settings; of the others nothing is ordered any more, as of those that close."""
        around = Around(
            self._server, self._world, *self._places, stack, self._leads, clock=self._clock, turns=self._turns
        )
        made = {entry.name: KINDS[entry.kinds[0]].make(entry, around) for entry in entries}
        hedges = frozenset(entry.name for entry in entries if entry.hedge)
        closing = {one.name for one in entries if one.closing} | {one.name for one in entries[named:]}
        return ProviderRunner(made, self._observe, self._clock, hedges, frozenset(closing))
