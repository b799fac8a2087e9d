"""Writes the status of every Model object while this process leads. I/O.

Per Model, important changes (conditions, replicas by state) are written at most once in NEWS_S, others (requests,
learned values, messages) at most once in CHANGE_S. Over all Models there are at most PER_S writes a second, the longest
overdue first. A Model that does not change causes no API request, and a step of the loop does no work per Model. Each
leadership begins with one read of all statuses, so that nothing is written twice. If another process overwrites a
status, such as an earlier leader whose request arrives late, it is written again. Each write is a server-side apply of
the whole status, so it cannot conflict with an edit of the spec.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from autoscaler.contract import ModelName
from autoscaler.exception_handling import Failure, attempt, describe_error, reraise_memory_error
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.resources import model_status
from autoscaler.kubernetes.resources.document_watcher import StatusSeen
from autoscaler.kubernetes.resources.model_conditions import ELSEWHERE
from autoscaler.kubernetes.resources.model_status import NO_STATUS, ClockReading, Status, Subject
from autoscaler.kubernetes.watch_set import list_collection_paths
from autoscaler.provisioning.unplaceable_models import is_fit_unchanged, list_unplaceable_models
from autoscaler.spec.pod import API_VERSION
from autoscaler.state.actions import Decided, Unmet
from autoscaler.state.world import World
from autoscaler.text import format_rfc3339

NEWS_S, CHANGE_S = 1.0, 60.0
"""Minimum interval between two writes of one Model, for important and for other changes."""
PER_S = 20.0
"""Maximum status writes per second, over all Models."""
LOOK_S, LOOK_S_MAX = 0.2, 1.0
"""Interval between two evaluations of the `World`: the minimum, and the maximum if it does not change."""
RETRY_S = 10.0
"""Pause after a rejected request, or while the API server does not answer."""

_log = logging.getLogger("pilotlight.autoscaler.resources")


class _Kept:
    """One Model object: its status in the API server, and when it is due to be written."""

    __slots__ = ("due_s", "status", "subject", "version", "weight", "wrote_s")

    def __init__(self, one: Subject) -> None:
        self.subject = one
        self.wrote_s = -math.inf
        self.due_s = math.inf
        self.weight: tuple[object, ...]
        self.forget(0)

    def see(self, known: Status, version: int) -> None:
        """Remember the status that the API server stores, as of a version of the object."""
        self.status, self.version, self.weight = known, version, model_status.summarize_status(known)

    def forget(self, version: int) -> None:
        """The stored status, as of a version of the object, is not known: every status differs from it."""
        self.status, self.version = NO_STATUS, version
        self.weight = ()


class Statuses:
    """The status writer: `on_step` is a listener of the loop, `run` is a task."""

    def __init__(
        self,
        api: Api,
        *,
        namespaces: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] | None = None,
        fault: Callable[[ModelName, str, Exception], None],
        installation: str = "",
    ) -> None:
        """`namespaces`: those that may be read; None: all. `fault` is called with a Model whose status raised an
        exception. `installation` owns the condition on Models that another installation serves.
        """
        self._owner = f"{WRITER}-{installation}"
        self._fault = fault
        self._api = api
        self._collections = list_collection_paths(API_VERSION, "models", namespaces)
        self._clock = clock
        self._wall = wall or api.unix_s
        self._world = self._looked = World(epoch=0)
        self._unmet: tuple[Unmet, ...] = ()
        self._looked_unmet: dict[ModelName, Unmet] = {}
        self._fitted = self._world
        self._misfits: dict[ModelName, Unmet] = {}
        """Models of the `World` `_fitted` that fit no device."""
        self._subjects: Sequence[Subject] = ()
        self._next_subjects: Sequence[Subject] = ()
        """The value of `_subjects` from the next step on."""
        self._news = asyncio.Event()
        self._epoch = -1
        """The epoch to which `_kept` belongs."""
        self._kept: dict[str, _Kept] = {}
        """The objects whose status we write, by UID."""
        self._elsewhere: list[Subject] = []
        """Objects whose condition ELSEWHERE must be written or removed."""
        self._tried: dict[str, tuple[str, str]] = {}
        """UID -> last attempt of this leadership: desired and current condition. It is not attempted twice."""
        self._again_s: dict[str, float] = {}
        """UID -> when the attempt is retried after a rejection."""
        self._heard: dict[str, StatusSeen] = {}
        """UID -> status received since the last evaluation."""
        self.trouble = ""
        """Why the last write, or the initial read, failed; empty: it succeeded."""

    def put(self, subjects: Iterable[Subject]) -> None:
        """Set all Model objects, after the loop has received their documents. They are used from the next step of the
        loop, so that no status reports a generation that the decisions do not use yet.
        """
        self._next_subjects = tuple(subjects)

    def hear(self, seen: StatusSeen) -> None:
        """Remember the status of an object that the API server stores, whichever client wrote it.
        It is compared at the next evaluation, when the results of our own writes and of the list are known.
        """
        self._heard[seen.uid] = seen

    def on_step(self, step: Decided) -> None:
        """Take the newest `World`; it is evaluated later, in `run`."""
        self._world, self._unmet, self._subjects = step.after, step.plan.unmet, self._next_subjects
        self._news.set()

    async def run(self) -> None:
        """Write until cancelled. While another process leads, nothing is cached: its writes are not known here."""
        while True:
            self._news.clear()  # cleared first, so that later news wakes the next round
            try:
                if self._leads(self._world.epoch):
                    await self._lead(self._world.epoch)
            except FencedError:
                await asyncio.sleep(LOOK_S_MAX)  # another process leads, which the next `World` shows
            except (ApiError, UnreachableError) as error:
                self._troubled(f"statuses of Models are not updated: {error}")
                await asyncio.sleep(RETRY_S)
            await self._news.wait()  # there is a step at least every second

    async def flush(self, within_s: float) -> None:
        """Write pending changes within the given time; call it at shutdown, after `run` and before another leads."""
        with contextlib.suppress(TimeoutError, ApiError, UnreachableError, FencedError):
            async with asyncio.timeout(within_s):
                for kept in sorted(self._kept.values(), key=lambda kept: kept.due_s):
                    if math.isfinite(kept.due_s) and self._leads(self._epoch):
                        await self._write(kept)

    # --- one leadership -----------------------------------------------------------------------------------------------

    def _leads(self, epoch: int) -> bool:
        """Whether we lead and the replicas are known; at first a new leader knows none."""
        return self._world.leadership.leads and self._world.leadership.synced and self._world.epoch == epoch

    async def _lead(self, epoch: int) -> None:
        found = await self._read()
        self._kept, self._looked, self._looked_unmet, self._epoch = {}, World(epoch=0), {}, epoch
        self._tried.clear()
        while self._leads(epoch):
            self._news.clear()
            self._look(found)
            for kept in self._due():
                if self._leads(epoch) and await self._write(kept):
                    await asyncio.sleep(1.0 / PER_S)
            for one in self._elsewhere[: int(PER_S * LOOK_S_MAX)]:
                if self._leads(epoch):
                    await self._write_elsewhere(one)
                    await asyncio.sleep(1.0 / PER_S)
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S_MAX - LOOK_S):
                    await self._news.wait()

    async def _read(self) -> dict[str, tuple[Status, int]]:
        """Read every existing status and the version of its object, by the object's UID."""
        found: dict[str, tuple[Status, int]] = {}
        for path in self._collections:
            try:
                async for page in self._api.pages(path):
                    for one in page.items:
                        of = one["metadata"]
                        found[of["uid"]] = _there(one.get("status", {})), _version(one)
            except ApiError as error:
                if error.status != 404:  # 404: the cluster does not have the kind
                    raise
        return found

    def _look(self, found: dict[str, tuple[Status, int]]) -> None:
        """Evaluate the newest `World`: determine which objects to write, and when."""
        now_s = self._clock()
        unmet = self._lacking()
        names = model_status.list_changed_models(self._looked, self._world) | model_status.list_changed_keys(
            self._looked_unmet, unmet
        )
        self._looked, self._looked_unmet = self._world, unmet
        before, self._kept = self._kept, {}
        self._elsewhere.clear()
        for one in self._subjects:
            is_new = self._tried.get(one.uid) != (one.elsewhere, one.shown) or self._again_s.get(one.uid, now_s) < now_s
            if one.elsewhere != one.shown and is_new:
                self._elsewhere.append(one)
            if one.elsewhere:
                continue
            kept = before.get(one.uid)
            if kept is None:
                kept = _Kept(one)
                self._see(kept, *found.get(one.uid, (NO_STATUS, 0)), now_s)
                self._note(kept, unmet, now_s)
            elif one._replace(shown=kept.subject.shown) != kept.subject or one.model in names:
                kept.subject = one
                self._note(kept, unmet, now_s)
            self._kept[one.uid] = kept
        for seen in self._heard.values():
            if seen.uid not in self._kept:
                found[seen.uid] = _there(seen.status), seen.version
            self._judge(seen, now_s)
        self._heard.clear()

    def _judge(self, seen: StatusSeen, now_s: float) -> None:
        """Schedule a write if another process changed the status after our last write."""
        kept = self._kept.get(seen.uid)
        if kept is None or seen.version <= kept.version:
            return
        before = kept.status
        self._see(kept, _there(seen.status), seen.version, now_s)
        if kept.status != before:
            kept.due_s = min(kept.due_s, max(now_s, kept.wrote_s + NEWS_S))

    def _see(self, kept: _Kept, known: Status, version: int, now_s: float) -> None:
        """Remember the stored status. One that raises an exception is forgotten, and written again."""
        done = attempt(lambda: kept.see(known, version))
        if isinstance(done, Failure):
            kept.forget(version)
            self._failed(kept, done.error, now_s)

    def _lacking(self) -> dict[ModelName, Unmet]:
        """Models that the plan could not place, and Models that have no replicas and fit no device."""
        now = self._world
        if not is_fit_unchanged(self._fitted, now):
            self._fitted = now
            found = list_unplaceable_models(
                mask_quarantined(now), lambda name, error: self._fault(name, "status", error)
            ).items()
            self._misfits = {name: Unmet(model=name, reason=why, never=True) for name, why in found}
        never = {name: unmet for name, unmet in self._misfits.items() if name not in now.by_model}
        return {one.model: one for one in self._unmet} | never

    def _note(self, kept: _Kept, unmet: Mapping[ModelName, Unmet], now_s: float) -> None:
        weight = attempt(
            lambda: model_status.summarize_input(model_status.build_status_input(self._world, unmet, kept.subject))
        )
        if isinstance(weight, Failure):
            self._failed(kept, weight.error, now_s)
        elif weight != kept.weight:
            kept.due_s = min(kept.due_s, max(now_s, kept.wrote_s + NEWS_S))
        else:
            kept.due_s = min(kept.due_s, max(now_s, kept.wrote_s + CHANGE_S))

    def _due(self) -> list[_Kept]:
        """The objects to write now, longest overdue first, at most as many as can be written in LOOK_S_MAX."""
        now_s = self._clock()
        due = sorted((kept for kept in self._kept.values() if kept.due_s <= now_s), key=lambda kept: kept.due_s)
        return due[: int(PER_S * LOOK_S_MAX)]

    async def _write(self, kept: _Kept) -> bool:
        """Write one status if it differs. Returns whether a request was sent. Raises FencedError, UnreachableError."""
        now_s = self._clock()
        unmet = self._lacking()
        clocks = ClockReading(self._clock(), self._wall())

        def render() -> tuple[Status, object]:
            case = model_status.build_status_input(self._world, unmet, kept.subject)
            status = model_status.render_status(case, kept.status, clocks)
            return status, model_status.encode_status(status)

        rendered = attempt(render)
        if isinstance(rendered, Failure):
            self._failed(kept, rendered.error, now_s)
            return False
        made, content = rendered
        kept.due_s = math.inf
        if made == kept.status:
            return False
        kept.wrote_s = now_s
        one = kept.subject
        try:
            done = await self._apply(one, content, WRITER)
        except ApiError as error:
            kept.due_s = now_s + RETRY_S
            if error.status not in (404, 409):  # deleted or replaced: `put` will report it
                self._troubled(f"status of Model {one.namespace}/{one.name} cannot be written: {error}")
            return True
        except (FencedError, UnreachableError):
            raise
        except Exception as error:  # noqa: BLE001 - the other statuses are written
            reraise_memory_error(error)
            self._failed(kept, error, now_s)
            return True
        self.trouble = ""
        self._see(kept, made, _version(done), now_s)
        return True

    async def _write_elsewhere(self, one: Subject) -> None:
        """Write or remove the condition that another installation serves the Model. If several installations do not
        serve the Model, one of them writes it: the apply is not forced. Raises FencedError, UnreachableError.
        """
        self._tried[one.uid] = (one.elsewhere, one.shown)
        self._again_s.pop(one.uid, None)
        seen = {
            "type": ELSEWHERE, "status": "True", "reason": "OtherInstallation", "message": one.elsewhere,
            "lastTransitionTime": format_rfc3339(self._wall()),
        }  # fmt: skip
        try:
            await self._apply(one, {"conditions": [seen]} if one.elsewhere else {}, self._owner, force=False)
        except ApiError as error:
            if error.status not in (404, 409):  # deleted, or another installation wrote it
                self._again_s[one.uid] = self._clock() + RETRY_S
                self._troubled(f"status of Model {one.namespace}/{one.name} cannot be written: {error}")
        except (FencedError, UnreachableError):
            raise
        except Exception as error:  # noqa: BLE001 - the other conditions are written
            reraise_memory_error(error)
            self._again_s[one.uid] = self._clock() + RETRY_S
            self._troubled(f"status of Model {one.namespace}/{one.name}: {describe_error(error)}")

    async def _apply(self, one: Subject, content: object, owner: str, *, force: bool = True) -> Object:
        body: Object = {
            "apiVersion": API_VERSION, "kind": "Model", "status": content,
            "metadata": {"name": one.name, "namespace": one.namespace, "uid": one.uid},
        }  # fmt: skip
        path = f"/apis/{API_VERSION}/namespaces/{one.namespace}/models/{one.name}/status"
        return await self._api.apply(path, body, owner, force=force)

    def _failed(self, kept: _Kept, error: Exception, now_s: float) -> None:
        """Quarantine a Model whose status could not be computed; its status then reports that."""
        kept.due_s = now_s + RETRY_S
        if kept.subject.model is None:
            self._troubled(f"status of Model {kept.subject.namespace}/{kept.subject.name}: {describe_error(error)}")
        else:
            self._fault(kept.subject.model, "status", error)

    def _troubled(self, trouble: str) -> None:
        """Log an error once, until it is over or changes."""
        if trouble != self.trouble:
            _log.warning("event=status_write_failed error=%s", trouble)
        self.trouble = trouble


def _there(seen: object) -> Status:
    """Read a stored status; an unreadable one counts as empty, so that it is rewritten."""
    done = attempt(lambda: model_status.read_status(seen))
    if not isinstance(done, Failure):
        return done
    if not isinstance(done.error, ValueError):
        _log.error("event=status_unreadable error=%s", describe_error(done.error))
    return NO_STATUS


def _version(of: Object) -> int:
    """Read the version of an object; an unreadable one counts as 0, so that each later event is newer."""
    done = attempt(lambda: int(of["metadata"]["resourceVersion"]))
    return 0 if isinstance(done, Failure) else done
