"""Assembles the cluster part of an autoscaler: driver, leader election, gateway pods, and authentication of reports.

Holds three connections to the API server: one for writes, closed when leadership ends; one for the Lease only, so that
nothing delays its renewal; and one for reads. In pods, the engine program is found on the image's PATH. Reports a
missing `kubernetes` extra as a usage error.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec
from msgspec.structs import replace

from autoscaler import engines
from autoscaler.capacity.attachable_nodes import read_group_limits
from autoscaler.contract import REPORT_EXPIRY_S, GatewayId, ModelName, ReplicaId
from autoscaler.controller.loop import Loop, LoopStep
from autoscaler.controller.weights_wait import AgentNodeSupply
from autoscaler.drivers import probes
from autoscaler.drivers.driver import SharedDriver
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.fold import leadership_and_operator_orders
from autoscaler.fold.fold import Observation
from autoscaler.queries.agent_reports import is_device_memory_free
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.server.auth import AGENT, BOTH, GATEWAY, Admits, Roles
from autoscaler.spec.installation_ownership import CLAIM_S, Ownership, installation_id, installation_title
from autoscaler.spec.model import Model
from autoscaler.state.events import DocumentsSeen, FaultSeen, FollowingSeen, LeadingSeen
from autoscaler.state.world import STORE, Leadership, World
from autoscaler.weights import mount_choice
from pilotlight.models.capacity_providers import Supplies

if TYPE_CHECKING:
    from autoscaler.drivers.kubernetes.inventory.declared_devices import DeclaredDevices
    from autoscaler.drivers.kubernetes.inventory.mig_manager import NodeCutter
    from autoscaler.drivers.kubernetes.inventory.node_cordons import NodeCordons
    from autoscaler.kubernetes.api import Api
    from autoscaler.kubernetes.leader_election import Elector

IN_IMAGES = {
    program.found: "python3" if program.package else program.found
    for engine in engines.ENGINES.values()
    for program in engine.programs
    if program.found != "xllamacpp"  # its launcher is a file of this machine
}
"""Engine programs in the engines' own images."""


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster options of an autoscaler."""

    namespace: str
    """Namespace of the pods."""
    home: str = ""
    """Namespace of the Lease and the gateways; empty: the same."""
    scope: Literal["cluster", "namespace"] = "cluster"
    """Scope of our rights: with `namespace`, nodes and Tenant resources may not be read."""
    kubeconfig: Path | None = None
    lease: str = "pilotlight"
    identity: str = ""
    """Our identity in the Lease; empty: the pod's or the host's name. Each process appends a random suffix."""
    gateway_pods: str = "app.kubernetes.io/component=gateway"
    """Label selector of gateway pods, whose names are the gateways' ids; empty: gateways are known only by reports."""
    adopt_in: tuple[str, ...] | None = None
    """Namespaces whose annotated Deployments and StatefulSets are also served; None: all that we may read."""
    watch_kubeai: bool = False
    """Whether Models of KubeAI are also served."""
    weights_store: str = STORE
    """Path of the agents' store on their nodes."""
    accounts: tuple[str, ...] = ()
    """Service accounts with the roles of both gateways and agents: NAME, or NAMESPACE:NAME."""
    gateway_accounts: tuple[str, ...] = ()
    """Service accounts with the role of gateways only."""
    agent_accounts: tuple[str, ...] = ()
    """Service accounts with the role of agents only."""

    @property
    def own_namespace(self) -> str:
        """Namespace of this process."""
        return self.home or self.namespace

    @property
    def installation(self) -> str:
        """Value of the installation label on created objects."""
        return installation_id(self.own_namespace, self.lease)

    @property
    def title(self) -> str:
        """Display name of the installation."""
        return installation_title(self.own_namespace, self.lease)

    @property
    def users(self) -> dict[str, Roles]:
        """Roles by user name of the API server."""
        found: dict[str, Roles] = {}
        for accounts, roles in ((self.accounts, BOTH), (self.gateway_accounts, GATEWAY), (self.agent_accounts, AGENT)):
            for one in accounts:
                user = f"system:serviceaccount:{one if ':' in one else f'{self.own_namespace}:{one}'}"
                found[user] = found.get(user, roles) | roles
        return found


class Cluster:
    """The cluster part of one autoscaler. Call `loop` before `run`."""

    _loop: Loop

    def __init__(
        self,
        options: ClusterOptions,
        apis: tuple[Api, Api],
        elector: Elector,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        """`apis`: one for writes, closed when leadership ends, and one for reads. `name` is our name in Events."""
        from autoscaler.drivers.kubernetes.composite import CompositeDriver
        from autoscaler.drivers.kubernetes.driver import KubernetesDriver
        from autoscaler.drivers.kubernetes.inventory.declared_devices import DeclaredDevices
        from autoscaler.drivers.kubernetes.inventory.disruption_budgets import Disruptions
        from autoscaler.drivers.kubernetes.inventory.mig_manager import NodeCutter
        from autoscaler.drivers.kubernetes.inventory.node_cordons import NodeCordons
        from autoscaler.server.token_review import Tokens
        from pilotlight.processes.cluster_documents import Resources
        from pilotlight.provider_kubernetes_client import Objects

        acting, asking = apis
        owner = Ownership(options.installation)
        self._options = options
        self._asking = asking
        self.unreadable = asking.unreadable
        """Objects that no watch of this process can decode."""
        self._elector = elector
        self._clock = clock
        self._listed = asyncio.Event()
        self._pace = probes.Pace(clock)
        self._pace.leads = False
        self._supply = AgentNodeSupply(lambda: self._loop.world, clock, self._fault)
        own = KubernetesDriver(
            acting,
            options.namespace,
            build_pod_launch,
            require_image,
            clock,
            settings=lambda: self._loop.world.settings,
            inventory=options.scope == "cluster",
            groups=lambda: read_group_limits(self._loop.world),
            measured=self._measured,
            pace=self._pace,
            supply=self._supply,
            owner=owner,
        )
        self._own = own
        self._declared: DeclaredDevices | None = None
        """Declared devices, if nodes may not be read."""
        if options.scope == "namespace":
            self._declared = DeclaredDevices(asking, options.namespace, self._observe, lambda: self._loop.world)
        self._disruptions = Disruptions(asking, options.namespace, self._observe, owner)
        self._resources = Resources(options, acting, asking, reporter=name, clock=clock, pace=self._pace)
        self.driver: SharedDriver = CompositeDriver(own, self._resources.adopted)
        self.cordons: NodeCordons | None = None
        """Cordons on Node objects, if nodes may be read."""
        self._cutter: NodeCutter | None = None
        """Repartitions GPUs of nodes."""
        if options.scope == "cluster":
            self.cordons = NodeCordons(acting, asking, self._observe, clock)
            self._cutter = NodeCutter(
                acting, asking, self._observe, lambda: self._loop.world.settings, clock, owner=owner
            )
        places = (options.namespace, options.own_namespace, options.lease)
        self._supplies = Supplies(
            Objects(acting, asking, owner, self._is_foreign), places, lambda: self._loop.world, self._observe, clock,
            leads=lambda: elector.writes_s() > 0,
        )  # fmt: skip
        self._tokens = Tokens(asking, options.users)
        self.admits: Admits | None = self._tokens.admits if options.users else None
        """Authenticates reports from clients that do not have the shared token."""

    @property
    def off(self) -> tuple[str, ...]:
        """Features that are disabled in this scope."""
        from autoscaler.kubernetes.rbac import OFF

        return OFF if self._options.scope == "namespace" else ()

    def loop(self) -> Loop:
        """Return the driver's loop, which leads once this process is elected."""
        elector = self._elector
        self._loop = Loop(
            World(epoch=0, leadership=Leadership(leads=False), installation=self._options.installation),
            self.driver, self._clock, elector.writes_s, elector.in_touch,
            cutter=self._cutter, supplier=self._supplies,
        )  # fmt: skip
        self.unreadable.fault = self._loop.trouble
        self._resources.join(self._loop)
        self._loop.listeners += [self._on_step, self._supply.on_step, self._supplies.on_step]
        return self._loop

    def put_files(self, seen: DocumentsSeen, faults: Sequence[FaultSeen] = ()) -> None:
        """Use the documents of files as one part of all documents, at startup and after a reload. `faults`: the
        exceptions that their Models raised.

        `auth: auto` requires keys here even without Tenants, so that deleting the last one does not open the port.
        """
        auth = "keys" if seen.settings.auth == "auto" else seen.settings.auth
        self._resources.put_files(replace(seen, settings=replace(seen.settings, auth=auth)), faults)

    def _observe(self, seen: Sequence[Observation]) -> None:
        self._loop.observe(seen)

    def _fault(self, model: ModelName, what: str, error: Exception) -> None:
        self._loop.fault(model, what, error)

    def _measured(self, replica: ReplicaId, since_s: float) -> bool:
        """Return whether agents report the device memory as free."""
        return is_device_memory_free(self._loop.world, replica, since_s, self._clock())

    def _is_foreign(self, model: ModelName) -> bool:
        """Return whether orders for this Model that have no label are left to the installation that serves it. If
        that installation has not labelled an order within CLAIM_S, it has no provider for the order.
        """
        led_s = self._clock() - self._loop.world.leadership.leading_since_s
        return led_s < CLAIM_S and self._resources.is_served_elsewhere(model)

    def _silent(self) -> list[GatewayId]:
        """Return the gateways that have not reported for REPORT_EXPIRY_S and may be gone."""
        since_s = self._clock() - REPORT_EXPIRY_S
        return [id for id, one in self._loop.world.gateways.items() if not one.gone and one.seen_s <= since_s]

    def _on_step(self, step: LoopStep) -> None:
        if step.after.leadership.synced:
            self._listed.set()
        others = step.before.settings is not step.after.settings
        if others:
            self._resources.adopted.look_again()
        if self._declared is not None:
            self._declared.on_step(step)
        elif others:
            self._own.look_again()
            if self._cutter is not None:
                self._cutter.look_again()

    # --- autoscaler.kubernetes.leader_election ------------------------------------------------------------------------

    def lease_seconds(self) -> int:
        """Return the Lease duration in the current Settings."""
        return self._loop.world.settings.lease_seconds

    def heard(self) -> frozenset[int]:
        """Return the epochs that gateways and agents have reported."""
        return leadership_and_operator_orders.list_reported_epochs(self._loop.world)

    def lead(self, epoch: int) -> None:
        """Start leading with a `World` that is rebuilt from the current state."""
        self._pace.leads = True
        self._loop.observe((LeadingSeen(epoch=epoch),))
        self.driver.lead()

    async def follow(self) -> None:
        """Stop leading and end all pending orders."""
        self._pace.leads = False
        await self.driver.follow()
        if self._cutter is not None:
            await self._cutter.follow()
        self._loop.observe((FollowingSeen(),))

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch the gateway pods, and join the election once all existing objects are known; until cancelled.

        Call `release` afterwards.
        """
        from autoscaler.drivers.kubernetes.weight_volumes import poll_cluster_facts
        from autoscaler.kubernetes.gateway_pods import GatewayPods

        looks = partial(
            poll_cluster_facts, self._asking, self._options.scope, self._options.weights_store, self._observe
        )
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "disruptions": self._disruptions.run,
            "volumes": looks,
            "resources": self._resources.run,
            "capacity": self._supplies.run,
        }
        if self._options.gateway_pods:
            home, selector = self._options.own_namespace, self._options.gateway_pods
            parts["gateways"] = GatewayPods(self._asking, home, self._loop.observe, selector, self._silent).run
        if self.cordons is not None:
            parts["cordons"] = self.cordons.run
        if self._cutter is not None:
            parts["cutting"] = self._cutter.run
        if self._declared is not None:
            parts["quotas"] = self._declared.run
        async with asyncio.TaskGroup() as tasks:
            for name, part in parts.items():
                tasks.create_task(retry_until_success(part, partial(self._loop.trouble, name)))
            await self._listed.wait()
            await self._resources.observed.wait()  # otherwise running pods would belong to no known Model
            tasks.create_task(
                retry_until_success(partial(self._elector.run, self), partial(self._loop.trouble, "election"))
            )

    async def release(self) -> None:
        """Release leadership, so that another process may lead at once."""
        await self._resources.flush()
        await self._elector.release()

    async def close(self) -> None:
        """Stop authenticating reports."""
        await self._tokens.close()


@asynccontextmanager
async def open_cluster(options: ClusterOptions, clock: Callable[[], float]) -> AsyncIterator[Cluster]:
    """Open the cluster. Raises click's usage error if the extra is not installed or no API server is configured."""
    from autoscaler.kubernetes.api import Api
    from autoscaler.kubernetes.kubeconfig import ApiAccessError, load_api_access
    from autoscaler.kubernetes.leader_election import Elector
    from autoscaler.kubernetes.unreadable_objects import UnreadableObjects

    try:
        way = await load_api_access(options.kubeconfig)
    except ApiAccessError as error:
        raise click.UsageError(str(error)) from None
    unreadable = UnreadableObjects()
    async with Api(way, unreadable=unreadable) as leasing, Api(way, unreadable=unreadable) as asking:
        # It also differs from that of a previous process here, which may still be writing.
        name = f"{options.identity or environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
        elector = Elector(leasing, options.own_namespace, options.lease, name, clock)
        async with Api(way, elector.writes_s, unreadable=unreadable) as acting:
            cluster = Cluster(options, (acting, asking), elector, name, clock)
            try:
                yield cluster
            finally:
                await cluster.close()


def build_pod_launch(model: Model, host: str, port: int, given: Given = AS_ASKED) -> engines.LaunchCommand:
    """Return the engine's launch command in a pod, whose address has the same family as this pod's (POD_IP). Raises
    EngineError, also if no image is named.
    """
    require_image(model)
    path, ipv6 = mount_choice.path_of(model.spec.artifact), ":" in environ.get("POD_IP", "")
    return engines.build_launch_command(model, path, host, port, IN_IMAGES, gpus=True, given=given, ipv6=ipv6)


def require_image(model: Model) -> str:
    """Return the image of its pods. Raises EngineError."""
    if not model.spec.image:
        image = engines.ENGINES[model.spec.engine].image
        fix = "set it to an image with the engine" + (f", such as {image}" if image else "")
        raise engines.EngineError(f"Model {model.name}: spec.image is not set: {fix}")
    return model.spec.image
