"""Keeps a node's weights: fetches and holds what autoscalers request, and reports the progress. I/O.

Acts on the requests of the newest epoch received, also while no autoscaler is reachable. When a further replica
waits, the registry authorizes access again, as at every start. Weights that a replica waits for or uses are held, so
that they are not evicted. Weights no longer requested are released after a delay, since leadership may change.
`pilotlight.agent.weights.fetch` does the fetching.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from artifacts.digest import BadDigestError
from artifacts.disk.thread_wait import run_in_thread
from artifacts.fetch import fetch
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Came, Registries
from artifacts.reference import BadReferenceError
from artifacts.registry_errors import PolicyError
from artifacts.store.copies import Copy
from artifacts.store.copy_record import Record, load_current_record
from artifacts.store.layout import StoreError
from artifacts.store.store import Store
from autoscaler.agent_contract import (
    FabricWant,
    ImageWant,
    NodeWants,
    WeightsReport,
    WeightsRequest,
    read_weights_request,
)
from autoscaler.contract import ReplicaId, make_decoder
from autoscaler.drivers.resilient_tasks import start_contained_task
from autoscaler.exception_handling import Failure, attempt, describe_error, reraise_memory_error
from autoscaler.spec.settings import Weights
from pilotlight.agent.weights.fetch import Fetching, SecretOf, build_fetch_access
from pilotlight.agent.weights.inspect import list_loadable_files
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.agent.weights.report_limits import REASON_CHARS_MAX, RowLimit, limit_copies, limit_headers
from pilotlight.models.page_cache import list_files, read_ahead
from pilotlight.models.weights_fetch import HEADERS

LINGER_S = 60.0
"""How long weights are held after they are no longer requested."""
LOOK_EVERY_S = 30.0
"""Interval at which the store is checked for copies removed by others."""
TELL_EVERY_S = 1.0
COPIES_MAX = 500
"""Maximum number of copies reported, most recently used first."""
LOOK_AGAIN_S = 60.0
FILES = "files"

log = logging.getLogger("pilotlight.agent.weights")
_decode = make_decoder(NodeWants)


def report_fault(model: None, what: str, reason: str) -> None:
    """Log an exception that was caught, as `autoscaler.controller.loop.report_fault` does."""
    del model
    log.error("event=agent_fault part=%r error=%s", what, reason)


@dataclasses.dataclass(slots=True)
class WeightsTask:
    """The state of one request for weights."""

    replicas: tuple[ReplicaId, ...] = ()
    given: tuple[ReplicaId, ...] = ()
    """Replicas that were given `copy`."""
    refused: tuple[ReplicaId, ...] = ()
    """Replicas that were refused with `failed` as the reason."""
    came: Came | None = None
    failed: str = ""
    copy: Copy | None = None
    looked: WeightsReport | None = None
    """The result, for a request that only inspects."""
    again_s: float = 0.0
    """When a failed inspection, or one that found no image, is repeated if no replica waits for it."""
    task: asyncio.Task[None] | None = None
    unwanted_s: float | None = None
    fault: str = ""
    """The exception that its part of the last report raised. Empty: none."""

    @property
    def due(self) -> bool:
        """Whether a replica waits, or nothing was tried yet."""
        if self.looked is not None and not self.replicas and not (self.looked.header or self.looked.no_header):
            return self.task is None  # the replicas that waited before needed no header
        tried = self.copy is not None or self.looked is not None or self.failed
        return self.task is None and (not tried or not set(self.replicas) <= {*self.given, *self.refused})

    def look_again(self) -> None:
        """Discard a failure, or an inspection that found no image, since the artifact may have changed."""
        self.failed = ""
        if self.looked is not None and self.looked.image is None:
            self.looked = None

    def refuse(self, reason: str) -> None:
        """Refuse the replicas that do not have the copy yet."""
        self.failed = reason[:REASON_CHARS_MAX]
        self.refused = tuple(one for one in self.replicas if one not in self.given)


class WeightsKeeper:
    """The weights of one node. `changed` is called when the report changes."""

    def __init__(self, root: Path, secret_of: SecretOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self.changed: Callable[[], None] = lambda: None
        self.images: Callable[[Sequence[ImageWant]], None] = lambda _: None
        """Receives the requested engine images."""
        self.fabric: Callable[[Sequence[FabricWant]], None] = lambda _: None
        """Receives the fabric devices to attach and detach."""
        self._wants: NodeWants | None = None
        self._wake = asyncio.Event()
        self._lines: dict[WeightsRequest, WeightsTask] = {}
        self._held: dict[str, tuple[Copy, float | None]] = {}
        """By folder: the copy that pods use, and since when they no longer do."""
        self.metrics = StoreMetrics()
        self.fetching = Fetching(root, secret_of, self.metrics, clock)
        self._warming = asyncio.Lock()
        self._copies: tuple[str, ...] = ()
        self._rows = RowLimit()
        self._said_s = 0.0
        self._trouble = ""
        self._faults: dict[str, str] = {}
        """By part of the agent, or by copy: the exception that was logged."""

    def heard(self, line: bytes) -> None:
        """Process a message of an autoscaler."""
        try:
            wants = _decode(line)
        except msgspec.DecodeError as error:
            log.warning("event=weights_request_invalid reason=%r", str(error))
            return
        if self._wants is None or wants.epoch >= self._wants.epoch:
            is_new_epoch = wants.epoch > self.epoch or self._wants is None
            self._wants = wants
            if is_new_epoch:  # report it at once: the next leader must not choose a lower epoch
                self.changed()
            self._wake.set()
            self._contain("images", lambda: self.images(wants.images))
            self._contain("fabric", lambda: self.fabric(wants.fabric))

    def _contain(self, part: str, act: Callable[[], object]) -> None:
        """Call `act`. Log an exception once, so that it does not affect other parts."""
        done = attempt(act)
        self._log_fault(part, describe_error(done.error) if isinstance(done, Failure) else "")

    def _log_fault(self, part: str, reason: str) -> None:
        """Log an exception once until its reason changes. Empty: there was none."""
        if not reason:
            self._faults.pop(part, None)
        elif self._faults.get(part) != reason:
            self._faults[part] = reason
            report_fault(None, part, reason)

    @property
    def epoch(self) -> int:
        """The newest epoch received, or 0."""
        return 0 if self._wants is None else self._wants.epoch

    def report(self) -> tuple[tuple[str, ...], tuple[WeightsReport, ...]]:
        """Return the artifacts on this node, and the progress of each request, within the limits of a report."""
        waiting, others = list[WeightsReport](), list[WeightsReport]()
        for request, line in self._lines.items():
            if line.unwanted_s is None:
                (waiting if line.replicas else others).extend(self._contained_rows(request, line))
        said = self._rows.choose(waiting, [*limit_headers(others)], self._clock())
        own = {request.artifact for request, line in self._lines.items() if line.copy is not None}
        return limit_copies(own, self._copies), said

    def _contained_rows(self, request: WeightsRequest, line: WeightsTask) -> Sequence[WeightsReport]:
        """Return the rows of one request. If they raise an exception, the waiting replicas are refused with it."""
        rows = attempt(lambda: tuple(self._said(request, line)))
        reason = describe_error(rows.error)[:REASON_CHARS_MAX] if isinstance(rows, Failure) else ""
        if reason and reason != line.fault:
            report_fault(None, f"report of {request.artifact}", reason)
        line.fault = reason
        if isinstance(rows, Failure):
            return (WeightsReport(**request._asdict(), replicas=line.replicas, failed=reason),)
        return rows

    def _said(self, request: WeightsRequest, line: WeightsTask) -> Iterator[WeightsReport]:
        said = WeightsReport(**request._asdict())
        if line.copy is not None:
            record, folder = line.copy.record, str(line.copy.folder.relative_to(self._root))
            more = list_loadable_files([one.path for one in record.laid])
            yield replace(said, replicas=line.given, folder=folder, digest=record.digest, bytes=record.bytes, **more)
        if line.looked is not None:
            yield replace(line.looked, replicas=line.given)
        if (line.copy is None and line.looked is None) or line.refused:
            came = line.came or Came(0, 0, 0.0)
            yield replace(
                said, replicas=line.refused, bytes=came.bytes, total_bytes=came.total_bytes,
                bytes_per_s=came.bytes_per_s, failed=line.failed,
            )  # fmt: skip

    async def run(self) -> None:
        """Process requests until cancelled. Leftovers of interrupted inspections are deleted first. It may be called
        again after an exception: copies in use are held again before the next pull.
        """
        await asyncio.to_thread(shutil.rmtree, self._root / HEADERS, ignore_errors=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    if self._wants is not None:
                        await self._turn(self._wants, tasks)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._wake.wait()
        finally:
            copies = [line.copy for line in self._lines.values()] + [copy for copy, _ in self._held.values()]
            for copy in copies:
                if copy is not None:
                    copy.close()
            self._lines.clear()
            self._held.clear()

    async def _turn(self, wants: NodeWants, tasks: asyncio.TaskGroup) -> None:
        """Process requests; an unreadable store, or an exception, does not stop the agent's other functions."""
        try:
            await self._act(wants, tasks)
            await self._look()
        except Exception as error:  # noqa: BLE001 - any exception is contained; the next turn tries again
            reraise_memory_error(error)
            reason = str(error) if isinstance(error, (StoreError, OSError)) else describe_error(error)
            if reason != self._trouble:
                self._trouble = reason
                log.warning("event=store_failed reason=%r", self._trouble)
        else:
            self._trouble = ""

    async def _act(self, wants: NodeWants, tasks: asyncio.TaskGroup) -> None:
        """Fetch what is requested. Copies in use are held first, since a pull may evict others."""
        await self._hold(wants.held)
        now_s, wanted = self._clock(), {read_weights_request(one): one for one in wants.wants}
        for request in [request for request in self._lines if request not in wanted]:
            self._let_go(request, now_s)
        for request, want in wanted.items():
            line = self._lines.setdefault(request, WeightsTask())
            line.replicas, line.unwanted_s = want.replicas, None
            if want.look and not want.replicas and line.task is None and now_s >= line.again_s:
                line.look_again()
            if line.due:
                work = self._bring(request, line, wants.weights)
                line.task = start_contained_task(tasks, work, partial(self._log_fault, request.artifact))

    def _let_go(self, request: WeightsRequest, now_s: float) -> None:
        line = self._lines[request]
        line.unwanted_s = now_s if line.unwanted_s is None else line.unwanted_s
        if (line.copy is None and line.task is None) or now_s >= line.unwanted_s + LINGER_S:
            del self._lines[request]
            if line.task is not None:
                line.task.cancel()
            if line.copy is not None:
                line.copy.close()

    async def _bring(self, request: WeightsRequest, line: WeightsTask, settings: Weights) -> None:
        cold: Copy | None = None
        try:
            cold = await self._brought(request, line, settings)
        except asyncio.CancelledError:
            line.task = None
            raise
        except Exception as error:  # noqa: BLE001 - any error fails only this start and becomes its reason
            reraise_memory_error(error)
            line.refuse(str(error) or type(error).__name__)
            log.warning("event=weights_failed artifact=%s reason=%r", request.artifact, line.failed)
        else:
            line.given, line.refused, line.failed = line.replicas, (), ""
        line.task, line.came, line.again_s = None, None, self._clock() + LOOK_AGAIN_S
        self.changed()
        self._wake.set()
        if cold is not None and line.replicas:  # concurrently with the rest of the start
            async with self._warming:
                await read_ahead(request.artifact, partial(list_files, cold.folder))

    async def _brought(self, request: WeightsRequest, line: WeightsTask, settings: Weights) -> Copy | None:
        """Return the copy if the store had it before, so that the caller reads it ahead. A new copy is in the page
        cache already.
        """
        if request.look:
            line.looked = await self.fetching.look(request, settings, header=not line.replicas)
            return None
        brought = await self.fetching.bring(request, settings, lambda came: self._came(line, came))
        _closed(line.copy)
        line.copy = brought.copy
        return brought.copy if brought.was_here else None

    def _came(self, line: WeightsTask, came: Came) -> None:
        line.came = came
        if self._clock() >= self._said_s + TELL_EVERY_S:
            self._said_s = self._clock()
            self.changed()

    # --- copies in the store ------------------------------------------------------------------------------------------

    async def _hold(self, folders: tuple[str, ...]) -> None:
        """Hold the copies that pods use, and for LINGER_S those that they no longer use. A copy that cannot be held is
        logged once, and does not prevent pulls, which may evict it.
        """
        now_s = self._clock()
        for folder in [one for one in folders if one not in self._held]:
            reason = ""
            try:
                copy = await run_in_thread(lambda folder=folder: self._found(folder), _closed)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - it concerns one copy
                reraise_memory_error(error)
                copy, reason = None, describe_error(error)
            self._log_fault(f"hold {folder[:REASON_CHARS_MAX]}", reason)
            if copy is not None:
                self._held[folder] = (copy, None)
        for folder, (copy, since_s) in list(self._held.items()):
            if folder in folders:
                self._held[folder] = (copy, None)
            elif since_s is None:
                self._held[folder] = (copy, now_s)
            elif now_s >= since_s + LINGER_S:
                copy.close()
                del self._held[folder]

    def _found(self, folder: str) -> Copy | None:
        """Return the copy of that folder, or None if there is none."""
        store = Store(self._root)
        record = load_current_record((self._root / folder).parent, store.layout.disk)
        if record is None or store.layout.copy(record.key) / FILES != self._root / folder:
            return None
        return store.find(record.key)

    async def _look(self) -> None:
        found = await run_in_thread(self._listed)
        if found != self._copies:
            self._copies = found
            self.changed()

    def _listed(self) -> tuple[str, ...]:
        """Return the artifacts whose reference still resolves to the stored copy."""
        store, found, ways = Store(self._root), list[str](), build_fetch_access(Registries())
        rows = store.rows()
        self.metrics.holds(rows)
        for row in rows:
            current = attempt(partial(_is_current, row.record, store, ways))
            if not isinstance(current, Failure):
                self._log_fault(row.record.reference, "")
                if current:
                    found.append(row.record.reference)
            elif isinstance(current.error, OSError | StoreError):
                raise current.error
            elif not isinstance(current.error, BadReferenceError | BadDigestError | PolicyError):
                self._log_fault(row.record.reference, describe_error(current.error))
        return tuple(found[:COPIES_MAX])


def _is_current(record: Record, store: Store, ways: Ways) -> bool:
    """Whether the record's reference still resolves to its copy."""
    of = fetch.parse_remote_source(record.reference)
    return any(fetch.find_cached_key(of, store, ways, allow_unsafe=one) == record.key for one in (False, True))


def _closed(copy: Copy | None) -> None:
    if copy is not None:
        copy.close()
