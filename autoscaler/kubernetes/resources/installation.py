"""Merges the documents of an installation from all sources: files, custom resources, adopted objects. Pure.

Keeps the last documents of each source and merges them into one set, without those that another installation serves
(`autoscaler.spec.ownership`); the oldest object keeps a contested name (`autoscaler.spec.names`). Nothing is passed on
until each expected source has reported and the installation that serves each namespace is known, because a missing
Model would look like a deleted one. Each Model's stored status is passed on once, with what was learned before a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autoscaler.contract import ModelName
from autoscaler.spec.model import Model
from autoscaler.spec.names import Origin, Settled, resolve_model_conflicts, resolve_tenant_conflicts
from autoscaler.spec.ownership import explain_not_served
from autoscaler.spec.tenant import Tenant
from autoscaler.state.events import DocumentsSeen

FILES, CUSTOMS = "files", "customs"

Status = Mapping[str, object]
"""The status of an object, as stored in the API server."""
Tell = Callable[[DocumentsSeen, Mapping[ModelName, Status]], None]
"""Receives all documents, and the status of each Model that is passed on for the first time."""


class Installation:
    """Passes on all documents together each time a source changes."""

    def __init__(
        self, tell: Tell, awaited: Collection[str] = (FILES,), *, title: str = "",
        ask: Callable[[Collection[str]], None] | None = None,
    ) -> None:  # fmt: skip
        """`title`: the title of this installation. `ask` receives the namespaces of Models and is answered through
        `put_holders`; without it all Models that name no other installation are ours.
        """
        self._tell = tell
        self._title, self._ask = title, ask
        self._holders: Mapping[str, str] = {}
        self._places: frozenset[str] = frozenset()
        """Further namespaces, also of objects that are not in force."""
        self._told = False
        self._awaited = set(awaited)
        self._files = DocumentsSeen()
        self._models: dict[str, Mapping[Origin, Model]] = {}
        self._tenants: dict[str, Sequence[Tenant]] = {}
        self._statuses: dict[Origin, Status] = {}
        """Statuses not passed on yet; at most one for each Model."""
        self.settled = Settled()
        self.tenants_taken: Mapping[str, str] = {}
        """Tenant -> a sentence on which of its name and keys belong to another Tenant."""

    def put_files(self, documents: DocumentsSeen) -> None:
        """Set the documents of files. Their names have precedence, and only files contain Settings."""
        self._files = documents
        self._put(FILES)

    def put(
        self,
        source: str,
        models: Mapping[Origin, Model],
        tenants: Sequence[Tenant] = (),
        statuses: Mapping[Origin, Status] | None = None,
        places: Collection[str] | None = None,
    ) -> None:
        """Set all documents of a source, Tenants oldest first, and the status of each Model new there. `places`:
        further namespaces for which the serving installation must be known.
        """
        if places is not None:
            self._places = frozenset(places)
        self._models[source] = models
        self._tenants[source] = tenants
        self._statuses |= statuses or {}
        self._put(source)

    def whose(self, namespace: str, named: str | None, field: str = "spec.installation") -> str | None:
        """A sentence on why another installation serves a Model of `namespace` that names `named` in `field`; empty:
        this one serves it; None: unknown yet.
        """
        holder = "" if self._ask is None else self._holders.get(namespace)
        if named is None and holder is None:
            return None
        return explain_not_served(named, holder or "", self._title, namespace, field)

    def heard(self, origin: Origin, status: Status) -> None:
        """Store the status that another installation wrote for a Model that may become ours."""
        if origin not in self.settled.names and origin in self._models.get(CUSTOMS, {}):
            self._statuses[origin] = status

    def put_holders(self, holders: Mapping[str, str]) -> None:
        """Set the title of the installation that serves each namespace; empty: no other installation is known."""
        self._holders = holders
        self._put("")

    def again(self) -> None:
        """Pass on the same documents again, because facts about them have changed."""
        self._put(FILES)

    def _put(self, source: str) -> None:
        self._awaited.discard(source)
        models = {origin: model for found in self._models.values() for origin, model in found.items()}
        if self._ask is not None:
            namespaces = self._places | {o.namespace for o, model in models.items() if model.spec.installation is None}
            self._ask(namespaces)
            if not self._told and namespaces - self._holders.keys():
                return
        if self._awaited:
            return
        self._told = True
        ours = {o: m for o, m in models.items() if self.whose(o.namespace, m.spec.installation) == ""}
        self.settled = resolve_model_conflicts(self._files.models, ours)
        others = [tenant for tenants in self._tenants.values() for tenant in tenants]
        tenants, taken = resolve_tenant_conflicts(self._files.tenants, others)
        self.tenants_taken = {str(name): why for name, why in taken.items()}
        names = self.settled.names
        statuses = {names[origin]: status for origin, status in self._statuses.items() if origin in names}
        self._statuses = {
            origin: said for origin, said in self._statuses.items() if origin in models and origin not in ours
        }
        self._tell(DocumentsSeen(models=self.settled.models, tenants=tenants, settings=self._files.settings), statuses)
