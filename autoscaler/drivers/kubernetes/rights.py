"""The rights that an autoscaler needs in a cluster: the list that the chart grants and `pilotlight doctor` asks for.

Owns the list and what goes without each right. Pure. A right is needed where it says: in the whole cluster, in the
engines' namespace, or in our own (the Lease, the gateways' pods). With scope `namespace` nothing is asked of the whole
cluster; what needs that is off.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Scope = Literal["cluster", "namespace"]
Where = Literal["cluster", "engines", "home"]


class Right(NamedTuple):
    """Some verbs on one resource (`models/status` is a subresource)."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    where: Where
    use: str
    """What does not work without it."""
    optional: bool = False
    """Without it something is off, and the rest works."""
    named: bool = False
    """On our own object only (the Lease)."""


_READ = ("get", "list", "watch")
_EVERYWHERE = (
    Right("", "nodes", _READ, "cluster", "devices are found"),
    Right("", "nodes", ("patch",), "cluster", "`pilotlight cordon` and `drain` are kept", optional=True),
    Right("", "pods", _READ, "cluster", "devices that others use are seen"),
    Right("authentication.k8s.io", "tokenreviews", ("create",), "cluster", "gateways are let in by their tokens"),
    Right("pilotlight.dev", "tenants", _READ, "cluster", "Tenant resources are read"),
)
_DOCUMENTS = (
    ("pilotlight.dev", "models", _READ, "Model resources are read", False),
    ("pilotlight.dev", "models/status", ("get", "patch"), "a Model's status is written", False),
    ("", "events", ("create", "patch"), "Events tell what happens", True),
)
_ADOPTION = (
    ("apps", "deployments", _READ, "annotated Deployments are found", True),
    ("apps", "statefulsets", _READ, "annotated StatefulSets are found", True),
    ("apps", "deployments/scale", ("get", "patch"), "adopted Deployments are scaled", True),
    ("apps", "statefulsets/scale", ("get", "patch"), "adopted StatefulSets are scaled", True),
    ("autoscaling", "horizontalpodautoscalers", ("list", "watch"), "another autoscaler is noticed", True),
    ("keda.sh", "scaledobjects", ("list", "watch"), "another autoscaler is noticed", True),
)
_ADOPTED_PODS = (Right("", "pods", ("patch",), "cluster", "the drained pod of an adopted Deployment goes first", True),)
_ENGINES = (Right("", "pods", (*_READ, "create", "patch", "delete"), "engines", "engines are started and stopped"),)
_HOME = (
    Right("coordination.k8s.io", "leases", ("create",), "home", "one autoscaler leads"),
    Right("coordination.k8s.io", "leases", (*_READ, "update"), "home", "one autoscaler leads", named=True),
    Right("", "pods", _READ, "home", "gateways that are silent are told from those that are gone"),
)


def rights(scope: Scope, *, adoption: bool = True) -> tuple[Right, ...]:
    """All of them for an installation of that scope."""
    where: Where = "cluster" if scope == "cluster" else "engines"
    documents = [
        Right(group, resource, verbs, where, use, optional)
        for group, resource, verbs, use, optional in (*_DOCUMENTS, *(_ADOPTION if adoption else ()))
    ]
    everywhere = (*_EVERYWHERE, *(_ADOPTED_PODS if adoption else ())) if scope == "cluster" else ()
    return (*everywhere, *documents, *_ENGINES, *_HOME)
