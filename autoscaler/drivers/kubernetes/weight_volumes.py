"""Mounts weights in pods: converts a choice of `autoscaler.weights.mount_choice` to pod fields, and creates volumes.
I/O.

Each node and namespace has one PersistentVolume of the node's store and one claim. The Node object owns both, so that
the garbage collector removes them with it. Invariants: weights are mounted read-only, because the volume itself is. A
sub-path limits a pod to its own copy. Kubelets do not change owners or modes in a store. Objects are created once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.constants import NODES, WRITER
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.pod import MANAGED_BY, OURS, Pod
from autoscaler.spec.settings import Settings
from autoscaler.state.events import MountsSeen
from autoscaler.state.world import STORE, ClusterFacts
from autoscaler.weights import mount_choice
from autoscaler.weights.mount_choice import ADAPTERS, MOUNT, ArtifactFacts, NodeMountFacts

VOLUMES = "/api/v1/persistentvolumes"
NAME = "pilotlight-weights"
"""Name of the volume in a pod."""
ENGINES = OURS + "engines"
"""Label of PersistentVolumes and claims: the namespace of the claim."""
HOSTNAME = "kubernetes.io/hostname"
FILE = "file://"
NONE_FOUND: Mapping[str, ArtifactFacts] = {}
NOMINAL = "1Gi"
"""Size of a volume and its claim: the API requires it, and nothing uses it."""
LOOK_S, RETRY_S = 300.0, 5.0
MADE_S = 60.0
"""Time for which a created volume is assumed to exist; others may delete it."""
NAME_CHARS_MAX = 63
RIGHTS = "grant the permissions of chart value `agent.enabled`, or set weights.mount in the Settings"


_log = logging.getLogger("pilotlight.autoscaler.volumes")


class MountError(Exception):
    """A model's weights cannot be mounted in its pods. `str()` is the reason and the fix, without a final period."""


class Mounted(NamedTuple):
    """How one pod sees its weights."""

    pod: Pod
    """Its `volumes` and `volume_mounts`, to be merged into the pod last."""
    path: str
    """Path that the engine loads; empty if no volume of ours contains the weights."""
    reason: str
    """The reason for this kind of mount, as the end of a sentence about the model's weights."""
    objects: tuple[Object, ...] = ()
    """The node's volume and its claim, which the pod requires; empty if it requires none."""
    adapters: Mapping[str, str] = {}
    """Adapter name -> path, for each adapter that was fetched."""


class _Way(NamedTuple):
    """How a pod mounts one artifact: a part of `Mounted`."""

    source: Mapping[str, object]
    """The volume's source, without its name."""
    reason: str
    folder: str = ""
    """The only folder of the volume that is visible."""
    below: str = ""
    """Path that the engine loads, relative to the mount point."""
    objects: tuple[Object, ...] = ()


def check_security_context(model: Model, settings: Settings) -> None:
    """Raise `MountError` for a security context with `hostPath`, because the namespace then admits privileged pods."""
    if model.spec.pod.security_context and settings.weights.mount == "hostPath":
        raise MountError("spec.pod.securityContext is not allowed with weights.mount hostPath: remove it")


def mount_weights(  # noqa: PLR0917  model, location, weights, then cluster facts and Settings
    model: Model,
    namespace: str,
    node: NodeMountFacts | None,
    found: ArtifactFacts | None,
    facts: ClusterFacts,
    settings: Settings,
    adapters: Mapping[str, ArtifactFacts] = NONE_FOUND,
    owner: Ownership = ANYBODYS,
) -> Mounted:
    """Return how a pod mounts its weights. `namespace`, `node`: the pod's (None: the scheduler chooses the node).
    `found`: its own weights; `adapters`: adapter name -> weights that were fetched; `owner`: owner of the volumes.
    Raises `MountError`.
    """
    artifacts = {one.name: one.artifact for one in model.spec.adapters}
    own = model.spec.artifact or ""
    fetched = found is None and own.startswith("hf://")  # by the engine, since no node has a copy
    asked = [("", own, found)] if mount_choice.is_mounted(own) and not fetched else []
    ways = {
        name: _way(f"the weights of {_whose(model, name)}", artifact, namespace, node, known, facts, settings, owner)
        for name, artifact, known in (*asked, *((name, artifacts[name], one) for name, one in adapters.items()))
    }
    volumes: dict[str, Mapping[str, object]] = {}
    seen: list[dict[str, object]] = []
    paths: dict[str, str] = {}
    for name, way in ways.items():
        at = f"{ADAPTERS}/{name}" if name else MOUNT
        volume = next((called for called, source in volumes.items() if source == way.source), "")
        volume = volume or (f"{NAME}-{len(volumes)}" if volumes else NAME)
        volumes[volume] = way.source
        seen.append(_mount(volume, at, way.folder))
        paths[name] = "/".join(filter(None, (at, way.below)))
    pod = Pod(
        volumes=tuple({"name": called, **source} for called, source in volumes.items()), volume_mounts=tuple(seen)
    )
    objects = next((way.objects for way in ways.values() if way.objects), ())
    reason = next((way.reason for way in ways.values()), "")
    return Mounted(pod, paths.pop("", ""), reason, objects, paths)


def _whose(model: Model, adapter: str) -> str:
    return f"adapter {adapter} of Model {model.name}" if adapter else f"Model {model.name}"


def _way(  # noqa: PLR0917  as `mount_weights`; `what`: the weights, in words
    what: str,
    artifact: str,
    namespace: str,
    node: NodeMountFacts | None,
    found: ArtifactFacts | None,
    facts: ClusterFacts,
    settings: Settings,
    owner: Ownership,
) -> _Way:
    choice = mount_choice.choose_mount(artifact, settings, facts, node, found)
    match choice.way:
        case None:
            raise MountError(f"{what} {choice.reason}")
        case "claim":
            return _Way(_claim(artifact), choice.reason, below=mount_choice.claim_of(artifact)[1])
        case "image":
            if found is None:
                raise MountError(f"the digest of {what} is not known yet")
            image = {"reference": mount_choice.image_of(artifact, found.digest), "pullPolicy": "IfNotPresent"}
            return _Way({"image": image}, choice.reason, below="/".join(filter(None, (found.image, found.file))))
        case "hostPath":
            here = _here(what, found)
            folder = {"path": f"{facts.store}/{here.folder}", "type": "Directory"}
            return _Way({"hostPath": folder}, choice.reason, below=here.file)
        case "volume":
            here = _here(what, found)
            if node is None:
                raise MountError(f"{what} are stored on a node, and no node is chosen yet")
            objects = build_node_volume(namespace, node, facts.store, owner)
            claim = {"claimName": objects[1]["metadata"]["name"], "readOnly": True}
            return _Way({"persistentVolumeClaim": claim}, choice.reason, here.folder, here.file, objects)


def mount_claim(artifact: str | None) -> Pod:
    """Return the volume and mount of `pvc://claim/path`; nothing for other artifacts."""
    if mount_choice.path_of(artifact) is None:
        return Pod()
    return Pod(volumes=({"name": NAME, **_claim(artifact or "")},), volume_mounts=(_mount(NAME, MOUNT),))


def resolve_weight_paths(model: Model, seen: Mounted) -> Model:
    """Return the model with the paths of its weights and fetched adapters within its pod."""
    artifact = f"{FILE}{seen.path}" if seen.path else model.spec.artifact
    there = (
        replace(one, artifact=FILE + seen.adapters[one.name]) if one.name in seen.adapters else one
        for one in model.spec.adapters
    )
    return replace(model, spec=replace(model.spec, artifact=artifact, adapters=tuple(there)))


def _claim(artifact: str) -> dict[str, object]:
    return {"persistentVolumeClaim": {"claimName": mount_choice.claim_of(artifact)[0], "readOnly": True}}


def _here(what: str, found: ArtifactFacts | None) -> ArtifactFacts:
    if found is None or not found.folder:
        raise MountError(f"{what} are not on its node yet")
    return found


def _mount(volume: str, at: str, folder: str = "") -> dict[str, object]:
    """Return a read-only mount. `folder`: the only folder of the volume that is visible."""
    mount: dict[str, object] = {"name": volume, "mountPath": at, "readOnly": True}
    return {**mount, "subPath": folder} if folder else mount


def read_node_facts(node: NodeSeen) -> NodeMountFacts:
    """Return the facts of a watched node that mounts depend on."""
    return NodeMountFacts(node.name, node.labels.get(HOSTNAME, ""), node.kubelet, node.runtime)


def build_node_volume(
    namespace: str, node: NodeMountFacts, store: str, owner: Ownership = ANYBODYS
) -> tuple[Object, Object]:
    """Return the node's volume and its claim in a namespace, as they are applied, but without the owning Node.

    Each names the other, so that neither is ever bound to anything else. Another store, host name or installation gets
    another volume, because none of these can be changed in an existing volume.
    """
    identity = " ".join(filter(None, (namespace, node.name, node.hostname, store, owner.installation)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    stem = f"weights-{re.sub(r'[^a-z0-9]+', '-', node.name)}"[: NAME_CHARS_MAX - 9].rstrip("-")
    claim = f"{stem}-{digest}"
    volume = f"pilotlight-{claim}"
    labels = {MANAGED_BY: WRITER, ENGINES: namespace, **owner.labels}
    on = {"key": HOSTNAME, "operator": "In", "values": [node.hostname]}
    shared: Object = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    return (
        {
            "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": labels, "annotations": {OURS + "node": node.name}},
            "spec": {
                **shared, "capacity": {"storage": NOMINAL}, "persistentVolumeReclaimPolicy": "Retain",
                "mountOptions": ["ro"], "local": {"path": store},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on]}]}},
                "claimRef": {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim,
                },
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": claim, "namespace": namespace, "labels": labels, "annotations": {OURS + "node": node.name},
            },
            "spec": {**shared, "volumeName": volume, "resources": {"requests": {"storage": NOMINAL}}},
        },
    )  # fmt: skip


class NodeVolumes:
    """Creates the objects of `build_node_volume`. Writes through `api` end with our leadership."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._made_s: dict[str, float] = {}
        """Volume name -> time of creation, for the last minute."""

    async def make(self, objects: Sequence[Object]) -> None:
        """Ensure that the objects exist: three requests at first, none for the next minute. Raises `ApiError` (with
        reason Conflict while they are being deleted), `UnreachableError`, `FencedError`.
        """
        if not objects:
            return
        volume, claim = objects
        name, now_s = volume["metadata"]["name"], self._clock()
        self._made_s = {made: at_s for made, at_s in self._made_s.items() if now_s - at_s < MADE_S}
        if name in self._made_s:
            return
        node = await self._api.get(f"{NODES}/{volume['metadata']['annotations'][OURS + 'node']}")
        owner = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"], "uid": node["metadata"]["uid"]}
        try:
            there = await self._apply(VOLUMES, volume, owner)
            bound = await self._apply(claims_path(claim["metadata"]["namespace"]), claim, owner)
            if there["spec"]["claimRef"].get("uid", "") not in {"", bound["metadata"]["uid"]}:
                await self._release(there)
        except ApiError as error:
            if error.status != 403:
                raise
            raise ApiError(403, error.reason, f"{error.message}: {RIGHTS}") from error
        self._made_s[name] = now_s

    async def _apply(self, path: str, one: Object, owner: Object) -> Object:
        wanted = {**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}}
        made = await self._api.apply(f"{path}/{one['metadata']['name']}", wanted, WRITER)
        if "deletionTimestamp" in made["metadata"]:
            raise ApiError(409, "Conflict", f"{one['kind']} {one['metadata']['name']} is being deleted")
        return made

    async def _release(self, volume: Object) -> None:
        """Unbind a volume whose claim was recreated under the same name; otherwise it stays bound to the UID of the old
        claim.
        """
        claim: dict[str, Any] = {"uid": None, "resourceVersion": None}
        version = volume["metadata"]["resourceVersion"]
        change: Object = {"metadata": {"resourceVersion": version}, "spec": {"claimRef": claim}}
        await self._api.patch(f"{VOLUMES}/{volume['metadata']['name']}", change)


def claims_path(namespace: str) -> str:
    """Return the API path of a namespace's PersistentVolumeClaims."""
    return f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"


async def poll_cluster_facts(
    api: Api, scope: str, store: str, observe: Callable[[tuple[MountsSeen, ...]], None]
) -> None:
    """Query the facts periodically, because permissions and server versions change."""
    while True:
        pause_s = LOOK_S
        try:
            observe((MountsSeen(facts=await query_cluster_facts(api, scope, store)),))
        except (ApiError, UnreachableError) as error:
            _log.info("event=mount_query_failed error=%s", error)
            pause_s = RETRY_S
        await asyncio.sleep(pause_s)


REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def query_cluster_facts(api: Api, scope: str, store: str = STORE) -> ClusterFacts:
    """Query the server's version and our permissions: two requests, or one with scope `namespace`.
    Raises `ApiError`, `UnreachableError`.
    """
    said = await api.get("/version")
    server = mount_choice.parse_version(f"{said.get('major', '')}.{said.get('minor', '')}")
    asked: Object = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"resource": "persistentvolumes", "verb": "create"}},
    }  # fmt: skip
    may = scope == "cluster" and bool((await api.create(REVIEWS, asked))["status"].get("allowed"))
    return ClusterFacts(may, server, store)
