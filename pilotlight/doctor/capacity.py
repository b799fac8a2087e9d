"""Checks the capacity providers in Settings `capacity`: whether they exist, may be used, and offer capacity. I/O.

Defines the checks and fixes for each kind of provider. A provider is created and queried as in an autoscaler, and its
own reason for offering nothing is reported as it is. Nothing is ordered or written, and findings contain no address or
secret.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from autoscaler.capacity.attachable_nodes import (
    GPU_COUNT,
    Groups,
    collect_group_limits,
    find_device_memory,
    list_attachable_nodes,
    list_node_selectors,
)
from autoscaler.providers.karpenter.nodepool import VERSIONS
from autoscaler.providers.kubernetes_access import AnswerError, ApiServer, Object, choose_served_version
from autoscaler.providers.kueue import objects as kueue_objects
from autoscaler.providers.machine_set_watcher import list_machine_group_objects, read_machine_groups
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request import objects
from autoscaler.providers.redfish.client import NoAnswerError, Service, StatusError
from autoscaler.providers.redfish.inventory import NOT_THERE, Reading
from autoscaler.providers.redfish.kubernetes_objects import SECRETS, Key, RedfishCredentials, RedfishCredentialsError
from autoscaler.providers.redfish.schema import RedfishDocumentError
from autoscaler.spec.capacity import ProviderSettings, Redfish
from autoscaler.spec.settings import Settings
from autoscaler.state.world import Leadership, World
from pilotlight.doctor.finding import Finding
from pilotlight.models import capacity_providers
from pilotlight.safe_output import list_names

NODES = "/api/v1/nodes"
NO_MOST = "no ready node has an annotation with its maximum number of GPUs"
NO_MOST_FIX = f"set `nodes[].devicesMax` in Settings, or the annotation {GPU_COUNT} on the nodes or their MachineSet"
CLASSES = (objects.CHECK, objects.ATOMIC, objects.GKE)
"""ProvisioningRequest classes that are known to be served."""
NAMES_MAX = 4
FORBIDDEN = 403
NOT_LET_IN = frozenset({400, 401, 403})


class Api(NamedTuple):
    """The API resources that a kind of provider needs, and the versions that it supports."""

    title: str
    group: str
    versions: tuple[str, ...]
    resources: tuple[str, ...]


APIS: Mapping[str, Api] = {
    "karpenter": Api("Karpenter", "karpenter.sh", VERSIONS, ("nodepools", "nodeclaims")),
    "provisioningRequest": Api("ProvisioningRequest", "autoscaling.x-k8s.io", ("v1",), ("provisioningrequests",)),
    "kueue": Api("Kueue", kueue_objects.API, kueue_objects.VERSIONS, ("localqueues", "workloads")),
    "cro": Api(
        "composable resources (CRO)", "cro.hpsys.ibm.ie.com", ("v1alpha1",),
        ("composabilityrequests", "composableresources"),
    ),
}  # fmt: skip
"""By kind of provider; the others need only Kubernetes' own APIs."""


class Place(NamedTuple):
    """The context of the checks."""

    server: ApiServer
    settings: Settings
    engines: str
    home: str
    secrets: Path = SECRETS
    """Folder of mounted Secrets, in a pod; a Secret not mounted there is read from the API server."""


class _At(NamedTuple):
    """One entry of Settings `capacity`."""

    place: Place
    entry: ProviderSettings

    def found(self, says: str) -> Finding:
        """Return a finding without a problem."""
        return Finding(f"capacity {self.entry.name}", "ok", says)

    def wrong(self, says: str, fix: str, *, blocks: bool = True) -> Finding:
        """Return a problem; `blocks`: the provider cannot work before it is fixed."""
        return Finding(f"capacity {self.entry.name}", "blocker" if blocks else "warning", says, fix)


async def check_capacity(place: Place) -> list[Finding]:
    """Check each entry of Settings `capacity`, in order."""
    found: list[Finding] = []
    for entry in place.settings.capacity:
        kind, at = entry.kinds[0], _At(place, entry)
        try:
            found.append(await find_missing_api(at, kind) or await _JUDGES[kind](at))
        except AnswerError as error:
            fix = "grant the kubeconfig's user this permission, or ask an administrator to run the check"
            found.append(at.wrong(f"the check failed: {error.reason}: {error.message}", fix, blocks=False))
    return found


async def find_missing_api(at: _At, kind: str) -> Finding | None:
    """Return a finding about resources of its API that are not served, or None."""
    wanted = APIS.get(kind)
    if wanted is None:
        return None
    served = set[str]()
    for version in wanted.versions:
        if not served:
            resources = await at.place.server.find(f"/apis/{wanted.group}/{version}")
            served = {one["name"] for one in (resources or {}).get("resources", ())}
    missing = [one for one in wanted.resources if one not in served]
    if not missing:
        return None
    says = f"{wanted.title}: {', '.join(missing)} of {wanted.group}/{wanted.versions[0]} are not served"
    return at.wrong(says, f"install it with its CustomResourceDefinitions, or remove `capacity[].{kind}`")


async def _offering(at: _At, fix: str) -> Finding:
    """Return a finding about the provider's own offers."""
    place = at.place
    world = World(epoch=0, settings=place.settings, leadership=Leadership(leads=False))
    async with AsyncExitStack() as stack:
        around = capacity_providers.Around(
            place.server, lambda: world, place.engines, place.home, stack, lambda: False, place.secrets
        )
        try:
            offers = await capacity_providers.KINDS[at.entry.kinds[0]](at.entry, around).offers()
        except RefusedError as error:
            return at.wrong(str(error), fix)
    names = sorted({one.name for one in offers})
    if not names:
        return Finding(f"capacity {at.entry.name}", "info", "no capacity available: the quota is in use", fix)
    return at.found(f"available: {list_names(names, NAMES_MAX)}")


# --- checks by kind of provider ---------------------------------------------------------------------------------------


async def _karpenter(at: _At) -> Finding:
    return await _offering(
        at, "set `capacity[].karpenter.nodePool` to a Ready NodePool (kubectl get nodepools), and describe its nodes "
        "in Settings `nodes`",
    )  # fmt: skip


async def _cluster_autoscaler(at: _At) -> Finding:
    group = at.entry.cluster_autoscaler
    name = "" if group is None else group.priority_class
    try:
        there = await at.place.server.find(f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}") is not None
    except AnswerError as error:
        there = error.status == FORBIDDEN  # an autoscaler need not read it either
        if not there:
            raise
    if not there:
        fix = (
            "create it with a lower value than that of engine pods, or name an existing one in "
            "`capacity[].clusterAutoscaler.priorityClass`"
        )
        return at.wrong(f"PriorityClass {name} does not exist, so placeholder pods cannot be created", fix)
    return await _offering(at, "describe the group's nodes in Settings `nodes`, with its `nodeLabels` as selector")


async def _provisioning(at: _At) -> Finding:
    of = at.entry.provisioning_request
    found = await _offering(at, "describe its nodes in Settings `nodes`, matching `provisioningRequest.selector`")
    if found.grade == "ok" and of is not None and of.class_name not in CLASSES:
        fix = f"check that a controller serves the class; known classes: {', '.join(CLASSES)}"
        return at.wrong(f"{found.says}; unknown provisioning class {of.class_name}", fix, blocks=False)
    return found


async def _kueue(at: _At) -> Finding:
    queue = "" if at.entry.kueue is None else at.entry.kueue.local_queue
    where = at.place.engines
    version = choose_served_version(await at.place.server.find(f"/apis/{kueue_objects.API}"), kueue_objects.VERSIONS)
    found = await at.place.server.find(f"/apis/{kueue_objects.API}/{version}/namespaces/{where}/localqueues/{queue}")
    if found is None:
        fix = "create it, or set `capacity[].kueue.localQueue` to another one: kubectl get localqueues -n " + where
        return at.wrong(f"LocalQueue {queue} does not exist in namespace {where}", fix)
    return await _offering(
        at,
        f"run kubectl describe localqueue {queue} -n {where}, and declare the queue's nodes in Settings `nodes`",
    )


async def _cro(at: _At) -> Finding:
    settings, there = at.place.settings, dict[str, Object]()
    for selector in list_node_selectors(settings):
        query = {"labelSelector": selector} if selector else {}
        there |= {one["metadata"]["name"]: one for one in await at.place.server.items(NODES, **query)}
    open_ = list_attachable_nodes([*there.values()], settings, groups=await groups_of(at.place.server))
    if not open_:
        return at.wrong(NO_MOST, NO_MOST_FIX, blocks=False)
    model = "" if at.entry.cro is None else at.entry.cro.model
    if find_device_memory(model, World(epoch=0, settings=settings, leadership=Leadership(leads=False))) is None:
        says = f"unknown GPU memory of {model}: no GPU of this product is ordered until a node has one"
        return at.wrong(
            says, f"add it to Settings `nodes`, for example `device: {{model: {model}, memory: 80Gi}}`", blocks=False
        )
    nodes = list_names(sorted(open_), NAMES_MAX)
    return at.found(f"the CustomResourceDefinitions are installed; GPUs can be attached to {nodes}")


async def groups_of(server: ApiServer) -> Groups:
    """Return the limits in MachineSets; empty if they may not be read, which the check of rights reports."""
    try:
        return collect_group_limits(read_machine_groups(await list_machine_group_objects(server), (), Settings()))
    except AnswerError:
        return {}


async def _redfish(at: _At) -> Finding:
    redfish = at.entry.redfish
    if redfish is None:
        raise TypeError(at.entry.name)
    mounted = (at.place.secrets / (redfish.secret_ref or "")).is_dir()
    key = None if mounted or redfish.secret_ref is None else _asked(at.place, redfish.secret_ref)
    access = RedfishCredentials(redfish.secret_ref, redfish.ca_file, at.place.secrets, key)
    service = Service(redfish.url, access.login, access.tls, may_write=lambda: False)
    secret = f"Secret {redfish.secret_ref or '(none is named)'} of namespace {at.place.home}"
    try:
        return await _composes(at, Reading(service, redfish.systems, at.entry.name), redfish, secret)
    except RedfishCredentialsError as error:
        keys = "username, password and, for a private CA, ca.crt"
        return at.wrong(str(error), f"add these keys to {secret}: {keys}")
    except StatusError as error:
        if error.status not in NOT_LET_IN:
            return at.wrong(f"the Redfish service rejects the request: {error}", "check `capacity[].redfish.url`")
        fix = f"set a user in {secret} that the service knows and that may compose systems"
        return at.wrong(f"the Redfish service rejects the login: {error}", fix)
    except NoAnswerError as error:
        fix = f"check `capacity[].redfish.url`, the network path from this machine, and ca.crt of {secret}"
        return at.wrong(f"the Redfish service cannot be reached from this machine ({error})", fix, blocks=False)
    except RedfishDocumentError as error:
        return at.wrong(f"the service does not support composition: {error}", "check `capacity[].redfish.url`")
    finally:
        await service.close()


async def _composes(at: _At, reading: Reading, redfish: Redfish, secret: str) -> Finding:
    """Check that the service admits us and has the configured systems. Raises the exceptions of `Reading.read`."""
    fabric = await reading.read(())
    missing: list[str] = []
    for node in sorted(redfish.systems):
        try:
            await reading.read((node,))
        except StatusError as error:
            if error.status not in NOT_THERE:
                raise
            missing.append(node)
    if missing:
        fix = "list its Systems, and correct `capacity[].redfish.systems`"
        return at.wrong(
            f"the configured system of {list_names(missing, NAMES_MAX)} does not exist in the Redfish service", fix
        )
    entered = f"accepts the user of {secret}" if redfish.secret_ref else "requires no login"
    return at.found(
        f"the Redfish service {entered}; it has {len(fabric.gpus)} GPUs, and the systems of all "
        f"configured nodes ({len(redfish.systems)})"
    )


def _asked(place: Place, secret: str) -> Key:
    """Return a reader of a Secret's keys through the API server."""
    path = f"/api/v1/namespaces/{place.home}/secrets/{secret}"

    async def key(name: str) -> str | None:
        data = (await place.server.find(path) or {}).get("data") or {}
        try:
            return None if name not in data else base64.b64decode(data[name]).decode().rstrip("\n")
        except ValueError:
            return ""

    return key


_JUDGES: Mapping[str, Callable[[_At], Awaitable[Finding]]] = {
    "cro": _cro,
    "redfish": _redfish,
    "karpenter": _karpenter,
    "clusterAutoscaler": _cluster_autoscaler,
    "provisioningRequest": _provisioning,
    "kueue": _kueue,
}
