"""Merges the documents of an installation from all sources: files, custom resources, adopted objects. Pure.

Keeps the last documents of each source and merges them into one set, without those that another installation serves
(`autoscaler.spec.installation_ownership`). The oldest object keeps a contested name (`autoscaler.spec.document_names`).
Nothing is published until each expected source has reported and the serving installation of each namespace was
determined or is unknown, because a missing Model would count as deleted. Each Model's stored status, with the values
learned before a restart, is published once. A Model whose document raises an exception keeps its last valid document
and is listed in `faults`. Models whose serving installation is unknown are listed there, too: a quarantined Model keeps
its replicas and starts none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from autoscaler.contract import ModelName
from autoscaler.documents.document_quarantine import DocumentFault
from autoscaler.spec.document_names import Origin, Settled, resolve_model_conflicts, resolve_tenant_conflicts
from autoscaler.spec.installation_ownership import CLAIM, explain_not_served
from autoscaler.spec.model import Model
from autoscaler.spec.tenant import Tenant
from autoscaler.state.events import DocumentsSeen

FILES, CUSTOMS = "files", "customs"

Status = Mapping[str, object]
"""The status of an object, as stored in the API server."""
UNKNOWN = f"it is unknown which installation serves namespace {{}}: its Lease {CLAIM} cannot be read or written"
NO_FAULTS: Mapping[Origin, str] = MappingProxyType({})
NO_FILE_FAULTS: Mapping[ModelName, DocumentFault] = MappingProxyType({})
NO_VERSIONS: Mapping[Origin, object] = MappingProxyType({})
Publish = Callable[[DocumentsSeen, Mapping[ModelName, Status]], None]
"""Receives all documents, and the status of each Model that is published for the first time."""


class Installation:
    """Publishes all documents together each time a source changes."""

    def __init__(
        self, publish: Publish, awaited: Collection[str] = (FILES,), *, title: str = "",
        request_claims: Callable[[Collection[str]], None] | None = None,
    ) -> None:  # fmt: skip
        """`title`: the title of this installation. `request_claims` is called with the namespaces of Models; the result
        is set by `put_holders`. Without it, all Models that name no other installation are ours.
        """
        self._publish = publish
        self._title, self._request_claims = title, request_claims
        self._holders: Mapping[str, str | None] = {}
        self._places: frozenset[str] = frozenset()
        """Further namespaces, also of objects that are not in force."""
        self._published = False
        self._awaited = set(awaited)
        self._files = DocumentsSeen()
        self._file_faults = NO_FILE_FAULTS
        self._models: dict[str, Mapping[Origin, Model]] = {}
        self._tenants: dict[str, Sequence[Tenant]] = {}
        self._statuses: dict[Origin, Status] = {}
        """Statuses that are not published yet; at most one for each Model."""
        self._undecoded: dict[str, Mapping[Origin, str]] = {}
        self.settled = Settled()
        self._versions: dict[str, Mapping[Origin, object]] = {}
        self.faults: Mapping[ModelName, DocumentFault] = {}
        """Models to quarantine, and why: the exception that the document raises, or UNKNOWN."""
        self.tenants_taken: Mapping[str, str] = {}
        """Tenant -> a sentence on which of its name and keys belong to another Tenant."""

    def put_files(self, documents: DocumentsSeen, faults: Mapping[ModelName, DocumentFault] = NO_FILE_FAULTS) -> None:
        """Set the documents of files. Their names take precedence, and only files contain Settings. `faults`: their
        Models that raised an exception.
        """
        self._files, self._file_faults = documents, faults
        self._put(FILES)

    def put(
        self,
        source: str,
        models: Mapping[Origin, Model],
        tenants: Sequence[Tenant] = (),
        statuses: Mapping[Origin, Status] | None = None,
        *,
        places: Collection[str] | None = None,
        faults: Mapping[Origin, str] = NO_FAULTS,
        versions: Mapping[Origin, object] = NO_VERSIONS,
    ) -> None:
        """Set all documents of a source, Tenants oldest first, and the status of each Model new there. `places`:
        further namespaces for which the serving installation must be known. `faults`: Models whose current document
        raised an exception when it was decoded. `versions`: the version of each document (`DocumentFault`).
        """
        if places is not None:
            self._places = frozenset(places)
        self._models[source] = models
        self._tenants[source] = tenants
        self._undecoded[source] = faults
        self._versions[source] = versions
        self._statuses |= statuses or {}
        self._put(source)

    def whose(self, namespace: str, named: str | None, field: str = "spec.installation") -> str | None:
        """Return why another installation serves a Model of `namespace` that names `named` in `field`, as one sentence.
        Empty: this installation serves it; None: unknown yet.
        """
        holder = "" if self._request_claims is None else self._holders.get(namespace)
        if named is None and holder is None:
            return None
        return explain_not_served(named, holder or "", self._title, namespace, field)

    def is_served_elsewhere(self, name: ModelName) -> bool:
        """Return whether another installation serves a Model of this name, and this installation serves none."""
        if any(model.name == name for model in self.settled.models):
            return False
        return any(
            name in {model.name, f"{model.namespace}/{model.name}"}
            and self.whose(origin.namespace, model.spec.installation)
            for found in self._models.values()
            for origin, model in found.items()
        )

    def heard(self, origin: Origin, status: Status) -> None:
        """Store the status that another installation wrote, since its Model may become ours."""
        if origin not in self.settled.names and origin in self._models.get(CUSTOMS, {}):
            self._statuses[origin] = status

    def put_holders(self, holders: Mapping[str, str | None]) -> None:
        """Set the title of the installation that serves each namespace; empty: no other installation is known; None:
        unknown, so that the replicas of the namespace's Models are neither started nor stopped.
        """
        self._holders = holders
        self._put("")

    def again(self) -> None:
        """Publish the same documents again, because facts about them have changed."""
        self._put(FILES)

    def _put(self, source: str) -> None:
        self._awaited.discard(source)
        models = {origin: model for found in self._models.values() for origin, model in found.items()}
        if self._request_claims is not None:
            namespaces = self._places | {o.namespace for o, model in models.items() if model.spec.installation is None}
            self._request_claims(namespaces)
            if not self._published and namespaces - self._holders.keys():
                return
        if self._awaited:
            return
        self._published = True
        unknown = {origin: why for origin, model in models.items() if (why := self._why_unknown(origin, model))}
        ours = {o: m for o, m in models.items() if o in unknown or self.whose(o.namespace, m.spec.installation) == ""}
        self.settled = resolve_model_conflicts(self._files.models, ours, self.settled)
        others = [tenant for tenants in self._tenants.values() for tenant in tenants]
        tenants, taken = resolve_tenant_conflicts(self._files.tenants, others)
        self.tenants_taken = {str(name): why for name, why in taken.items()}
        names = self.settled.names
        undecoded = {origin: why for found in self._undecoded.values() for origin, why in found.items()}
        faults = {
            origin: DocumentFault(why, self._versions.get(origin.source, NO_VERSIONS).get(origin))
            for origin, why in (undecoded | dict(self.settled.faults)).items()
        } | {origin: DocumentFault(why, why) for origin, why in unknown.items()}
        self.faults = {**self._file_faults, **{names[o]: fault for o, fault in faults.items() if o in names}}
        statuses = {names[origin]: status for origin, status in self._statuses.items() if origin in names}
        self._statuses = {
            origin: status for origin, status in self._statuses.items() if origin in models and origin not in ours
        }
        self._publish(
            DocumentsSeen(models=self.settled.models, tenants=tenants, settings=self._files.settings), statuses
        )

    def _why_unknown(self, origin: Origin, model: Model) -> str:
        """Return why the installation that serves the Model is unknown; empty: it is known, or still being read."""
        if self._request_claims is None or model.spec.installation is not None:
            return ""
        return UNKNOWN.format(origin.namespace) if self._holders.get(origin.namespace, "") is None else ""
