"""The permissions that an autoscaler needs in a cluster: granted by the chart, checked by `pilotlight doctor`. Pure.

Each permission has a scope: the whole cluster, the engines' namespace, our own (the Lease, the gateways' pods), or one
in which workloads are adopted. With scope `namespace` no cluster-wide permission is needed, and the features that need
one are off. Permissions to change objects of others (adoption, cordons) are needed only if the feature is enabled. The
same applies to volumes, because their creator can name any folder of any node; the chart's admission policy restricts
ours to the nodes' stores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from autoscaler.kubernetes.device_plugin_config import PLACES
from autoscaler.spec.capacity import PUBLISH
from autoscaler.spec.installation_ownership import CLAIM
from autoscaler.state.pending_claims import DRIVER

Scope = Literal["cluster", "namespace"]
Where = Literal["cluster", "engines", "home", "adopted"]


class Right(NamedTuple):
    """A permission: some verbs on one resource (`models/status` is a subresource)."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    where: Where
    use: str
    """Its purpose, as a clause that completes "required so that"."""
    optional: bool = False
    """Without the permission, only that feature is off."""
    named: bool = False
    """Limited to our own object (the Lease)."""
    name: str = ""
    """Limited to objects with this name."""
    namespace: str = ""
    """The namespace, if `where` is `adopted`."""


_READ = ("get", "list", "watch")
_SHARING = "the sharing mode of GPUs is read from the device plug-in's configuration if labels do not state it"
_DEVICES = "the devices of DRA drivers, and the pods that use them, are known"
_EVERYWHERE = (
    Right("", "nodes", _READ, "cluster", "the devices of nodes are known"),
    Right("", "pods", _READ, "cluster", "the devices that other pods use are known"),
    Right(
        "authentication.k8s.io", "tokenreviews", ("create",), "cluster", "gateways are authenticated by their tokens"
    ),
    Right("pilotlight.dev", "tenants", _READ, "cluster", "Tenant resources are read"),
    *(
        Right("", "configmaps", _READ, "cluster", _SHARING, optional=True, name=name)
        for name in dict.fromkeys(place.name for place in PLACES)
    ),
    Right("resource.k8s.io", "resourceslices", ("list", "watch"), "cluster", _DEVICES, optional=True),
    Right("resource.k8s.io", "resourceclaims", ("list", "watch"), "cluster", _DEVICES, optional=True),
)
_DOCUMENTS = (
    ("pilotlight.dev", "models", _READ, "Model resources are read", False),
    ("pilotlight.dev", "models/status", ("get", "patch"), "a Model's status is written", False),
    ("", "events", ("create", "patch"), "Events about Models are written", True),
)
_ONE_SERVES = "only one of several installations serves the Models of a namespace"
_ADOPTION = (
    ("apps", "deployments", _READ, "annotated Deployments are found", True),
    ("apps", "statefulsets", _READ, "annotated StatefulSets are found", True),
    ("apps", "deployments/scale", ("get", "patch"), "adopted Deployments are scaled", True),
    ("apps", "statefulsets/scale", ("get", "patch"), "adopted StatefulSets are scaled", True),
    ("apps", "deployments/status", ("patch",), "the status of adopted Deployments shows why they are scaled", True),
    ("apps", "statefulsets/status", ("patch",), "the status of adopted StatefulSets shows why they are scaled", True),
    ("autoscaling", "horizontalpodautoscalers", ("list", "watch"), "other autoscalers are detected", True),
    ("keda.sh", "scaledobjects", ("list", "watch"), "other autoscalers are detected", True),
)
_ADOPTED_PODS = (
    ("", "pods", ("patch",), "the drained pod of an adopted Deployment is deleted first", True),
    ("", "events", ("list",), "the reason why a pod of an adopted workload waits for a volume is reported", True),
)
"""In the engines' namespace these permissions are needed without adoption, too."""
_CORDONS = (
    Right(
        "", "nodes", ("patch",), "cluster", "`pilotlight cordon` and `drain` survive a change of leader", optional=True
    ),
)
_CUT = "GPUs of idle nodes are repartitioned"
_ENGINES = (
    Right("", "pods", (*_READ, "create", "patch", "delete"), "engines", "engines are started and stopped"),
    Right("", "events", ("list",), "engines", "the reason why a pod waits for a volume is reported", optional=True),
    Right("", "resourcequotas", _READ, "engines", "the unused part of each ResourceQuota is known", optional=True),
    Right(
        "", "limitranges", ("list", "watch"), "engines", "a rejected start is retried when a LimitRange changes",
        optional=True,
    ),
    Right(
        "policy", "poddisruptionbudgets", _READ, "engines", "PodDisruptionBudgets protect replicas from eviction",
        optional=True,
    ),
)  # fmt: skip
_CLAIMS = (
    Right(
        "resource.k8s.io", "resourceclaims", ("get", "create", "patch", "delete"), "engines",
        "engines get devices of DRA drivers", optional=True,
    ),
)  # fmt: skip
_SEEN = "engines mount the weights of their node's store as a volume"
_VOLUMES = (
    Right("", "persistentvolumes", ("create", "patch"), "cluster", _SEEN, optional=True),
    Right("", "persistentvolumeclaims", ("create", "patch"), "engines", _SEEN, optional=True),
)
_ADDED = "nodes are added and removed through Karpenter"
_KEPT = Right(
    "", "nodes", ("patch",), "cluster", "a node is removed only after its attached devices are detached", optional=True
)
_FABRIC, _CRO = "GPUs of a fabric are attached and detached", "cro.hpsys.ibm.ie.com"
_PUBLISHED = "ResourceClaims of all pods can get GPUs of a fabric (`redfish.publish`)"
_KUEUE = "capacity is requested through queues of Kueue"
_QUEUED = "nodes are requested through ProvisioningRequests"
_GROWS = "machines that a growing machine group will add are not ordered again"
_GROUPS = (
    Right("cluster.x-k8s.io", "machinedeployments", ("list",), "cluster", _GROWS, optional=True),
    Right("cluster.x-k8s.io", "machinesets", ("list",), "cluster", _GROWS, optional=True),
    Right("machine.openshift.io", "machinesets", ("list",), "cluster", _GROWS, optional=True),
)
_LEARNT = "the next leader knows the lead times of capacity providers"
_REMEMBERED = (
    Right("", "configmaps", ("create",), "home", _LEARNT, optional=True),
    Right("", "configmaps", ("get", "patch"), "home", _LEARNT, optional=True, name="pilotlight-learnt"),
)
_CAPACITY: Mapping[str, tuple[Right, ...]] = {
    "cro": (
        Right(
            _CRO,
            "composabilityrequests",
            ("list", "watch", "create", "patch", "delete"),
            "cluster",
            _FABRIC,
            optional=True,
        ),
        Right(_CRO, "composableresources", ("list", "watch", "patch"), "cluster", _FABRIC, optional=True),
        _KEPT,
    ),
    "clusterAutoscaler": (),
    "karpenter": (
        Right("karpenter.sh", "nodepools", ("get",), "cluster", _ADDED, optional=True),
        Right(
            "karpenter.sh", "nodeclaims", ("get", "list", "create", "patch", "delete"), "cluster", _ADDED, optional=True
        ),
        Right(
            "",
            "nodes",
            ("patch",),
            "cluster",
            "Karpenter may remove a node again after its first replica ran there",
            optional=True,
        ),
    ),
    "redfish": (
        Right("", "configmaps", ("get", "patch"), "home", _FABRIC, optional=True, name="pilotlight-fabric"),
        _KEPT,
    ),
    PUBLISH: (
        Right("resource.k8s.io", "resourceslices", ("create", "patch", "delete"), "cluster", _PUBLISHED, optional=True),
        Right("resource.k8s.io", "resourceclaims", ("get",), "cluster", _PUBLISHED, optional=True),
        Right("resource.k8s.io", "resourceclaims/status", ("patch",), "cluster", _PUBLISHED, optional=True),
        Right(
            "resource.k8s.io",
            "resourceclaims/driver",
            ("arbitrary-node:patch",),
            "cluster",
            _PUBLISHED,
            optional=True,
            name=DRIVER,
        ),
    ),
    "kueue": (
        Right("kueue.x-k8s.io", "localqueues", ("get",), "engines", _KUEUE, optional=True),
        Right("kueue.x-k8s.io", "workloads", ("get",), "engines", _KUEUE, optional=True),
    ),
    "provisioningRequest": (
        Right(
            "autoscaling.x-k8s.io",
            "provisioningrequests",
            ("get", "list", "create", "patch", "delete"),
            "engines",
            _QUEUED,
            optional=True,
        ),
        Right("", "podtemplates", ("get", "list", "create", "patch", "delete"), "engines", _QUEUED, optional=True),
    ),
}
"""Permissions by kind of provider; the key PUBLISH has those for `redfish.publish`."""
_HOME = (
    Right("coordination.k8s.io", "leases", ("create",), "home", "one autoscaler leads"),
    Right("coordination.k8s.io", "leases", (*_READ, "update"), "home", "one autoscaler leads", named=True),
    Right("", "pods", _READ, "home", "silent gateways are distinguished from gateways that are gone"),
)


OFF = (
    "Tenant resources are not read; Tenants come from documents (with the chart, from the Secret `tenantsSecret`)",
    "nodes are not read; devices come from Settings `nodes`, or their number from a ResourceQuota",
    "the Kubernetes scheduler chooses the nodes, not Pilotlight",
    "tokens of gateways are not checked; gateways authenticate with certificates",
    "without node agents, nothing measures device memory and health; devices count as free a fixed time after a stop",
    "what operators ordered with `pilotlight cordon` and `pilotlight drain` is lost when the leader changes",
    "Models, Deployments, StatefulSets and KubeAI's Models of other namespaces are not served",
    "capacity providers are rejected, because the existing nodes are not known",
    "weights are mounted from claims (pvc://), not from nodes' stores",
)
"""The features that are off in scope `namespace`, one sentence for each, as `pilotlight status` shows them."""


def list_required_rights(
    scope: Scope, adopted: Sequence[str] | None = (), *, cordons: bool = False,
    cutting: tuple[str, str] | None = None, volumes: bool = False, capacity: Collection[str] = (),
) -> tuple[Right, ...]:  # fmt: skip
    """All permissions of an installation. `adopted`: namespaces in which workloads are adopted; None: all in the scope.
    `cutting`: namespace and name of the ConfigMap in Settings `cutting`; None: no MIG repartitioning. `volumes`:
    whether volumes of the nodes' stores are created. `capacity`: kinds of providers in Settings, PUBLISH among them.
    """
    where: Where = "cluster" if scope == "cluster" else "engines"
    own = [Right(group, resource, verbs, where, use, optional) for group, resource, verbs, use, optional in _DOCUMENTS]
    own += [
        Right("coordination.k8s.io", "leases", ("create",), where, _ONE_SERVES, optional=True),
        Right(
            "coordination.k8s.io", "leases", ("get", "list", "update"), where, _ONE_SERVES, optional=True, name=CLAIM
        ),
    ]
    if scope == "namespace":
        return (*own, *_adoption(where, adopted), *_ENGINES, *_HOME)
    changed = _CORDONS if cordons else () if cutting is None else (_CORDONS[0]._replace(use=_CUT),)
    own += [*([] if cutting is None else _cutting(*cutting)), *(_VOLUMES if volumes else ())]
    own += (*_GROUPS, *_REMEMBERED) if capacity else ()
    own += [right for kind in sorted(_CAPACITY.keys() & set(capacity)) for right in _CAPACITY[kind]]
    return (*_EVERYWHERE, *changed, *own, *_adoption(where, adopted), *_ENGINES, *_CLAIMS, *_HOME)


def _adoption(where: Where, adopted: Sequence[str] | None) -> list[Right]:
    """Permissions for adoption. In the engines' namespace the pods may be changed anyway."""
    places: list[tuple[Where, str]] = [(where, "")] if adopted is None else [("adopted", one) for one in adopted]
    return [
        Right(group, resource, verbs, place, use, optional, namespace=namespace)
        for place, namespace in places
        for group, resource, verbs, use, optional in (*_ADOPTION, *(() if place == "engines" else _ADOPTED_PODS))
    ]


def _cutting(namespace: str, name: str) -> list[Right]:
    """Permissions for MIG repartitioning. `create` cannot be limited to one name."""
    return [
        Right("", "configmaps", ("create",), "adopted", _CUT, optional=True, namespace=namespace),
        Right("", "configmaps", ("get", "patch"), "adopted", _CUT, optional=True, name=name, namespace=namespace),
    ]
