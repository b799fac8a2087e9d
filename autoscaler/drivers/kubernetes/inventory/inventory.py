"""Watches a cluster's devices: nodes, other pods, claims and the device plug-in's ConfigMap. I/O; makes no decisions.

Derives the reported slices from these watches, and the fields by which a pod requests its slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from autoscaler.capacity.attachable_nodes import Groups
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.objects.other_pods import Hosts, OtherPod
from autoscaler.drivers.kubernetes.objects.pod_manifest import SLICES
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.kubernetes import device_plugin_config
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.constants import NODE_POOL, NODES
from autoscaler.kubernetes.device_plugin_config import PLACES
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from autoscaler.slicing import device_usage, dra_binding_conditions, slicers
from autoscaler.slicing.actual_slices import resolve_actual_slices
from autoscaler.slicing.dra import common_claim_name, dra_device_name_of_id, list_alternatives, rename_common_claims
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.settings import PriorityClass, Settings, kind_of
from autoscaler.state.events import HostsSeen, ImagesSeen, SlicesSeen
from autoscaler.state.node_labels_and_taints import find_untolerated_taint
from autoscaler.state.pending_claims import AwaitedSeen, sort_by_wait
from autoscaler.state.world import NodeId, Replica, Slice, SliceId

HOSTS_EVERY_S = 0.5
"""Delay of reports about pods without devices: they change constantly in a large cluster, so changes are combined."""


class Inventory:
    """The watches of one cluster. `is_ours`: whether a pod is a replica of this driver. `held`: slices of the replicas
    that are not proven clean. `changed` is called if the slices may have changed, with whether a node has changed.
    `hosts_changed` is called if only CPU, memory or images of nodes have changed. `groups`: machine groups, with the
    maximum number of devices of their nodes.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        settings: Callable[[], Settings],
        *,
        is_ours: Callable[[Object], bool],
        owner: Ownership = ANYBODYS,
        held: Callable[[], Iterable[SliceId]],
        changed: Callable[[bool], None],
        hosts_changed: Callable[[], None],
        groups: Callable[[], Groups] = dict,
    ) -> None:
        self._settings, self._groups = settings, groups
        self._namespace, self._owner = namespace, owner
        self._is_ours = is_ours
        self._held = held
        self._nodes = Watched(api, NODES, nodes.read_node, self._nodes_changed)
        self._changed, self._hosts_changed = changed, hosts_changed
        self._others = Watched(
            api, "/api/v1/pods", self._read_other, self._others_changed, optional=True, fieldSelector=other_pods.HOLDING
        )
        self._hosts, self._with_devices = Hosts(), dict[ObjectKey, OtherPod]()
        self._due: asyncio.TimerHandle | None = None
        """Timer of the next report of CPU and memory used by pods without devices."""
        self._plugins = {
            place: Watched(
                api, f"/api/v1/namespaces/{place.namespace}/configmaps", device_plugin_config.read_plugin_configs,
                lambda _: changed(False), optional=True, **place.query,
            )
            for place in PLACES
        }  # fmt: skip
        self._published = Watched(
            api, resource_claims.PUBLISHED, resource_claims.read_resource_slice, lambda _: changed(False), optional=True
        )
        self._claims = Watched(
            api,
            resource_claims.CLAIMS,
            lambda found: resource_claims.read_claim(found, namespace, owner),
            lambda _: changed(False),
            optional=True,
        )
        self._only_hosts = self._images_changed = False
        self._made: nodes.Made = {}
        self._slices: dict[SliceId, Slice] = {}
        """As last reported."""
        self._awaited = AwaitedSeen(awaited=())
        self._gone: dict[str, int] = {}
        """`Slice.counted` -> number of slices held by others, as last reported."""

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Return once everything that exists is known; the watches continue in `tasks`."""
        watches: tuple[Watched[Any], ...] = (
            self._nodes,
            self._others,
            self._published,
            self._claims,
            *self._plugins.values(),
        )  # each of a different type
        for watched in watches:
            tasks.create_task(watched.run())
        for watched in watches:
            await watched.synced.wait()

    async def refresh(self) -> None:
        """Re-read the nodes. Raises `ApiError`, `UnreachableError`."""
        await self._nodes.refresh()

    def node(self, name: str) -> NodeSeen | None:
        """Return the node; None if no node of that name exists."""
        return self._nodes.items.get(ObjectKey("", name))

    def may_be_taken(self, name: str | None) -> bool:
        """Return whether Karpenter may remove the node; None: whether it may remove any node."""
        found = self._nodes.items.values() if name is None else filter(None, (self.node(name),))
        return any(NODE_POOL in one.labels for one in found)

    def look(self) -> tuple[SlicesSeen | HostsSeen | ImagesSeen | AwaitedSeen, ...]:
        """Return the current state; without slices if only CPU and memory used by others, or images, have changed."""
        if self._due is not None:
            self._due.cancel()
        hosts, self._due = self._hosts_report(), None
        images: tuple[ImagesSeen, ...] = ()
        if self._images_changed or not self._only_hosts:
            seen = {node.name: node.images for node in self._nodes.items.values() if node.images}
            images = (ImagesSeen(images=seen),)
        self._images_changed = False
        if self._only_hosts:
            return (hosts, *images)
        return (self._slices_report(), hosts, *images, *self._new_claims_report())

    def _new_claims_report(self) -> tuple[AwaitedSeen, ...]:
        """Return the awaited claims if they have changed."""
        found = (awaited for one in self._claims.items.values() for awaited in one.awaited)
        before, self._awaited = self._awaited, AwaitedSeen(awaited=sort_by_wait(found))
        return () if self._awaited == before else (self._awaited,)

    def _nodes_changed(self, changes: list[Change[NodeSeen]]) -> None:
        """Report node changes; changes of images alone are reported later, because no slice depends on them."""
        if any(old is None or new is None or old._replace(images=new.images) != new for _, old, new in changes):
            self._changed(True)
            return
        self._images_changed = True
        self._later()

    def _hosts_report(self) -> HostsSeen:
        """Report CPU and memory of nodes; of nodes without devices, only of those that accept any pod now."""
        there = (node for node in self._nodes.items.values() if any(node.cpu_memory))
        eligible = {
            NodeId(node.name): node.cpu_memory
            for node in there
            if node.amounts or node.annotations or (node.usable and find_untolerated_taint(node.taints, ()) is None)
        }
        return HostsSeen(hosts=self._hosts.seen(eligible))

    def _slices_report(self) -> SlicesSeen:
        configs = {
            place: one.items[ObjectKey(*place[:2])]
            for place, one in self._plugins.items()
            if ObjectKey(*place[:2]) in one.items
        }
        there = self._nodes.items.values()
        held, published = list(self._held()), resource_claims.group_slices_by_node(self._published.items.values())
        seen = list(self._claims.items.values()) if published else []
        chosen = [dra_device_name_of_id(id) for id in held] if published else []
        found = nodes.build_slices(
            there,
            self._settings().nodes,
            lambda labels: device_plugin_config.select_plugin_config(labels, configs),
            published,
            [*(got.entry for one in seen for got in one.got), *chosen],
            made=self._made,
            groups=self._groups(),
        )
        found = dra_binding_conditions.apply_bindings(found, (binding for one in seen for binding in one.bindings))
        others = list(self._with_devices.values())
        theirs = [one for pod in others if pod.cards for one in device_usage.list_card_usage(pod.node, pod.cards)]
        theirs += device_usage.list_dra_usage(found, (got for one in seen if not one.ours for got in one.got))
        ours = [(key.name, one) for key, one in self._claims.items.items() if one.ours] if published else []
        own = [(name.removesuffix(self._owner.suffix), got) for name, one in ours for got in one.got]
        common = {common_claim_name(one) for one in found} if own else set[str]()
        unchosen = (got for name, got in own if got.entry not in chosen and name not in common)
        found = nodes.close_claimed_slices(found, own)
        found, gone = device_usage.subtract_usage(
            found, [*theirs, *device_usage.list_dra_usage(found, unchosen, ours=True)]
        )
        found, lost = nodes.close_stale_slices(found, held)
        self._slices = {one.id: one for one in found}
        self._gone = nodes.count_taken_slices(there, found, [*others, *lost]) | gone
        return SlicesSeen(slices=found, others=self._gone)

    def fields(self, replica: Replica, ranked: PriorityClass | None) -> PodFields | None:
        """Return the device requests of the replica's pod; None: it has no slices. `ranked`: its priority class.
        Raises `ValueError` if a slice no longer exists, because the request depends on the slice's kind.
        """
        asks = slicers.build_pod_fields(replica, self._slices, ranked, self._instead(replica))
        if asks is None and replica.resources.slices:
            raise ValueError(f"a slice of the replica no longer exists: {', '.join(replica.resources.slices)}")
        return asks if asks is None else rename_common_claims(asks, self._name_common_claim)

    def _name_common_claim(self, name: str) -> str:
        """Return the full name of a shared claim. An earlier version appended no suffix: while its claim holds the
        device, further pods on the device must use that claim.
        """
        before = self._claims.items.get(ObjectKey(self._namespace, name))
        return name if before is not None and before.ours else name + self._owner.suffix

    def _instead(self, replica: Replica) -> list[Slice]:
        """Return alternatives to the replica's only slice, as many as the Settings allow for its node."""
        own = self._slices.get(replica.resources.slices[0]) if len(replica.resources.slices) == 1 else None
        node = None if own is None else self.node(own.node)
        if own is None or node is None:
            return []
        kind = kind_of(node.labels, self._settings().nodes)
        many = kind.slicing.alternatives if kind is not None and kind.slicing is not None else 0
        gone = {*self._held(), *(counted for counted, much in self._gone.items() if much > 0), *node.cordoned}
        return list(islice(list_alternatives(own, self._slices.values(), gone), many))

    def actual(self, pod: PodSeen) -> tuple[SliceId, ...]:
        """Return the slices that our pod actually has, if they are known and differ from those chosen; else empty."""
        seen = [self._claims.items.get(ObjectKey(pod.namespace, name)) for name in pod.claims]
        if not pod.node or not all(one is not None and one.got for one in seen):
            return ()
        got = [got for one in seen if one is not None for got in one.got]
        return resolve_actual_slices(
            pod.slices, pod.node, self._slices, lambda: frozenset(self._held()), cards=pod.cards, got=got
        )

    def reserved(self, pod: PodSeen) -> bool:
        """Return whether a claim is still reserved for our pod, so that its devices are not free yet."""
        seen = (self._claims.items.get(ObjectKey(pod.namespace, name)) for name in pod.claims)
        return any(one is not None and pod.uid in one.users for one in seen)

    def knows(self, slices: Iterable[SliceId]) -> bool:
        """Return whether all slices were in the last report and exist also when they are free, unlike DRA parts."""
        known = [self._slices.get(id) for id in slices]
        return all(one is not None and not (one.kind == "dra" and one.device_bytes) for one in known)

    def _read_other(self, pod: Object) -> OtherPod | None:
        """Parse a pod of others. Of our own pods, only those without slices count, with their CPU and memory."""
        if not self._is_ours(pod):
            return other_pods.read_other_pod(pod)
        slices = (pod["metadata"].get("annotations") or {}).get(SLICES)
        found = None if slices else other_pods.read_other_pod(pod)
        return None if found is None else OtherPod(found.node, cpu_memory=found.cpu_memory)

    def _others_changed(self, changes: list[Change[OtherPod]]) -> None:
        devices = hosts = False
        for key, old, new in changes:
            hosts |= old is not None and self._hosts.give_back(old.node, old.cpu_memory)
            hosts |= new is not None and self._hosts.take(new.node, new.cpu_memory)
            devices |= old is not None and self._with_devices.pop(key, None) is not None
            if new is not None and new.has_devices:
                self._with_devices[key] = new
                devices = True
        if devices:
            self._changed(False)
        elif hosts:
            self._later()

    def _later(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(HOSTS_EVERY_S, self._hosts_are_due)

    def _hosts_are_due(self) -> None:
        self._due, self._only_hosts = None, True
        try:
            self._hosts_changed()
        finally:
            self._only_hosts = False
