"""Sends Events about Models and unreadable objects while this process leads. I/O; `events` derives their content.

The listener of the loop only records; a task sends at most PER_S requests a second over all objects, with a limit per
object, and at most UNREADABLE_MAX Events about unreadable objects in UNREADABLE_S. The Events are core/v1, not
events.k8s.io: `kubectl describe` shows both, and only the text of a core/v1 Event may be updated when a series
continues. A rejected Event is dropped and counted. While the API server does not answer, Events wait. After a transient
error of the API server, only the Events of the same object wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from autoscaler.exception_handling import (
    FaultReport,
    attempt_for,
    describe_error,
    raise_fault,
    reraise_memory_error,
)
from autoscaler.kubernetes.api import Api, ApiError, FencedError, UnreachableError
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.resources import events as kubernetes_events
from autoscaler.kubernetes.resources.events import Book, Due, ModelEvent, Regarding
from autoscaler.kubernetes.unreadable_objects import Unreadable, UnreadableObjects
from autoscaler.provisioning.release import Leaving
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.state.actions import Decided
from autoscaler.state.capacity import LeaseId
from autoscaler.state.world import World

PER_S = 10.0
RETRY_S = 10.0
UNREADABLE_MAX, UNREADABLE_S = 100, 3600.0
"""Limit of Events about unreadable objects, which any user can create: further ones are only logged and counted."""
NAME_MAX = 200
"""Maximum characters of the object's name in the name of an Event."""

_log = logging.getLogger("pilotlight.autoscaler.resources")


class Events:
    """Records and sends Events. `regarding` returns the object of a Model's Events, `reporter` is our pod's name."""

    def __init__(
        self,
        api: Api,
        reporter: str = WRITER,
        regarding: Callable[[Model], Regarding | None] = kubernetes_events.find_involved_object,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] | None = None,
        unreadable: UnreadableObjects | None = None,
        owner: Ownership = ANYBODYS,
        fault: FaultReport = raise_fault,
    ) -> None:
        self._api = api
        self._reporter = reporter[:128]
        self._regarding = regarding
        self._owner = owner
        self._fault = fault
        self._clock = clock
        self._wall = wall or api.unix_s
        self._book = Book()
        self._leaving = Leaving()
        self._stuck: frozenset[LeaseId] = frozenset()
        """Stuck capacity orders that were reported."""
        self._leads = False
        self._unreadable = unreadable or UnreadableObjects()
        self._unreadable.listeners.append(self._on_unreadable)
        self._unreadable_s = deque[float](maxlen=UNREADABLE_MAX)
        """When the last Events about unreadable objects were recorded."""
        self._news = asyncio.Event()
        self.trouble = ""
        """Why the last Event was not sent; empty if it was sent."""

    @property
    def dropped(self) -> int:
        """Number of occurrences that were never sent."""
        return self._book.dropped

    def note(self, about: Regarding, happening: ModelEvent) -> None:
        """Record an occurrence about any object."""
        self._book.note(about, happening, self._clock())
        self._news.set()

    def on_step(self, step: Decided) -> None:
        """Record what happened in one step of the loop. Those of an earlier leader are not reported."""
        self._leaving.look(step.after.capacity, self._clock())  # on followers, too, since they may lead later
        began, self._leads = step.after.leadership.leads and not self._leads, step.after.leadership.leads
        if not step.after.leadership.leads:
            return
        if began:
            for found in self._unreadable:
                self._on_unreadable(found)
        self._report_stuck(step.after)
        if not (step.transitions or step.actions or step.before.capacity is not step.after.capacity):
            return
        events = kubernetes_events.derive_step_events(
            step.transitions, step.actions, step.before, step.after, self._fault
        )
        for one in events:
            attempt_for(one.model, "events", self._fault, partial(self._record_event, one, step.after, step.before))

    def _report_stuck(self, world: World) -> None:
        """Report each stuck capacity order once per leader."""
        stuck = self._leaving.stuck()
        for id in sorted(stuck - self._stuck):
            self._record_event(kubernetes_events.build_stuck_capacity_event(world.capacity.leases[id]), world)
        self._stuck = stuck

    def _on_unreadable(self, found: Unreadable) -> None:
        """Record an unreadable object. A follower writes no Events; a new leader reports all unreadable objects."""
        event, now_s = kubernetes_events.build_unreadable_event(found), self._clock()
        times = self._unreadable_s
        if not self._leads or event is None or (len(times) == UNREADABLE_MAX and now_s - times[0] < UNREADABLE_S):
            return
        times.append(now_s)
        self.note(*event)

    def _record_event(self, one: ModelEvent, *worlds: World) -> None:
        """Record an occurrence about the Model's own object, if one of these Worlds has it."""
        model = next((world.models[one.model] for world in worlds if one.model in world.models), None)
        about = self._regarding(model) if model is not None else None
        if about is not None:
            self.note(about, one)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._news.clear()
            while (due := self._book.take(self._clock())) is not None:
                await self._send(due)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._book.wait_s(self._clock())):
                    await self._news.wait()

    async def _send(self, due: Due) -> None:
        try:
            await self._write_event(due)
        except FencedError:
            self._book.drop(due)
            self._book.clear()
        except UnreachableError as error:
            self._book.put_back(due)
            self._troubled(str(error))
            await asyncio.sleep(RETRY_S)
        except ApiError as error:
            if error.is_transient:
                self._book.postpone(due, self._clock(), RETRY_S)
            else:
                self._book.drop(due)
            self._troubled(str(error))
        except Exception as error:  # noqa: BLE001 - the other Events are sent
            reraise_memory_error(error)
            self._book.drop(due)
            self._troubled(describe_error(error))
        else:
            self.trouble = ""
        await asyncio.sleep(1.0 / PER_S)

    async def _write_event(self, due: Due) -> None:
        """Update the existing Event of the series, or create one."""
        path = f"/api/v1/namespaces/{kubernetes_events.event_namespace(due.regarding)}/events"
        known = self._book.series(due)
        if known is not None:
            times = known.times + due.times
            try:
                await self._api.patch(
                    f"{path}/{known.name}", dict(kubernetes_events.build_event_patch(due, times, self._unix))
                )
            except ApiError as error:
                if error.status != 404:
                    raise
                self._book.forget(due)  # Events expire after an hour
            else:
                self._book.sent(due, known.name, times)
                return
        name = f"{due.regarding.name[:NAME_MAX].rstrip('-.')}.{secrets.token_hex(8)}"
        made = dict(kubernetes_events.build_event_manifest(due, name, self._reporter, self._unix))
        await self._api.create(path, self._owner.label(made))
        self._book.sent(due, name, due.times)

    def _unix(self, at_s: float) -> str:
        moment = datetime.fromtimestamp(round(self._wall() + at_s - self._clock()), UTC)
        return moment.isoformat().replace("+00:00", "Z")

    def _troubled(self, trouble: str) -> None:
        """Log an error once, until it is over or changes."""
        if trouble != self.trouble:
            _log.warning("event=event_write_failed error=%s", trouble)
        self.trouble = trouble
