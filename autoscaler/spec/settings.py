"""The Settings document: what holds for the whole installation (interfaces, section 2).

Owns the typed definition of what is in force now. One document at most; `PILOTLIGHT_...` variables override it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from autoscaler.spec.capacity import ProviderSettings
from autoscaler.spec.decode import Part
from autoscaler.spec.model import Priority, Seconds
from autoscaler.spec.pod import Pod
from autoscaler.spec.quantity import Bytes, BytesOrAuto


class DeclaredDevice(Part, frozen=True):
    """A device that no driver tells of: a machine without a GPU, or a share of it."""

    name: str
    memory_bytes: Bytes = field(name="memory")
    model: str = ""


class NodeDevice(Part, frozen=True):
    """The devices of one node, all of a kind: the name of their product, the memory of one, and how many there are."""

    model: str
    memory_bytes: Bytes = field(name="memory")
    count: Annotated[int, Meta(ge=1, le=64)] = 1


class NodeSlicing(Part, frozen=True):
    """How each device of a node is shared: its kind of Slice, and how many there are of it; or who gives parts of it
    out, and tells them: MIG, HAMi, a DRA driver, Volcano; or that KAI lets pods share it.
    """

    kind: Literal["whole", "timeslice", "mps", "mig", "hami", "dra", "volcano", "kai"]
    replicas: Annotated[int, Meta(ge=2, le=1000)] | None = None
    cut: bool = False
    """MIG: whether we may cut the GPUs of such a node anew while nobody uses it. DRA: whether who needs less than a GPU
    that nobody is on claims a part of it."""
    overcommit: bool = True
    """HAMi, Volcano: whether more of a card may be given out than it has, where they say so."""
    alternatives: Annotated[int, Meta(ge=0, le=7)] = 0
    """DRA: how many devices of the node that would do as well a claim names, should the chosen one be gone by then."""
    template: str = ""
    """HAMi: the part that each Ascend NPU of such a node is cut into; empty: an NPU is whole."""
    sharing: Literal["timeslice", "mps"] | None = None
    """DRA: how its driver lets Replicas share a whole GPU, up to its memory; if said, `replicas` of them at most."""


class NodeKind(Part, frozen=True):
    """Nodes that have these labels, and what their own do not tell of their devices. No labels: any node."""

    selector: dict[str, str]
    device: NodeDevice
    slicing: NodeSlicing | None = None
    devices_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """So many devices such a node can have with those that are attached to it; None: nothing is."""


def kind_of(labels: Mapping[str, str], declared: Sequence[NodeKind]) -> NodeKind | None:
    """What the Settings say of a node with these labels, there or not; None: nothing."""
    return next((kind for kind in declared if kind.selector.items() <= labels.items()), None)


class Cutting(Part, frozen=True):
    """The ConfigMap from which NVIDIA's mig-manager reads how nodes are cut; our part of it is written by us."""

    namespace: str = "gpu-operator"
    config_map: str = "pilotlight-mig"


class Limits(Part, frozen=True):
    """Bounds of the inference port."""

    body_bytes_max: Bytes = Bytes(64 << 20)
    header_seconds_max: Seconds = 15.0
    body_seconds_max: Seconds = 30.0
    idle_seconds_max: Seconds = 75.0
    write_stall_seconds_max: Seconds = 60.0
    connections_per_address_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 2000
    memory_bytes: BytesOrAuto = BytesOrAuto(0)


class Stream(Part, frozen=True):
    """How streams behave while they wait."""

    keepalive_seconds: Seconds = 15.0


class Tls(Part, frozen=True):
    """Certificates in PEM files, each read again when it changes.

    `cert_file` and `key_file` are shown to clients of the inference port, which speaks TLS and nothing else with them;
    `ca_file` holds the authorities that engines' certificates must come from, by default the system's.
    """

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None


class Cors(Part, frozen=True):
    """Origins of web pages that may call the inference port."""

    origins: tuple[str, ...] = ()


class Adoption(Part, frozen=True):
    """How Deployments and StatefulSets of others are served. `hold_seconds`: so long a person's own scale holds."""

    hold_seconds: Seconds = 600.0


class PriorityClass(Part, frozen=True):
    """What pods of Models from this priority on have: a PriorityClass, and on HAMi's cards a task priority."""

    least: Priority
    name: str
    hami_priority: Literal[0, 1] | None = None
    """0 goes before 1, which waits while a 0 computes on its card."""


class Price(Part, frozen=True):
    """What an hour of one Device costs that is bought in a certain way."""

    device: str
    per_hour: Annotated[float, Meta(ge=0, le=1_000_000)]
    bought: Literal["on-demand", "spot", "reserved", "committed", "flex", "fabric"] = field(
        name="class", default="on-demand"
    )
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"


class Signer(Part, frozen=True):
    """Who signs with a certificate (keyless): the subject of it, and the issuer of the login that it was given for."""

    subject: Annotated[str, Meta(min_length=1, max_length=2048)]
    issuer: Annotated[str, Meta(min_length=1, max_length=2048)]


class Signatures(Part, frozen=True):
    """What is asked of signatures of weights: nothing, to be told, or that one holds, by a key or an identity."""

    policy: Literal["off", "warn", "enforce"] = "off"
    keys: tuple[str, ...] = ()
    """PEM, or a file of it."""
    identities: tuple[Signer, ...] = ()
    trusted_root: str | None = None
    """A file: by what certificates of `identities` are checked."""


class WeightsMirror(Part, frozen=True):
    """Somebody who has what a registry has, and is asked first; never about tags."""

    host: str
    """`host` or `host:port`, and where its repositories have names of their own, `/` and what stands before theirs."""
    registry: str = ""
    """As artifacts name it; absent: every registry."""


class Weights(Part, frozen=True):
    """A node's store of weights, and the registries that they come from."""

    store_bytes_max: Bytes | None = None
    """Of all Copies together; absent: the disk, less 1 GiB."""
    mirrors: tuple[WeightsMirror, ...] = ()
    ca_file: str | None = None
    """Authorities beside the system's that registries' certificates may come from (PEM)."""
    signatures: Signatures = Signatures()
    mount: Literal["auto", "volume", "image", "hostPath"] = "auto"
    """How pods of engines see what agents pull (`autoscaler.weights.mounts`)."""


class Settings(Part, frozen=True):
    """All settings, at their defaults."""

    auth: Literal["auto", "keys", "none"] = "auto"
    tls: Tls = Tls()
    cors: Cors = Cors()
    hosts: tuple[str, ...] = ()
    """Names in Host that the inference port serves on loopback without keys, in addition to local names."""
    silent_seconds_max: Seconds = 0.0
    stream: Stream = Stream()
    devices: tuple[DeclaredDevice, ...] = ()
    nodes: tuple[NodeKind, ...] = ()
    """The first that matches a node counts. Where nodes may not be read each stands for one node."""
    cutting: Cutting = Cutting()
    limits: Limits = Limits()
    lease_seconds: Annotated[int, Meta(ge=2, le=600)] = 15
    prices: tuple[Price, ...] = ()
    """The first that names a Device counts."""
    capacity: tuple[ProviderSettings, ...] = ()
    """Where more comes from, when there is no room."""
    adoption: Adoption = Adoption()
    priority_classes: tuple[PriorityClass, ...] = ()
    weights: Weights = Weights()
    pod: Pod = Pod()
    """What is laid over all pods, under what their Model says."""

    def priority_class(self, priority: int) -> PriorityClass | None:
        """Of a Model's pods: the one that begins the highest at or below its priority."""
        reached = [one for one in self.priority_classes if one.least <= priority]
        return max(reached, key=lambda one: one.least) if reached else None
