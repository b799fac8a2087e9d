"""What a kind of Slice is: a Slicer reads a node as inventory, and says what the pod of a Replica must ask for.

Owns the Protocol and its two records; each kind is one file beside this one. All of it is pure: nodes, labels and
objects come in as they were read, and what goes out is data. It knows no API server and decides nothing.

Whole numbers and sizes as nodes tell them: in labels, annotations and objects that anybody may have written.

Owns the one way from such a text to a number that may be trusted: None for what is no number, or one that no device
can have. Must not raise, whatever it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from autoscaler.spec.quantity import parse_bytes
from autoscaler.spec.settings import NodeKind
from autoscaler.state.world import NodeId, Slice

Object = dict[str, Any]
"""As the Kubernetes API has it."""


class NodeFacts(NamedTuple):
    """What of a node a Slicer reads."""

    name: NodeId
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    allocatable: Mapping[str, str] = {}
    """Extended resource -> how many, as it is written there."""
    declared: NodeKind | None = None
    """What Settings say of it; None: nothing."""
    plugin: Mapping[str, Any] = {}
    """The device plug-in's configuration for it, parsed; empty: it is not known."""
    devices: Sequence[Object] = ()
    """The ResourceSlices (resource.k8s.io/v1) that name it."""
    kept: Sequence[str] = ()
    """Their entries that are offered before others: those that claims hold, then those that were chosen."""


class SliceShare(NamedTuple):
    """One Slice that a Replica has, and how much of it."""

    slice: Slice
    memory_bytes: int
    compute_percent: int = 0


class PodFields(NamedTuple):
    """What a pod says to get its Slices; laid over what every pod of ours says."""

    limits: Mapping[str, str] = {}
    """Of its engine's container: extended resources."""
    env: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    memory_fraction: float | None = None
    """Of each Device, what its engine is told to take; None: it need not be told."""
    scheduler: str = ""
    """Who places it; empty: the cluster's own."""
    claims: tuple[Object, ...] = ()
    """ResourceClaims that are made before it, each with `metadata.name`; the pod and its container name them."""
    common: frozenset[str] = frozenset()
    """Names of those that other pods on its Devices have, too."""


class Slicer(Protocol):
    """One kind. `kind` is its name in Settings and in `Slice.kind`."""

    @property
    def kind(self) -> str:
        """See Slice.kind."""

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """The node's Slices of this kind, in order; None: its devices are not shared in this way. What is known in
        general of a node (labels, taints, health) is not filled in here.
        """

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """What the pod of that Replica asks for; all parts are of this kind and of one node."""


MIB = 1 << 20
MEMORY_MIB_MAX = 1 << 31
"""What HAMi and Kubernetes count in has 31 bits; no device has 2 PiB."""
COUNT_MAX = 1024
"""Devices of one node, and parts of one device."""
_DIGITS = re.compile(r"[0-9]{1,10}")


def parse_bounded_int(said: Any, most: int) -> int | None:
    """0 to `most`, from a text or a number; None: it is nothing of the kind."""
    if isinstance(said, str) and _DIGITS.fullmatch(said):
        said = int(said)
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= most else None


def parse_count(said: Any) -> int:
    """How many of something a node has: 0 where it does not say."""
    return parse_bounded_int(said, COUNT_MAX) or 0


def parse_mebibytes(said: Any) -> int | None:
    """A size that is told in MiB, in bytes; None: it is not told, or 0."""
    mib = parse_bounded_int(said, MEMORY_MIB_MAX)
    return mib * MIB if mib else None


def parse_size(said: Any) -> int | None:
    """A Kubernetes quantity in bytes; None: it is none that a device can have, or 0."""
    try:
        found = parse_bytes(said)
    except ValueError:
        return None
    return int(found) if 0 < found <= MEMORY_MIB_MAX * MIB else None


def in_mib(memory_bytes: int) -> int:
    """The least MiB that hold so many bytes."""
    return -(-memory_bytes // MIB)
