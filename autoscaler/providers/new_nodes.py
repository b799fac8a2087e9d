"""What a node that is not there yet would have, by the labels that it will have and the Settings' `nodes`. Pure.

Owns that answer for whoever adds nodes or queues for them. A node that was never seen tells nothing, so the Settings
must, or labels as GPU feature discovery sets them, put where the node group is described (scale from zero). What only a
running node tells (MIG's cuts, a DRA driver's parts) is not offered ahead. Promises: the name of what a queue could
bring stays as long as its entry does, wherever that stands in the list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.placement.model.prices import Prices, read_capacity_type
from autoscaler.queries.pod_requests import requests_for
from autoscaler.spec.pod import GPU, selector_of
from autoscaler.spec.quantity import whole_number
from autoscaler.spec.settings import NodeKind, Settings, kind_of
from autoscaler.state.capacity_orders import Bought, Offer
from autoscaler.state.node_labels import Taint, filter_provisioning_labels
from autoscaler.state.world import World

PRODUCT, MEMORY_MIB, COUNT, REPLICAS = (f"{GPU}.{name}" for name in ("product", "memory", "count", "replicas"))
"""Labels of GPU feature discovery."""
SHARED = "-SHARED"
DEVICES_MAX, PARTS_MAX = 64, 1000
HOST_WATTS = 150.0
"""What a node takes beside its Devices; of two that cost the same the thriftier is taken."""
EXPECTED_S = 240.0
"""From an order to a node whose GPUs can be used, while nothing is learnt and the Settings do not say."""
CONFIDENCE: Mapping[Bought, float] = {"spot": 0.8}
"""Of those that are bought so, this part comes, while nothing is learnt; of others 0.9."""
NOBODY = "no entry of Settings `nodes` says what it brings (those with `slicing` mig or dra do not): add one with"
"""Why a queue has no Offer at all; what the entry must have comes behind it."""
WHOLE = frozenset({"whole"})
PARTED = frozenset({"timeslice", "mps"})
TOGETHER = frozenset({"hami", "kai", "volcano"})
"""Kinds of Slices: one for each Device, several equal ones, or one that several Replicas are on."""
_UNSAFE = re.compile(r"[^a-z0-9]+")


class Shape(NamedTuple):
    """What of Devices such a node has."""

    product: str
    memory_bytes: int
    devices: int
    parts: int = 1
    """Each Device is offered so many times."""
    shared: bool = False
    counted: bool = True
    """Pods ask for them by the GPU's resource: who adds nodes may be asked for it, too."""


class OfferTerms(NamedTuple):
    """How it is given."""

    many: int
    expected_s: float | None = EXPECTED_S
    """None: nobody can say."""
    lasts_s: float | None = None
    """None: as long as one likes."""
    taints: Sequence[Taint] = ()
    whole: bool = True
    """A node comes, with all its Devices; else it is room on nodes that are there, and takes no more power."""
    queued: bool = False
    """See Offer."""
    bought: Bought | None = None
    """None: as the labels tell."""


class NodeRequirements(NamedTuple):
    """Without which a node would be of no use to whom it is added for."""

    where: Mapping[str, str] = {}
    """Labels that it asks for and that who adds nodes knows."""
    beside: Mapping[str, str] = {}
    """What it requests beside Devices."""


def resolve_node_requirements(world: World, owner: ModelName) -> NodeRequirements:
    """Nobody's: any node does."""
    model, defaults = world.models.get(owner), world.settings.pod
    if model is None:
        return NodeRequirements()
    return NodeRequirements(
        filter_provisioning_labels(selector_of(defaults, model.spec.pod)), requests_for(model, defaults)
    )


def infer_node_shape(labels: Mapping[str, str], kind: NodeKind | None) -> Shape | None:
    """None: nobody tells, or only the running node does. Labels go before the Settings, as of nodes that are there."""
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


def build_offer(  # noqa: PLR0917  what, of whom, at what price
    provider: str, name: str, of: Shape, labels: Mapping[str, str], terms: OfferTerms, settings: Settings
) -> Offer:
    """Of such nodes. `labels`: those that each will have."""
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
    """What a queue could bring, which says nothing of Devices itself: one for each entry of the Settings' `nodes` that
    `selector` does not contradict, and whose Devices pods ask for by the GPU's resource, as those in queues do.
    """
    for kind in settings.nodes:
        labels = {**kind.selector, **selector}
        if kind_of(labels, settings.nodes) is kind and not _is_two(labels, kind, settings.nodes):
            of = infer_node_shape(labels, kind)
            if of is not None and of.counted:
                yield build_offer(provider, _name(kind, labels), of, labels, terms, settings)


def _is_two(labels: Mapping[str, str], kind: NodeKind, declared: Sequence[NodeKind]) -> bool:
    """Labels that were put together are of no node where they are of another product, too; what all nodes of `kind` are
    as well (a rest that catches all) says nothing.
    """
    others = (one for one in declared if one.device.model != kind.device.model)
    said, before = labels.items(), kind.selector.items()
    return any(one.selector.items() <= said and not one.selector.items() <= before for one in others)


def _name(kind: NodeKind, labels: Mapping[str, str]) -> str:
    """`nvidia-l4-x2-5f3a1c`."""
    said = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    stem = _UNSAFE.sub("-", kind.device.model.lower()).strip("-")[:30]
    return f"{stem}-x{kind.device.count}-{hashlib.sha256(said.encode()).hexdigest()[:6]}"
