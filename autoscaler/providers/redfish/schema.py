"""Parses documents of a Redfish service about composition: resource blocks, systems, GPUs, tasks. Pure.

Reads parts of DMTF's schemas (ResourceBlock 1.4, ComputerSystem 1.21, Processor 1.20, Task 1.7), and the mark that
names a block's order. Invalid documents raise RedfishDocumentError, which does not quote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from autoscaler.contract import ModelName

ROOT = "/redfish/v1/"
PATH_CHARACTERS_MAX = 512
MEMBERS_MAX = 1024
"""Maximum size of a collection, or of a list of links."""
MARK_CHARACTERS_MAX = 1024
_PATH = re.compile(r"/redfish/v1(/[A-Za-z0-9_~@:+()-][A-Za-z0-9._~@:+()%-]*)*/?")
_PLACE = re.compile(r"(?i:https?:)?(?://[^/?#]*)?(/[^?#]*)(\?[!-\"$-~]*)?(?:#.*)?")
_PRODUCT = re.compile(r"[^A-Za-z0-9._-]+")
_BARE = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_MIB = 1 << 20
Read = TypeVar("Read")


class RedfishDocumentError(ValueError):
    """A document is invalid; `str()` describes the expected document."""


class BlockMark(NamedTuple):
    """The order that a block belongs to, stored by the service (`ResourceBlock.Client`) or in `Notes`."""

    name: str
    owner: ModelName
    epoch: int
    devices: int
    """Number of devices of the whole order."""
    node: str
    by: str
    """The provider of the order; a mark of another provider belongs to another client of the fabric."""
    before: int = 0
    """Number of devices that the node had without ours."""
    gone: bool = False
    """It was released while the outcome of its attach was unknown. If the block is attached, we detach it."""

    def text(self) -> str:
        """The stored text: one line, also readable for people."""
        said = f"{'pilotlight-gone' if self.gone else 'pilotlight'} name={self.name} node={self.node} by={self.by}"
        return f"{said} before={self.before} devices={self.devices} epoch={self.epoch} owner={self.owner}"


class Block(NamedTuple):
    """One resource block."""

    path: str
    etag: str
    """Empty: the service has none."""
    free_for: str | None
    """Its `Client`; None: the service does not have that property."""
    state: str
    """CompositionState; empty: not reported."""
    sound: bool
    reserved: bool
    processors: tuple[str, ...]
    systems: tuple[str, ...]
    """Systems that it is attached to."""
    zones: tuple[str, ...]


class ComputerSystem(NamedTuple):
    """One composed system."""

    path: str
    etag: str
    blocks: tuple[str, ...]


class RedfishGpu(NamedTuple):
    """The GPU in a block."""

    product: str
    memory_bytes: int
    uuid: str
    watts: float


class Task(NamedTuple):
    """The state of an operation."""

    over: bool
    well: bool


class _Link(Struct):
    path: str = field(name="@odata.id")


class _Status(Struct):
    state: str | None = field(name="State", default=None)
    health: str | None = field(name="Health", default=None)


class _Composition(Struct):
    state: str | None = field(name="CompositionState", default=None)
    reserved: bool | None = field(name="Reserved", default=None)


class _BlockLinks(Struct):
    systems: list[_Link] = field(name="ComputerSystems", default=[])
    zones: list[_Link] = field(name="Zones", default=[])


class _Block(Struct):
    path: str = field(name="@odata.id")
    etag: str = field(name="@odata.etag", default="")
    client: str | UnsetType | None = field(name="Client", default=UNSET)
    status: _Status = field(name="Status", default_factory=_Status)
    composition: _Composition = field(name="CompositionStatus", default_factory=_Composition)
    processors: list[_Link] = field(name="Processors", default=[])
    links: _BlockLinks = field(name="Links", default_factory=_BlockLinks)


class _SystemLinks(Struct):
    blocks: list[_Link] = field(name="ResourceBlocks")


class _System(Struct):
    path: str = field(name="@odata.id")
    links: _SystemLinks = field(name="Links")
    etag: str = field(name="@odata.etag", default="")


class _Memory(Struct):
    mib: float | None = field(name="TotalMemorySizeMiB", default=None)


class _Chips(Struct):
    mib: float | None = field(name="CapacityMiB", default=None)
    kind: str | None = field(name="MemoryType", default=None)


class _Processor(Struct):
    kind: str | None = field(name="ProcessorType", default=None)
    model: str | None = field(name="Model", default=None)
    uuid: str | None = field(name="UUID", default=None)
    serial: str | None = field(name="SerialNumber", default=None)
    memory: _Memory = field(name="MemorySummary", default_factory=_Memory)
    chips: list[_Chips] = field(name="ProcessorMemory", default=[])
    watts: float | None = field(name="MaxTDPWatts", default=None)


class _Collection(Struct):
    members: list[dict[str, Any]] = field(name="Members")
    more: str | None = field(name="Members@odata.nextLink", default=None)


class _Task(Struct):
    state: str | None = field(name="TaskState", default=None)
    health: str | None = field(name="TaskStatus", default=None)


def decode_document(body: bytes, kind: type[Read]) -> Read:
    """Decode a document as this type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RedfishDocumentError(f"expected a document of Redfish: {kind.__name__.strip('_')}") from None


def parse_path(path: str) -> str:
    """Validate a path that a service reports: it must be below the service's root."""
    if len(path) > PATH_CHARACTERS_MAX or not _PATH.fullmatch(path):
        raise RedfishDocumentError("expected a path below /redfish/v1")
    return path.rstrip("/")


def parse_location(location: str) -> str:
    """Return the path and query of a Location header; empty if there is none.
    Its host is ignored: a service may use another name of itself, and no other host is contacted.
    """
    found = _PLACE.fullmatch(location)
    try:
        return parse_path(found[1]) + (found[2] or "") if found else ""
    except RedfishDocumentError:
        return ""


def parse_link_paths(links: list[_Link]) -> tuple[str, ...]:
    """Return the paths of all links."""
    if len(links) > MEMBERS_MAX:
        raise RedfishDocumentError(f"expected at most {MEMBERS_MAX} links")
    return tuple(parse_path(one.path) for one in links)


def find_link(body: bytes, *names: str) -> str:
    """Return the path of the link at these nested keys of a document; empty if there is none."""
    part: Any = decode_document(body, dict)
    for name in names:
        part = part.get(name) if isinstance(part, dict) else None
    path = part.get("@odata.id") if isinstance(part, dict) else None
    return parse_path(path) if isinstance(path, str) else ""


def can_expand_collections(body: bytes) -> bool:
    """Whether a service root reports that collections can be read with their members in one response."""
    part: Any = decode_document(body, dict)
    for name in ("ProtocolFeaturesSupported", "ExpandQuery", "NoLinks"):
        part = part.get(name) if isinstance(part, dict) else None
    return part is True


def parse_collection(body: bytes) -> tuple[list[str], list[bytes], str]:
    """Paths of a collection's members, the included members, and the path of the next page; empty: the last page."""
    found = decode_document(body, _Collection)
    if len(found.members) > MEMBERS_MAX:
        raise RedfishDocumentError(f"expected at most {MEMBERS_MAX} members")
    paths = [parse_path(str(one.get("@odata.id"))) for one in found.members]
    whole = [msgspec.json.encode(one) for one in found.members if len(one) > 1]
    return paths, whole, parse_path(found.more.partition("?")[0]) and found.more if found.more else ""


def parse_block(body: bytes, etag: str = "") -> Block:
    """Parse a resource block. `etag`: from the response header."""
    document = decode_document(body, _Block)
    status, composition = document.status, document.composition
    return Block(
        path=parse_path(document.path),
        etag=etag or document.etag,
        free_for=None if isinstance(document.client, UnsetType) else document.client or "",
        state=composition.state or "",
        sound=status.state in {None, "Enabled", "StandbyOffline", "StandbySpare"} and status.health in {None, "OK"}
        and composition.state not in {"Failed", "Unavailable"},
        reserved=composition.reserved or False,
        processors=parse_link_paths(document.processors),
        systems=parse_link_paths(document.links.systems),
        zones=parse_link_paths(document.links.zones),
    )  # fmt: skip


def parse_system(body: bytes, etag: str = "") -> ComputerSystem:
    """Parse a system. `etag`: from the response header."""
    document = decode_document(body, _System)
    return ComputerSystem(parse_path(document.path), etag or document.etag, parse_link_paths(document.links.blocks))


def parse_gpu(body: bytes) -> RedfishGpu | None:
    """Parse a processor; None if it is not a GPU.
    Raises RedfishDocumentError if its kind, model or memory is not reported yet.
    """
    document = decode_document(body, _Processor)
    mib = document.memory.mib or sum(one.mib or 0.0 for one in document.chips if not (one.kind or "").endswith("Cache"))
    if document.kind and document.kind not in {"GPU", "Accelerator"}:
        return None
    if not document.kind or not document.model or not 0 < mib < float(1 << 30):
        raise RedfishDocumentError("expected a processor with its type, model and memory")
    product = _PRODUCT.sub("-", document.model.strip())[:MARK_CHARACTERS_MAX]
    nvidia = product.lower().startswith("nvidia")
    uuid = _PRODUCT.sub("-", document.uuid or ("" if nvidia else document.serial) or "")[:MARK_CHARACTERS_MAX]
    if nvidia and _BARE.fullmatch(uuid):
        uuid = f"GPU-{uuid.lower()}"  # as NVIDIA's driver reports it, which never uses the serial number
    return RedfishGpu(product, int(mib) * _MIB, uuid, max(0.0, document.watts or 0.0))


def parse_task(body: bytes) -> Task:
    """Parse the state of a task; a document that is not a task is the operation's result."""
    document = decode_document(body, _Task)
    over = document.state in {None, "Completed", "Exception", "Killed", "Cancelled", "Interrupted"}
    return Task(over, document.state in {None, "Completed"} and document.health in {None, "OK", "Warning"})


def parse_mark(text: str | None) -> BlockMark | None:
    """Parse a mark; None if there is none or another program wrote it."""
    word, _, rest = (text or "").partition(" ")
    if word not in {"pilotlight", "pilotlight-gone"} or len(rest) > MARK_CHARACTERS_MAX:
        return None
    fields: Mapping[str, str] = dict(pair for one in rest.split(" ") if len(pair := one.split("=", 1)) == 2)
    numbers = [fields.get(name, "") for name in ("devices", "epoch", "before")]
    if not (fields.get("name") and fields.get("node") and fields.get("by")):
        return None
    if not all(one.isdecimal() and len(one) < 16 for one in numbers):
        return None
    return BlockMark(
        fields["name"], ModelName(fields.get("owner", "")), int(numbers[1]), int(numbers[0]), fields["node"],
        fields["by"], int(numbers[2]),
        gone=word == "pilotlight-gone",
    )  # fmt: skip
