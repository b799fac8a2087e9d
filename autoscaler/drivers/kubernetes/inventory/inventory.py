"""What devices a cluster has, as it is watched: nodes, pods of others, claims, the device plug-in's ConfigMap. I/O.

Owns these watches and what is made of them: the Slices that are told, and what a pod must ask for to get its own.
Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from autoscaler.capacity.attachable_nodes import Groups
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import device_plugin_config
from autoscaler.drivers.kubernetes.objects import node as nodes
from autoscaler.drivers.kubernetes.objects.node import NodeSeen, OtherPod
from autoscaler.drivers.kubernetes.objects.node_resources import Hosts
from autoscaler.drivers.kubernetes.objects.pod import SLICES, PodSeen
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.constants import NODE_POOL, NODES, PLACES
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from autoscaler.slicing import dra_binding_conditions, registry, usage
from autoscaler.slicing.base import PodFields
from autoscaler.slicing.dra_claims import common_claim_name, dra_device_name_of_id, list_alternatives
from autoscaler.slicing.usage import resolve_actual_slices
from autoscaler.spec.ownership import ANYBODYS, Ownership
from autoscaler.spec.settings import PriorityClass, Settings, kind_of
from autoscaler.state.device_claims import AwaitedSeen, sort_by_wait
from autoscaler.state.events import HostsSeen, ImagesSeen, SlicesSeen
from autoscaler.state.node_labels import find_untolerated_taint
from autoscaler.state.world import NodeId, Replica, Slice, SliceId

HOSTS_EVERY_S = 0.5
"""Pods without devices come and go all the time in a large cluster: what they have is told together."""


class Inventory:
    """`is_ours`: whether a pod is a Replica of this driver; `held` gives the Slices of those that are not proven clean.
    `changed` hears that the Slices may be others now, and whether a node is, too; `hosts_changed`, that only CPU,
    memory or images of nodes are. `groups`: of machines, how many devices their nodes can have.
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
        self._is_ours = is_ours
        self._held = held
        self._nodes = Watched(api, NODES, nodes.read_node, self._nodes_changed)
        self._changed, self._hosts_changed = changed, hosts_changed
        self._others = Watched(
            api, "/api/v1/pods", self._read_other, self._others_changed, optional=True, fieldSelector=nodes.HOLDING
        )
        self._hosts, self._with_devices = Hosts(), dict[ObjectKey, OtherPod]()
        self._due: asyncio.TimerHandle | None = None
        """When others are told who have CPU and memory, but no devices."""
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
        """As they were last told."""
        self._awaited = AwaitedSeen(awaited=())
        self._gone: dict[str, int] = {}
        """What others have of them, as it was last told."""

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Returns when all that is there is known; it is watched on in `tasks`."""
        watches: tuple[Watched[Any], ...] = (
            self._nodes,
            self._others,
            self._published,
            self._claims,
            *self._plugins.values(),
        )  # each of a type of its own
        for watched in watches:
            tasks.create_task(watched.run())
        for watched in watches:
            await watched.synced.wait()

    async def refresh(self) -> None:
        """Reads the nodes anew. Raises ApiError, UnreachableError."""
        await self._nodes.refresh()

    def node(self, name: str) -> NodeSeen | None:
        """None: there is none of that name."""
        return self._nodes.items.get(ObjectKey("", name))

    def may_be_taken(self, name: str | None) -> bool:
        """Whether a node is Karpenter's; None: whether any is."""
        found = self._nodes.items.values() if name is None else filter(None, (self.node(name),))
        return any(NODE_POOL in one.labels for one in found)

    def look(self) -> tuple[SlicesSeen | HostsSeen | ImagesSeen | AwaitedSeen, ...]:
        """What there is now; without the Slices where only CPU and memory of others have changed, or images."""
        if self._due is not None:
            self._due.cancel()
        hosts, self._due = self._look_at_hosts(), None
        images = (self._look_at_images(),) if self._images_changed or not self._only_hosts else ()
        self._images_changed = False
        if self._only_hosts:
            return (hosts, *images)
        return (self._look_at_slices(), hosts, *images, *self._look_at_claims())

    def _look_at_claims(self) -> tuple[AwaitedSeen, ...]:
        """Where it is news."""
        found = (awaited for one in self._claims.items.values() for awaited in one.awaited)
        before, self._awaited = self._awaited, AwaitedSeen(awaited=sort_by_wait(found))
        return () if self._awaited == before else (self._awaited,)

    def _look_at_images(self) -> ImagesSeen:
        return ImagesSeen(images={node.name: node.images for node in self._nodes.items.values() if node.images})

    def _nodes_changed(self, changes: list[Change[NodeSeen]]) -> None:
        """Images come and go all the time, too: no Slice depends on them."""
        if any(old is None or new is None or old._replace(images=new.images) != new for _, old, new in changes):
            self._changed(True)
            return
        self._images_changed = True
        self._later()

    def _look_at_hosts(self) -> HostsSeen:
        """Of nodes without devices only those on which any pod may be now."""
        there = (node for node in self._nodes.items.values() if any(node.beside))
        told = {
            NodeId(node.name): node.beside
            for node in there
            if node.amounts or node.annotations or (node.usable and find_untolerated_taint(node.taints, ()) is None)
        }
        return HostsSeen(hosts=self._hosts.seen(told))

    def _look_at_slices(self) -> SlicesSeen:
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
        theirs = [one for pod in others if pod.cards for one in usage.list_card_usage(pod.node, pod.cards)]
        theirs += usage.list_dra_usage(found, (got for one in seen if not one.ours for got in one.got))
        ours = [(key.name, one) for key, one in self._claims.items.items() if one.ours] if published else []
        own = [(name, got) for name, one in ours for got in one.got]
        common = {common_claim_name(one) for one in found} if own else set[str]()
        strange = (got for name, got in own if got.entry not in chosen and name not in common)
        found = nodes.close_claimed_slices(found, own)
        found, gone = usage.subtract_usage(found, [*theirs, *usage.list_dra_usage(found, strange, ours=True)])
        found, lost = nodes.close_stale_slices(found, held)
        self._slices = {one.id: one for one in found}
        self._gone = nodes.count_taken_slices(there, found, [*others, *lost]) | gone
        return SlicesSeen(slices=found, others=self._gone)

    def fields(self, replica: Replica, ranked: PriorityClass | None) -> PodFields | None:
        """What its pod asks for; None: it has no Slices. Raises ValueError where they are not there any more: what they
        were, and so what to ask for, nobody knows. `ranked`: by its Model's priority.
        """
        asks = registry.build_pod_fields(replica, self._slices, ranked, self._instead(replica))
        if asks is None and replica.slices:
            raise ValueError(f"there is no {', '.join(replica.slices)} any more")
        return asks

    def _instead(self, replica: Replica) -> list[Slice]:
        """What may be given in place of its one Slice, as Settings say of its node."""
        own = self._slices.get(replica.slices[0]) if len(replica.slices) == 1 else None
        node = None if own is None else self.node(own.node)
        if own is None or node is None:
            return []
        kind = kind_of(node.labels, self._settings().nodes)
        many = kind.slicing.alternatives if kind is not None and kind.slicing is not None else 0
        gone = {*self._held(), *(counted for counted, much in self._gone.items() if much > 0), *node.cordoned}
        return list(islice(list_alternatives(own, self._slices.values(), gone), many))

    def actual(self, pod: PodSeen) -> tuple[SliceId, ...]:
        """What a pod of ours really has, where that is known and is not what was chosen; else empty."""
        seen = [self._claims.items.get(ObjectKey(pod.namespace, name)) for name in pod.claims]
        if not pod.node or not all(seen):
            return ()  # nobody knows yet, or nobody knows any more
        got = [got for one in seen if one is not None for got in one.got]
        return resolve_actual_slices(
            pod.slices, pod.node, self._slices, lambda: frozenset(self._held()), cards=pod.cards, got=got
        )

    def reserved(self, pod: PodSeen) -> bool:
        """Whether a claim is still a pod's of ours: what it holds can be nobody else's, and may not be put away yet."""
        seen = (self._claims.items.get(ObjectKey(pod.namespace, name)) for name in pod.claims)
        return any(one is not None and pod.uid in one.users for one in seen)

    def knows(self, slices: Iterable[SliceId]) -> bool:
        """Whether all of them are there, as last told, whoever has them: a part of a GPU is while somebody has it."""
        told = [self._slices.get(id) for id in slices]
        return all(one is not None and not (one.kind == "dra" and one.device_bytes) for one in told)

    def _read_other(self, pod: Object) -> OtherPod | None:
        """A pod of ours has what its Replica has; one without Slices is wherever the scheduler put it."""
        if not self._is_ours(pod):
            return nodes.read_other_pod(pod)
        slices = (pod["metadata"].get("annotations") or {}).get(SLICES)
        found = None if slices else nodes.read_other_pod(pod)
        return None if found is None else OtherPod(found.node, beside=found.beside)

    def _others_changed(self, changes: list[Change[OtherPod]]) -> None:
        devices = hosts = False
        for key, old, new in changes:
            hosts |= old is not None and self._hosts.give_back(old.node, old.beside)
            hosts |= new is not None and self._hosts.take(new.node, new.beside)
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
