"""All documents of an installation, whatever they are written in: files, custom resources, objects that are adopted.

Owns what each source last said and the one set that comes of it, names settled by age (`autoscaler.names`). Promises:
nothing is told before every source that is awaited has said something, since a Model that is not told yet would look
like one that is gone; each Model's status is told once with it, for what was learnt before a restart. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autoscaler.contract import ModelName
from autoscaler.model import Model
from autoscaler.names import Origin, Settled, settle, settle_tenants
from autoscaler.observations import DocumentsSeen
from autoscaler.tenant import Tenant

FILES, CUSTOMS = "files", "customs"

Status = Mapping[str, object]
"""Of an object, as an API server has it."""
Tell = Callable[[DocumentsSeen, Mapping[ModelName, Status]], None]
"""Takes all documents, and the status of each Model that is told for the first time."""


class Installation:
    """Tells all documents together each time that a source says something new."""

    def __init__(self, tell: Tell, awaited: Collection[str] = (FILES,)) -> None:
        self._tell = tell
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
    ) -> None:
        """All that a source has now, Tenants oldest first; and the status of each Model that is new there."""
        self._models[source] = models
        self._tenants[source] = tenants
        self._statuses |= statuses or {}
        self._put(source)

    def again(self) -> None:
        """The same once more: what is known of them has changed."""
        self._put(FILES)

    def _put(self, source: str) -> None:
        self._awaited.discard(source)
        if self._awaited:
            return
        self.settled = settle(self._files.models, {o: m for models in self._models.values() for o, m in models.items()})
        others = [tenant for tenants in self._tenants.values() for tenant in tenants]
        tenants, taken = settle_tenants(self._files.tenants, others)
        self.tenants_taken = {str(name): why for name, why in taken.items()}
        names = self.settled.names
        statuses = {names[origin]: status for origin, status in self._statuses.items() if origin in names}
        self._statuses = {}
        self._tell(DocumentsSeen(models=self.settled.models, tenants=tenants, settings=self._files.settings), statuses)
