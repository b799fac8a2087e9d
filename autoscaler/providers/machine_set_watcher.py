"""Reads MachineSets and MachineDeployments (Cluster API, OpenShift) as node groups, and what each provides.

The devices of a group's future nodes are derived from the Settings' `nodes`, from labels of GPU feature discovery, or
from the group's own annotation. If GPUs are attached to its nodes later, the annotation is the maximum per node, not
the number that a new node has. A MachineSet of a MachineDeployment is not counted separately.

`MachineGroupWatcher` polls every LOOK_S seconds while there are groups, otherwise every NONE_S. A group that cannot be
read counts as absent, so Pilotlight may order capacity that the group also adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from autoscaler.capacity.attachable_nodes import DEVICES_MAX, GPU_COUNT, parse_device_count
from autoscaler.providers.future_nodes import COUNT, OfferTerms, build_offer, infer_node_shape
from autoscaler.providers.kubernetes_access import ApiServer, Object
from autoscaler.providers.reconciler import Reconciler
from autoscaler.spec.pod import GPU, OURS
from autoscaler.spec.settings import Settings, kind_of
from autoscaler.state.capacity import Group, GroupsSeen, Offer
from autoscaler.state.world import World

CAPI, OPENSHIFT = "cluster.x-k8s.io", "machine.openshift.io"
LABELS: Final = "capacity.cluster-autoscaler.kubernetes.io/labels"
"""Annotation of a group with the labels of its nodes: `a=b,c=d`."""
TO_NODES = ("node-role.kubernetes.io", "node-restriction.kubernetes.io", "node.cluster.x-k8s.io")
"""Cluster API copies machine labels of these domains and their subdomains to nodes."""
DEPLOYMENT = "MachineDeployment"


class MachineGroupObject(NamedTuple):
    """The object of a machine group, and its kind."""

    kind: str
    body: Object


def read_machine_groups(
    found: Iterable[MachineGroupObject], pods: Sequence[Object], settings: Settings
) -> tuple[Group, ...]:
    """Return the groups, sorted by name. `pods`: those without a node."""
    return tuple(sorted((_group(one, pods, settings) for one in found), key=lambda one: one.name))


def _group(found: MachineGroupObject, pods: Sequence[Object], settings: Settings) -> Group:
    metadata, spec, status = found.body["metadata"], found.body["spec"], found.body.get("status") or {}
    notes, labels = metadata.get("annotations") or {}, _labels(found.body)
    most, name = parse_device_count(notes.get(GPU_COUNT)), f"{found.kind} {metadata['namespace']}/{metadata['name']}"
    if any(one.get("controller") and one["kind"] == DEPLOYMENT for one in metadata.get("ownerReferences") or ()):
        return Group(name=name, most=most, labels=labels)
    return Group(
        name=name, wanted=spec.get("replicas", 1), ready=status.get("readyReplicas") or 0, most=most, labels=labels,
        offer=_node_offer(name, labels, most, settings), claimed=sum(_claims(pods, labels)),
    )  # fmt: skip


def _labels(body: Object) -> dict[str, str]:
    """Labels of the group's nodes: machine labels of TO_NODES (Cluster API) or of the machine spec (OpenShift)."""
    said = (body["metadata"].get("annotations") or {}).get(LABELS, "")
    annotated = dict(pair.split("=", 1) for pair in said.split(",") if "=" in pair)
    template = body["spec"].get("template") or {}
    if body["apiVersion"].startswith(OPENSHIFT):
        own = ((template.get("spec") or {}).get("metadata") or {}).get("labels") or {}
    else:
        machines = (template.get("metadata") or {}).get("labels") or {}
        own = {key: value for key, value in machines.items() if _of_nodes(key.partition("/")[0])}
    return {**annotated, **own}


def _of_nodes(domain: str) -> bool:
    return any(domain == one or domain.endswith(f".{one}") for one in TO_NODES)


def _node_offer(name: str, labels: Mapping[str, str], most: int, settings: Settings) -> Offer | None:
    """The devices of one node of the group, as an Offer; None if it has none or they are unknown."""
    kind = kind_of(labels, settings.nodes)
    fabric = any(one.cro is not None or one.redfish is not None for one in settings.capacity)
    filled = kind is not None and kind.devices_max is not None
    if filled or (fabric and most and all(one.devices_max is None for one in settings.nodes)):
        of = infer_node_shape(labels, kind) if COUNT in labels else None
    else:
        of = infer_node_shape({COUNT: str(min(most, DEVICES_MAX)), **labels} if most else labels, kind)
    return None if of is None or not labels else build_offer(name, "node", of, labels, OfferTerms(1), settings)


def _claims(pods: Sequence[Object], labels: Mapping[str, str]) -> Iterator[int]:
    """GPUs requested by each pending pod of others that fits there. Own pods are created only if they have room."""
    for pod in pods:
        metadata, spec = pod["metadata"], pod["spec"]
        ours = any(key.startswith(OURS) for key in metadata.get("labels") or {})
        if not ours and (spec.get("nodeSelector") or {}).items() <= labels.items():
            asked = ((one.get("resources") or {}).get("limits") or {} for one in spec["containers"])
            yield sum(parse_device_count(one.get(GPU)) for one in asked)


LOOK_S, NONE_S = 5.0, 60.0
"""Seconds between polls, with groups and without."""
PODS: Final = "/api/v1/pods"
WAITING: Final = "spec.nodeName=,status.phase=Pending"


async def list_machine_group_objects(server: ApiServer) -> list[MachineGroupObject]:
    """Return all MachineDeployments and MachineSets of a cluster. Raises AnswerError."""
    found: list[MachineGroupObject] = []
    capi = await _version(server, CAPI)
    if capi:
        for kind in (DEPLOYMENT, "MachineSet"):
            found += await _listed(server, kind, capi)
    if await _version(server, OPENSHIFT):
        found += await _listed(server, "MachineSet", f"{OPENSHIFT}/v1beta1")
    return found


async def _version(server: ApiServer, group: str) -> str:
    """The server's preferred version of an API group; empty if it does not serve the group."""
    said = await server.find(f"/apis/{group}")
    return "" if said is None else str((said.get("preferredVersion") or said["versions"][0])["groupVersion"])


async def _listed(server: ApiServer, kind: str, version: str) -> list[MachineGroupObject]:
    items: list[Object] = await server.items(f"/apis/{version}/{kind.lower()}s")
    return [MachineGroupObject(kind, {**one, "apiVersion": version}) for one in items]


class MachineGroupWatcher(Reconciler):
    """Reports the machine groups to `observe` at each poll."""

    def __init__(
        self, server: ApiServer, world: Callable[[], World], observe: Callable[[tuple[GroupsSeen, ...]], None]
    ) -> None:
        super().__init__(self._once, "machine groups are not read; their growth is not counted")
        self._server, self._world, self._observe = server, world, observe

    async def _once(self) -> float:
        """Read and report the groups and, if there are any, the pending pods; an empty list is reported once."""
        found, known = await list_machine_group_objects(self._server), self._world().capacity
        if found or known.groups or not known.grouped:
            pods = await self._server.items(PODS, fieldSelector=WAITING) if found else []
            self._observe((GroupsSeen(groups=read_machine_groups(found, pods, self._world().settings)),))
        return LOOK_S if found else NONE_S
