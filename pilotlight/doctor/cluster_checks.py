"""Checks a cluster: API server, definitions, rights, pod security, nodes, providers, ingress. I/O.

Makes the requests and grades the answers; `pilotlight.doctor.nodes` judges nodes, and `pilotlight.doctor.gpu_operator`
the GPU operator's policy. Nothing is changed: the one pod that is sent is a dry run. A missing right to read is
reported, and the other checks continue.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autoscaler.capacity.attachable_nodes import list_attachable_nodes
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.engines import LaunchCommand
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.rbac import Right, Scope, list_required_rights
from autoscaler.kubernetes.resources import events
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.schema.crds import GROUP, MODEL, TENANT, CrdKind, build_crd
from autoscaler.spec import installation_ownership
from autoscaler.spec.model import Gpu, Model, ModelSpec
from autoscaler.spec.settings import Settings
from autoscaler.state.world import Replica, ReplicaResources
from pilotlight.doctor import capacity as checks_capacity
from pilotlight.doctor import gpu_operator
from pilotlight.doctor import nodes as checks_nodes
from pilotlight.doctor.finding import Finding
from pilotlight.provider_kubernetes_client import Objects
from pilotlight.safe_output import list_names

VERSION_MIN = (1, 30)
"""Definitions use CEL rules and selectable fields, which older servers do not support."""
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRDS_FIX = "kubectl apply --server-side --force-conflicts -f charts/pilotlight/crds"
INGRESS = (
    "load balancers close silent connections, most after 60 s: an Ingress in front of the gateway needs a read timeout "
    "above 600 s and no response buffering"
)
LEASE_FIX = "delete it, and it is created again: kubectl delete lease -n {} {}"
SKIPPED_FIX = "correct the object (for example, it is nested too deeply), or delete it"
INGRESS_FIX = "test a stream of a model at zero with curl -N; `settings.silentSecondsMax` limits the silent time"


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """The subject of the checks."""

    engines: str
    """The engines' namespace."""
    home: str
    """The namespace of gateways and autoscalers."""
    scope: Scope
    account: str = ""
    """Service account, NAMESPACE:NAME, whose rights are checked; empty: the current user."""
    lease: str = "pilotlight"
    adopted: tuple[str, ...] | None = ()
    """Namespaces whose workloads are adopted; None: all."""
    cordons: bool = False
    """Whether operator orders about nodes are stored on the nodes."""
    cutting: tuple[str, str] | None = None
    """Namespace and name of the ConfigMap for MIG repartitioning; None: disabled."""
    volumes: bool = False
    """Whether volumes for the nodes' stores are created."""
    capacity: tuple[str, ...] = ()
    """Kinds of the providers in Settings."""
    settings: Settings = Settings()
    """Settings whose `capacity` is checked entry by entry."""


Check = Callable[[Api, Scene], Awaitable[list[Finding]]]


async def check_cluster(api: Api, scene: Scene) -> list[Finding]:
    """Run all checks, or only the first if the API server does not answer."""
    findings = await check_server(api, scene)
    if findings[0].grade == "blocker":
        return findings
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            findings += await check(api, scene)
        except ApiError as error:
            fix = "grant the kubeconfig's user this permission, or ask an administrator to run the check"
            findings.append(Finding(name, "warning", f"the check failed: {error.reason}: {error.message}", fix))
        except UnreachableError as error:
            findings.append(Finding(name, "warning", f"no response from the API server: {error}", "try again"))
    return findings


async def check_server(api: Api, _: Scene) -> list[Finding]:
    """Check that the API server answers and is recent enough."""
    try:
        version = await api.get("/version")
    except (UnreachableError, ApiError) as error:
        fix = "check the server, certificate and user in --kubeconfig"
        return [Finding("API server", "blocker", f"it does not respond: {error}", fix)]
    server_version = str(version.get("gitVersion", "?"))
    numbers = re.match(r"v?(\d{1,9})\.(\d{1,9})", server_version)
    if numbers is not None and (0, 0) < (int(numbers[1]), int(numbers[2])) < VERSION_MIN:  # 0.0: a custom build
        least = ".".join(map(str, VERSION_MIN))
        return [
            Finding(
                "API server", "warning", f"Kubernetes {server_version} is older than {least}", "upgrade the cluster"
            )
        ]
    return [Finding("API server", "ok", f"Kubernetes {server_version}")]


async def definitions(api: Api, scene: Scene) -> list[Finding]:
    """Check that the custom resources are installed in this version."""
    return [await _definition(api, kind) for kind in (MODEL, TENANT) if kind is MODEL or scene.scope == "cluster"]


async def _definition(api: Api, kind: CrdKind) -> Finding:
    check, name = f"{kind.name} definition", f"{kind.plural}.{GROUP}"
    try:
        found = await api.get(f"{CRDS}/{name}")
    except ApiError as error:
        if error.status == 404:
            return Finding(check, "blocker", f"{name} is not installed", CRDS_FIX)
        served = {one["name"] for one in (await _resources(api, f"/apis/{GROUP}/v1alpha1"))}
        if kind.plural in served:
            return Finding(check, "ok", "installed (no permission to read its version)")
        return Finding(check, "blocker", f"{name} is not installed", CRDS_FIX)
    lacking = sorted(set(_keys(build_crd(kind, lambda _: {}))) - set(_keys(found)))
    if lacking:
        return Finding(check, "warning", f"another version is installed, without {list_names(lacking, 3)}", CRDS_FIX)
    return Finding(check, "ok", "installed, with all fields of this version of Pilotlight")


def _keys(crd: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of each property of its first version, such as `spec.gpu.count`."""

    def walk(schema: Mapping[str, Any], at: str) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if at or name in {"spec", "status"}:
                yield f"{at}{name}"
                yield from walk(inner, f"{at}{name}.")

    yield from walk(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "")


async def _resources(api: Api, path: str) -> list[dict[str, Any]]:
    try:
        return list((await api.get(path)).get("resources", []))
    except ApiError:
        return []


async def rights_given(api: Api, scene: Scene) -> list[Finding]:
    """Check all required rights of the account or the current user; return one finding per incomplete right."""
    missing: list[Finding] = []
    asked = _rights(scene)
    for right in asked:
        lacks = [verb for verb in right.verbs if not await _may(api, scene, right, verb)]
        if lacks:
            missing.append(_missing(scene, right, lacks))
    who = scene.account or "this user"
    return missing or [Finding("rights", "ok", f"{who} has all {sum(len(one.verbs) for one in asked)} permissions")]


def _rights(scene: Scene) -> Sequence[Right]:
    return list_required_rights(
        scene.scope, scene.adopted, cordons=scene.cordons, cutting=scene.cutting, volumes=scene.volumes,
        capacity=scene.capacity,
    )  # fmt: skip


def _missing(scene: Scene, right: Right, lacks: list[str]) -> Finding:
    where = _namespace(scene, right)
    place = f"in namespace {where}" if where else "in the whole cluster"
    resource = f"{right.resource}.{right.group}" if right.group else right.resource
    kind = f"Role in {where}" if where else "ClusterRole"
    fix = (
        f"add to the {kind}: "
        f'{{apiGroups: ["{right.group}"], resources: [{right.resource}], verbs: [{", ".join(lacks)}]}}'
    )
    says = f"missing permission: {', '.join(lacks)} {resource} {place} (required so that {right.use})"
    return Finding("rights", "warning" if right.optional else "blocker", says, fix)


def _namespace(scene: Scene, right: Right) -> str:
    return {"cluster": "", "engines": scene.engines, "home": scene.home, "adopted": right.namespace}[right.where]


async def _may(api: Api, scene: Scene, right: Right, verb: str) -> bool:
    resource, _, part = right.resource.partition("/")
    wanted = {"group": right.group, "resource": resource, "subresource": part, "verb": verb}
    wanted |= {"namespace": _namespace(scene, right), "name": scene.lease if right.named else right.name}
    spec: Object = {"resourceAttributes": {key: value for key, value in wanted.items() if value}}
    kind = "SelfSubjectAccessReview"
    if scene.account:
        kind, (namespace, _, name) = "SubjectAccessReview", scene.account.partition(":")
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        spec |= {"user": f"system:serviceaccount:{namespace}:{name}", "groups": groups}
    body: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = await api.create(f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)
    return bool(answer["status"].get("allowed"))


async def pod_security(api: Api, scene: Scene) -> list[Finding]:
    """Check by a dry run that an engine pod passes pod security, quotas and webhooks."""
    check = "engine pods"
    try:
        await api.create(f"/api/v1/namespaces/{scene.engines}/pods?dryRun=All", _engine_pod())
    except ApiError as error:
        if error.status == 404:
            fix = f"kubectl create namespace {scene.engines}"
            return [Finding(check, "blocker", f"namespace {scene.engines} does not exist", fix)]
        fix = "check the namespace's pod-security labels, its ResourceQuota and LimitRange, and admission webhooks"
        if "forbidden: User" in error.message:
            return [
                Finding(
                    check, "info", "no permission to test an engine pod", "run it as a user who may create pods there"
                )
            ]
        return [Finding(check, "blocker", f"a test pod is rejected in namespace {scene.engines}: {error.message}", fix)]
    return [Finding(check, "ok", f"accepted in namespace {scene.engines}")]


def _engine_pod() -> Object:
    model = Model(name=ModelName("doctor"), spec=ModelSpec(engine="command", gpu=Gpu(count=0)))
    replica = Replica(
        id=ReplicaId("pilotlight-doctor"),
        model=model.name,
        spec_hash="",
        intent="doctor",
        resources=ReplicaResources(slices=(), memory_bytes=0),
    )
    launch = LaunchCommand(argv=("true",), env={}, readiness_path="/")
    return pod_manifest.build_pod_manifest(replica, model, launch, "pilotlight-doctor")


async def nodes(api: Api, scene: Scene) -> list[Finding]:
    """Check the GPUs that nodes offer: device plug-in or DRA, labels, taints, sharing."""
    if scene.scope == "namespace":
        return [Finding("GPUs", "info", "not checked: with scope namespace, devices come from `nodes` in Settings")]
    found = [node async for page in api.pages("/api/v1/nodes") for node in page.items]
    classes = {one["name"] for one in await _resources(api, "/apis/resource.k8s.io/v1")}
    return checks_nodes.check_gpu_nodes(found, dra="deviceclasses" in classes)


async def objects(api: Api, scene: Scene) -> list[Finding]:
    """Report objects that an autoscaler skips, of all kinds that it lists: those that it cannot decode, and those that
    it reported in an Event.
    """
    listed = [one for one in _rights(scene) if "list" in one.verbs]
    if scene.scope == "cluster":
        listed.append(Right("kubeai.org", "models", ("list",), "cluster", ""))
    places = dict.fromkeys((one.group, one.resource, _namespace(scene, one), one.name) for one in listed)
    found: dict[tuple[str, str, str], Unreadable] = {}
    reported = await _reported(api, scene)
    for group, resource, namespace, name in places:
        try:
            at = (await api.get(f"/apis/{group}"))["preferredVersion"]["groupVersion"] if group else "v1"
            within = f"/namespaces/{namespace}" if namespace else ""
            query = {"fieldSelector": f"metadata.name={name}"} if name else {}
            async for page in api.pages(f"/{'apis' if group else 'api'}/{at}{within}/{resource}", query):
                there = [reported[uid] for one in page.items if (uid := one["metadata"].get("uid")) in reported]
                found |= {(one.kind, one.namespace, one.name): one for one in (*page.unreadable, *there)}
        except ApiError as error:
            if error.status not in {403, 404}:  # reported by `rights_given`; not every cluster has every kind
                raise
    return [*map(_skipped, found.values())]


async def _reported(api: Api, scene: Scene) -> dict[str, Unreadable]:
    """Return by uid the objects about which autoscalers wrote an Event, which expires after an hour by default."""
    within = "" if scene.scope == "cluster" else f"/namespaces/{scene.engines}"
    found: dict[str, Unreadable] = {}
    try:
        async for page in api.pages(f"/api/v1{within}/events", {"fieldSelector": f"reason={events.UNREADABLE}"}):
            for event in page.items:
                about = event["involvedObject"]
                kind, namespace, name = (str(about.get(key, "")) for key in ("kind", "namespace", "name"))
                reason = str(event.get("message", "")).removeprefix(events.SKIPS)
                when = f" (Event of {event.get('lastTimestamp')})"
                found[about.get("uid", "")] = Unreadable(kind, namespace, name, "", reason + when)
    except ApiError as error:
        if error.status != 403:
            raise
    return found


async def installations(api: Api, scene: Scene) -> list[Finding]:
    """Report this installation's name, the namespaces whose Models another installation serves, and Leases that cannot
    be decoded.
    """
    me = installation_ownership.installation_title(scene.home, scene.lease)
    within = "" if scene.scope == "cluster" else f"/namespaces/{scene.engines}"
    path, query = (
        f"/apis/coordination.k8s.io/v1{within}/leases",
        {"fieldSelector": f"metadata.name={installation_ownership.CLAIM}"},
    )
    findings = [Finding("installation", "ok", me)]
    async for page in api.pages(path, query):
        for lease in page.items:
            namespace, holder = lease["metadata"]["namespace"], (lease.get("spec") or {}).get("holderIdentity")
            if holder and holder != me:
                says = f"installation {holder} serves the Models of namespace {namespace}"
                fix = f"to let this installation serve a Model, set the Model's spec.installation to {me}"
                findings.append(Finding("installation", "info", says, fix))
        for one in page.unreadable:
            says = (
                f"Lease {one.namespace}/{one.name} cannot be decoded, {one.reason}: only the installation that already "
                f"serves the Models of namespace {one.namespace} continues to serve them; if that installation "
                "restarts, their replicas keep running, but no new replicas start"
            )
            findings.append(Finding("installation", "warning", says, LEASE_FIX.format(one.namespace, one.name)))
    return findings


def _skipped(one: Unreadable) -> Finding:
    name = f"{one.namespace}/{one.name}" if one.namespace else one.name
    return Finding("objects", "warning", f"{one.kind} {name} is skipped, {one.reason}", SKIPPED_FIX)


async def cutting(api: Api, scene: Scene) -> list[Finding]:
    """Check that mig-manager uses our ConfigMap."""
    if scene.cutting is None:
        return []
    found, skipped = list[Object](), list[Unreadable]()
    try:
        async for page in api.pages(gpu_operator.POLICIES):
            found += page.items
            skipped += page.unreadable
    except ApiError as error:
        if error.status != 404:
            raise
    return [*map(_skipped, skipped), *gpu_operator.check_cluster_policies(found, scene.cutting[1])]


async def providers(api: Api, scene: Scene) -> list[Finding]:
    """Report the available capacity providers, and check those named in Settings."""
    groups = {one["name"] for one in (await api.get("/apis"))["groups"]}
    apis = checks_capacity.APIS
    there = [one.title for one in apis.values() if one.group in groups]
    says = f"found: {', '.join(there)}" if there else "none found; capacity is limited to the existing nodes"
    findings = [Finding("capacity providers", "info", says)]
    looked_at = {entry.kinds[0] for entry in scene.settings.capacity}
    for kind, one in apis.items():
        if kind in scene.capacity and kind not in looked_at and one.group not in groups:
            says = f"{one.title}: the API group {one.group} is not served"
            fix = f"install it, or remove `capacity[].{kind}`"
            findings.append(Finding("capacity providers", "blocker", says, fix))
    asks = "cro" in scene.capacity and "cro" not in looked_at
    asked = [one async for page in api.pages(NODES) for one in page.items] if asks else []
    place = checks_capacity.Place(Objects(api, api), scene.settings, scene.engines, scene.home)
    if asked and not list_attachable_nodes(asked, scene.settings, groups=await checks_capacity.groups_of(place.server)):
        findings.append(Finding("capacity providers", "info", checks_capacity.NO_MOST, checks_capacity.NO_MOST_FIX))
    return findings + await checks_capacity.check_capacity(place)


async def ingress(_: Api, __: Scene) -> list[Finding]:
    """Report a hint about the Ingress, since only a request through the Ingress can check its configuration."""
    return [Finding("ingress", "info", INGRESS, INGRESS_FIX)]


CHECKS: tuple[Check, ...] = (
    definitions, rights_given, pod_security, nodes, installations, objects, cutting, providers, ingress,
)  # fmt: skip
