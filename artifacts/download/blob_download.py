"""Downloads blobs into a folder: concurrent, verified, resumable after a crash, and never visible incomplete. I/O.

Decides the order of spans, how many run and which are repeated (`concurrency`), and what happens to a complete blob.
All requests go through the source and therefore through one transport. Threads write the bodies to the files
(`tls_receive`), those of plain HTTP without copying them to user space (`splice`). A file at its final path matches its
digest. Data received before an error is resumed. If a blob's digest does not match, only parts with a known matching
digest are kept (`Sums`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk, DiskError, describe_os_error
from artifacts.disk.thread_wait import wait_until_done
from artifacts.download import concurrency, splice, tls_receive
from artifacts.download.concurrency import Judge, Window
from artifacts.download.partial_file import Partial
from artifacts.download.splice import Goal
from artifacts.download.tls_receive import Ends
from artifacts.http.transport import DetachedBody
from artifacts.oci import blob_progress as parts
from artifacts.oci.blob_progress import Span
from artifacts.registry.blobs import Blob, BlobSource, Moved
from artifacts.registry_errors import BrokenError, MismatchError, RegistryError

TICK_S = 0.25
BATCH_BYTES = 512 << 10
"""Bytes written at once of a body that passes through this process."""
THREADS_MAX = 3 * concurrency.MOST
"""One thread per request, one to sync its parts, and one to hash them."""

FAILURES = (RegistryError, DiskError)
"""Expected failures, reported in one line; any other exception is a bug."""
Progress = Callable[[Digest, int], None]
"""Called with the number of bytes of a blob that are present, at first those found on disk. The number drops if the
download of the blob restarts."""
Sums = Callable[[Digest, int], Awaitable[Sequence[str]]]
"""Returns the part digests of a blob of this size, or nothing if they are unknown; does not raise."""
Result = TypeVar("Result")


class BlobTarget(NamedTuple):
    """A blob and the path of its file in the folder."""

    blob: Blob
    path: Path
    learned: Callable[[Digest], None] | None = None
    """If the real digest is unknown, so that `blob` has a placeholder: called with the real digest, in a thread."""


async def fetch_blobs(
    wanted: Sequence[BlobTarget],
    source: BlobSource,
    folder: Path,
    progress: Progress | None = None,
    *,
    file_system: Disk | None = None,
    clock: Callable[[], float] = time.monotonic,
    sums: Sums | None = None,
) -> None:
    """Return when every blob has its final name on disk. Each blob and each path may occur once.
    `sums`: called for a blob of many parts whose digest does not match, so that only bad parts are fetched again.

    Raises the first error: AbsentError, DeniedError, MismatchError, PolicyError, UnreachableError, DiskError.
    """
    if len({one.blob.digest for one in wanted}) < len(wanted) or len({one.path for one in wanted}) < len(wanted):
        raise ValueError("a blob or a path is requested twice")
    made = _Fetch(source, folder, progress or (lambda _digest, _came: None), file_system or Disk(), clock, sums=sums)
    try:
        await made.all(wanted)
    finally:
        made.close()


class _Coming:
    """A blob being downloaded."""

    def __init__(self, wanted: BlobTarget, partial: Partial, source: BlobSource) -> None:
        self.wanted = wanted
        self.partial = partial
        self.source = source
        self.running = 0
        """Number of its queued and running spans."""
        self.helped: dict[Callable[[], None], asyncio.Task[None]] = {}
        """Running jobs from `Partial.wants`."""
        self.finishing = False
        self.reported = -1
        self.restarted = False
        """Whether it was restarted after a digest mismatch."""


class _Run:
    """Fetches a span of a blob, and receives the response bodies."""

    def __init__(self, fetch: _Fetch, coming: _Coming, span: Span, repeats: int = 0) -> None:
        self.coming = coming
        self.at, self.end = span
        self.repeats = repeats
        self.stalled = False
        self._fetch = fetch
        self._batch: list[bytes] = []
        self._batch_at, self._batch_bytes = span.first, 0
        self._writing: asyncio.Task[None] | None = None

    async def go(self) -> None:
        """Fetch the span into the file."""
        source, blob = self.coming.source, self.coming.wanted.blob
        try:
            async with aclosing(source.read(blob, self.at, self.end, self)) as pieces:
                async for piece in pieces:
                    self._batch.append(piece)
                    self._batch_bytes += len(piece)
                    if self._batch_bytes >= BATCH_BYTES:
                        await self._write()
            await self._flush()
        finally:
            if self._writing is not None:
                await wait_until_done(self._writing)

    async def move(self, at: int, body: DetachedBody) -> Moved:
        """Write a detached body to the file, in a thread."""
        head, rest, left, sealed = body
        with rest:
            await self._flush()
            if head:
                await self._fetch.thread(self.coming, self._put, at, [head])
            begin, limits = at + len(head), self.coming.source.limits
            if sealed is None:
                goal = Goal(self.coming.partial.file.number, self._wrote)
                job = partial(splice.splice_body, rest, left, goal, begin, limits)
            else:
                job = partial(tls_receive.receive_body, Ends(rest, sealed), left, self._put, begin, limits)
            moved = await self._fetch.thread(self.coming, job, interrupt=lambda: splice.interrupt_transfer(rest))
        self._batch_at = at + len(head) + moved.came
        return Moved(len(head) + moved.came, moved.broken)

    def broke(self, error: BrokenError) -> None:
        """Report a failed attempt, which reduces the concurrency for a while."""
        self._fetch.broke(error)

    async def _write(self) -> None:
        """Start writing the received bytes, one batch at a time to keep the order."""
        await self._written()
        batch, at = self._batch, self._batch_at
        self._batch, self._batch_at, self._batch_bytes = [], at + self._batch_bytes, 0
        self._writing = asyncio.create_task(self._fetch.thread(self.coming, self._put, at, batch))

    async def _written(self) -> None:
        if self._writing is not None:
            writing = self._writing
            await asyncio.wait([writing])
            self._writing = None
            writing.result()

    async def _flush(self) -> None:
        if self._batch:
            await self._write()
        await self._written()

    def _put(self, at: int, pieces: Sequence[bytes | memoryview]) -> None:
        self.coming.partial.put(at, pieces)
        self._came(at + sum(len(piece) for piece in pieces))

    def _wrote(self, at: int, count: int) -> None:
        self.coming.partial.wrote(at, count)
        self._came(at + count)

    def _came(self, at: int) -> None:
        self.at = at
        if self.coming.partial.wants():
            self._fetch.help_soon(self.coming)


class _Fetch:
    """State of one `fetch_blobs` call."""

    def __init__(
        self, source: BlobSource, folder: Path, progress: Progress, file_system: Disk, clock: Callable[[], float],
        *, sums: Sums | None,
    ) -> None:  # fmt: skip
        self._source = source
        self._folder = folder
        self._progress = progress
        self._disk = file_system
        self._clock = clock
        self._sums = sums
        self._window = Window(clock())
        self._judge = Judge()
        self._blobs: list[_Coming] = []
        self._queue: deque[_Run] = deque()
        self._running: dict[asyncio.Task[None], _Run] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._failed: list[RegistryError | DiskError] = []
        self._loop = asyncio.get_running_loop()
        self._to_help: set[_Coming] = set()
        self._nudged: asyncio.Future[None] = self._loop.create_future()
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="fetch")

    def close(self) -> None:
        """Stop the threads before closing the files that they use."""
        self._pool.shutdown()
        for coming in self._blobs:
            coming.partial.close()

    async def all(self, wanted: Sequence[BlobTarget]) -> None:
        for one in wanted:
            self._blobs.append(_Coming(one, await self._opened(one), self._source))
        self._tell()
        missing = sum(one.partial.size - one.partial.ledger.came for one in self._blobs)
        free = self._disk.free_bytes(self._folder)
        if missing > free:
            raise DiskError(
                f"{missing} bytes are required in {self._folder}, which has {free} bytes free; free space or use a "
                f"larger volume"
            )
        async with AsyncExitStack() as stack:
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            for number in self._source.order("blobs", len(self._blobs)):
                self._queue_up(self._blobs[number])
            await self._drive()
            if self._failed:
                for task in (*self._running, *self._finishing):
                    task.cancel()
        if self._failed:
            for coming in self._blobs:
                if not coming.finishing:
                    with suppress(DiskError):  # the first failure is reported
                        await self.thread(coming, coming.partial.keep)
            raise self._failed[0]

    async def thread(
        self,
        coming: _Coming | BlobTarget,
        job: Callable[..., Result],
        *given: object,
        interrupt: Callable[[], None] | None = None,
    ) -> Result:
        """Run a blocking job; returns only after the job has ended, even if cancelled. Raises DiskError."""
        running = self._loop.run_in_executor(self._pool, job, *given)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if interrupt is not None:
                interrupt()
            await wait_until_done(running)
            raise
        except OSError as error:
            wanted = coming if isinstance(coming, BlobTarget) else coming.wanted
            said = f"{wanted.blob} cannot be stored in {self._folder}: {describe_os_error(error)}"
            raise DiskError(f"{said}; the bytes on disk are kept for the next pull") from None

    def broke(self, _error: BrokenError) -> None:
        self._window.broke(self._clock())

    def help_soon(self, coming: _Coming) -> None:
        """Schedule `_help`; callable from any thread."""
        self._loop.call_soon_threadsafe(self._nudge, coming)

    def _nudge(self, coming: _Coming) -> None:
        self._to_help.add(coming)
        if not self._nudged.done():
            self._nudged.set_result(None)

    def _help(self) -> None:
        """Start the background jobs that blobs need, at most one of each kind per blob."""
        for coming in self._to_help:
            wants = [] if coming.finishing else coming.partial.wants()
            for job in wants:
                if job not in coming.helped:
                    coming.helped[job] = self._group.create_task(self._helped(coming, job))
                    self._finishing.add(coming.helped[job])
        self._to_help.clear()
        self._nudged = self._loop.create_future()

    async def _helped(self, coming: _Coming, job: Callable[[], None]) -> None:
        try:
            await self.thread(coming, job)
        except FAILURES as error:
            self._failed.append(error)
        finally:
            del coming.helped[job]
            if coming.partial.wants():  # because of bytes received meanwhile
                self._nudge(coming)

    async def _opened(self, wanted: BlobTarget) -> Partial:
        blob = wanted.blob
        made = partial(Partial, learned=wanted.learned)
        return await self.thread(wanted, made, self._folder, blob.digest, blob.size, self._disk)

    def _queue_up(self, coming: _Coming) -> None:
        spans = coming.partial.ledger.spans()
        coming.running = len(spans)
        order = coming.source.order(coming.wanted.blob.digest, len(spans))
        self._queue.extend(_Run(self, coming, spans[number]) for number in order)
        if not spans:
            self._finishing.add(self._group.create_task(self._finished(coming)))

    async def _drive(self) -> None:
        """Run until everything is done or something has failed."""
        while not self._failed and (self._queue or self._running or self._finishing):
            while self._queue and len(self._running) < self._window.size:
                run = self._queue.popleft()
                self._running[self._group.create_task(self._one(run))] = run
            working: set[asyncio.Future[None]] = {*self._running, *self._finishing, self._nudged}
            await asyncio.wait(working, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            self._help()
            self._finishing -= {task for task in self._finishing if task.done()}
            for task in [task for task in self._running if task.done()]:
                self._ended(self._running.pop(task))
            self._look()

    def _ended(self, run: _Run) -> None:
        if run.stalled and run.at < run.end:
            self._queue.appendleft(_Run(self, run.coming, Span(run.at, run.end), run.repeats + 1))
            return
        run.coming.running -= 1
        if not run.coming.running and not self._failed:
            self._finishing.add(self._group.create_task(self._finished(run.coming)))

    def _look(self) -> None:
        """Update the window and cancel stalled requests."""
        now_s = self._clock()
        came = sum(one.partial.ledger.came - one.partial.resumed for one in self._blobs)
        self._window.measured(now_s, came, busy=bool(self._queue) and len(self._running) >= self._window.size)
        runs = {task: run for task, run in self._running.items() if not run.stalled}
        at = {task: run.at for task, run in runs.items()}
        for task in self._judge.stalled(now_s, at, {task: run.repeats for task, run in runs.items()}):
            runs[task].stalled = True
            task.cancel()
        self._tell()

    def _tell(self) -> None:
        for coming in self._blobs:
            if coming.reported != coming.partial.ledger.came:
                coming.reported = coming.partial.ledger.came
                self._progress(coming.wanted.blob.digest, coming.reported)

    async def _one(self, run: _Run) -> None:
        try:
            await run.go()
        except asyncio.CancelledError:
            if not run.stalled:
                raise
        except FAILURES as error:
            self._failed.append(error)

    async def _finished(self, coming: _Coming) -> None:
        """Publish a complete blob; on a digest mismatch fetch it, or its bad parts, again if that may help."""
        coming.finishing = True
        try:
            if coming.helped:
                await asyncio.wait(coming.helped.values())
            path = self._folder / coming.wanted.path
            if await self.thread(coming, coming.partial.publish, path):
                return
            sums: Sequence[str] = ()
            if self._sums is not None and not coming.restarted and coming.partial.size > parts.WHOLE_BYTES_MAX:
                sums = await self._sums(coming.partial.digest, coming.partial.size)
            repaired = await self.thread(coming, coming.partial.keep_matching_parts, sums)
            if coming.restarted or (self._source.lonely and not coming.partial.resumed and not repaired):
                said = f"{coming.wanted.blob}: its bytes do not match its digest; nothing is kept"
                self._failed.append(MismatchError(said))
                return
            coming.partial.close()
            coming.partial = await self._opened(coming.wanted)
            coming.finishing = False
            coming.source, coming.restarted = self._source.doubted(coming.wanted.blob), True
            self._queue_up(coming)
        except FAILURES as error:
            self._failed.append(error)
