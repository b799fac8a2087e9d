"""Reads a whole fabric from its Redfish service and stores marks there, or in Notes if it cannot store them. I/O.

Collections are read in one response if the service supports it. Raises NoAnswerError, StatusError or
RedfishDocumentError instead of returning a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from autoscaler.providers.kubernetes_access import gather_or_cancel
from autoscaler.providers.redfish import schema
from autoscaler.providers.redfish.client import RedfishResponse, Service, StatusError
from autoscaler.providers.redfish.planning import Fabric
from autoscaler.providers.redfish.schema import ROOT, Block, BlockMark, ComputerSystem, RedfishDocumentError, RedfishGpu

PAGES_MAX = 64
"""Maximum pages of a collection."""
NOT_THERE = frozenset({404, 410})
_EXPANDED = "?$expand=.($levels=1)"


class StoredMarks(NamedTuple):
    """Marks by block, and the version of the whole set."""

    marks: Mapping[str, str]
    version: str


class Notes(Protocol):
    """Stores the marks of a service that cannot store them, shared by all leaders."""

    def read(self) -> Awaitable[StoredMarks]:
        """Read all marks."""

    def write(self, noted: StoredMarks) -> Awaitable[bool]:
        """Replace all marks; False if they have changed since `noted.version`."""


class _Places(NamedTuple):
    blocks: str
    expands: bool


class Reading:
    """Reads and marks the blocks of one service."""

    def __init__(
        self, service: Service, systems: Mapping[str, str], by: str, notes: Notes | None = None
    ) -> None:  # fmt: skip
        """`systems`: by node, the path of its system. `by`: the provider whose marks are ours."""
        self.service, self.systems, self._by, self._notes = service, dict(systems), by, notes
        self._places: _Places | None = None
        self._gpus: dict[str, RedfishGpu | None] = {}
        """By the only processor of a block; None: it is not a GPU."""
        self._unidentified: set[str] = set()
        """Processors whose last read did not report a kind."""

    async def read(self, nodes: Iterable[str] | None = None) -> Fabric:
        """Read all blocks and the systems of these nodes, which must exist.
        The default is all nodes; then missing systems are recorded in `Fabric.missing` and do not raise.
        """
        wanted = [*self.systems] if nodes is None else [one for one in nodes if one in self.systems]
        system = self._perhaps if nodes is None else self._system
        results: list[Any] = await gather_or_cancel([self._blocks(), *map(system, wanted)])
        blocks: dict[str, Block] = results[0]
        systems: dict[str, ComputerSystem] = {
            node: one for node, one in zip(wanted, results[1:], strict=True) if one is not None
        }
        gpus = await self._read_gpus(blocks.values(), again=nodes is None)
        texts = {path: one.free_for or "" for path, one in blocks.items() if one.free_for is not None}
        if self._notes is not None:
            noted = (await self._notes.read()).marks
            texts = {**{path: text for path, text in noted.items() if path in blocks}, **texts}
        said = ((path, schema.parse_mark(text)) for path, text in texts.items())
        marks = {path: mark for path, mark in said if mark is not None and mark.by == self._by}
        keeps = self._notes is not None or any(one.free_for is not None for one in blocks.values())
        return Fabric(blocks, systems, gpus, marks, keeps, frozenset(wanted) - systems.keys())

    async def keep(self, block: Block, mark: BlockMark | None) -> None:
        """Mark a block; None: remove its mark. Raises StatusError (412) if it has changed."""
        text = "" if mark is None else mark.text()
        if block.free_for is not None:
            etag = block.etag or await self._etag(block)
            await self.service.patch(block.path, {"Client": text or None}, etag)
        elif self._notes is not None:
            noted = await self._notes.read()
            kept = {path: one for path, one in noted.marks.items() if path != block.path}
            if not await self._notes.write(StoredMarks({**kept, block.path: text} if text else kept, noted.version)):
                raise StatusError(412, "another process has changed the stored marks of the blocks")

    async def link(self, system: ComputerSystem, blocks: Iterable[str]) -> RedfishResponse:
        """Link a system to exactly these blocks."""
        body = {"Links": {"ResourceBlocks": [{"@odata.id": path} for path in blocks]}}
        return await self.service.patch(system.path, body, system.etag)

    # --- documents ----------------------------------------------------------------------------------------------------

    async def _system(self, node: str) -> ComputerSystem:
        answer = await self.service.get(self.systems[node])
        return schema.parse_system(answer.body, answer.etag)

    async def _perhaps(self, node: str) -> ComputerSystem | None:
        """Read a node's system; None if the service does not have it."""
        try:
            return await self._system(node)
        except StatusError as error:
            if error.status not in NOT_THERE:
                raise
            return None

    async def _blocks(self) -> dict[str, Block]:
        places = await self._where()
        asked = f"{places.blocks}{_EXPANDED}" if places.expands else places.blocks
        found: list[Block] = []
        paths: list[str] = []
        for _ in range(PAGES_MAX):
            page, whole, asked = schema.parse_collection((await self.service.get(asked)).body)
            found += [schema.parse_block(one) for one in whole]
            paths += page
            if len(paths) > schema.MEMBERS_MAX:
                break
            if not asked:
                seen = {one.path for one in found}
                found += await gather_or_cancel([self._block(path) for path in paths if path not in seen])
                return {one.path: one for one in found}
        raise RedfishDocumentError(f"expected at most {schema.MEMBERS_MAX} resource blocks")

    async def _block(self, path: str) -> Block:
        answer = await self.service.get(path)
        return schema.parse_block(answer.body, answer.etag)

    async def _etag(self, block: Block) -> str:
        """Read the ETag of a block, which collections may lack.
        If the document has none either, only this read protects against overwriting another client's mark.
        """
        now = await self._block(block.path)
        if now.free_for != block.free_for:
            raise StatusError(412, "another client has changed the Client property of the block")
        return now.etag

    async def _where(self) -> _Places:
        if self._places is None:
            root = (await self.service.get(ROOT)).body
            composing = schema.find_link(root, "CompositionService")
            if not composing:
                raise RedfishDocumentError("expected a service root with a CompositionService")
            blocks = schema.find_link((await self.service.get(composing)).body, "ResourceBlocks")
            if not blocks:
                raise RedfishDocumentError("expected a CompositionService with ResourceBlocks")
            self._places = _Places(blocks, schema.can_expand_collections(root))
        return self._places

    async def _read_gpus(self, blocks: Iterable[Block], *, again: bool) -> dict[str, RedfishGpu]:
        """Return the GPU of each block that has one. A processor is read once, since a block's content does not change.
        `again`: also read processors that did not report their kind. Set for full reads only; the others are frequent.
        """
        one_each = {one.path: one.processors[0] for one in blocks if len(one.processors) == 1}
        there = {*one_each.values()}
        self._unidentified = set() if again else self._unidentified & there
        self._gpus = {one: found for one, found in self._gpus.items() if one in there}
        await gather_or_cancel([self._learn(one) for one in sorted(there - self._gpus.keys() - self._unidentified)])
        return {path: found for path, one in one_each.items() if (found := self._gpus.get(one)) is not None}

    async def _learn(self, path: str) -> None:
        try:
            self._gpus[path] = schema.parse_gpu((await self.service.get(path)).body)
        except (StatusError, RedfishDocumentError):
            self._unidentified.add(path)  # not offered until its kind is known
