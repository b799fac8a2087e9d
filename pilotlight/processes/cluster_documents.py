"""Assembles the API server objects that an autoscaler reads as documents, and those that it writes back.

Documents come from files, custom resources, adopted workloads and KubeAI's Models. Results are written to the status of
Models and as Events on Models and workloads. A Model outside of the pods' namespace cannot refer to objects of that
namespace (`autoscaler.documents.document_rules`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents import document_rules, parse
from autoscaler.documents.document_quarantine import PART, DocumentFault, list_faults_over
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.adoption.driver import AdoptedDriver, WorkloadEvent
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.importers.kubeai import models as kubeai
from autoscaler.importers.kubeai.config import CHART
from autoscaler.kubernetes.installation_leases import ModelClaims
from autoscaler.kubernetes.resources import events, model_status
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, FILES, Installation, Status
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher, StatusSeen
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.kubernetes.resources.kubeai_watcher import KUBEAI, KubeaiModels
from autoscaler.kubernetes.resources.model_status import list_subjects
from autoscaler.kubernetes.resources.status_writer import Statuses
from autoscaler.spec.decode import WrongKeyError, format_path
from autoscaler.spec.document_names import Origin
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.tenant import Tenant
from autoscaler.state.events import DocumentsSeen, FaultSeen
from pilotlight.models.cluster_model_memory import Sizes

if TYPE_CHECKING:
    from autoscaler.controller.loop import Loop
    from autoscaler.kubernetes.api import Api
    from pilotlight.processes.cluster import ClusterOptions

ADOPTED = "adopted"
FLUSH_S = 0.3
"""How long the last status update may take at shutdown."""

log = logging.getLogger("pilotlight.autoscaler.documents")


def decode_custom_resource(namespace: str, document: object) -> Model | Tenant:
    """Decode a custom resource; pods are created in `namespace`. Raises WrongKeyError."""
    said = parse.read_document(document)
    if isinstance(said, Model):
        document_rules.check_namespace_access(said, namespace)
    return said


def decode_kubeai_model(namespace: str, value: object) -> tuple[Model | None, str, tuple[str, ...]]:
    """Decode a KubeAI Model as `kubeai.convert_live_model` does; outside of `namespace`, without KubeAI's Secret."""
    model, wrong, notes = kubeai.convert_live_model(value)
    if model is None or model.namespace == namespace:
        return model, wrong, notes
    model, wrong, notes = kubeai.convert_live_model(value, CHART._replace(secret=""))
    try:
        if model is not None:
            document_rules.check_namespace_access(model, namespace)
    except WrongKeyError as error:
        return None, f"{format_path(error.path)}: {error.message}", notes
    return model, wrong, notes


class Resources:
    """The documents and statuses of one process. Call `join` and `put_files` before `run`."""

    _loop: Loop

    def __init__(
        self, options: ClusterOptions, acting: Api, asking: Api, *, reporter: str,
        clock: Callable[[], float], pace: probes.Pace,
    ) -> None:  # fmt: skip
        namespaces = None if options.scope == "cluster" else [options.namespace]
        awaited = {FILES, CUSTOMS, ADOPTED} | ({KUBEAI} if options.watch_kubeai else set())
        self._clock = clock
        self._unix_s = asking.unix_s
        owner = Ownership(options.installation)
        self._claims = ModelClaims(asking, options.title, self._held, clock, owner)
        self._installation = Installation(self._tell, awaited, title=options.title, request_claims=self._claims.ask)
        self._customs = DocumentWatcher(
            asking, partial(decode_custom_resource, options.namespace), self._installation, namespaces,
            tenants=namespaces is None, heard=self._heard,
        )  # fmt: skip
        self._kubeai = None
        if options.watch_kubeai:
            self._kubeai = KubeaiModels(
                asking, partial(decode_kubeai_model, options.namespace), self._installation, namespaces
            )
        self.adopted = AdoptedDriver(
            acting, namespaces if options.adopt_in is None else options.adopt_in,
            lambda models, faults: self._installation.put(ADOPTED, models, faults=faults),
            hold_s=lambda: self._loop.world.settings.adoption.hold_seconds,
            whose=partial(self._installation.whose, field=INSTALLATION),
            note=self._note, clock=clock, pace=pace,
        )  # fmt: skip
        self._statuses = Statuses(
            acting, namespaces=namespaces, clock=clock, fault=self._fault, installation=options.installation
        )
        self._events = Events(
            acting, reporter, clock=clock, unreadable=asking.unreadable, owner=owner, fault=self._fault
        )
        self._others: set[tuple[str, str]] = set()
        """Namespaces whose Models another installation serves, and its name."""
        self._taken: Mapping[str, str] = {}
        """The last logged conflict of each Tenant."""
        self._sizes = Sizes(clock)
        self._faults: Mapping[ModelName, DocumentFault] = {}
        """Models whose document raises an exception when it is decoded, merged or sized."""
        self.observed = asyncio.Event()
        """Set once all documents have been observed."""

    def join(self, loop: Loop) -> None:
        """Connect the loop that receives the documents."""
        self._loop = loop
        loop.listeners += [self._statuses.on_step, self._events.on_step, self._sizes.on_step]
        loop.retries.append(self._retry)

    def put_files(self, seen: DocumentsSeen, faults: Sequence[FaultSeen] = ()) -> None:
        """Use the documents of files, at startup and after a reload. `faults`: the exceptions that their Models raised.
        These are observed with the documents, because the loop ignores a fault of a Model that it does not know.
        """
        self._installation.put_files(seen, {one.model: DocumentFault(one.reason) for one in faults})

    def is_served_elsewhere(self, name: ModelName) -> bool:
        """Return whether another installation serves a Model of this name, and this installation serves none."""
        return self._installation.is_served_elsewhere(name)

    def _tell(self, seen: DocumentsSeen, statuses: Mapping[ModelName, Status]) -> None:
        learned, wrong = model_status.restore_histories(statuses, self._clock(), self._unix_s())
        for line in wrong:
            log.warning("event=history_unreadable error=%s", line)
        taken, self._taken = self._taken, self._installation.tenants_taken
        for tenant, why in self._taken.items():
            if taken.get(tenant) != why:
                log.warning("event=tenant_conflict tenant=%s reason=%s", tenant, why)
        self._statuses.put(list_subjects(self._customs.models, self._installation.settled, self._installation.whose))
        sized = self._sizes.of(seen.models, self._loop.world.learned.looked)
        unsized = {one.model: DocumentFault(one.reason) for one in sized.faults}
        before, self._faults = self._faults, {**unsized, **self._installation.faults}
        over = list_faults_over(before, self._faults)
        faults = [FaultSeen(model=name, reason=fault.reason, part=PART) for name, fault in self._faults.items()]
        self._loop.observe([*learned, *over, replace(seen, models=sized.models), *faults])
        self.adopted.called(self._installation.settled.names, self._installation.settled.taken)
        self.observed.set()

    def _retry(self, ended: frozenset[ModelName]) -> None:
        """Read the documents of these Models again; quarantine those that raise an exception again."""
        if ended.isdisjoint(self._faults):
            return
        origins = {origin for origin, name in self._installation.settled.names.items() if name in ended}
        self._customs.retry(origins)
        if self._kubeai is not None:
            self._kubeai.retry(origins)
        self.adopted.retry(origins)
        for name in sorted(ended & self._faults.keys()):
            self._loop.fault(name, PART, self._faults[name].reason)

    def _held(self, holders: Mapping[str, str | None]) -> None:
        """Record which installation serves the Models of each namespace."""
        others = {(space, holder) for space, holder in holders.items() if holder not in {None, self._claims.me}}
        for namespace, holder in sorted(others - self._others):
            log.warning("event=namespace_served_elsewhere namespace=%s installation=%s", namespace, holder)
        self._others = others
        self._installation.put_holders(holders)

    def _heard(self, origin: Origin, said: StatusSeen) -> None:
        """Use a status that the leader wrote; followers need it when they lead."""
        self._installation.heard(origin, said.status)
        name = self._installation.settled.names.get(origin)
        if self._loop.world.leadership.leads:
            self._statuses.hear(said)
        elif name is not None:
            self._loop.observe(model_status.restore_histories({name: said.status}, self._clock(), self._unix_s())[0])

    def _fault(self, model: ModelName, what: str, error: Exception) -> None:
        self._loop.fault(model, what, error)

    def _note(self, note: WorkloadEvent) -> None:
        """Write an Event for a workload's owner."""
        kind, namespace, name = note.workload
        about = events.Regarding("apps/v1", kind, namespace, name, note.uid)
        weight = events.WARNING if note.warning else events.NORMAL
        self._events.note(about, events.ModelEvent(ModelName(""), note.reason, note.message, weight))

    async def run(self) -> None:
        """Read and write until cancelled; call `flush` afterwards."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._customs.run())
            tasks.create_task(retry_until_success(self._claims.run, partial(self._loop.trouble, "claims of Models")))
            if self._kubeai is not None:
                tasks.create_task(self._kubeai.run())
            tasks.create_task(retry_until_success(self._statuses.run, partial(self._loop.trouble, "status")))
            tasks.create_task(retry_until_success(self._events.run, partial(self._loop.trouble, "events")))
            await self.observed.wait()
            sized = partial(self._sizes.run, self._installation.again)
            tasks.create_task(retry_until_success(sized, partial(self._loop.trouble, "sizes")))

    async def flush(self) -> None:
        """Write pending statuses before another process leads."""
        await self._statuses.flush(FLUSH_S)
