"""The Model document: a name clients may call, and what is needed to serve it (interfaces, section 2).

Owns the typed definition, from which JSON Schema (and later the CRD) is generated. Keys that are not in force yet are
not fields here: `autoscaler.documents.load` refuses them and says so. YAML names are camelCase and mostly carry no unit
(`gpu.memory`); Python names end in their unit (`gpu.memory_bytes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from autoscaler.contract import ModelName, TenantName
from autoscaler.spec.artifact import normalize_artifact
from autoscaler.spec.decode import Part
from autoscaler.spec.pod import EnvSource, Pod, Resources
from autoscaler.spec.quantity import Bytes, BytesOrAuto

Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]
Priority = Annotated[int, Meta(ge=-1_000_000_000, le=1_000_000_000)]
Auto = Literal["auto"]
EngineName = Literal["vllm", "sglang", "llama.cpp", "ollama", "command"]

IDLE_AUTO_S = (60.0, 900.0)
"""Bounds of `idleSeconds: auto` = 10 x median start, clamped."""
RESIDENCY_AUTO_S = (1.0, 30.0)
"""Bounds of `residencySeconds: auto` = 3 x last start, clamped."""


class FixedGpu(Part, frozen=True):
    """Of `Gpu` that for which a running Replica would have to be restarted."""

    count: Annotated[int, Meta(ge=0, le=64)] = 1
    memory_bytes: BytesOrAuto | None = field(default=None, name="memory")
    compute_percent: Annotated[int, Meta(ge=1, le=100)] | None = field(default=None, name="compute")
    isolation: Literal["any", "memory", "hardware"] = "any"
    models: tuple[str, ...] = ()


class Gpu(FixedGpu, frozen=True):
    """What one Replica needs of a device. `count` 0: CPU only. Absent memory: the artifact's, but all of it for an
    engine that pages its cache; `auto`: the artifact's for every engine; where that says nothing, all of it.
    `elastic`: with how many percent less memory it makes do where that fills a hole. `growth`: how many percent more it
    is started with where nobody else could use that. `link`: what joins all of several devices, at least; `any`: that
    they are of one node.
    """

    elastic_percent: Annotated[int, Meta(ge=1, le=50)] | None = field(default=None, name="elastic")
    growth_percent: Annotated[int, Meta(ge=1, le=1000)] | None = field(default=None, name="growth")
    link: Literal["any", "pcieRoot", "nvlink"] = "any"


class ReplicaWindow(Part, frozen=True):
    """At each moment that `cron` names in its time zone begins a window in which no fewer Replicas are kept."""

    cron: Annotated[str, Meta(max_length=100)]
    seconds: Annotated[float, Meta(ge=60, le=2_678_400)]
    min: Annotated[int, Meta(ge=1, le=1000)] = 1
    time_zone: Annotated[str, Meta(max_length=100)] = "UTC"


class ReplicaRange(Part, frozen=True):
    """How few and how many Replicas there may be."""

    min: Annotated[int, Meta(ge=0, le=1000)] = 0
    max: Annotated[int, Meta(ge=1, le=1000)] = 1
    schedule: Annotated[tuple[ReplicaWindow, ...], Meta(max_length=16)] = ()


class Start(Part, frozen=True):
    """Bounds of a start, counted from the first process start: tries after 0, 0.5 and 1 s within it."""

    seconds_max: Annotated[float, Meta(gt=0, le=86_400)] = 900.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 3
    exclusive_seconds: Seconds = 120.0


class Queue(Part, frozen=True):
    """Bounds of one gateway's queue."""

    calls_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    bytes_max: Bytes = Bytes(256 << 20)
    wait_seconds_max: Seconds = 540.0


class Rollout(Part, frozen=True):
    """How a changed spec replaces the old one. `surge`: new Replicas that may start beside the old ones at once, where
    Slices are free; 0: an old one always drains first.
    """

    surge: Annotated[int, Meta(ge=0, le=100)] = 1


class EngineTls(Part, frozen=True):
    """The engine speaks TLS. Its certificate must be for `server_name`; absent: for the address that it listens on."""

    server_name: str | None = None


class Adapter(Part, frozen=True):
    """Weights that are laid over the Model's own; clients call it as `model:name`."""

    name: str
    artifact: str


class ModelSpec(Part, frozen=True):
    """The spec of a Model; every field has the default that docs/reference/configuration.md states."""

    engine: EngineName
    artifact: str | None = None
    allow_unsafe: bool = False
    """Code and pickled weights, which may run programs when they are loaded, are taken, too."""
    aliases: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    image: str = ""
    """Of its pods; only the Kubernetes driver asks for it, as for `resources`, `pull_secret` and `pod`."""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str | EnvSource] = {}
    readiness_path: str | None = None
    tls: EngineTls | None = None
    """None: the engine speaks plain HTTP."""
    context_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None
    gpu: Gpu = Gpu()
    resources: Resources = Resources()
    replicas: ReplicaRange = ReplicaRange()
    slots: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Calls at once on one Replica; absent = the engine's default."""
    idle_seconds: Seconds | Auto = "auto"
    residency_seconds: Seconds | Auto = "auto"
    start: Start = Start()
    queue: Queue = Queue()
    response_seconds_max: Seconds = 600.0
    first_byte_seconds_max: Seconds = 300.0
    stall_seconds_max: Seconds = 60.0
    drain_seconds_max: Seconds = 600.0
    priority: Priority = 0
    pull_secret: str | None = None
    """Of its image."""
    rollout: Rollout = Rollout()
    tenants: tuple[TenantName, ...] | None = None
    paused: bool = False
    unlisted: bool = False
    installation: str | None = None
    """The installation (NAMESPACE/LEASE) that serves the Model; None: the holder of the Lease of its namespace."""
    spread: str | None = None
    """A label of nodes: its Replicas are put under different values of it where they may as well be; None: anywhere."""
    near: str | None = None
    """A label of nodes: its Replicas are put under one value of it where they may as well be; None: anywhere."""
    pod: Pod = Pod()


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """The Deployment or StatefulSet whose pods are a Model's Replicas, where they are not ours; and who scales it."""

    kind: Literal["Deployment", "StatefulSet"]
    namespace: str
    name: str
    toggled: bool = False
    """Another autoscaler scales it: only zero or not zero is decided here."""
    held: bool = False
    """A person's scale holds for a while: `replicas`, or `paused` at zero, say it, and no document does."""
    reason: str = "Adopted"
    """Why it is scaled as it is, in one word, as an Event on it has it; and in a sentence:"""
    message: str = ""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """What a Replica's cache takes of its Device, as the artifact says."""

    total_bytes: int
    """Of all of the Replica."""
    slot_bytes: int
    """One Slot less takes so much less, and one token of context of a Slot:"""
    token_bytes: int
    context_tokens: int
    """The model's own."""


ADOPTED_HASH = "adopted"
"""Stands for the spec of every Replica that was adopted: its pods' template is its owner's."""


class Model(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A Model as the autoscaler uses it: the document with what the front door learnt from the artifact filled in."""

    name: ModelName
    spec: ModelSpec
    namespace: str = "default"
    uid: str = ""
    """Of its custom resource; empty: it has none."""
    memory_bytes: int = 0
    """Memory one Replica needs of a device: the spec's, else the artifact's as measured; 0 means the whole device."""
    estimated_bytes: int = 0
    """What was worked out of the artifact, before anything was measured; 0: nothing was, or the document decides."""
    unread_s: float | None = None
    """Since when an agent is to read of its artifact what it takes (the loop's clock); None: none is, or it did."""
    cache: Cache | None = None
    """Of one of llama.cpp that may have less or more; None: nobody could read it."""
    slots: int = 1
    """Calls at once on one Replica: the spec's, else the engine's default."""
    served_name: str = ""
    """What its engine serves it as, where that is not its name: an older Model has that name
    (`autoscaler.spec.names`).
    """
    created_unix_s: int = 0
    order: int = 0
    """Position among all documents, as they were read."""
    adopted: Adopted | None = None
    """None: its Replicas are started by the driver itself."""

    def served(self) -> str:
        """What its engine serves it as."""
        return self.served_name or self.name

    def names(self) -> Iterator[str]:
        """What clients may call it by: its name and aliases."""
        yield self.name
        yield from self.spec.aliases

    def artifacts(self) -> Iterator[str]:
        """By the names that they are known by: its own weights (empty: it has none), and its adapters'."""
        yield normalize_artifact(self.spec.artifact or "")
        for adapter in self.spec.adapters:
            yield normalize_artifact(adapter.artifact)

    def adapter_names(self) -> Iterator[str]:
        """What clients may call its adapters by."""
        for adapter in self.spec.adapters:
            for name in self.names():
                yield f"{name}:{adapter.name}"

    def spec_hash(self) -> str:
        """Eight hex digits over everything that a running Replica would have to be restarted for."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        """Made once per document: every plan asks for the hash of every Model that runs."""
        if self.adopted is not None:
            return ADOPTED_HASH
        s = self.spec
        parts = (
            self.served(),
            s.engine,
            s.artifact,
            s.command,
            s.args,
            sorted(s.env.items()),
            s.context_tokens,
            FixedGpu(**{name: getattr(s.gpu, name) for name in FixedGpu.__struct_fields__}),
            int(s.gpu.memory_bytes or 0),  # as asked: another estimate, or a measurement, starts nothing anew
            self.slots,
            s.readiness_path,
            *(() if s.tls is None else (s.tls,)),
            *((s.adapters,) if s.adapters else ()),
            *_unusual(s),
        )
        return hashlib.sha256(msgspec.json.encode(parts, enc_hook=int, order="deterministic")).hexdigest()[:8]

    def idle_s(self, median_start_s: float | None) -> float:
        """Seconds without a Call after which it may go to zero; `auto` starts at 60 until starts are known."""
        if self.spec.idle_seconds != "auto":
            return float(self.spec.idle_seconds)
        low, high = IDLE_AUTO_S
        return min(max(10.0 * (median_start_s or 0.0), low), high)

    def residency_s(self, last_start_s: float | None) -> float:
        """Seconds after getting ready in which it is not evicted for another Model."""
        if self.spec.residency_seconds != "auto":
            return float(self.spec.residency_seconds)
        low, high = RESIDENCY_AUTO_S
        return min(max(3.0 * (last_start_s or 0.0), low), high)


def _unusual(spec: ModelSpec) -> Iterator[tuple[str, object]]:
    """What few Models tell, most of it of pods: hashes of Models that say nothing of it are as they were."""
    if spec.allow_unsafe:
        yield "allowUnsafe", True
    if spec.image:
        yield "image", spec.image
    if spec.pull_secret is not None:
        yield "pullSecret", spec.pull_secret
    if spec.resources != Resources():
        yield "resources", spec.resources
    if spec.pod != Pod():
        yield "pod", spec.pod
    if spec.gpu.link != "any":
        yield "link", spec.gpu.link
