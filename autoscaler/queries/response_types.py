"""The types of the responses of the operations port (interfaces, section 4).

The port encodes them, commands decode them, and `autoscaler.server.openapi` describes them. The module has few imports,
so that commands start fast. Explanations and the response to `plan --live` have their types in their own modules.
"""

from __future__ import annotations

from typing import Literal

from autoscaler.agent_contract import DeviceReport, PodDevices
from autoscaler.contract import ModelName, ReplicaId, TenantName
from autoscaler.state import StateRecord
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import DeviceId, NodeId, SliceId

Verb = Literal["wake", "stop", "cordon", "uncordon", "drain"]


class Row(StateRecord, frozen=True):
    """One line of `pilotlight status`."""

    model: ModelName
    state: str
    replicas: dict[str, int]
    """State -> number of replicas."""
    waiting: int = 0
    running: int = 0
    devices: tuple[str, ...] = ()
    since_s: float | None = None
    """Seconds since the Model entered this state. None: it has never been in another state."""
    why: str = ""
    adapters: tuple[str, ...] = ()
    weights: str = ""
    """State of its pulled weights: here, absent or failed. Empty: none are pulled."""


class DemandView(StateRecord, frozen=True):
    """The requests for one Model at all gateways, as last reported."""

    waiting: int
    running: int


class ModelView(StateRecord, frozen=True):
    """One Model and its replicas."""

    name: ModelName
    engine: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    """Adapters. Clients request each as `model:adapter`."""
    memory_bytes: int
    """Device memory per replica. 0: the whole device."""
    slots: int
    replicas: dict[str, int]
    """State -> number of replicas."""
    demand: DemandView
    last_start_seconds: float | None = None
    last_start_phases: dict[str, float] = {}
    """Seconds per phase of the last observed start of an existing replica; `place.*` are parts of `place`. The status
    of a custom resource keeps them longer.
    """
    idle_seconds: float = 0.0
    """The current idle timeout: the time without a request after which the Model scales to zero, in seconds."""
    idle_auto: bool = False
    """Whether `idleSeconds` is `auto`: the timeout doubles each time a request follows soon after the scale to zero."""
    weights: str = ""
    """State of its pulled weights: here, absent or failed. Empty: none are pulled."""
    faulty: str = ""
    """The exception that quarantined the Model. Empty: it is not quarantined."""


class HeldView(StateRecord, frozen=True):
    """A replica that holds a slice."""

    id: ReplicaId
    model: ModelName
    state: ReplicaState
    memory_bytes: int
    devices: tuple[str, ...] = ()
    """The IDs of the pod's devices, as the node's agent reports them. Empty: unknown."""


class DeviceView(StateRecord, frozen=True):
    """A slice of a device, and the replicas that hold it."""

    id: SliceId
    device: DeviceId
    node: NodeId
    product: str
    memory_bytes: int
    compute_percent: int
    isolation: str
    """The isolation: none, memory or hardware."""
    shared: bool
    healthy: bool
    replicas: tuple[HeldView, ...]
    closed: str = ""
    """Why nothing new is placed on it. Empty: it is open."""
    drains: bool = False
    """Whether its replicas are being moved to other slices."""
    used_bytes: int | None = None
    """The used memory of the device, as the node's agent last measured it. None: unknown."""


class NodeView(StateRecord, frozen=True):
    """One node, and the last report of its agent."""

    name: NodeId
    cordoned: bool
    drains: bool
    age_seconds: float | None = None
    """The age of the report. None: there is no report."""
    fresh: bool = False
    """Whether the report is recent enough to be used."""
    copies: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()


class TenantView(StateRecord, frozen=True):
    """One Tenant. The keys are counted and not shown."""

    name: TenantName
    weight: float
    keys: int


class OrderResult(StateRecord, frozen=True):
    """The result of an operator order."""

    verb: Verb
    kind: Literal["model", "device", "node"]
    name: str
    says: str
    """The effect as a sentence, for people."""
    replicas: tuple[ReplicaId, ...] = ()
    """Replicas that the order stops."""


class Sentences(StateRecord, frozen=True):
    """Sentences that explain a state to people. Events are listed newest first."""

    sentences: tuple[str, ...]


class Problem(StateRecord, frozen=True):
    """The error of a request, with the valid choices."""

    error: str


class OffView(StateRecord, frozen=True):
    """Functions that are unavailable."""

    sentences: tuple[str, ...]
    """Functions that this mode of operation does not support."""
    degraded: str = ""
    """Parts that fail because of an internal error that no Model causes, with their exceptions. Empty: none."""


class DocumentsView(StateRecord, frozen=True):
    """Whether the documents in use are the latest."""

    problem: str = ""
    """Why the last reload failed, so that the previous documents stay in use. Empty: it succeeded."""
