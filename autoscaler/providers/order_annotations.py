"""Labels and annotations of the objects of capacity orders, from which any leader restores the orders. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from autoscaler.contract import ModelName
from autoscaler.providers.kubernetes_access import Object
from autoscaler.spec.pod import MANAGED_BY, OURS
from autoscaler.spec.quantity import whole_number
from autoscaler.state.capacity import AcquireOrder, Listed, Offer

LEASE: Final = OURS + "capacity"
"""Label: the provider's name, shortened to a valid label value."""

NODE: Final = OURS + "node"

_UNLABEL = re.compile(r"[^A-Za-z0-9._-]+")


PROVIDER, OWNER, EPOCH, DEVICES, OFFER = (OURS + one for one in ("provider", "owner", "epoch", "devices", "offer"))
"""PROVIDER is a label, which selects a provider's objects; the others are annotations."""


WRITER = "pilotlight"


def build_lease_annotations(order: AcquireOrder) -> dict[str, str]:
    """Annotations of an order's objects, from which any leader can restore the order."""
    return {
        OWNER: order.owner, EPOCH: str(order.epoch), DEVICES: str(order.devices),
        OFFER: msgspec.json.encode(order.offer).decode(),
    }  # fmt: skip


def is_from_provider(found: Object, provider: str) -> bool:
    """Whether the object was created for an order to that provider."""
    labels: Mapping[str, str] = found["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY) == WRITER and labels.get(PROVIDER) == provider


def read_lease_annotations(found: Object, provider: str) -> Listed:
    """Read an order from an object's annotations. Invalid values become defaults."""
    said: Mapping[str, str] = found["metadata"].get("annotations") or {}
    try:
        offer = msgspec.json.decode(said.get(OFFER, ""), type=Offer)
    except (msgspec.DecodeError, RecursionError):
        offer = Offer(provider=provider, name="", product="", memory_bytes=0)
    return Listed(
        name=found["metadata"]["name"], offer=offer, devices=max(1, whole_number(said.get(DEVICES)) or 0),
        owner=ModelName(said.get(OWNER, "")), epoch=whole_number(said.get(EPOCH)) or 0,
    )  # fmt: skip


def provider_label_value(provider: str) -> str:
    """Return a provider's name as a label value."""
    return _UNLABEL.sub("-", provider)[:63].strip("._-")


def read_offer(notes: Mapping[str, str]) -> Offer | None:
    """Read the offer from annotations; None if it is missing or invalid."""
    try:
        return msgspec.json.decode(notes.get(OFFER, ""), type=Offer)
    except (msgspec.DecodeError, RecursionError):
        return None
