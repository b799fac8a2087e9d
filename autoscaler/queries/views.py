"""What the operations port sends, as types (interfaces, section 4).

The port encodes them, commands decode them, and `autoscaler.server.openapi` describes them. The module imports little,
so that commands start fast. Explanations and the answer to `plan --live` have types of their own modules.
"""

from __future__ import annotations

from typing import Literal

from autoscaler.contract import DeviceReport, ModelName, PodDevices, ReplicaId, TenantName
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import DeviceId, Fact, NodeId, SliceId

Verb = Literal["wake", "stop", "cordon", "uncordon", "drain"]


class Row(Fact, frozen=True):
    """One line of `pilotlight status`."""

    model: ModelName
    state: str
    replicas: dict[str, int]
    """State -> how many."""
    waiting: int = 0
    running: int = 0
    devices: tuple[str, ...] = ()
    since_s: float | None = None
    """Seconds since it is in this state; None: it never was in another."""
    why: str = ""
    adapters: tuple[str, ...] = ()
    weights: str = ""
    """Those that come from elsewhere: here, absent or failed (`weightwords.word`); empty: none do."""


class DemandView(Fact, frozen=True):
    """Calls of one Model at all gateways, as last reported."""

    waiting: int
    running: int


class ModelView(Fact, frozen=True):
    """One Model and what runs of it."""

    name: ModelName
    engine: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    """Each is called as `model:adapter`."""
    memory_bytes: int
    """Of a device, for one Replica; 0 is the whole device."""
    slots: int
    replicas: dict[str, int]
    """State -> how many."""
    demand: DemandView
    last_start_seconds: float | None = None
    last_start_phases: dict[str, float] = {}
    """Seconds of each phase of the start that ended last, of those that are there and were seen to start; `place.*` are
    parts of `place`. A status keeps it longer."""
    idle_seconds: float = 0.0
    """Without a Call for so long it goes to zero, as it is now."""
    idle_auto: bool = False
    """`idleSeconds: auto`: it is doubled each time the Model is called soon after it went to zero."""
    weights: str = ""
    """Those that come from elsewhere: here, absent or failed, as a row of the status says it; empty: none do."""
    faulty: str = ""
    """The exception that quarantined it; empty: it is not quarantined."""


class HeldView(Fact, frozen=True):
    """A Replica that holds a Slice."""

    id: ReplicaId
    model: ModelName
    state: ReplicaState
    memory_bytes: int
    devices: tuple[str, ...] = ()
    """Which Devices of the node its pod has, by their own ids, as its agent says; empty: nobody says so."""


class DeviceView(Fact, frozen=True):
    """A Slice of a Device and who holds it."""

    id: SliceId
    device: DeviceId
    node: NodeId
    product: str
    memory_bytes: int
    compute_percent: int
    isolation: str
    """none, memory or hardware."""
    shared: bool
    healthy: bool
    replicas: tuple[HeldView, ...]
    closed: str = ""
    """Why nothing new is put there; empty: it is open."""
    drains: bool = False
    """What is there moves away."""
    used_bytes: int | None = None
    """Of its Device's memory, as its node's agent measured it lately; None: no agent says so."""


class NodeView(Fact, frozen=True):
    """One node, and what its agent said last."""

    name: NodeId
    cordoned: bool
    drains: bool
    age_seconds: float | None = None
    """Of the report; None: there was none."""
    fresh: bool = False
    """The report is recent enough to count."""
    copies: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()


class TenantView(Fact, frozen=True):
    """One Tenant. Of its keys only the number is told."""

    name: TenantName
    weight: float
    keys: int


class Told(Fact, frozen=True):
    """What will happen."""

    verb: Verb
    kind: Literal["model", "device", "node"]
    name: str
    says: str
    """In a sentence, for people."""
    replicas: tuple[ReplicaId, ...] = ()
    """Replicas that go because of it."""


class Sentences(Fact, frozen=True):
    """An explanation for people, one sentence each; of what happened the newest first."""

    sentences: tuple[str, ...]


class Problem(Fact, frozen=True):
    """What was wrong with a request, and the valid choices."""

    error: str


class OffView(Fact, frozen=True):
    """What does not work."""

    sentences: tuple[str, ...]
    """What does not work in this mode."""
    degraded: str = ""
    """Parts in which an internal error occurs that no Model explains, each with its exception; empty: none."""


class DocumentsView(Fact, frozen=True):
    """Whether the documents in force are the latest."""

    problem: str = ""
    """Why the last reload failed, so that the last valid documents stay in force; empty: it succeeded."""
