"""Weights of this machine's Models that lie elsewhere: brought before a start, ahead of it where Calls wait for room.

Owns which Copy of the node's store is which Model's, and what of it an engine is given. Promises: a Copy that a
reference meant when it was last pulled here is taken without asking anybody, unless it needs a login; a Model's weights
come once, whoever waits for them; a pull that fails costs only that Model's start. What is fetched and kept, and how,
is `artifacts.obtain`'s and `artifacts.store`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from artifacts import bring, gguf, obtain, reference
from artifacts.bring import Lies, Ways
from artifacts.digests import BadDigestError
from artifacts.layout import Key
from artifacts.obtain import Came, MirrorSite, Registries
from artifacts.publish import Copy
from artifacts.reference import BadReferenceError
from artifacts.refusals import PolicyError
from artifacts.store import Store, in_thread
from autoscaler.contract import ModelName
from autoscaler.engines import EngineError
from autoscaler.fold import Observation
from autoscaler.loop import Listener, Step
from autoscaler.model import Model
from autoscaler.observations import CopiesSeen
from autoscaler.settings import Weights as WeightsSettings
from autoscaler.wanted import loaded
from autoscaler.words import size
from autoscaler.world import Copy as CopySeen
from autoscaler.world import World
from pilotlight import signers
from pilotlight.keychain import keychain
from pilotlight.needs import comes

STORE = "weights"
"""Below the state directory."""
HEADERS = "headers"
"""Below the store: of what is not in it."""
LOOK_EVERY_S = 30.0
"""How often it is seen what of the store others have taken away; what came is seen at once."""
TELL_EVERY_S = 1.0

log = logging.getLogger("pilotlight.supply")


class Held(NamedTuple):
    """As `autoscaler.drivers.base.Weights`."""

    artifact: str
    copy: Copy

    @property
    def lease_fd(self) -> int:
        """As Weights."""
        return self.copy.lease.fd

    def close(self) -> None:
        """As Weights."""
        self.copy.close()


class Watched(Protocol):
    """What it needs of the loop."""

    world: World
    listeners: list[Listener]

    def observe(self, batch: Sequence[Observation], /) -> None:
        """Into the loop's inbox."""


class Supply:
    """As `autoscaler.drivers.base.Supply`, and a listener of the loop."""

    def __init__(
        self, root: Path, settings: WeightsSettings, registries: Registries | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`env`: says how the Hub and buckets are reached; this process's own."""
        self._store = Store(root, bytes_max=settings.store_bytes_max)
        self._ways = Ways(registries or reached(settings), os.environ if env is None else env, Path.home())
        self._opening = asyncio.Lock()
        self._open = False
        self._changed = asyncio.Event()
        self._ahead: set[str] = set()
        """Artifacts that were asked for while Calls wait for room."""
        self._asked: set[str] = set()
        self._coming: set[asyncio.Task[None]] = set()
        self._headers: dict[str, tuple[Path, list[str]]] = {}
        """Of artifacts that are not here: as `headers.lay` gives them, in their folder; nothing while it is asked."""

    def __call__(self, model: Model, told: Callable[[str], None]) -> Awaitable[Held] | None:
        """As Supply."""
        return self._held(model, told) if comes(model) else None

    async def _held(self, model: Model, told: Callable[[str], None]) -> Held:
        copy = await self._copy(bring.lies(model.spec.artifact or ""), _Telling(told))
        try:
            return Held(f"file://{weights_in(copy.folder, copy, model)}", copy)
        except BaseException:
            copy.close()
            raise
        finally:
            self._changed.set()

    async def _copy(self, of: Lies, told: obtain.Told) -> Copy:
        async with self._opening:
            if not self._open:
                await in_thread(self._store.open)
                self._open = True
        return await bring.kept(of, self._store, self._ways) or await bring.bring(
            of, self._store, self._ways, told, _left
        )

    def located(self, model: Model) -> Model:
        """The Model with its weights, or their headers, where they lie here, if they do.

        Blocks for a look at the disk; holds nothing.
        """
        key = self._key(model)
        record = None if key is None else self._store.layout.record(key)
        if key is not None and record is not None:
            folder, paths = self._store.layout.copy(key) / "files", [one.path for one in record.laid]
        else:
            folder, paths = self._headers.get(model.spec.artifact or "", (Path(), []))
        if not paths:
            return model
        try:
            artifact = f"file://{chosen(folder, paths, model)}"
        except EngineError:
            return model  # its start says so
        return replace(model, spec=replace(model.spec, artifact=artifact))

    def _key(self, model: Model) -> Key | None:
        """Which Copy it is, if any ever was."""
        try:
            of = bring.lies(model.spec.artifact or "") if comes(model) else None
            return None if of is None else bring.recalled(of, self._store, self._ways)
        except (BadReferenceError, BadDigestError, PolicyError):
            return None

    # --- ahead of a start, and what is here ---------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """Models whose Calls wait and for which nothing could be started yet have their weights brought already."""
        world = step.after
        if world.models is not step.before.models:
            self._changed.set()
        if (world.loads, world.by_model, world.models) == (step.before.loads, step.before.by_model, step.before.models):
            return
        ahead = {
            model.spec.artifact or ""
            for model in (world.models.get(name) for name in wanting(world))
            if model is not None and comes(model) and not world.by_model.get(model.name)
        }
        if ahead != self._ahead:
            self._asked &= ahead
            self._ahead = ahead
            self._changed.set()

    async def run(self, loop: Watched, read_again: Callable[[], Awaitable[None]]) -> None:
        """Until cancelled."""
        loop.listeners.append(self.on_step)
        known = frozenset[str]()
        await asyncio.to_thread(shutil.rmtree, self._store.layout.root / HEADERS, ignore_errors=True)
        try:
            while True:
                self._changed.clear()
                for artifact in self._ahead - self._asked:
                    self._asked.add(artifact)
                    self._bring_ahead(artifact)
                world = loop.world
                here = await asyncio.to_thread(self._here, [m for m in world.models.values() if comes(m)])
                self._ask_headers(world, here)
                told = here | {artifact for artifact, (_, paths) in self._headers.items() if paths}
                if any(
                    not model.memory_bytes and model.spec.artifact in told - known for model in world.models.values()
                ):
                    await read_again()  # what is here says how much memory it needs
                known = told
                nodes = {slice_.node for slice_ in world.slices.values()}
                copies = frozenset(CopySeen(artifact=one, node=node) for one in here for node in nodes)
                if copies != loop.world.copies:
                    loop.observe([CopiesSeen(copies=copies)])
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._coming:
                task.cancel()
            await asyncio.gather(*self._coming, return_exceptions=True)

    def _here(self, models: list[Model]) -> frozenset[str]:
        """The artifacts that lie here."""
        found = set[str]()
        for model in models:
            key = self._key(model)
            if key is not None and self._store.layout.record(key) is not None:
                found.add(model.spec.artifact or "")
        return frozenset(found)

    def _ask_headers(self, world: World, here: frozenset[str]) -> None:
        """Of each Model whose memory nothing says yet, once."""
        for model in world.models.values():
            artifact = model.spec.artifact or ""
            if comes(model) and not model.memory_bytes and artifact not in here and artifact not in self._headers:
                self._headers[artifact] = (Path(), [])
                self._begin(self._lay_header(artifact))

    async def _lay_header(self, artifact: str) -> None:
        folder = self._store.layout.root / HEADERS / hashlib.sha256(artifact.encode()).hexdigest()
        try:
            paths = await bring.lay_headers(bring.lies(artifact), self._ways, folder)
        except Exception as error:  # noqa: BLE001 - then it is counted with a whole device until it is here
            log.info("event=weights_header_failed artifact=%s reason=%r", artifact, str(error))
            return
        self._headers[artifact] = (folder, paths)
        self._changed.set()

    def _bring_ahead(self, artifact: str) -> None:
        async def ahead() -> None:
            try:
                (await self._copy(bring.lies(artifact), lambda _: None)).close()
            except Exception as error:  # noqa: BLE001 - it is only ahead of time: the start tells what is wrong
                log.info("event=weights_ahead_failed artifact=%s reason=%r", artifact, str(error))
            self._changed.set()

        self._begin(ahead())

    def _begin(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)


def _left(path: str, why: str) -> None:
    log.info("event=weights_left_out path=%r reason=%r", path, why)


def wanting(world: World) -> list[ModelName]:
    """Models that are called, or always wanted."""
    called = [name for name, load in world.loads.items() if load.waiting]
    return called + [model.name for model in world.models.values() if model.spec.replicas.min]


def reached(settings: WeightsSettings) -> Registries:
    """Registries as Settings say, with this machine's logins. A file that cannot be read is an
    error of each pull. Raises SignersError.
    """
    mirrors: dict[str, list[MirrorSite]] = {}
    for one in settings.mirrors:
        host, _, prefix = one.host.partition("/")
        registry = reference.DOCKER_HOST if one.registry == reference.DOCKER else one.registry
        mirrors.setdefault(registry, []).append(MirrorSite(host, f"{prefix}/" if prefix else ""))
    ca, signed = Path(settings.ca_file) if settings.ca_file else None, signers.policy(settings.signatures)
    return Registries(keychain(), ca=ca, mirrors=mirrors, signatures=signed)


def weights_in(folder: Path, copy: Copy, model: Model) -> Path:
    """What of a Copy the Model's engine loads. Raises EngineError."""
    return chosen(folder, [one.path for one in copy.record.laid], model)


def chosen(folder: Path, paths: list[str], model: Model) -> Path:
    """The one GGUF file, or its first part; else the folder, which has safetensors. Raises EngineError."""
    return folder / loaded(gguf.bases(paths), model)


class _Telling:
    """How far a pull is, in words, now and then."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._said_s = 0.0

    def __call__(self, came: Came) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= TELL_EVERY_S:
            self._said_s = now_s
            self._told(f"{size(came.bytes)} of {size(came.total_bytes)}, {size(round(came.bytes_per_s))} a second")
