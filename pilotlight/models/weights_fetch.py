"""Fetches remote weights of Models on one machine before a start, or earlier if requests wait for capacity.

Assigns copies in the store to Models, and selects the files for the engine. A copy to which a reference resolved when
it was last pulled is used without contacting the registry, unless it needs a login. Weights are fetched once, however
many replicas wait; adapters are fetched in parallel. A failed pull fails only that Model's start.
`artifacts.fetch.registry` and `artifacts.store.store` do the fetching and storing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from artifacts.digest import BadDigestError
from artifacts.disk.thread_wait import run_in_thread
from artifacts.fetch import fetch
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Came, OnProgress, Registries
from artifacts.reference import BadReferenceError
from artifacts.registry_errors import PolicyError
from artifacts.store.copies import Copy
from artifacts.store.copy_record import Record
from artifacts.store.layout import ForbiddenError
from artifacts.store.store import Store
from autoscaler.contract import ModelName
from autoscaler.controller.loop import Listener, LoopStep
from autoscaler.engines import EngineError
from autoscaler.exception_handling import Failure, attempt
from autoscaler.fold.fold import Observation
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Weights as WeightsSettings
from autoscaler.state.events import CopiesSeen
from autoscaler.state.world import Copy as CopySeen
from autoscaler.state.world import World
from autoscaler.text import format_size
from pilotlight.models.model_parts import (
    Part,
    get_own_part,
    is_fetched_by_store,
    list_adapter_parts,
    list_parts,
    use_local_files,
)
from pilotlight.models.registry_access import build_registries
from pilotlight.models.retry_tasks import TROUBLE, RetryTasks

STORE = "weights"
"""Folder below the state directory."""
HEADERS = "headers"
"""Folder below the store, for headers of artifacts that are not stored."""
LOOK_EVERY_S = 30.0
"""Interval at which the store is checked for removed copies; new copies are noticed at once."""
PROGRESS_EVERY_S = 1.0


class AdapterError(Exception):
    """An adapter's weights could not be fetched; `str()` names the adapter and the reason."""


log = logging.getLogger("pilotlight.models.weights_fetch")


class Held(NamedTuple):
    """Implements `autoscaler.drivers.driver.WeightsHandle`."""

    model: Model
    copies: tuple[Copy, ...]

    @property
    def lease_fds(self) -> tuple[int, ...]:
        """File descriptors of the locks on the copies."""
        return tuple(one.lease.fd for one in self.copies)

    def close(self) -> None:
        """Release the copies."""
        for one in self.copies:
            one.close()


class Watched(Protocol):
    """The part of the loop that `Supply` uses."""

    world: World
    listeners: list[Listener]

    def observe(self, batch: Sequence[Observation], /) -> None:
        """Add events to the loop's inbox."""

    def fault(self, name: ModelName, what: str, error: Exception, /) -> None:
        """Quarantine the Model that caused an exception."""


class Supply:
    """Implements `autoscaler.drivers.driver.Supply`; a listener of the loop."""

    def __init__(
        self, root: Path, settings: WeightsSettings, registries: Registries | None = None,
        env: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`env`: configures access to the Hub and buckets; None: this process's environment."""
        self._store = Store(root, bytes_max=settings.store_bytes_max)
        self._ways = Ways(registries or build_registries(settings), os.environ if env is None else env, Path.home())
        self._clock = clock
        self._opening = asyncio.Lock()
        self._open = False
        self._changed = asyncio.Event()
        self._waiting: frozenset[ModelName] = frozenset()
        """Models whose parts are fetched while requests wait for capacity."""
        self._headers: dict[Part, tuple[Path, list[str]]] = {}
        """Folder and paths of headers of parts that are not stored, as `fetch_headers` returns them."""
        self._prefetches = RetryTasks("weights_prefetch_failed", self._prefetch, self._changed.set, clock)
        self._header_fetches = RetryTasks("weights_header_failed", self._fetch_header, self._changed.set, clock)

    def __call__(self, model: Model, report: Callable[[str], None]) -> Awaitable[Held] | None:
        """Return the Model's weights when they are fetched, or None if it has no remote weights."""
        return self._held(model, report) if list_parts(model) else None

    async def _held(self, model: Model, report: Callable[[str], None]) -> Held:
        """Fetch all of its parts in parallel; if one fails, the others are cancelled."""
        wanted, progress = list_parts(model), PullProgress(report, self._clock)
        try:
            came = await gather_copies([self._fetch_part(model, one, progress.of(one)) for one in wanted])
            held = Held(model, tuple(came))
            try:
                folders = [(one.folder, [laid.path for laid in one.record.laid]) for one in came]
                return held._replace(model=use_local_files(model, dict(zip(wanted, folders, strict=True))))
            except BaseException:
                held.close()
                raise
        finally:
            self._changed.set()

    async def _fetch_part(self, model: Model, part: Part, report: OnProgress) -> Copy:
        """Fetch a part. If this fails and only adapters use the part, raises AdapterError."""
        try:
            return await self._copy(part, report)
        except TROUBLE as error:
            names = [name for name, one in list_adapter_parts(model).items() if one == part]
            if not names or (part == get_own_part(model) and is_fetched_by_store(model)):
                raise
            raise AdapterError(f"adapter {', '.join(names)}: {error}") from error

    async def _copy(self, part: Part, report: OnProgress) -> Copy:
        async with self._opening:
            if not self._open:
                await run_in_thread(self._store.open)
                self._open = True
        of = fetch.parse_remote_source(part.artifact)
        with suppress(ForbiddenError):  # the tag may have moved since: resolve and authorize it again
            found = await fetch.find_stored_copy(of, self._store, self._ways, allow_unsafe=part.unsafe)
            if found is not None:
                return found
        return await fetch.fetch_artifact(of, self._store, self._ways, report, _left, allow_unsafe=part.unsafe)

    def located(self, model: Model) -> Model:
        """Return the Model with the local path of its weights, or of their headers, if they are here.

        Blocks on disk access; takes no locks.
        """
        where = {one: found for one in list_parts(model) if (found := self._where(one)) is not None}
        try:
            return use_local_files(model, where)
        except EngineError:
            return model  # its start reports the error

    def _where(self, part: Part) -> tuple[Path, list[str]] | None:
        record = self._record(part)
        if record is None:
            return self._headers.get(part)
        return self._store.layout.copy(record.key) / "files", [one.path for one in record.laid]

    def _record(self, part: Part) -> Record | None:
        """Return the record of the stored copy that the part may use."""
        try:
            key = fetch.find_cached_key(
                fetch.parse_remote_source(part.artifact), self._store, self._ways, allow_unsafe=part.unsafe
            )
        except (BadReferenceError, BadDigestError, PolicyError):
            return None
        record = None if key is None else self._store.layout.record(key)
        return None if record is None or (record.unsafe and not part.unsafe) else record

    # --- prefetching and stored copies --------------------------------------------------------------------------------

    def on_step(self, step: LoopStep) -> None:
        """Note the Models with waiting requests that have no replica yet, so that `run` prefetches their weights."""
        world = step.after
        if world.models is not step.before.models:
            self._changed.set()
        if (world.loads, world.by_model, world.models) == (step.before.loads, step.before.by_model, step.before.models):
            return
        waiting = frozenset(name for name in list_wanted_models(world) if not world.by_model.get(name))
        if waiting != self._waiting:
            self._waiting = waiting
            self._changed.set()

    async def run(self, loop: Watched, read_again: Callable[[], Awaitable[None]]) -> None:
        """Prefetch, and report stored copies, until cancelled."""
        known = frozenset[Part]()
        await asyncio.to_thread(shutil.rmtree, self._store.layout.root / HEADERS, ignore_errors=True)
        try:
            while True:
                self._changed.clear()
                models = loop.world.models
                parts = list_contained(models.values(), list_parts, loop.fault)
                unsized = list_contained(models.values(), list_unsized_parts, loop.fault)
                wanted = {one for name in self._waiting & parts.keys() for one in parts[name]}
                self._prefetches.want(wanted, self._clock())
                of_all = {one for found in parts.values() for one in found}
                here, faults = await asyncio.to_thread(self._stored, of_all)
                for source in (self._prefetches.take_faults(), self._header_fetches.take_faults(), faults):
                    report_part_faults(source, parts, loop.fault)
                unknown = {one for found in unsized.values() for one in found} - here - self._headers.keys()
                unknown -= faults.keys()
                self._header_fetches.want(unknown, self._clock())
                located = here | self._headers.keys()
                if any(found & (located - known) for found in unsized.values()):
                    await read_again()  # the new files contain the memory need
                known = located
                self._report_copies(loop, here)
                try:
                    async with asyncio.timeout(self._wait_s()):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            await self._prefetches.close()
            await self._header_fetches.close()

    def _report_copies(self, loop: Watched, here: frozenset[Part]) -> None:
        """Report stored copies and failures to the loop."""
        nodes = {slice_.node for slice_ in loop.world.nodes.slices.values()}
        copies = frozenset(CopySeen(artifact=one.artifact, node=node) for one in here for node in nodes)
        failed = {one.artifact: why for one, why in (self._header_fetches.failed() | self._prefetches.failed()).items()}
        if (copies, failed) != (loop.world.nodes.copies, loop.world.learned.unbrought):
            loop.observe([CopiesSeen(copies=copies, failed=failed)])

    def _wait_s(self) -> float:
        due = [at_s for at_s in (self._prefetches.next_s(), self._header_fetches.next_s()) if at_s is not None]
        return max(min([LOOK_EVERY_S, *(at_s - self._clock() for at_s in due)]), 0.0)

    def _stored(self, parts: Iterable[Part]) -> tuple[frozenset[Part], dict[Part, Exception]]:
        """Return those of the parts that are stored, and those that raise an exception. Blocks on disk access."""
        records = {one: attempt(partial(self._record, one)) for one in parts}
        faults = {one: found.error for one, found in records.items() if isinstance(found, Failure)}
        return frozenset(one for one in records.keys() - faults.keys() if records[one] is not None), faults

    async def _fetch_header(self, part: Part) -> None:
        named = f"{part.artifact}\0{part.unsafe}"
        folder = self._store.layout.root / HEADERS / hashlib.sha256(named.encode()).hexdigest()
        paths = await fetch.fetch_headers(
            fetch.parse_remote_source(part.artifact), self._ways, folder, allow_unsafe=part.unsafe
        )
        if paths:
            self._headers[part] = (folder, paths)

    async def _prefetch(self, part: Part) -> None:
        (await self._copy(part, lambda _: None)).close()


def list_contained(
    models: Iterable[Model], list_of: Callable[[Model], Collection[Part]],
    fault: Callable[[ModelName, str, Exception], None],
) -> dict[ModelName, Set[Part]]:  # fmt: skip
    """Return the parts of each Model. `fault` receives a Model for which `list_of` raises an exception."""
    found: dict[ModelName, Set[Part]] = {}
    for model in models:
        done = attempt(partial(list_of, model))
        if isinstance(done, Failure):
            fault(model.name, "weights", done.error)
        else:
            found[model.name] = frozenset(done)
    return found


def report_part_faults(
    faults: Mapping[Part, Exception], parts: Mapping[ModelName, Set[Part]],
    fault: Callable[[ModelName, str, Exception], None],
) -> None:  # fmt: skip
    """Call `fault` for each Model of `parts` with a part that raised an exception."""
    for name, found in parts.items():
        for one in found & faults.keys():
            fault(name, "weights", faults[one])


def list_unsized_parts(model: Model) -> Set[Part]:
    """Return the parts that determine its memory need if its document does not: its own weights until they are known,
    and its adapters, which come on top.
    """
    if not model.memory_bytes:
        return set(list_parts(model))
    return set() if model.spec.gpu.memory_bytes else set(list_adapter_parts(model).values())


async def gather_copies(coming: Sequence[Coroutine[None, None, Copy]]) -> list[Copy]:
    """Return all copies in order. If one fails, raise its error and release the others."""
    tasks = [asyncio.create_task(one) for one in coming]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
        raise


def _left(path: str, why: str) -> None:
    log.info("event=weights_left_out path=%r reason=%r", path, why)


def list_wanted_models(world: World) -> list[ModelName]:
    """Return the Models with waiting requests or a minimum number of replicas."""
    called = [name for name, load in world.loads.items() if load.waiting]
    return called + [model.name for model in world.models.values() if model.spec.replicas.min]


class PullProgress:
    """Reports the total progress of one start's pulls as text, at most every TELL_EVERY_S."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._came: dict[Part, Came] = {}
        self._reported_s = -PROGRESS_EVERY_S

    def of(self, part: Part) -> OnProgress:
        """Return the progress callback for one part."""

        def came(now: Came) -> None:
            self._came[part] = now
            now_s = self._clock()
            if now_s - self._reported_s >= PROGRESS_EVERY_S:
                self._reported_s = now_s
                bytes_, total_bytes, bytes_per_s = (sum(column) for column in zip(*self._came.values(), strict=True))
                self._report(
                    f"{format_size(int(bytes_))} of {format_size(int(total_bytes))}, "
                    f"{format_size(round(bytes_per_s))} a second"
                )

        return came
