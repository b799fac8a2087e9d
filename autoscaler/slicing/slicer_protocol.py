"""The Slicer protocol and its records, and safe parsing of numbers and sizes from node metadata.

A Slicer reads a node as an inventory of slices, and returns what the pod of a replica must request. Each sharing
mechanism is one module of this package. All of it is pure: nodes, labels and objects are passed in as read, and data is
returned; nothing calls the API server. Anyone may have written the labels, annotations and objects, so the parsers
never raise: they return None (`parse_count`: 0) for a malformed number, or one that no device can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from autoscaler.spec.settings import NodeKind
from autoscaler.state.world import NodeId, Slice

Object = dict[str, Any]
"""A Kubernetes API object."""


class NodeFacts(NamedTuple):
    """The node data that a Slicer reads."""

    name: NodeId
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    allocatable: Mapping[str, str] = {}
    """Extended resource -> amount, as written on the node."""
    declared: NodeKind | None = None
    """The matching entry of Settings `nodes`; None if there is none."""
    plugin: Mapping[str, Any] = {}
    """The parsed device plugin configuration of the node; empty if it is unknown."""
    devices: Sequence[Object] = ()
    """The ResourceSlices (resource.k8s.io/v1) of the node."""
    kept: Sequence[str] = ()
    """Entries of `devices` to offer first: those held by claims, then those chosen by a placement."""


class SliceShare(NamedTuple):
    """A slice assigned to a replica, and how much of it."""

    slice: Slice
    memory_bytes: int
    compute_percent: int = 0


class PodFields(NamedTuple):
    """The pod fields that request the slices; merged over the fields common to all Pilotlight pods."""

    limits: Mapping[str, str] = {}
    """Extended resources of the engine's container."""
    env: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    memory_fraction: float | None = None
    """Fraction of each device's memory that the engine may use; None if no limit is passed to it."""
    scheduler: str = ""
    """Scheduler of the pod; empty for the cluster's default scheduler."""
    claims: tuple[Object, ...] = ()
    """ResourceClaims to create before the pod, each with `metadata.name`; the pod and its container reference them."""
    common: frozenset[str] = frozenset()
    """Names of the claims that other pods on the same devices share."""


class Slicer(Protocol):
    """One sharing mechanism. `kind` is its name in Settings and in `Slice.kind`."""

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the node's slices of this kind, in order; None if its devices are not shared in this way.
        General node properties (labels, taints, health) are not filled in here.
        """

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Return what the replica's pod requests; all parts are of this kind and of one node."""
