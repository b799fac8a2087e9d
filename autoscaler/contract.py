"""The shared words on the wire between gateways and autoscalers (interfaces, section 6).

Owns every message that crosses the two: Catalogue and Routes (autoscaler to gateway, as streams of deltas) and
Report (gateway to autoscaler, levels that expire). It is the only module of the autoscaler that a gateway may import.
Messages are JSON, one per line in streams. Fields are additive: unknown ones are ignored, so versions may be mixed.

Versions compare as (epoch, version). Durations are seconds and relative ("ago" or "from now"), because the monotonic
clocks of two machines have nothing in common; who receives a message turns them into its own time.
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
"""At most one report per gateway in this time."""
BUSY_PERIOD_S = 0.050
"""At least one report in this time while anything waits, here or elsewhere: a lost edge then costs no more."""
HEARTBEAT_S = 1.0
"""A gateway with nothing to say still says so this often (never slower than 3 s)."""
REPORT_EXPIRY_S = 10.0
"""A report that is older counts for nothing: its demand is gone. The gateway is silent, not dead."""
NODE_PERIOD_S = 3.0
"""An agent says what its node has at least so often."""
NODE_EXPIRY_S = 10.0
"""A node's report that is older says nothing about now."""
LEADER_SILENT_S = 5.0
"""A gateway that heard nothing for so long falls back to the stated bound of interfaces section 6."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z"
"""Of a gateway (its pod's name, `--id`) and of a boot."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z"
NAME_CHARS_MAX = 512
"""Of a Model, a Tenant and a Replica: two names of at most 253 characters, as in `namespace/name`. The pattern is not
the reader's to check, for it takes six times as long then (`autoscaler.server.gateways`).
"""
COUNT_MAX = 1_000_000
"""Requests, holds and failures at one gateway."""
TOTAL_MAX = (1 << 53) - 1
"""Versions, sequences and sums since a boot: what JSON numbers carry exactly."""
AGE_S_MAX = 1e9
ROWS_MAX = 100_000
"""Rows of one kind in a report."""
Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Number = Annotated[int, Meta(ge=0, le=TOTAL_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Age = Annotated[float, Meta(ge=-AGE_S_MAX, le=AGE_S_MAX)]
"""Seconds; a clock that was set back makes one negative."""

DEFAULT_TENANT = TenantName("default")
"""Whose Calls they are when no key is needed."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: immutable, defaults left out on the wire."""


class QueueLimits(Message, frozen=True):
    """Bounds of one Model's queue in one gateway."""

    calls_max: int = 1000
    bytes_max: int = 256 << 20
    wait_seconds_max: float = 540.0


class Clocks(Message, frozen=True):
    """How long an engine may take. Streams: first byte, then between bytes. Others: the whole response."""

    response_seconds_max: float = 600.0
    first_byte_seconds_max: float = 300.0
    stall_seconds_max: float = 60.0


class AdapterEntry(Message, frozen=True):
    """An adapter of a Model, which clients call as `model:name`: in the Model's queue, with the Model's permission."""

    name: str
    served_name: str
    """The body's `model` is rewritten to this."""
    lora: str = ""
    """The body's `lora` is set to this, which is JSON; empty: it is not needed."""


class ModelEntry(Message, frozen=True):
    """What a gateway needs to know of a Model, whether or not anything of it runs."""

    name: ModelName
    served_name: str
    """The engine's own name for it: the body's `model` is rewritten to this."""
    aliases: tuple[str, ...] = ()
    serves_aliases: bool = False
    """Its engine knows each alias by that very name; else it is asked for `served_name` whatever the client said."""
    adapters: tuple[AdapterEntry, ...] = ()
    lora: str = ""
    """For Calls without an adapter: the body's `lora` is set to this, which is JSON; paths where a Call cannot say it
    are refused. Empty: it is not needed."""
    tenants: tuple[TenantName, ...] | None = None
    """Who may call it; None means every Tenant that names no models of its own."""
    dialects: tuple[str, ...] = ("openai",)
    unlisted: bool = False
    paused: bool = False
    slots: int = 1
    context_tokens: int | None = None
    created_unix_s: int = 0
    closes_after_stream: bool = False
    takes_cache_salt: bool = False
    """The gateway says whose prefix cache a prompt may use."""
    queue: QueueLimits = QueueLimits()
    clocks: Clocks = Clocks()


class KeyEntry(Message, frozen=True):
    """An API key as its hash: `sha256` is lower-case hex of the key's UTF-8 bytes."""

    sha256: str
    name: str = ""
    role: str = "tenant"
    expires_unix_s: float | None = None


class TenantEntry(Message, frozen=True):
    """Who may call. `models` are case-sensitive globs over Model names; None means Models that list no tenants."""

    name: TenantName
    keys: tuple[KeyEntry, ...] = ()
    models: tuple[str, ...] | None = None
    weight: float = 1.0
    priority_max: int = 0


class FrontSettings(Message, frozen=True):
    """Settings of the inference port. `keys_needed` False: every Call belongs to `default`, a key sent is ignored."""

    keys_needed: bool = False
    keepalive_seconds: float = 15.0
    silent_seconds_max: float = 0.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """Names that the host check allows in addition to local names."""


class CatalogueDelta(Message, frozen=True):
    """A change of the catalogue. `full`: forget everything before it. Entries replace those of the same name."""

    epoch: int
    version: int
    full: bool = False
    models: tuple[ModelEntry, ...] = ()
    models_gone: tuple[ModelName, ...] = ()
    tenants: tuple[TenantEntry, ...] = ()
    tenants_gone: tuple[TenantName, ...] = ()
    settings: FrontSettings | None = None


class Route(Message, frozen=True):
    """One Replica as one gateway may use it. `state` is a ReplicaState value; only "ready" takes new Calls."""

    replica: ReplicaId
    model: ModelName
    state: str
    address: str = ""
    """host:port of the engine; `https://host:port` where it speaks TLS, and `https://name@host:port` where its
    certificate is for that name. Empty until known."""
    slots: int = 1
    hold: int = 0
    """How many Calls this gateway may have on the Replica at once (interfaces section 6, Holds)."""
    granted: int = 0
    """Version of the Routes that granted `hold`. The gateway takes `hold` only when (epoch, granted) is newer than the
    grant it acts on, so that a message sent before it lowered its hold cannot raise it again. 0: this leader granted
    nothing yet (it is new, and waits for every gateway's report): the gateway keeps the hold that it has."""


class Refusal(Message, frozen=True):
    """Why a Model's Calls are refused instead of parked: a code of interfaces section 3, and when to try again."""

    code: str
    message: str
    retry_after_s: float = 1.0


class ModelRoute(Message, frozen=True):
    """What Routes say of a Model as a whole."""

    model: ModelName
    state: str = "zero"
    """For people and GET /v1/models: zero, starting, ready, draining or failed."""
    expected_wait_s: float | None = None
    """Time until a cold Call would be answered; None is unknown, and unknown never refuses."""
    capacity_wait_s: float | None = None
    """So long at least the capacity takes that it waits for: who gives up before is told. None: it waits for none."""
    phases_ms: dict[str, float] = {}
    """The last start's phases for Server-Timing, see `autoscaler.queries.start_phases`."""
    others_wait: bool = False
    """Another gateway has Calls waiting: a held Slot that is not used here is given back at once."""
    refusal: Refusal | None = None


class RoutesDelta(Message, frozen=True):
    """A change of one gateway's Routes. `full`: forget every Replica and Model before it. Sent empty as a heartbeat."""

    epoch: int
    version: int
    full: bool = False
    gateways: int = 1
    """How many gateways are known, this one included."""
    replicas: tuple[Route, ...] = ()
    replicas_gone: tuple[ReplicaId, ...] = ()
    models: tuple[ModelRoute, ...] = ()
    models_gone: tuple[ModelName, ...] = ()


class Level(Message, frozen=True):
    """Demand of one (Model, Tenant, priority) at one gateway, now. A report lists all that are not zero."""

    model: Annotated[ModelName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    tenant: Annotated[TenantName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    priority: Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)] = 0
    waiting: Count = 0
    running: Count = 0
    oldest_wait_s: Age = 0.0
    soonest_deadline_s: Age | None = None


class Total(Message, frozen=True):
    """Cumulative counts of one (Model, Tenant) since the gateway's boot. A report may leave out what did not change.

    Those of a Model that was gone from catalogue and Routes may begin at 0 again.
    """

    model: Annotated[ModelName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    tenant: Annotated[TenantName, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    admitted: Number = 0
    refused_cold: Number = 0
    """Calls refused because the Model is cold: each is demand for one start."""
    finished: Number = 0
    busy_slot_us: Number = 0
    waiting_call_us: Number = 0
    tokens_in: Number = 0
    tokens_out: Number = 0
    idle_s: Age = 0.0
    """Age of the last activity (arrival or finish) of this pair at this gateway."""
    retry_after_s: Age = 0.0
    """The longest Retry-After given to a refused_cold Call: a start nobody waits for any more is held twice as long."""


class ReplicaUse(Message, frozen=True):
    """One Replica as this gateway uses it: the hold it acts on, Calls on it, and what connections tell."""

    replica: Annotated[ReplicaId, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    hold: Count = 0
    in_use: Count = 0
    connect_failures: Count = 0
    """Consecutive failed connects; the gateway has stopped using the Replica until it is confirmed."""
    last_byte_age_s: Age | None = None
    """Since a byte of an answer last came from it to this gateway, to within about 0.2 s; None: none ever did."""


class Report(Message, frozen=True):
    """What one gateway has, as levels. It also acknowledges: `epoch` and `version` are the Routes it acts on.

    Ids and numbers are bounded: the reader raises msgspec.ValidationError that names the field.
    """

    gateway: Annotated[GatewayId, Meta(pattern=ID_PATTERN)]
    boot: Id
    """Differs at every start of the gateway: cumulative counts and holds begin anew."""
    sequence: Number
    epoch: Number = 0
    version: Number = 0
    levels: Annotated[tuple[Level, ...], Meta(max_length=ROWS_MAX)] = ()
    totals: Annotated[tuple[Total, ...], Meta(max_length=ROWS_MAX)] = ()
    replicas: Annotated[tuple[ReplicaUse, ...], Meta(max_length=ROWS_MAX)] = ()


class DeviceReport(Message, frozen=True):
    """One Device as its node's agent measures it."""

    id: str
    """The driver's own: NVML's UUID."""
    product: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    """Of the memory, by whomever."""
    healthy: bool = True


class PodDevices(Message, frozen=True):
    """A pod and its Devices: those that its kubelet gave it, which knows its name; else those that its processes hold
    memory of, which tell its uid.
    """

    devices: tuple[str, ...]
    pod_uid: str = ""
    namespace: str = ""
    name: str = ""


class WeightsReport(Message, frozen=True):
    """How far the agent is with weights that its node is to have (`autoscaler.agent_contract`)."""

    artifact: str
    pull_secret: str = ""
    replicas: tuple[ReplicaId, ...] = ()
    """For whom they came, or failed to: who is not named is not answered yet."""
    folder: str = ""
    """Of their files, below the node's store; empty: they are not there, or not given to whom asks."""
    digest: str = ""
    ggufs: tuple[str, ...] = ()
    """What in it an engine could load of GGUF files, below `folder`, at most 5; none: the folder."""
    adapters: tuple[str, ...] = ()
    """What in it could be laid over other weights: files, or folders (empty: its own), at most 5."""
    bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    failed: str = ""
    """Why they did not come."""
    allow_unsafe: bool = False
    look: bool = False
    """They were looked at, and not brought."""
    image: str | None = None
    """Of a look: `digest` is that of an image whose files are the model's, below this folder; None: of none."""
    no_image: str = ""
    """Why not."""
    header: str = ""
    """Of a look ahead of starts: what its header says of memory, as the front door writes and reads it (`bytes`: what
    the one adapter in it takes)."""
    no_header: str = ""
    """Why that could not be read."""


class PodUse(Message, frozen=True):
    """How much of a Device's memory the processes of one pod hold."""

    pod_uid: str
    device: str
    used_bytes: int


class FabricReport(Message, frozen=True):
    """How far the agent is with a Device of a fabric that comes to its node, or leaves it
    (`autoscaler.agent_contract`).
    """

    device: str
    leave: bool = False
    done: bool = False
    """The node has it, or has let go of it: it may be detached."""
    failed: bool = False
    """It came, and is not seen."""
    says: str = ""
    """What it waits for, or why it failed."""


class NodeReport(Message, frozen=True):
    """What the agent of one node sees, whole: what it leaves out is not there. It counts for NODE_EXPIRY_S."""

    node: str
    boot: Id
    """Differs at every start of the agent."""
    sequence: Number
    brings: bool = False
    """It brings weights that are wanted there."""
    epoch: Number = 0
    """The newest that it heard of, whose wants it acts on."""
    peer: str = ""
    """Where it gives them to agents of other nodes, `https://HOST:PORT`; empty: it does not."""
    copies: tuple[str, ...] = ()
    """Artifacts that are complete on the node."""
    weights: tuple[WeightsReport, ...] = ()
    images: tuple[str, ...] = ()
    """By every name that they have there."""
    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()
    uses: tuple[PodUse, ...] = ()
    """Of pods of which that can be told."""
    age_s: Age = 0.0
    """How long ago the agent began to look, when it said this."""
    attaches: bool = False
    """It takes Devices of a fabric that come to its node, and lets go of those that leave it."""
    fabric: tuple[FabricReport, ...] = ()


class NodeAnswer(Message, frozen=True):
    """The autoscaler's answer to a node's report."""

    epoch: int


class ReportAnswer(Message, frozen=True):
    """The autoscaler's answer to a report. `resend`: it does not know this boot, so send every total again."""

    epoch: int
    leads: bool = True
    resend: bool = False


def make_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Reads messages of one kind. The reader raises msgspec.DecodeError for all that is none; broken UTF-8 and endless
    nesting would be other errors.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(data: bytes) -> T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(type(error).__name__) from None

    return read
