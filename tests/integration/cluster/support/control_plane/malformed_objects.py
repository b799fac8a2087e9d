"""Objects that a hostile or broken client writes: for each kind that Pilotlight lists or watches, on a real API server.

Values are nested deeply, contain surrogates, are long, huge or of another type. Third-party kinds are defined without a
schema, as an operator's definition may be. The API server rejects some of the objects; those that it accepts remain.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from autoscaler.drivers.kubernetes.adoption.annotations import KNOWN
from autoscaler.importers.kubeai.models import API_VERSION as KUBEAI
from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.device_plugin_config import PLACES
from autoscaler.kubernetes.rbac import list_required_rights
from autoscaler.slicing.slicers import ANNOTATIONS, CHOICES
from autoscaler.spec.capacity import KINDS as PROVIDERS
from autoscaler.spec.capacity import PUBLISH
from autoscaler.spec.installation_ownership import CLAIM
from autoscaler.spec.pod import MANAGED_BY, OURS
from tests.integration.cluster.support.control_plane import custom_resources

UNREADABLE: Final = 200
"""Status of the ApiError for an object that was created and whose response cannot be decoded."""
MIB: Final = 1 << 20
LEVELS: Final = (50, 101, 1_100, 5_000, 100_000)
"""The API server accepts up to 10,000. It needs seconds for each object with more than 5,000."""
FEW: Final = 101
"""Deeper values are used in only a few fields of one object, for the same reason."""
FIELDS: Final = (
    "conditions", "engine", "features", "model", "nodeName", "podSets", "providerID", "replicas", "requirements",
    "resource", "scaleTargetRef", "selector", "source", "taints", "template", "url",
)  # fmt: skip
"""Fields of specs and statuses that Pilotlight reads."""
TEXTS: Final = ("[" * 100_000, '{"a":' * 20_000, "9" * 100_000, "-1", "1e999", "NaN", "null", "{", "a,b:c|" * 9_000)
NOTES: Final = tuple(dict.fromkeys((*KNOWN, *sorted(ANNOTATIONS), *sorted(CHOICES), OURS + "slices", OURS + "cordon")))
"""Annotations that Pilotlight reads."""
WORKLOADS: Final = "apps/v1"
_OURS = {MANAGED_BY: "pilotlight", OURS + "intent": "poison", OURS + "model": "x"}
_NO_SCHEMA: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


class Listed(NamedTuple):
    """A kind that Pilotlight lists or watches."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    body: Object | None = None
    """A valid object without metadata; None: the definition has no schema."""

    @property
    def group(self) -> str:
        """The kind's API group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str) -> str:
        """The path of the kind's objects in the namespace."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if self.namespaced else f"{root}/{self.plural}"


def nested(levels: int) -> msgspec.Raw:
    """JSON with that many levels of nesting."""
    return msgspec.Raw(b'{"a":' * levels + b"1" + b"}" * levels)


def _container(**more: object) -> Object:
    return {"name": "c", "image": "i", **more}


def _template(**more: object) -> Object:
    return {"metadata": {"labels": {"app": "poison"}}, "spec": {"containers": [_container(**more)]}}


def _workload(kind: str) -> Listed:
    long = [{"name": "A", "value": "x" * MIB}]
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": "poison"}}, "template": _template(env=long)}
    return Listed(WORKLOADS, kind, f"{kind.lower()}s", body={"spec": spec})


def _claim(parameters: msgspec.Raw) -> Listed:
    devices = {
        "requests": [{"name": "r", "exactly": {"deviceClassName": "any"}}],
        "config": [{"opaque": {"driver": "x.example", "parameters": parameters}}],
    }
    return Listed("resource.k8s.io/v1", "ResourceClaim", "resourceclaims", body={"spec": {"devices": devices}})


_DEVICE: Object = {
    "name": "d",
    "attributes": {"uuid": {"string": "\u202e" * 20}, "x.example/n": {"int": (1 << 63) - 1}},
}
_GPUS = {"nvidia.com/gpu": "9223372036854775807", "nvidia.com/mig-1g.5gb": "1M", "cpu": "1e18", "memory": "9E"}
_SCALER = {"maxReplicas": 2147483647, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}}
ALL: Final = (
    Listed("v1", "Node", "nodes", False, {"status": {"capacity": _GPUS, "allocatable": _GPUS}}),
    Listed("v1", "Pod", "pods", body={"spec": {"containers": [_container()], "schedulingGates": [{"name": "a.b/c"}]}}),
    Listed("v1", "ConfigMap", "configmaps", body={"data": {"a": "x" * 700_000, "config.yaml": "[" * 50_000}}),
    Listed("v1", "ResourceQuota", "resourcequotas", body={"spec": {"hard": {"requests.nvidia.com/gpu": "8E"}}}),
    Listed(
        "v1", "LimitRange", "limitranges",
        body={"spec": {"limits": [{"type": "PersistentVolumeClaim", "max": {"storage": "8E"}}]}},
    ),
    Listed("v1", "PodTemplate", "podtemplates", body={"template": _template()}),
    Listed("v1", "Event", "events", body={"involvedObject": {"kind": "Pod", "name": "x"}, "message": "\u202e" * 300}),
    Listed("coordination.k8s.io/v1", "Lease", "leases", body={"spec": {"leaseTransitions": 2147483647}}),
    Listed(
        "policy/v1", "PodDisruptionBudget", "poddisruptionbudgets",
        body={"spec": {"maxUnavailable": "100%", "selector": {"matchLabels": {"app": "poison"}}}},
    ),
    Listed(
        "resource.k8s.io/v1", "ResourceSlice", "resourceslices", False,
        {"spec": {
            "driver": "x.example", "nodeName": "poison", "devices": [_DEVICE],
            "pool": {"name": "poison", "generation": (1 << 63) - 1, "resourceSliceCount": 1},
        }},
    ),
    _claim(nested(1_100)),
    _claim(msgspec.Raw(b'{"a":"\\ud800","b":"\\ude00\\ud83d"}')),
    _workload("Deployment"),
    _workload("StatefulSet"),
    Listed("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", body={"spec": _SCALER}),
    Listed("pilotlight.dev/v1alpha1", "Model", "models"),
    Listed("pilotlight.dev/v1alpha1", "Tenant", "tenants", False),
    Listed(KUBEAI, "Model", "models"),
    Listed("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    Listed("cro.hpsys.ibm.ie.com/v1alpha1", "ComposabilityRequest", "composabilityrequests", False),
    Listed("cro.hpsys.ibm.ie.com/v1alpha1", "ComposableResource", "composableresources", False),
    Listed("karpenter.sh/v1", "NodeClaim", "nodeclaims", False),
    Listed("cluster.x-k8s.io/v1beta1", "MachineDeployment", "machinedeployments"),
    Listed("cluster.x-k8s.io/v1beta1", "MachineSet", "machinesets"),
    Listed("machine.openshift.io/v1beta1", "MachineSet", "machinesets"),
    Listed("autoscaling.x-k8s.io/v1", "ProvisioningRequest", "provisioningrequests"),
)  # fmt: skip


def listed() -> set[tuple[str, str]]:
    """Returns (group, plural) of each kind that Pilotlight lists or watches, from its own list of permissions."""
    every = (
        *list_required_rights(
            "cluster", None, cordons=True, cutting=("n", "c"), volumes=True, capacity=(*PROVIDERS, PUBLISH)
        ),
        *list_required_rights("namespace", None),
    )
    found = {(one.group, one.resource) for one in every if {"list", "watch"} & set(one.verbs)}
    return found | {(KUBEAI.partition("/")[0], "models")}  # no permission in that list names this kind


def bodies(of: Listed) -> Iterator[Object]:
    """Yields objects without a name."""
    if of.body is None:
        yield from _without_schema()
    else:
        yield from _with_schema(of.body, of.api_version)


def _values() -> Iterator[object]:
    yield from map(nested, LEVELS)
    yield "x" * MIB
    yield from map(msgspec.Raw, (b'"\\ud800"', b'"\\udfff\\ud800"', b"1e300", b"-9223372036854775808", b"[[[null]]]"))
    yield from ([], [1, "a", None], "text", 7, True, "9" * 5_000, "\u202e\x1b[31m")


def _without_schema() -> Iterator[Object]:
    for value in _values():
        yield {"spec": value}
        if len(msgspec.json.encode(value)) <= len(bytes(nested(FEW))):
            yield {"spec": dict.fromkeys(FIELDS, value), "status": dict.fromkeys(FIELDS, value)}


def _with_schema(body: Object, api_version: str) -> Iterator[Object]:
    yield body
    for number, text in enumerate(TEXTS):
        notes = dict.fromkeys(NOTES, text[: 200_000 // len(NOTES)])
        labels = {"nvidia.com/gpu.memory": text[:63]} if text.isalnum() else {}
        yield {**body, "metadata": {"annotations": notes, "labels": labels}}
        # One at a time, since the first invalid one hides the others; each with 3 texts, and the fuzz tests use all.
        for name in KNOWN[number % 3 :: 3] if api_version == WORKLOADS else ():
            yield {**body, "metadata": {"annotations": {KNOWN[0]: "poison", name: text[:200_000]}}}
    yield {**body, "metadata": {"annotations": {KNOWN[0]: "m" * 200_000}, "labels": dict(_OURS)}}
    yield {**body, "metadata": {"annotations": {KNOWN[0]: msgspec.Raw(b'"\\ud800"')}}}
    for levels in LEVELS[1:-1]:
        fields = msgspec.Raw(b'{"f:a":' * levels + b"{}" + b"}" * levels)
        entry = {
            "manager": "poison", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields,
            "apiVersion": api_version, "time": "2027-01-31T12:00:00Z",
        }  # fmt: skip
        yield {**body, "metadata": {"managedFields": [entry]}}


def _mixed(made: Iterator[Object], start: int) -> list[Object]:
    """Shuffles in an order in which the first few are of all sorts, and which differs for each kind."""
    all_ = list(made)
    places = sorted(range(len(all_)), key=lambda place: (7 * place + 5 * start) % len(all_))
    return [all_[place] for place in places]


class Poisoned(NamedTuple):
    """The poisoned objects that exist."""

    paths: list[str]
    kinds: Mapping[tuple[str, str], int]
    """(group, plural) -> number of objects of the kind."""


async def install(api: Api) -> None:
    """Installs the definitions of kinds without a schema. Definitions of an older release accepted such Models."""
    for one in ALL:
        if one.body is None:
            names = {
                "kind": one.kind,
                "plural": one.plural,
                "singular": one.kind.lower(),
                "listKind": f"{one.kind}List",
            }
            version = {
                "name": one.api_version.rpartition("/")[2], "served": True, "storage": True,
                "schema": {"openAPIV3Schema": _NO_SCHEMA}, "subresources": {"status": {}},
            }  # fmt: skip
            await custom_resources.install_one(api, {
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{one.plural}.{one.group}"},
                "spec": {
                    "group": one.group, "names": names, "versions": [version],
                    "scope": "Namespaced" if one.namespaced else "Cluster",
                },
            })  # fmt: skip


async def create(api: Api, namespace: str, stem: str, most: int = 1_000) -> Poisoned:
    """Creates at most `most` objects that the API server accepts, of all kinds in turn, named with the stem."""
    paths, kinds = list[str](), dict[tuple[str, str], int]()
    mixed = (zip(itertools.repeat(one), _mixed(bodies(one), start), strict=False) for start, one in enumerate(ALL))
    turns = itertools.zip_longest(*mixed)
    numbered = enumerate(made for turn in turns for made in turn if made is not None)
    for number, (one, body) in numbered:
        if len(paths) >= most:
            break
        name = f"{stem}-{number}"
        if await _create(api, one, one.path(namespace), name, body):
            paths.append(f"{one.path(namespace)}/{name}")
            kinds[one.group, one.plural] = kinds.get((one.group, one.plural), 0) + 1
    return Poisoned(paths, kinds)


async def create_named(api: Api) -> None:
    """Creates ConfigMaps with the names that Pilotlight watches."""
    for place in PLACES:
        with contextlib.suppress(ApiError):
            of = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": place.namespace}}
            await api.create("/api/v1/namespaces", of)
        data = {"config.yaml": "[" * 50_000, "default": yaml.safe_dump({"sharing": ["x"]}), "long": "x" * (MIB // 2)}
        with contextlib.suppress(ApiError):
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": place.name}, "data": data}
            await api.create(f"/api/v1/namespaces/{place.namespace}/configmaps", body)


async def create_claim(api: Api, namespace: str) -> str:
    """Creates the Lease that names the installation of a namespace, so that it cannot be decoded; returns its path."""
    leases = next(one for one in ALL if one.kind == "Lease")
    body = next(one for one in bodies(leases) if "managedFields" in one.get("metadata", {}))
    path = leases.path(namespace)
    assert await _create(api, leases, path, CLAIM, body)
    return f"{path}/{CLAIM}"


async def delete(api: Api, poisoned: Poisoned) -> None:
    """Deletes all of them."""
    for path in poisoned.paths:
        with contextlib.suppress(ApiError):
            await api.delete(path, grace_s=0)


async def _create(api: Api, of: Listed, path: str, name: str, body: Object) -> bool:
    """Creates one object and returns whether the API server accepts it."""
    metadata: dict[str, Any] = {**body.get("metadata", {}), "name": name}
    if of.kind == "Event":
        body = {**body, "involvedObject": {**body["involvedObject"], "namespace": path.split("/")[-2]}}
    try:
        await api.create(path, {"apiVersion": of.api_version, "kind": of.kind, **body, "metadata": metadata})
    except ApiError as error:
        return error.status == UNREADABLE
    return True
