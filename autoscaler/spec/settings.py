"""The Settings document: options of the whole installation (interfaces, section 2).

Owns the typed definition of the supported keys. There is at most one document; `PILOTLIGHT_...` variables override it.
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
    """A device that is declared by hand because no driver reports it: a machine without a GPU, or a part of it."""

    name: str
    """The name of the device."""
    memory_bytes: Bytes = field(name="memory")
    """The memory of the device."""
    model: str = ""
    """The product name, for `gpu.models` of a Model."""


class NodeDevice(Part, frozen=True):
    """The devices of one node, all of the same product."""

    model: str
    """The product name, for `gpu.models` of a Model."""
    memory_bytes: Bytes = field(name="memory")
    """The memory of one device."""
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of devices."""


class NodeSlicing(Part, frozen=True):
    """How the devices of a node are shared."""

    kind: Literal["whole", "timeslice", "mps", "mig", "hami", "dra", "volcano", "kai"]
    """The sharing mode. `whole`: one replica per device. `timeslice`, `mps`: the device plug-in offers each device
    several times. `mig`, `hami`, `dra`, `volcano`: these allocate parts of devices and report them. `kai`: the KAI
    scheduler lets pods share a device by memory.
    """
    replicas: Annotated[int, Meta(ge=2, le=1000)] | None = None
    """How many times the device plug-in offers each device (`timeslice`, `mps`, or `dra` with `sharing`)."""
    cut: bool = False
    """`mig`: whether Pilotlight may repartition the GPUs of a node while the node is idle. `dra`: whether a replica
    that needs less than a whole unused GPU claims a part of it.
    """
    overcommit: bool = True
    """`hami`, `volcano`: whether more of a card may be allocated than it has, if the scheduler reports a larger amount.
    """
    alternatives: Annotated[int, Meta(ge=0, le=7)] = 0
    """`dra`: how many alternative devices of the same node a claim lists, in case the chosen device is taken."""
    template: str = ""
    """`hami`: the template of the parts of each Ascend NPU. Empty: NPUs are not partitioned."""
    sharing: Literal["timeslice", "mps"] | None = None
    """`dra`: how the driver lets replicas share a whole GPU, up to its memory and at most `replicas` of them."""


class NodeKind(Part, frozen=True):
    """Nodes with these labels, and properties of their devices that the nodes do not report.

    Without labels: any node.
    """

    selector: dict[str, str]
    """Labels of the nodes."""
    device: NodeDevice
    """The devices of one such node."""
    slicing: NodeSlicing | None = None
    """How the devices are shared. None: as the node's labels or its device plug-in report."""
    devices_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """The maximum number of devices of such a node, including attached devices. None: an annotation of the node or its
    MachineSet sets the maximum; without it, no devices are attached.
    """


def kind_of(labels: Mapping[str, str], declared: Sequence[NodeKind]) -> NodeKind | None:
    """Return the first declared entry for a node with these labels, which may not exist yet; None: no entry matches."""
    return next((kind for kind in declared if kind.selector.items() <= labels.items()), None)


class Cutting(Part, frozen=True):
    """The ConfigMap from which NVIDIA's mig-manager reads MIG configurations.

    Pilotlight writes its own entries in it.
    """

    namespace: str = "gpu-operator"
    """The namespace of the ConfigMap."""
    config_map: str = "pilotlight-mig"
    """The name of the ConfigMap."""


class Limits(Part, frozen=True):
    """Limits of the inference port."""

    body_bytes_max: Bytes = Bytes(64 << 20)
    """The maximum size of a request body."""
    header_seconds_max: Seconds = 15.0
    """The maximum time for a request head or a TLS handshake, in seconds."""
    body_seconds_max: Seconds = 30.0
    """The maximum time without progress of a request body, in seconds."""
    body_bytes_per_second_min: Bytes = Bytes(4 << 10)
    """The minimum average rate of a request body after `bodySecondsMax`, in bytes per second."""
    idle_seconds_max: Seconds = 75.0
    """The time after which an idle connection is closed, in seconds."""
    write_stall_seconds_max: Seconds = 60.0
    """The time after which a connection is closed whose client does not read, in seconds."""
    connections_per_address_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 2000
    """The maximum number of connections of one client address to one gateway."""
    memory_bytes: BytesOrAuto = BytesOrAuto(0)
    """The memory limit of one gateway process. `auto`: the limit of its cgroup."""


class ModelList(Part, frozen=True):
    """Options of the list of Models on the inference port."""

    list_aliases: bool = False
    """Whether the list contains aliases too."""


class ExternalChecks(Part, frozen=True):
    """Addresses that external checks of request policies may use."""

    hosts: tuple[str, ...] = ()
    """Hosts in URLs of checks that may have any address, also on loopback or of a service of the cluster."""
    service_networks: tuple[str, ...] = ()
    """Networks of the cluster's services, for example `10.96.0.0/12`. Checks may not use them. Empty: in a cluster,
    checks may use no private address.
    """


class Stream(Part, frozen=True):
    """Options of streamed responses that wait."""

    keepalive_seconds: Seconds = 15.0
    """The interval of keep-alive comments in a waiting stream, in seconds. 0: none."""


class Tls(Part, frozen=True):
    """Certificates in PEM files, which are read again when they change."""

    cert_file: str | None = None
    """The certificate of the inference port and its chain. With it the port accepts only TLS."""
    key_file: str | None = None
    """The private key of `cert_file`, not encrypted."""
    ca_file: str | None = None
    """The CAs for certificates of engines. None: the system's CAs."""


class Cors(Part, frozen=True):
    """Cross-origin access from web pages to the inference port."""

    origins: tuple[str, ...] = ()
    """Allowed origins, for example `https://llm.example`; `*` allows all."""


class Adoption(Part, frozen=True):
    """Options for adopted Deployments and StatefulSets."""

    hold_seconds: Seconds = 600.0
    """How long a user's own scale of an adopted workload is respected, in seconds."""


class PriorityClass(Part, frozen=True):
    """The PriorityClass of pods of Models from a priority on, and their task priority on cards that HAMi shares."""

    least: Priority
    """The lowest Model priority that this entry applies to."""
    name: str
    """The name of the PriorityClass."""
    hami_priority: Literal[0, 1] | None = None
    """The task priority on HAMi cards. A task with 1 waits while a task with 0 computes on the same card."""


class Price(Part, frozen=True):
    """The price of one device per hour, for one purchase option."""

    device: str
    """The product: words of its name, or a glob over the whole name."""
    per_hour: Annotated[float, Meta(ge=0, le=1_000_000)]
    """The price of one whole device per hour."""
    bought: Literal["on-demand", "spot", "reserved", "committed", "flex", "fabric"] = field(
        name="class", default="on-demand"
    )
    """The purchase option."""
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"
    """The currency, for example `USD`. It must be the same in all entries."""


class Signer(Part, frozen=True):
    """An identity that signs with a short-lived certificate (keyless signing)."""

    subject: Annotated[str, Meta(min_length=1, max_length=2048)]
    """The subject of the certificate, for example an e-mail address or the URL of a workflow."""
    issuer: Annotated[str, Meta(min_length=1, max_length=2048)]
    """The URL of the OpenID Connect issuer."""


class Signatures(Part, frozen=True):
    """Whether signatures of weights are required, and which keys or identities are trusted."""

    policy: Literal["off", "warn", "enforce"] = "off"
    """`off`: signatures are not checked. `warn`: a missing or wrong signature is reported. `enforce`: weights without a
    valid signature are rejected.
    """
    keys: tuple[str, ...] = ()
    """Public keys in PEM, or absolute paths of files with one."""
    identities: tuple[Signer, ...] = ()
    """Identities for keyless signing."""
    trusted_root: str | None = None
    """The path of the file with Sigstore's certificate authorities and logs, for `identities`."""


class WeightsMirror(Part, frozen=True):
    """A mirror of a registry. It is tried first, except to resolve tags."""

    host: str
    """`host` or `host:port`, optionally followed by `/` and a prefix of the repository names."""
    registry: str = ""
    """The registry, as artifacts name it. Empty: every registry."""


class Weights(Part, frozen=True):
    """The store of weights on each node, and the registries that weights are pulled from."""

    store_bytes_max: Bytes | None = None
    """The maximum size of all copies of weights on a node. None: the size of the disk less 1 GiB."""
    mirrors: tuple[WeightsMirror, ...] = ()
    """Mirrors of registries."""
    ca_file: str | None = None
    """A file with additional CAs for the certificates of registries (PEM)."""
    signatures: Signatures = Signatures()
    """Whether signatures of weights are required."""
    mount: Literal["auto", "volume", "image", "hostPath"] = "auto"
    """How engine pods mount the weights that agents pull (`autoscaler.weights.mount_choice`)."""


class PrometheusServer(Part, frozen=True):
    """The server that answers the queries in `scaling.prometheus` of Models."""

    url: str | None = None
    """The URL of the server, without `/api/v1`. None: such queries are not possible."""


class Settings(Part, frozen=True):
    """The options of the whole installation."""

    auth: Literal["auto", "keys", "none"] = "auto"
    """Whether requests need an API key. `auto`: as soon as a Tenant exists."""
    tls: Tls = Tls()
    """Certificates of the inference port and of engines."""
    cors: Cors = Cors()
    """Cross-origin access to the inference port."""
    hosts: tuple[str, ...] = ()
    """Additional host names that the inference port accepts on loopback without API keys."""
    silent_seconds_max: Seconds = 0.0
    """The maximum time that a request without streaming waits in silence, in seconds; then it gets 503. 0: no limit."""
    stream: Stream = Stream()
    """Options of streamed responses."""
    models: ModelList = ModelList()
    """Options of the list of Models."""
    default_model: str | None = None
    """The name or alias of the Model for requests that name none. None: such requests are rejected."""
    checks: ExternalChecks = ExternalChecks()
    """Addresses that external checks of request policies may use."""
    devices: tuple[DeclaredDevice, ...] = ()
    """Devices that are declared by hand. If there are any, NVML is not used."""
    nodes: tuple[NodeKind, ...] = ()
    """Descriptions of nodes. The first entry that matches a node applies. Without permission to read nodes, each entry
    describes one node.
    """
    cutting: Cutting = Cutting()
    """The ConfigMap for MIG repartitioning."""
    limits: Limits = Limits()
    """Limits of the inference port."""
    lease_seconds: Annotated[int, Meta(ge=2, le=600)] = 15
    """The duration of the leader-election Lease, in seconds."""
    prices: tuple[Price, ...] = ()
    """Prices of devices. If several entries match a device and its purchase option, the first one applies."""
    capacity: tuple[ProviderSettings, ...] = ()
    """Providers of additional capacity."""
    adoption: Adoption = Adoption()
    """Options for adopted workloads."""
    priority_classes: tuple[PriorityClass, ...] = ()
    """PriorityClasses by Model priority."""
    weights: Weights = Weights()
    """The store of weights on each node."""
    prometheus: PrometheusServer = PrometheusServer()
    """The server that answers queries of Models."""
    pod: Pod = Pod()
    """Fields to merge into all engine pods. A Model's own fields override them."""

    def priority_class(self, priority: int) -> PriorityClass | None:
        """Return the entry with the highest `least` that is not above the priority."""
        reached = [one for one in self.priority_classes if one.least <= priority]
        return max(reached, key=lambda one: one.least) if reached else None
