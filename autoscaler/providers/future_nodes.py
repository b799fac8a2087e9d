"""Derives the devices of a future node from its expected labels and the Settings' `nodes`. Pure.

To scale a node group from zero, the Settings or labels of GPU feature discovery must describe its nodes. Devices that
only a running node reports (MIG partitions, devices of a DRA driver) are not offered in advance.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.placement.model.prices import Prices, read_capacity_type
from autoscaler.spec.pod import GPU, selector_of
from autoscaler.spec.quantity import whole_number
from autoscaler.spec.settings import NodeKind, Settings, kind_of
from autoscaler.state.capacity import Bought, Offer
from autoscaler.state.node_labels_and_taints import Taint, filter_provisioning_labels
from autoscaler.state.pod_requests import requests_for
from autoscaler.state.world import World

PRODUCT, MEMORY_MIB, COUNT, REPLICAS = (f"{GPU}.{name}" for name in ("product", "memory", "count", "replicas"))
"""Labels of GPU feature discovery."""
SHARED = "-SHARED"
DEVICES_MAX, PARTS_MAX = 64, 1000
HOST_WATTS = 150.0
"""Power of a node without its devices, in watts. Of two offers at the same price, the one with less power is chosen."""
EXPECTED_S = 240.0
"""Default seconds from an order until the node's GPUs can be used, while none is learned or set in Settings."""
CONFIDENCE: Mapping[Bought, float] = {"spot": 0.8}
"""Share of orders that are delivered, by purchase type; 0.9 for all others. Used until it is learned."""
NO_NODE_ENTRY = (
    "no entry of Settings `nodes` describes its devices (entries with `slicing` kind mig or dra are ignored): "
    "add one with"
)
"""Why a queue has no offer; what the entry must contain is appended."""
WHOLE = frozenset({"whole"})
PARTED = frozenset({"timeslice", "mps"})
TOGETHER = frozenset({"hami", "kai", "volcano"})
"""Kinds of slicing: one slice per device, several equal ones, or one that several replicas share."""
_UNSAFE = re.compile(r"[^a-z0-9]+")


class Shape(NamedTuple):
    """The devices of such a node."""

    product: str
    memory_bytes: int
    devices: int
    parts: int = 1
    """Slices per device."""
    shared: bool = False
    counted: bool = True
    """Pods request the devices by the GPU resource, so an order for a node can request them, too."""


class OfferTerms(NamedTuple):
    """The terms of an offer."""

    many: int
    expected_s: float | None = EXPECTED_S
    """None: unknown."""
    lasts_s: float | None = None
    """None: unlimited."""
    taints: Sequence[Taint] = ()
    whole: bool = True
    """A node is added with all its devices. Otherwise the offer is for existing nodes, which need no more power."""
    queued: bool = False
    """See `Offer.queued`."""
    bought: Bought | None = None
    """None: derived from the labels."""


class NodeRequirements(NamedTuple):
    """Requirements of a model on a node that is added for it."""

    where: Mapping[str, str] = {}
    """Required labels that a node provisioner can set."""
    requests: Mapping[str, str] = {}
    """Resource requests without devices."""


def resolve_node_requirements(world: World, owner: ModelName) -> NodeRequirements:
    """Return a model's requirements; none if the model does not exist."""
    model, defaults = world.models.get(owner), world.settings.pod
    if model is None:
        return NodeRequirements()
    return NodeRequirements(
        filter_provisioning_labels(selector_of(defaults, model.spec.pod)), requests_for(model, defaults)
    )


def infer_node_shape(labels: Mapping[str, str], kind: NodeKind | None) -> Shape | None:
    """Return the devices of a node; None if they are unknown or only a running node reports them.
    Labels take precedence over the Settings, as for existing nodes.
    """
    mib, count = whole_number(labels.get(MEMORY_MIB)) or 0, whole_number(labels.get(COUNT)) or 0
    product = labels.get(PRODUCT, "").removesuffix(SHARED)
    if kind is None:
        if not (mib and count):
            return None
        return Shape(product, mib << 20, min(count, DEVICES_MAX), _parts(labels, 1))
    memory_bytes = mib << 20 or int(kind.device.memory_bytes)
    devices = min(count or kind.device.count, DEVICES_MAX)
    one = Shape(product or kind.device.model, memory_bytes, devices)
    slicing = kind.slicing
    if slicing is None or slicing.kind in WHOLE | PARTED:
        return one._replace(parts=_parts(labels, (slicing.replicas if slicing is not None else None) or 1))
    if slicing.kind in TOGETHER:
        return one._replace(shared=True)
    if slicing.kind == "dra" and not slicing.cut:
        return one._replace(shared=slicing.sharing is not None, counted=False)
    return None


def _parts(labels: Mapping[str, str], said: int) -> int:
    replicas = whole_number(labels.get(REPLICAS)) or 0
    return replicas if 1 <= replicas <= PARTS_MAX else said


def build_offer(  # noqa: PLR0917  identity, shape, labels and terms are independent
    provider: str, name: str, of: Shape, labels: Mapping[str, str], terms: OfferTerms, settings: Settings
) -> Offer:
    """Build the offer of such nodes. `labels`: those of each new node."""
    how = terms.bought or read_capacity_type(labels)
    price = 0.0 if how == "owned" else Prices(settings.prices).at(of.product, how)
    return Offer(
        provider=provider, name=name, product=of.product, memory_bytes=of.memory_bytes,
        devices_min=of.devices if terms.whole else 1, devices_max=of.devices, parts=of.parts, shared=of.shared,
        labels=dict(labels), bought=how,
        taints=tuple(one for one in terms.taints if one.key != GPU and one.effect != "PreferNoSchedule"),
        price_per_hour=price, watts=HOST_WATTS if terms.whole else 0.0, many=terms.many,
        expected_s=terms.expected_s, confidence=CONFIDENCE.get(how, 0.9), lasts_s=terms.lasts_s,
        queued=terms.queued, room=not terms.whole,
    )  # fmt: skip


def build_node_kind_offers(
    provider: str, selector: Mapping[str, str], terms: OfferTerms, settings: Settings
) -> Iterator[Offer]:
    """Yield the offers of a queue, which does not describe devices: one per entry of the Settings' `nodes`.
    Skips entries that contradict `selector`, and those whose devices pods do not request by the GPU resource.
    """
    for kind in settings.nodes:
        labels = {**kind.selector, **selector}
        if kind_of(labels, settings.nodes) is kind and not _is_two(labels, kind, settings.nodes):
            of = infer_node_shape(labels, kind)
            if of is not None and of.counted:
                yield build_offer(provider, _name(kind, labels), of, labels, terms, settings)


def _is_two(labels: Mapping[str, str], kind: NodeKind, declared: Sequence[NodeKind]) -> bool:
    """Whether the combined labels also match an entry of another product, so that no node can have them.
    Ignores entries that match all nodes of `kind` (a catch-all).
    """
    others = (one for one in declared if one.device.model != kind.device.model)
    said, before = labels.items(), kind.selector.items()
    return any(one.selector.items() <= said and not one.selector.items() <= before for one in others)


def _name(kind: NodeKind, labels: Mapping[str, str]) -> str:
    """Name an offer, for example `nvidia-l4-x2-5f3a1c`."""
    said = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    stem = _UNSAFE.sub("-", kind.device.model.lower()).strip("-")[:30]
    return f"{stem}-x{kind.device.count}-{hashlib.sha256(said.encode()).hexdigest()[:6]}"
