"""Reads Karpenter's NodePools: which node kinds of the Settings a pool can add, and how many more nodes. Pure.

Reads karpenter.sh/v1 and v1beta1. There is one variant per entry of the Settings' `nodes` that the pool admits, and per
capacity type that it allows; the default is on-demand. A label that the pool does not mention may be requested if
clouds set it. Offers stay within the pool's limits, counted by its NodeClaims and by its status. CPU and memory are
known for launched nodes only: before that, one node is offered, and none while it is launching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from autoscaler.providers.future_nodes import Shape, infer_node_shape
from autoscaler.providers.kubernetes_access import Object
from autoscaler.spec.pod import GPU
from autoscaler.spec.quantity import read_milli, whole_number
from autoscaler.spec.settings import NodeKind, kind_of
from autoscaler.state.node_labels_and_taints import Taint

GROUP = "karpenter.sh"
VERSIONS = ("v1", "v1beta1")
"""The first served version is used."""
POOL_LABEL, BOUGHT_LABEL = f"{GROUP}/nodepool", f"{GROUP}/capacity-type"
BOUGHT = ("reserved", "spot", "on-demand")
"""Karpenter's capacity types, cheapest first."""
CLOUDS = ("kubernetes.io", "k8s.io", "karpenter.sh", "k8s.aws", "azure.com", "k8s.gcp", "kwok.sh", "gke.io")
"""Domain suffixes of labels that nodes have even if their NodePool does not mention them."""
MANY_MAX: Final = 1000
"""Number of nodes that a pool without limits can add."""
NODES = "nodes"
"""The limit on the number of nodes; all other limits are of resources."""


class Requirement(NamedTuple):
    """A NodePool's requirement on a label."""

    key: str
    operator: str
    values: tuple[str, ...]

    def admits(self, value: str) -> bool:
        """Whether a node with that value satisfies the requirement."""
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "DoesNotExist":
                return False
            case "Exists":
                return True
        return len(self.values) == 1 and _compared(self.operator, value, self.values[0])


class NodePool(NamedTuple):
    """The parts of a NodePool that are used."""

    name: str
    uid: str
    version: str
    """Version of its API."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    taints: tuple[Taint, ...]
    spec: Object
    """Spec of a NodeClaim, from the pool's template."""
    hashes: Mapping[str, str]
    """Annotations by which Karpenter detects that a node has drifted from its pool."""
    limits: Mapping[str, str]
    used: Mapping[str, str]
    expire_after: str
    closed: str = ""
    """Why it adds no nodes, as a phrase that follows its name; empty: it adds nodes."""


class Variant(NamedTuple):
    """One kind of node of a pool, with one capacity type."""

    name: str
    shape: Shape
    labels: Mapping[str, str]
    """Labels of the future node, as far as they are known."""
    pinned: Mapping[str, str]
    """Labels to request in addition to the pool's."""


def read_nodepool(pool: Object) -> NodePool:
    """Read a NodePool object."""
    metadata, spec = pool["metadata"], pool["spec"]
    template: Object = spec["template"]
    inner: Object = template["spec"]
    said: Object = template.get("metadata") or {}
    requirements = tuple(
        Requirement(one["key"], one["operator"], tuple(one.get("values") or ()))
        for one in inner.get("requirements") or ()
    )
    labels = {one.key: one.values[0] for one in requirements if one.operator == "In" and len(one.values) == 1}
    notes: Mapping[str, str] = metadata.get("annotations") or {}
    status: Object = pool.get("status") or {}
    taints = tuple(Taint(one["key"], one.get("value", ""), one["effect"]) for one in inner.get("taints") or ())
    return NodePool(
        metadata["name"], metadata["uid"], pool["apiVersion"].rpartition("/")[2],
        {**labels, **(said.get("labels") or {}), POOL_LABEL: metadata["name"]}, said.get("annotations") or {},
        requirements, taints, inner,
        {key: value for key, value in notes.items() if key.startswith(f"{GROUP}/nodepool-hash")},
        spec.get("limits") or {}, status.get("resources") or {},
        str(inner.get("expireAfter") or (spec.get("disruption") or {}).get("expireAfter") or "Never"),
        _closed(metadata, spec, status),
    )  # fmt: skip


def _closed(metadata: Object, spec: Object, status: Object) -> str:
    if "deletionTimestamp" in metadata:
        return "is being deleted"
    if spec.get("replicas") is not None:
        return "has a fixed number of nodes (replicas)"
    ready = next((one for one in status.get("conditions") or () if one["type"] == "Ready"), None)
    if ready is not None and ready["status"] == "False":
        return f"is not ready: {ready.get('message') or ready.get('reason') or 'no reason was given'}"
    return ""


def list_variants(pool: NodePool, kinds: Sequence[NodeKind]) -> tuple[Variant, ...]:
    """All variants that the pool can add. Their names depend only on the pool and the Settings."""
    found: dict[str, Variant] = {}
    for kind in (*kinds, None):
        more = find_pinned_labels(pool, {} if kind is None else kind.selector)
        if more is None:
            continue
        labels = {**pool.labels, **more}
        of = infer_node_shape(labels, kind)
        if of is None or not of.devices or kind_of(labels, kinds) is not kind:
            continue
        stem = ".".join(more[key] for key in sorted(more)) or pool.name
        for word in BOUGHT:
            if _buys(pool, word):
                name, how = f"{stem}/{word}", {BOUGHT_LABEL: word}
                found.setdefault(name, Variant(name, of, {**labels, **how}, {**more, **how}))
    return tuple(found.values())


def narrow_variant(pool: NodePool, variant: Variant, selector: Mapping[str, str]) -> Variant | None:
    """Restrict a variant to nodes with these labels; None if the pool cannot add such a node."""
    more = find_pinned_labels(pool, {key: value for key, value in selector.items() if key not in variant.labels})
    if more is None:
        return None
    return variant._replace(labels={**variant.labels, **more}, pinned={**variant.pinned, **more})


def find_pinned_labels(pool: NodePool, selector: Mapping[str, str]) -> dict[str, str] | None:
    """Labels to request in addition to the pool's to get such a node; None if the pool cannot add one."""
    found: dict[str, str] = {}
    for key, value in selector.items():
        if key in pool.labels:
            if pool.labels[key] != value:
                return None
            continue
        said = [one for one in pool.requirements if one.key == key]
        is_cloud_label = key.partition("/")[0].endswith(CLOUDS) and not key.startswith("kubernetes.io/hostname")
        if not all(one.admits(value) for one in said) or not (said or is_cloud_label):
            return None
        found[key] = value
    return found


def _buys(pool: NodePool, word: str) -> bool:
    said = [one for one in pool.requirements if one.key == BOUGHT_LABEL]
    return all(one.admits(word) for one in said) if said else pool.labels.get(BOUGHT_LABEL, "on-demand") == word


def count_remaining_nodes(pool: NodePool, of: Shape, claims: Sequence[Object]) -> int:
    """Return how many more such nodes the pool's limits allow. `claims`: all NodeClaims of the pool.
    CPU and memory are not in the Settings but are read from launched nodes with at least as many GPUs. Until then, the
    result is 1.
    """
    if pool.closed:
        return 0
    many = MANY_MAX
    for name, limit in pool.limits.items():
        takes = [_has(one, name) for one in claims]
        each = max(takes, default=0)
        if name == GPU:
            each = max(each, of.devices * 1000)
        elif name == NODES:
            each = 1000
        else:
            coming = [one for one in claims if not _capacity(one)]
            if not all(_has_launched(_has(one, GPU), claims) for one in coming):
                return 0
            if not _has_launched(of.devices * 1000 if of.counted else 0, claims):
                many = min(many, 1)
            takes = [has if _capacity(one) else each for one, has in zip(claims, takes, strict=True)]
        rest = _milli(limit) - max(_milli(pool.used.get(name, "0")), sum(takes))
        many = min(many, max(0, rest) // each if each else MANY_MAX if rest > 0 else 0)
    return many


def _has_launched(gpus_milli: int, claims: Sequence[Object]) -> bool:
    """Whether a node with at least so many GPUs has launched."""
    return any(_capacity(one) and _milli(_capacity(one).get(GPU, "0")) >= gpus_milli for one in claims)


def _capacity(claim: Object) -> Mapping[str, Any]:
    """Resources of a launched node; empty before."""
    return (claim.get("status") or {}).get("capacity") or {}


def _has(claim: Object, resource: str) -> int:
    """Thousandths of a resource that a NodeClaim takes from its pool's limits, as far as known."""
    if resource == NODES:
        return 1000
    asked: dict[str, Any] = (claim["spec"].get("resources") or {}).get("requests") or {}
    return max(_milli(_capacity(claim).get(resource, "0")), _milli(asked.get(resource, "0")))


def _milli(amount: object) -> int:
    try:
        return read_milli(str(amount))
    except ValueError:
        return 0


def _compared(operator: str, value: str, bound: str) -> bool:
    one, other = whole_number(value), whole_number(bound)
    if one is None or other is None:
        return False
    answers = {"Gt": one > other, "Lt": one < other, "Gte": one >= other, "Lte": one <= other}
    return answers.get(operator, False)


def build_requirements(pool: NodePool, pinned: Mapping[str, str]) -> Iterator[Object]:
    """Requirements of a NodeClaim: the pool's, replaced by pinned labels, each label once."""
    asked = {**pinned, POOL_LABEL: pool.name}
    yield from (one for one in pool.spec.get("requirements") or () if one["key"] not in asked)
    yield from ({"key": key, "operator": "In", "values": [value]} for key, value in sorted(asked.items()))
