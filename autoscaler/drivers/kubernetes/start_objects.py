"""Builds the objects of a start: a replica's pod, its claims and volumes, from current facts and Settings. No I/O.

This module collects the inputs; `objects.pod_manifest` defines the manifest of the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from autoscaler.agent_contract import OWN, Laid, LaidAdapter
from autoscaler.drivers.driver import Launcher, NodeSupply
from autoscaler.drivers.kubernetes import weight_volumes as volumes
from autoscaler.drivers.kubernetes.inventory import declared_devices
from autoscaler.drivers.kubernetes.inventory import resource_claims as claims
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects.pod_overrides import CollisionError
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.kubernetes.api import Object
from autoscaler.queries.granted_memory import compute_engine_limits
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.pod import QUEUE, Pod
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import Marks
from autoscaler.state.world import Replica
from autoscaler.weights.mount_choice import MOUNT, ArtifactFacts

PORT = pods.PORTS[0]
SOMEWHERE = f"{MOUNT}/weights.gguf"
"""Placeholder path for weights that are not fetched yet."""


class Made(NamedTuple):
    """The objects to create for one start."""

    pod: Object
    claims: tuple[Object, ...]
    """ResourceClaims for devices."""
    volumes: tuple[Object, ...] = ()
    """The PersistentVolume of the node's store and its claim."""


class PodBuilder(NamedTuple):
    """Builds the pods of one driver."""

    namespace: str
    launch: Launcher
    image: Callable[[Model], str]
    settings: Callable[[], Settings]
    inventory: Inventory | None
    supply: NodeSupply
    owner: Ownership = ANYBODYS

    def obstacle(self, model: Model) -> str:
        """Return why a launch of the model would fail; empty if no reason is known."""
        if reason := self.supply.obstacle(model):
            return reason
        try:
            volumes.check_security_context(model, self.settings())
            self.launch(_somewhere(model, self.supply.brings(model)), pods.HOST, PORT)
        except Exception as error:  # noqa: BLE001 - launch is foreign code: any exception is a failed start
            reraise_memory_error(error)
            return str(error)
        return ""

    def __call__(self, replica: Replica, model: Model, laid: Laid | None) -> Made:
        """Build the objects. Raises `MountError`, `CollisionError` and the exceptions of `launch` and `image`."""
        settings, known = self.settings(), self.inventory
        volumes.check_security_context(model, settings)
        ranked = settings.priority_class(model.spec.priority)
        asks = (
            declared_devices.find_pod_fields(settings.nodes, replica, ranked)
            if known is None
            else known.fields(replica, ranked)
        )
        part = compute_engine_limits(model, replica, asks and asks.memory_fraction)
        seen = None if laid is None else self._seen(replica, model, laid)
        there = model if seen is None else volumes.resolve_weight_paths(model, seen)
        launch = self.launch(there, pods.HOST, pods.assign_engine_port(replica.id), part)
        where = declared_devices.find_node_selector(settings.nodes, replica.resources.slices)
        named = None if ranked is None else ranked.name
        pod = pods.build_pod_manifest(
            replica, model, launch, self.image(model), settings.pod, where, named, asks, seen and seen.pod,
            self.owner,
        )  # fmt: skip
        _mark(pod, replica.runtime.marks)
        if QUEUE in pod["metadata"]["labels"] or self._evicted(replica):
            pods.add_pre_stop_sleep(pod)
        if laid is not None:
            pod["metadata"]["annotations"] |= {pods.WEIGHTS: ",".join(laid.folders)} if laid.folders else {}
        wanted = tuple(map(self.owner.label, claims.build_claims(replica, asks)))
        return Made(pod, wanted, seen.objects if seen is not None else ())

    def _evicted(self, replica: Replica) -> bool:
        """Return whether Karpenter may evict the pod.
        Karpenter evicts without a drain, and an engine that gets SIGTERM at once aborts its requests.
        """
        if self.inventory is None:
            return True
        node = pods.parse_node_name(replica.resources.slices) if replica.resources.slices else None
        return self.inventory.may_be_taken(node)

    def _seen(self, replica: Replica, model: Model, laid: Laid) -> volumes.Mounted:
        node = (
            None
            if self.inventory is None or not replica.resources.slices
            else self.inventory.node(pods.parse_node_name(replica.resources.slices))
        )
        on = None if node is None else volumes.read_node_facts(node)
        found = _found(laid) if laid.folder or laid.digest else None
        adapters = {one.name: _found(one) for one in laid.adapters}
        facts, settings = self.supply.mounting(), self.settings()
        return volumes.mount_weights(model, self.namespace, on, found, facts, settings, adapters, self.owner)


def _mark(pod: Object, marks: Marks) -> None:
    for what, ours in (("label", marks.labels), ("annotation", marks.annotations)):
        theirs = pod["metadata"][f"{what}s"]
        for name, value in ours.items():
            if theirs.get(name, value) != value:
                raise CollisionError(
                    f"the ordered capacity of this pod requires {what} {name}: {value}: remove the other value from "
                    "the Model or the Settings"
                )
        theirs |= ours
    if marks.gates:
        pod["spec"]["schedulingGates"] = [{"name": gate} for gate in marks.gates]


def _found(laid: Laid | LaidAdapter) -> ArtifactFacts:
    return ArtifactFacts(laid.digest, laid.folder, laid.path, laid.image)


def _somewhere(model: Model, parts: Collection[str]) -> Model:
    """Return the model with placeholder paths for parts that are not fetched yet."""
    there = dict.fromkeys(parts, SOMEWHERE)
    return volumes.resolve_weight_paths(model, volumes.Mounted(Pod(), there.pop(OWN, ""), "", adapters=there))
