"""An autoscaler of one namespace with steps and clocks that a test controls, and the status of its Models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from autoscaler.contract import ModelName
from autoscaler.documents.parse import read_document as parse
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources import model_status, status_writer
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, FILES, Installation
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher, StatusSeen
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.kubernetes.resources.model_status import list_subjects
from autoscaler.kubernetes.resources.status_writer import Statuses
from autoscaler.spec.document_names import Origin
from autoscaler.state.events import DocumentsSeen, Seen
from autoscaler.state.world import World
from tests.support.builders.fold import reported
from tests.support.builders.worlds import T0, device, level, world
from tests.support.harness.driver_events import seen_of
from tests.support.harness.faults.contained_faults import raised
from tests.support.harness.manual_loop import SteppedLoop

WAIT_S_MAX = 90.0
UNIX0 = 1_800_000_000.0
REST_S = 1.0


class House:
    """Documents, statuses and Events around a loop that the test steps."""

    def __init__(self, api: Api, namespace: str, *, now_s: float = T0, unix_now_s: float = UNIX0) -> None:
        self.stepped = SteppedLoop(world(slices=[device()]), now_s)
        self._wall_at_0_s = unix_now_s - now_s
        self.received = asyncio.Event()
        self.installation = Installation(self._tell, (FILES, CUSTOMS))
        self.installation.put_files(DocumentsSeen())
        self.customs = DocumentWatcher(api, parse, self.installation, [namespace], tenants=False, heard=self._hear)
        self.statuses = Statuses(api, namespaces=[namespace], clock=self._now_s, wall=self._unix_s, fault=raised)
        self.events = Events(api, "pod-0", clock=self._now_s, wall=self._unix_s)
        self.stepped.loop.listeners += [self.statuses.on_step, self.events.on_step]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[House]:
        """Yields when the Models of the namespace are known."""
        tasks = [asyncio.create_task(one.run()) for one in (self.customs, self.statuses, self.events)]
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await self.received.wait()
            yield self
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, documents: DocumentsSeen, known: Mapping[ModelName, Mapping[str, object]]) -> None:
        seen, wrong = model_status.restore_histories(known, self._now_s(), self._unix_s())
        assert not wrong
        self.statuses.put(
            list_subjects(self.customs.models, self.installation.settled, self.installation.whose)
        )  # fmt: skip
        self.stepped.step(*seen, documents)
        self.received.set()

    def _now_s(self) -> float:
        return self.stepped.now_s

    def _unix_s(self) -> float:
        return self._wall_at_0_s + self.stepped.now_s

    def _hear(self, origin: Origin, reported: StatusSeen) -> None:
        name = self.installation.settled.names.get(origin)
        if self.stepped.loop.world.leadership.leads:
            self.statuses.hear(reported)
        elif name is not None:
            self.stepped.step(
                *model_status.restore_histories({name: reported.status}, self._now_s(), self._unix_s())[0]
            )

    # --- inputs -------------------------------------------------------------------------------------------------------

    def call(self, sequence: int, waiting: int = 1) -> World:
        """Reports as a gateway the number of waiting requests for `ada`."""
        levels = [level("ada", waiting)] if waiting else []
        return self.stepped.step(reported(sequence, levels=levels, version=self.stepped.loop.world.version))

    def see(self, seen: Seen, reason: str = "") -> World:
        """Reports all started replicas as observed in this state."""
        replicas = self.stepped.loop.world.replicas.values()
        assert replicas
        return self.stepped.step(*(seen_of(one, seen, reason=reason, proof="assumed") for one in replicas))

    def later(self, by_s: float) -> None:
        """Advances the clocks."""
        self.stepped.now_s += by_s
        self.stepped.step()


async def until(api: Api, path: str, holds: Callable[[Object], object]) -> Object:
    """Polls an object or a list and returns it once `holds` is true."""
    found: Object = {}
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                found = await api.get(path)
                if holds(found):
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never so: {found}") from None


def has_condition(type: str, reason: str) -> Callable[[Object], bool]:
    """Returns a predicate: whether the condition has that reason."""
    return lambda found: condition(found, type).get("reason") == reason


def condition(found: Object, type: str) -> dict[str, str]:
    """One condition of a Model; empty if it has none."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == type), {})


async def at_rest(api: Api) -> None:
    """Waits until no request was sent for a while, so that watches have started."""
    asked = -1
    while api.requests != asked:
        asked = api.requests
        await asyncio.sleep(REST_S)


async def looks(house: House, many: int = 5) -> None:
    """Waits until the status writer has checked that many times, so that pending changes are written."""
    for _ in range(many):
        house.stepped.step()
        await asyncio.sleep(2 * status_writer.LOOK_S_MAX)
