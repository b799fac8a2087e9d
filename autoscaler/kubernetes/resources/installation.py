"""All documents of an installation, whatever they are written in: files, custom resources, objects that are adopted.

Owns what each source last said and the one set that comes of it, without what another installation serves
(`autoscaler.spec.ownership`); older objects keep a contested name (`autoscaler.spec.names`). Nothing is passed on
before each expected source has reported and the installation that serves each namespace is known, because a missing
Model would look like a deleted one. Each Model's stored status is passed on once, with what was learnt before a
restart. Pure.
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
"""Of an object, as an API server has it."""
Tell = Callable[[DocumentsSeen, Mapping[ModelName, Status]], None]
"""Takes all documents, and the status of each Model that is told for the first time."""


class Installation:
    """Tells all documents together each time that a source says something new."""

    def __init__(
        self, tell: Tell, awaited: Collection[str] = (FILES,), *, title: str = "",
        ask: Callable[[Collection[str]], None] | None = None,
    ) -> None:  # fmt: skip
        """`title`: of this installation. `ask` gets the namespaces of Models, and `put_holders` is to follow; without
        it all Models that name no other installation are ours.
        """
        self._tell = tell
        self._title, self._ask = title, ask
        self._holders: Mapping[str, str] = {}
        self._places: frozenset[str] = frozenset()
        """Namespaces of objects that are not in force."""
        self._told = False
        self._awaited = set(awaited)
        self._files = DocumentsSeen()
        self._models: dict[str, Mapping[Origin, Model]] = {}
        self._tenants: dict[str, Sequence[Tenant]] = {}
        self._statuses: dict[Origin, Status] = {}
        """Not told yet; at most one of each Model."""
        self.settled = Settled()
        self.tenants_taken: Mapping[str, str] = {}
        """Tenant -> what others have of its name and keys, in a sentence."""

    def put_files(self, documents: DocumentsSeen) -> None:
        """What the files say. Their names come first, and only they have Settings."""
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
        """All that a source has now, Tenants oldest first; and the status of each Model that is new there. `places`:
        more namespaces of which it is to be known which installation serves their Models.
        """
        if places is not None:
            self._places = frozenset(places)
        self._models[source] = models
        self._tenants[source] = tenants
        self._statuses |= statuses or {}
        self._put(source)

    def whose(self, namespace: str, named: str | None, field: str = "spec.installation") -> str | None:
        """Why another installation serves a Model of `namespace` that names `named` in `field`, in a sentence; empty:
        this one serves it; None: it is not known yet.
        """
        holder = "" if self._ask is None else self._holders.get(namespace)
        if named is None and holder is None:
            return None
        return explain_not_served(named, holder or "", self._title, namespace, field)

    def heard(self, origin: Origin, status: Status) -> None:
        """What another installation wrote of a Model that may become ours."""
        if origin not in self.settled.names and origin in self._models.get(CUSTOMS, {}):
            self._statuses[origin] = status

    def put_holders(self, holders: Mapping[str, str]) -> None:
        """Which installation serves the Models of each namespace, by its title; empty: not known to be another's."""
        self._holders = holders
        self._put("")

    def again(self) -> None:
        """The same once more: what is known of them has changed."""
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
