"""The Model document: a name that clients request, and what is needed to serve it (interfaces, section 2).

Owns the typed definition, from which the JSON Schema and the CustomResourceDefinition are generated. Keys that are not
supported yet are not fields here: `autoscaler.documents.parse` rejects them. YAML names are camelCase and mostly have
no unit (`gpu.memory`); Python names end in their unit (`gpu.memory_bytes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from autoscaler.contract import ModelName, TenantName
from autoscaler.spec.artifact_name import normalize_artifact
from autoscaler.spec.decode import Part
from autoscaler.spec.pod import EnvSource, Pod, Resources
from autoscaler.spec.policy import ModelPolicy
from autoscaler.spec.quantity import Bytes, BytesOrAuto

Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]
Priority = Annotated[int, Meta(ge=-1_000_000_000, le=1_000_000_000)]
Auto = Literal["auto"]
EngineName = Literal[
    "vllm", "sglang", "tensorrt-llm", "triton", "llama.cpp", "ollama", "tei", "infinity", "transformers", "speaches",
    "command",
]  # fmt: skip
TritonBackend = Literal["auto", "tensorrt-llm", "tensorrt-llm-api", "vllm"]
ChatTemplateName = Literal["chatml", "gemma", "llama3", "messages", "mistral", "phi", "plain"]

IDLE_AUTO_S = (60.0, 900.0)
"""The bounds of `idleSeconds: auto`, which is 10 times the median start time."""
RESIDENCY_AUTO_S = (1.0, 30.0)
"""The bounds of `residencySeconds: auto`, which is 3 times the last start time."""


class FixedGpu(Part, frozen=True):
    """The keys of `Gpu` whose change restarts running replicas."""

    count: Annotated[int, Meta(ge=0, le=64)] = 1
    """Devices per replica. Above 1: whole devices of one node. 0: CPU only."""
    memory_bytes: BytesOrAuto | None = field(default=None, name="memory")
    """Device memory per replica and device. None: the size of the artifact, or the whole device for an engine with a
    paged cache. `auto`: the size of the artifact for every engine. If the size of the artifact is unknown, the whole
    device is used.
    """
    compute_percent: Annotated[int, Meta(ge=1, le=100)] | None = field(default=None, name="compute")
    """The share of a device's compute that one replica claims, in percent. It is counted for placement and not
    enforced.
    """
    isolation: Literal["any", "memory", "hardware"] = "any"
    """The minimum isolation from other replicas on the device."""
    models: tuple[str, ...] = ()
    """GPU products that the Model accepts, as case-insensitive globs, best first. `|` separates globs of the same rank.
    Empty: any product.
    """


class Gpu(FixedGpu, frozen=True):
    """The devices that one replica requires."""

    elastic_percent: Annotated[int, Meta(ge=1, le=50)] | None = field(default=None, name="elastic")
    """The maximum reduction of the memory request, in percent, if a replica fits a gap that way."""
    growth_percent: Annotated[int, Meta(ge=1, le=1000)] | None = field(default=None, name="growth")
    """The maximum increase of the memory request at the start, in percent, if no other replica could use that memory.
    """
    link: Literal["any", "pcieRoot", "nvlink"] = "any"
    """The minimum link between the devices of one replica, if it has several. `any`: they are on the same node."""


class ReplicaWindow(Part, frozen=True):
    """A recurring window in which at least `min` replicas are kept. It begins at each time that `cron` matches."""

    cron: Annotated[str, Meta(max_length=100)]
    """The five-field cron expression, for example `30 8 * * mon-fri`."""
    seconds: Annotated[float, Meta(ge=60, le=2_678_400)]
    """The length of the window, in seconds."""
    min: Annotated[int, Meta(ge=1, le=1000)] = 1
    """The minimum number of replicas in the window."""
    time_zone: Annotated[str, Meta(max_length=100)] = "UTC"
    """The time zone of `cron`, for example `Europe/Berlin`."""


class ReplicaRange(Part, frozen=True):
    """The minimum and the maximum number of replicas."""

    min: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The number of replicas that are always kept."""
    max: Annotated[int, Meta(ge=1, le=1000)] = 1
    """The maximum number of replicas."""
    schedule: Annotated[tuple[ReplicaWindow, ...], Meta(max_length=16)] = ()
    """Windows with a higher minimum. If several windows apply, the highest minimum counts."""


SignalName = Literal["kvCachePercent", "tokensPerSecond", "engineQueue", "prometheus"]
"""A scaling signal, by its key in `spec.scaling`."""


class PrometheusQuery(Part, frozen=True):
    """A query whose result scales the Model."""

    query: Annotated[str, Meta(min_length=1, max_length=4096)]
    """The query in PromQL. Its result must be one number: the total of the Model."""
    target: Annotated[float, Meta(gt=0, le=1e15)]
    """The part of the total that one replica can serve."""


class Scaling(Part, frozen=True):
    """Signals that start replicas in addition to queued and running requests. Each target is per replica."""

    kv_cache_percent: Annotated[float, Meta(ge=1, le=100)] | None = None
    """The mean use of the KV cache, in percent."""
    tokens_per_second: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Generated tokens per second."""
    engine_queue: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Requests that wait inside the engine, after the gateway has forwarded them."""
    prometheus: PrometheusQuery | None = None
    """A query at the server in Settings `prometheus.url`."""

    def targets(self) -> dict[SignalName, float]:
        """Return the target per replica of each signal that is set."""
        found: dict[SignalName, float | None] = {
            "kvCachePercent": self.kv_cache_percent,
            "tokensPerSecond": self.tokens_per_second,
            "engineQueue": self.engine_queue,
            "prometheus": None if self.prometheus is None else self.prometheus.target,
        }
        return {name: target for name, target in found.items() if target is not None}


NO_SCALING = Scaling()


class StartLimits(Part, frozen=True):
    """The limits of a start. All attempts share `secondsMax`, which counts from the first start of a process."""

    seconds_max: Annotated[float, Meta(gt=0, le=86_400)] = 900.0
    """The maximum time of a start, in seconds, including its retries."""
    retries: Annotated[int, Meta(ge=0, le=10)] = 3
    """Attempts after the first one, after pauses of 0 s, 0.5 s and then 1 s."""
    exclusive_seconds: Seconds = 120.0
    """How long a start can block other starts on its device after its memory last grew, in seconds."""


class Queue(Part, frozen=True):
    """The limits of the Model's queue in each gateway."""

    calls_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    """The maximum number of waiting requests."""
    bytes_max: Bytes = Bytes(256 << 20)
    """The maximum size of the waiting request bodies."""
    wait_seconds_max: Seconds = 540.0
    """The maximum time that a request waits for a slot, in seconds."""


class Rollout(Part, frozen=True):
    """How replicas of a changed spec replace the old ones."""

    surge: Annotated[int, Meta(ge=0, le=100)] = 1
    """The number of new replicas that may start while the old ones still run, if devices are free. 0: an old replica
    always drains first.
    """


class EngineTls(Part, frozen=True):
    """TLS of the engine. The gateway verifies the engine's certificate."""

    server_name: str | None = None
    """The name in the engine's certificate. None: the address that the engine listens on."""


class Triton(Part, frozen=True):
    """The inputs of a model of Triton, to which the gateway translates requests."""

    backend: TritonBackend = "auto"
    """The backend of the model. `auto`: the inputs of TensorRT-LLM and vLLM together, and at most one stop sequence."""
    chat_template: ChatTemplateName = "chatml"
    """The template that makes one prompt of the messages of a chat. `messages`: the prompt is their JSON text."""
    embedding_input: Annotated[str, Meta(min_length=1, max_length=200)] = "text_input"
    """The name of the input for the texts of a request for embeddings."""


class Adapter(Part, frozen=True):
    """Weights that are applied on top of the Model's own weights (LoRA). Clients request an adapter as `model:name`."""

    name: str
    """The name of the adapter: 1 to 63 letters, digits, `.`, `_` or `-`."""
    artifact: str
    """The weights of the adapter, for example `file:///models/support.gguf`."""


class ModelSpec(Part, frozen=True):
    """The spec of a Model. Defaults are listed in docs/reference/configuration.md."""

    engine: EngineName
    """The engine that serves the Model."""
    artifact: str | None = None
    """The weights, for example `file:///models/a.gguf`. All engines but ollama, speaches and command require one."""
    allow_unsafe: bool = False
    """Whether code and pickled weights are accepted. Both may run programs when they are loaded."""
    aliases: tuple[str, ...] = ()
    """Additional names of the Model."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that are loaded with the Model, at most 64."""
    image: str = ""
    """The container image of the engine. Only the Kubernetes driver uses it. The same applies to `resources`,
    `pull_secret` and `pod`.
    """
    command: tuple[str, ...] = ()
    """The command line of engine `command`. One word must contain `{port}`."""
    args: tuple[str, ...] = ()
    """Arguments to append to the engine's command line."""
    env: dict[str, str | EnvSource] = {}
    """Variables to add to the engine's environment."""
    readiness_path: str | None = None
    """The HTTP path that returns 200 if the engine accepts requests. None: the engine's default."""
    tls: EngineTls | None = None
    """TLS of the engine. None: the engine uses plain HTTP."""
    triton: Triton | None = None
    """The inputs of the model of engine `triton`. None: the defaults."""
    context_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None
    """The context length of one slot, in tokens. None: the engine's default."""
    gpu: Gpu = Gpu()
    """The devices that one replica requires."""
    resources: Resources = Resources()
    """Resource requests and limits of the pod, without GPUs."""
    replicas: ReplicaRange = ReplicaRange()
    """The minimum and the maximum number of replicas."""
    scaling: Scaling = NO_SCALING
    """Signals that start replicas in addition to queued and running requests."""
    slots: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Concurrent requests per replica. None: the engine's default."""
    idle_seconds: Seconds | Auto = "auto"
    """The time without a request after which the Model scales to zero, in seconds. `auto`: 10 times the median start
    time, from 60 to 900 seconds.
    """
    residency_seconds: Seconds | Auto = "auto"
    """The time after it becomes ready in which a replica is not evicted for another Model, in seconds. `auto`: 3 times
    the last start time, from 1 to 30 seconds.
    """
    start: StartLimits = StartLimits()
    """The limits of a start."""
    queue: Queue = Queue()
    """The limits of the queue in each gateway."""
    response_seconds_max: Seconds = 600.0
    """The maximum time of a response that is not streamed, in seconds."""
    first_byte_seconds_max: Seconds = 590.0
    """The maximum time until the first byte of a streamed response, in seconds."""
    stall_seconds_max: Seconds = 590.0
    """The maximum pause within a streamed response, in seconds."""
    drain_seconds_max: Seconds = 600.0
    """The maximum time that a replica drains, in seconds. It is then stopped even if requests still run."""
    priority: Priority = 0
    """The priority. A Model can evict replicas of Models with a lower priority."""
    pull_secret: str | None = None
    """The Secret for pulling the image, and the weights of an `oci://` artifact."""
    rollout: Rollout = Rollout()
    """How replicas of a changed spec replace the old ones."""
    tenants: tuple[TenantName, ...] | None = None
    """The Tenants that may use the Model. None: every Tenant. In a cluster this also limits which Models share a GPU.
    """
    paused: bool = False
    """Whether the Model is stopped. Requests get 503."""
    unlisted: bool = False
    """Whether `GET /v1/models` omits the Model. Clients can still use it."""
    policy: ModelPolicy = ModelPolicy()
    """Changes to the members of request bodies, and external checks."""
    installation: str | None = None
    """The installation (NAMESPACE/LEASE) that serves the Model. None: the installation that holds the Lease of the
    namespace.
    """
    spread: str | None = None
    """A node label. If possible, replicas are placed on nodes with different values of it."""
    near: str | None = None
    """A node label. If possible, replicas are placed on nodes with the same value of it."""
    pod: Pod = Pod()
    """Fields to merge into the pods of the Model."""


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """The Deployment or StatefulSet whose pods are the replicas of an adopted Model."""

    kind: Literal["Deployment", "StatefulSet"]
    namespace: str
    name: str
    toggled: bool = False
    """Whether another autoscaler sets the number of replicas. Pilotlight then decides only between
    zero and not zero.
    """
    held: bool = False
    """Whether a user has scaled the workload directly; that scale applies for a limited time. Then `replicas` (or
    `paused`, if the user scaled to zero) comes from that scale and not from a document.
    """
    reason: str = "Adopted"
    """The reason of the current scale, in one word, as in the Event on the workload."""
    message: str = ""
    """The same reason, as a sentence."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a replica's KV cache on its device, as derived from the artifact."""

    total_bytes: int
    """The size of the whole cache of one replica."""
    slot_bytes: int
    """The reduction for one slot less."""
    token_bytes: int
    context_tokens: int
    """The model's own context length."""


ADOPTED_HASH = "adopted"
"""The spec hash of every adopted replica: its owner defines the pod template."""


class Model(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A Model as the autoscaler uses it: the document, completed with properties of the artifact."""

    name: ModelName
    spec: ModelSpec
    namespace: str = "default"
    uid: str = ""
    """The UID of its custom resource. Empty: it has none."""
    memory_bytes: int = 0
    """The device memory that one replica requires: the spec's value, else the measured size of the artifact. 0: the
    whole device.
    """
    estimated_bytes: int = 0
    """The estimate from the artifact, before any measurement. 0: there is no estimate, or the
    document sets the memory.
    """
    unread_s: float | None = None
    """The time (the loop's clock) since when an agent has been assigned to read the memory requirements from the
    artifact. None: no agent is assigned, or the result is known.
    """
    cache: Cache | None = None
    """The cache of a llama.cpp Model whose size can vary. None: it could not be determined."""
    slots: int = 1
    """Concurrent requests per replica: the spec's value, else the engine's default."""
    served_name: str = ""
    """The name under which the engine serves the Model, if it is not the Model's name: an older Model has that name
    (`autoscaler.spec.document_names`).
    """
    created_unix_s: int = 0
    order: int = 0
    """The position among all documents, in the order in which they were read."""
    adopted: Adopted | None = None
    """None: the driver starts the replicas itself."""

    def served(self) -> str:
        """Return the name under which the engine serves the Model."""
        return self.served_name or self.name

    def names(self) -> Iterator[str]:
        """Yield the names that clients can request: the name and the aliases."""
        yield self.name
        yield from self.spec.aliases

    def artifacts(self) -> Iterator[str]:
        """Yield the canonical artifact names: the Model's own (empty if it has none), then those of its adapters."""
        yield normalize_artifact(self.spec.artifact or "")
        for adapter in self.spec.adapters:
            yield normalize_artifact(adapter.artifact)

    def adapter_names(self) -> Iterator[str]:
        """Yield the names that clients can request for the adapters."""
        for adapter in self.spec.adapters:
            for name in self.names():
                yield f"{name}:{adapter.name}"

    def spec_hash(self) -> str:
        """Return eight hex digits over everything whose change restarts running replicas."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        """Computed once per document: every plan needs the hash of every running Model."""
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
            int(s.gpu.memory_bytes or 0),  # as configured: a new estimate or measurement must not restart replicas
            self.slots,
            s.readiness_path,
            *(() if s.tls is None else (s.tls,)),
            *((s.adapters,) if s.adapters else ()),
            *_unusual(s),
        )
        return hashlib.sha256(msgspec.json.encode(parts, enc_hook=int, order="deterministic")).hexdigest()[:8]

    def idle_s(self, median_start_s: float | None) -> float:
        """Return the idle timeout before a scale to zero, in seconds. `auto` is 60 until start times are known."""
        if self.spec.idle_seconds != "auto":
            return float(self.spec.idle_seconds)
        low, high = IDLE_AUTO_S
        return min(max(10.0 * (median_start_s or 0.0), low), high)

    def residency_s(self, last_start_s: float | None) -> float:
        """Return how long after becoming ready a replica is protected from eviction for another Model, in seconds."""
        if self.spec.residency_seconds != "auto":
            return float(self.spec.residency_seconds)
        low, high = RESIDENCY_AUTO_S
        return min(max(3.0 * (last_start_s or 0.0), low), high)


def _unusual(spec: ModelSpec) -> Iterator[tuple[str, object]]:
    """Yield rarely used keys, mostly of the pod.

    Keys at their defaults are left out, so that they do not change the hashes of existing Models.
    """
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
