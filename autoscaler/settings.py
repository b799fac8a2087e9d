"""The Settings document: what holds for the whole installation (interfaces, section 2).

Owns the typed definition of what is in force now. One document at most; `PILOTLIGHT_...` variables override it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from autoscaler.model import Priority, Seconds
from autoscaler.part import Part
from autoscaler.podspec import Pod
from autoscaler.quantity import Bytes, BytesOrAuto


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


class NodeKind(Part, frozen=True):
    """Nodes that have these labels, and what their own do not tell of their devices. No labels: any node."""

    selector: dict[str, str]
    device: NodeDevice


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
    """Origins that OPTIONS answers."""

    origins: tuple[str, ...] = ()


class Adoption(Part, frozen=True):
    """How Deployments and StatefulSets of others are served. `hold_seconds`: so long a person's own scale holds."""

    hold_seconds: Seconds = 600.0


class PriorityClass(Part, frozen=True):
    """The PriorityClass of pods of Models from this priority on."""

    least: Priority
    name: str


class Settings(Part, frozen=True):
    """All settings, at their defaults."""

    auth: Literal["auto", "keys", "none"] = "auto"
    tls: Tls = Tls()
    cors: Cors = Cors()
    silent_seconds_max: Seconds = 0.0
    stream: Stream = Stream()
    devices: tuple[DeclaredDevice, ...] = ()
    nodes: tuple[NodeKind, ...] = ()
    """The first that matches a node counts. Where nodes may not be read each stands for one node."""
    limits: Limits = Limits()
    lease_seconds: Annotated[int, Meta(ge=2, le=600)] = 15
    adoption: Adoption = Adoption()
    priority_classes: tuple[PriorityClass, ...] = ()
    pod: Pod = Pod()
    """What is laid over all pods, under what their Model says."""

    def priority_class(self, priority: int) -> str | None:
        """Of a Model's pods: the one that begins the highest at or below its priority."""
        reached = [one for one in self.priority_classes if one.least <= priority]
        return max(reached, key=lambda one: one.least).name if reached else None
