"""The messages between gateways and autoscalers (interfaces, section 6). `agent_contract` has those of node agents.

Owns every message of this protocol: catalogue and routes (autoscaler to gateway, as streams of deltas) and reports
(gateway to autoscaler; levels that expire). It is the only module of the autoscaler that a gateway may import. Messages
are JSON, one per line in streams. Fields are additive: unknown fields are ignored, so different versions can be mixed.

Versions compare as (epoch, version). Durations are seconds and relative ("ago" or "from now"), because the monotonic
clocks of two machines are unrelated. The receiver converts them to its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NewType, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

ModelName = NewType("ModelName", str)
TenantName = NewType("TenantName", str)
ReplicaId = NewType("ReplicaId", str)
GatewayId = NewType("GatewayId", str)

REPORT_GAP_S = 0.010
"""The minimum time between two reports of a gateway."""
BUSY_PERIOD_S = 0.050
"""The maximum time between two reports while requests wait at any gateway. It limits the cost of a lost update."""
HEARTBEAT_S = 1.0
"""The interval of reports of an idle gateway (never slower than 3 s)."""
REPORT_EXPIRY_S = 10.0
"""The age at which a report expires: its demand no longer counts. The gateway counts as silent, not as terminated."""
LEADER_SILENT_S = 5.0
"""The time without a message from the leader after which a gateway falls back to the limits of interfaces section 6."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z"
"""The form of a gateway's ID (its pod's name, or `--id`) and of a boot ID."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z"
NAME_CHARS_MAX = 512
"""The maximum length of the name of a Model, Tenant or replica: two names of at most 253 characters, as in
`namespace/name`. The decoder does not check NAME_PATTERN, because that would make it six times slower
(`autoscaler.server.gateways` does).
"""
COUNT_MAX = 1_000_000
"""The maximum of requests, allocated slots and failures at one gateway."""
TOTAL_MAX = (1 << 53) - 1
"""The maximum of versions, sequence numbers, sizes in bytes and totals since a boot. JSON numbers are exact integers up
to it.
"""
BYTES_PER_S_MAX = 1e25
"""The maximum rate of a pull: TOTAL_MAX bytes within one nanosecond, rounded up."""
AGE_S_MAX = 1e9
ROWS_MAX = 100_000
"""The maximum number of rows of one kind in a report."""
Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Number = Annotated[int, Meta(ge=0, le=TOTAL_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Age = Annotated[float, Meta(ge=-AGE_S_MAX, le=AGE_S_MAX)]
"""A relative time in seconds; it can be negative after a clock was set back."""
Weight = Annotated[float, Meta(ge=1e-6, le=1_000_000)]
BytesPerSecond = Annotated[float, Meta(ge=0, le=BYTES_PER_S_MAX)]

DEFAULT_TENANT = TenantName("default")
"""The Tenant of requests when no API key is needed."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: immutable, without default values on the wire."""


class QueueLimits(Message, frozen=True):
    """Limits of one Model's queue in one gateway."""

    calls_max: int = 1000
    bytes_max: int = 256 << 20
    wait_seconds_max: float = 540.0


class Clocks(Message, frozen=True):
    """Time limits of an engine's response. Streams: the first byte, then each pause. Others: the whole response."""

    response_seconds_max: float = 600.0
    first_byte_seconds_max: float = 590.0
    stall_seconds_max: float = 590.0


class AdapterEntry(Message, frozen=True):
    """An adapter of a Model. Clients request it as `model:name`, with the queue and the permission of the Model."""

    name: str
    served_name: str
    """The new value of `model` in the request body."""
    lora: str = ""
    """The value of `lora` in the request body, as JSON. Empty: it is not set."""


RESERVED_MEMBERS = frozenset(
    {
        "model", "messages", "prompt", "input", "file", "image", "stream", "stream_options", "cache_salt", "api_base",
        "base_url", "lora_path", "lora", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params",
        "ec_transfer_params", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "id_slot", "slot_id",
        "extra_key", "session_params", "rid",
    }
)  # fmt: skip
"""Members of request bodies that no policy may change: the content, and members that a gateway reads, sets or rejects.
"""
TOKEN_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict"})
"""Members with the maximum number of generated tokens in the APIs of engines."""
_SAME_MEMBERS = (
    TOKEN_LIMITS,
    frozenset({"n", "best_of", "n_cmpl"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
)


def same_members(name: str) -> frozenset[str]:
    """Return the members of request bodies that have the same meaning as `name`, including itself. A rule of a policy
    applies to all of them.
    """
    return next((names for names in _SAME_MEMBERS if name in names), frozenset({name}))


class PolicyCheck(Message, frozen=True):
    """An external HTTP check of requests or answers."""

    url: str
    timeout_s: float = 5.0
    fail_open: bool = False
    """Whether a failed check counts as passed."""
    rejects_streams: bool = False
    """For checks of answers: whether requests for a stream are rejected. Otherwise they are not checked."""


class PolicyEntry(Message, frozen=True):
    """The request policy of a Model or Tenant. Values of members are JSON texts."""

    defaults: dict[str, str] = {}
    forced: dict[str, str] = {}
    caps: dict[str, float] = {}
    removed: tuple[str, ...] = ()
    forced_by_name: dict[str, dict[str, str]] = {}
    """Requested name of the Model -> values that override those in `forced`."""
    request_check: PolicyCheck | None = None
    answer_check: PolicyCheck | None = None


class TurnFrame(Message, frozen=True):
    """The texts before and after the content of a message."""

    before: str
    after: str


class ChatTemplate(Message, frozen=True):
    """How the messages of a chat become one prompt."""

    roles: dict[str, TurnFrame]
    """Frames by role. Without `system`, the content of system messages is put in front of the next message of the user.
    """
    answer: str
    """The text after the last message, where the answer begins."""


class TritonEntry(Message, frozen=True):
    """The inputs of a model of Triton, whose server has no API of OpenAI: requests are translated to them."""

    inputs: dict[str, str]
    """Member of OpenAI's API, or `exclude_prompt` -> input."""
    json_input: str = ""
    """The input for the JSON text of all sampling parameters, with OpenAI's names. Empty: there is none."""
    one_stop: bool = False
    """Whether a request may have only one stop sequence: a list is an error for models without that input."""
    chat_template: ChatTemplate | None = None
    """None: the prompt is the JSON text of the messages."""
    embedding_input: str = "text_input"
    """The input for the texts of a request for embeddings."""


class ModelEntry(Message, frozen=True):
    """The properties of a Model that a gateway needs, whether or not a replica of it runs."""

    name: ModelName
    served_name: str
    """The name under which the engine serves the Model: the new value of `model` in the request body."""
    aliases: tuple[str, ...] = ()
    serves_aliases: bool = False
    """Whether the engine serves each alias under its own name. Otherwise `served_name` replaces the alias."""
    adapters: tuple[AdapterEntry, ...] = ()
    lora: str = ""
    """The value of `lora` in the body of requests without an adapter, as JSON. Requests on paths without this field are
    rejected. Empty: it is not set.
    """
    tenants: tuple[TenantName, ...] | None = None
    """Tenants that may use the Model. None: every Tenant that does not list models."""
    dialects: tuple[str, ...] = ("openai",)
    unlisted: bool = False
    paused: bool = False
    slots: int = 1
    context_tokens: int | None = None
    created_unix_s: int = 0
    closes_after_stream: bool = False
    takes_cache_salt: bool = False
    """Whether the gateway sets `cache_salt`, which separates prefix caches."""
    takes_stream_options: bool = True
    """Whether the gateway may request the token usage of streams with `stream_options`."""
    queue: QueueLimits = QueueLimits()
    clocks: Clocks = Clocks()
    policy: PolicyEntry | None = None
    triton: TritonEntry | None = None
    """None: the engine has the APIs of `dialects`."""


class KeyEntry(Message, frozen=True):
    """An API key, as the SHA-256 of its UTF-8 bytes in lower-case hex."""

    sha256: str
    name: str = ""
    role: str = "tenant"
    expires_unix_s: float | None = None


class TenantEntry(Message, frozen=True):
    """A Tenant that may send requests.
    `models` are case-sensitive globs over names of Models. None: Models that do not list Tenants.
    """

    name: TenantName
    keys: tuple[KeyEntry, ...] = ()
    models: tuple[str, ...] | None = None
    weight: Weight = 1.0
    priority_max: int = 0
    policy: PolicyEntry | None = None


class FrontSettings(Message, frozen=True):
    """Settings of the inference port. Unless `keys_needed`, keys are ignored and every request belongs to `default`."""

    keys_needed: bool = False
    keepalive_seconds: float = 15.0
    silent_seconds_max: float = 0.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """Host names that the host check accepts in addition to local names."""
    lists_aliases: bool = False
    """Whether the list of models contains aliases."""
    default_model: str = ""
    """The name of the Model for requests that name none. Empty: they are rejected."""
    check_hosts: tuple[str, ...] = ()
    """Hosts of external checks that may have any address."""
    service_networks: tuple[str, ...] = ()
    """Networks of cluster services, which external checks may not use. Empty: unknown."""


class CatalogueDelta(Message, frozen=True):
    """A change of the catalogue. `full`: it replaces everything before it. Entries replace those with the same name."""

    epoch: int
    version: int
    full: bool = False
    models: tuple[ModelEntry, ...] = ()
    models_gone: tuple[ModelName, ...] = ()
    tenants: tuple[TenantEntry, ...] = ()
    tenants_gone: tuple[TenantName, ...] = ()
    settings: FrontSettings | None = None


class Route(Message, frozen=True):
    """One replica as one gateway may use it. `state` is a ReplicaState value; only "ready" ones get new requests."""

    replica: ReplicaId
    model: ModelName
    state: str
    address: str = ""
    """host:port of the engine. `https://host:port` if it uses TLS, `https://name@host:port` if its certificate is for
    that name. Empty until known.
    """
    slots: int = 1
    hold: int = 0
    """The number of slots that this gateway may use on the replica at the same time (interfaces section 6, Holds)."""
    granted: int = 0
    """The version of the routes that granted `hold`. The gateway applies `hold` only if (epoch, granted) is newer than
    its current grant. Otherwise an older message could raise the number again after it was lowered. 0: this leader
    waits for the reports of all gateways and has granted nothing; the gateway keeps its slots.
    """


class Refusal(Message, frozen=True):
    """The reason why requests for a Model are rejected: an error code (interfaces, section 3) and a retry delay."""

    code: str
    message: str
    retry_after_s: float = 1.0
    should_retry: bool = True
    """False: the same request would fail again, so clients are asked not to retry it by themselves."""


class ModelRoute(Message, frozen=True):
    """The state of a Model in the routes."""

    model: ModelName
    state: str = "zero"
    """For people and GET /v1/models: zero, starting, ready, draining or failed."""
    expected_wait_s: float | None = None
    """The expected time until a cold request is answered, in seconds. None: unknown, requests are not rejected."""
    capacity_wait_s: float | None = None
    """The minimum time until ordered capacity arrives, in seconds. Requests with an earlier timeout are rejected at
    once. None: no capacity is ordered.
    """
    phases_ms: dict[str, float] = {}
    """The phases of the last start for Server-Timing, see `autoscaler.queries.start_phases`."""
    others_wait: bool = False
    """Whether requests wait at another gateway: unused allocated slots are then released at once."""
    refusal: Refusal | None = None


class RoutesDelta(Message, frozen=True):
    """A change of one gateway's routes. `full`: it replaces all replicas and Models. An empty delta is a heartbeat."""

    epoch: int
    version: int
    full: bool = False
    gateways: int = 1
    """The number of known gateways, including this one."""
    replicas: tuple[Route, ...] = ()
    replicas_gone: tuple[ReplicaId, ...] = ()
    models: tuple[ModelRoute, ...] = ()
    models_gone: tuple[ModelName, ...] = ()


class Level(Message, frozen=True):
    """The current demand of one (Model, Tenant, priority) at one gateway. A report lists all that are not zero."""

    model: Annotated[ModelName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    tenant: Annotated[TenantName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    priority: Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)] = 0
    waiting: Count = 0
    running: Count = 0
    oldest_wait_s: Age = 0.0
    soonest_deadline_s: Age | None = None


class Total(Message, frozen=True):
    """Cumulative counts of one (Model, Tenant) since the gateway's boot. Unchanged rows may be omitted from a report.

    The counts restart at 0 after the Model was removed from catalogue and routes.
    """

    model: Annotated[ModelName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    tenant: Annotated[TenantName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    admitted: Number = 0
    refused_cold: Number = 0
    """Requests that were rejected because the Model was cold. An increase requests one start of the Model."""
    finished: Number = 0
    busy_slot_us: Number = 0
    waiting_call_us: Number = 0
    tokens_in: Number = 0
    tokens_out: Number = 0
    idle_s: Age = 0.0
    """The time since the last arrival or completion for this pair at this gateway, in seconds."""
    retry_after_s: Age = 0.0
    """The longest Retry-After for a rejected cold request. The Model is started, and kept for twice this time after the
    rejection.
    """


class ReplicaUse(Message, frozen=True):
    """One replica as this gateway uses it: its allocated slots, running requests and the state of connections."""

    replica: Annotated[ReplicaId, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    hold: Count = 0
    in_use: Count = 0
    connect_failures: Count = 0
    """Consecutive connection failures. The gateway stops using the replica until it is confirmed."""
    last_byte_age_s: Age | None = None
    """The time since the last byte of a response from the replica to this gateway, within about 0.2 s. None: no
    byte has arrived yet.
    """
    stalled: bool = False
    """Whether several requests waited until their limit, and no byte came from the replica."""


class Report(Message, frozen=True):
    """The whole state of one gateway, not its changes. The report acknowledges routes: `epoch` and `version` are the
    routes in use.

    The sizes of IDs and numbers are limited: the decoder raises msgspec.ValidationError with the name of the field.
    """

    gateway: Annotated[GatewayId, Meta(pattern=ID_PATTERN)]
    boot: Id
    """Changes at every start of the gateway; cumulative counts and allocated slots then restart."""
    sequence: Number
    epoch: Number = 0
    version: Number = 0
    levels: Annotated[tuple[Level, ...], Meta(max_length=ROWS_MAX)] = ()
    totals: Annotated[tuple[Total, ...], Meta(max_length=ROWS_MAX)] = ()
    replicas: Annotated[tuple[ReplicaUse, ...], Meta(max_length=ROWS_MAX)] = ()


class ReportAnswer(Message, frozen=True):
    """The response to a report. `resend`: this boot is unknown, so all totals must be sent again."""

    epoch: int
    leads: bool = True
    resend: bool = False


def make_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a decoder for messages of one kind.
    It raises msgspec.DecodeError for all invalid input, including broken UTF-8 and deep nesting.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(data: bytes) -> T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(type(error).__name__) from None

    return read
