"""Watches KubeAI's Models (`kubeai.org/v1`), converts them, and passes them to the installation. I/O.

The kind may be installed at any time (`watch_set`). KubeAI's objects are only read. An object that cannot be
converted does not affect the others; its last valid version stays in force, and `wrong` is the reason. The `convert`
function converts an object (`autoscaler.importers.kubeai.models`). If it raises an exception, the Model is quarantined
and converted again later (`undecoded_models`, `retry`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.exception_handling import Failure, attempt
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources.document_merge import Installation
from autoscaler.kubernetes.resources.undecoded_models import Undecoded, describe_unconverted
from autoscaler.kubernetes.watch import Change, ObjectKey
from autoscaler.kubernetes.watch_set import Kinds, created_unix_s, list_collection_paths
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model

API_VERSION = "kubeai.org/v1"
KUBEAI = "kubeai"
"""The name of this document source."""

Convert = Callable[[object], tuple[Model | None, str, tuple[str, ...]]]
"""An object -> (its Model, or None; the error; a line for each key that was not converted)."""

_log = logging.getLogger("pilotlight.autoscaler.resources")


class KubeaiObject(NamedTuple):
    """The retained state of an object."""

    uid: str
    model: Model | None
    """The current or the last valid version; None: the object was never valid."""
    wrong: str
    """Why its current version is not in force; empty: it is."""
    notes: tuple[str, ...]
    """The keys that were not converted, a line for each."""
    undecoded: Undecoded | None = None
    """Its current version, if its conversion raised an exception."""

    @property
    def in_force(self) -> Model | None:
        """The Model in force; None: there is none."""
        return self.undecoded.stand_in if self.model is None and self.undecoded is not None else self.model


class KubeaiModels:
    """Watches KubeAI's Models in a cluster or in some namespaces. `api` must be open; nothing is written."""

    def __init__(
        self, api: Api, convert: Convert, installation: Installation, namespaces: Sequence[str] | None = None
    ) -> None:
        self._convert = convert
        self._installation = installation
        self._generations: dict[ObjectKey, int] = {}
        """The generation of each object that was converted: KubeAI updates status and replica counts constantly."""
        self._kinds = Kinds(api, self._put)
        self._watches = [
            self._kinds.add(path, self._read, self._changed, optional=True)
            for path in list_collection_paths(API_VERSION, "models", namespaces)
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._kinds.run()

    @property
    def found(self) -> dict[ObjectKey, KubeaiObject]:
        """All KubeAI Models that exist."""
        return {key: found for watched in self._watches for key, found in watched.items.items()}

    @property
    def wrong(self) -> dict[ObjectKey, str]:
        """Objects whose current version is not in force, and why."""
        return {key: found.wrong for key, found in self.found.items() if found.wrong}

    def _changed(self, changes: list[Change[KubeaiObject]]) -> None:
        for key, old, new in changes:
            if new is None:
                self._generations.pop(key, None)
            elif new.wrong and (old is None or old.wrong != new.wrong):
                _log.error("event=kubeai_model_rejected model=%s/%s reason=%s", *key, new.wrong)
            for note in new.notes if new is not None and (old is None or old.notes != new.notes) else ():
                _log.warning("event=kubeai_field_ignored model=%s/%s reason=%s", *key, note)

    def _put(self) -> None:
        found_now = {Origin(KUBEAI, *key): found for key, found in self.found.items()}
        models = {origin: model for origin, found in found_now.items() if (model := found.in_force) is not None}
        faults = {
            origin: found.undecoded.reason for origin, found in found_now.items() if found.undecoded is not None
        }  # fmt: skip
        versions = {Origin(KUBEAI, *key): (found.uid, self._generations.get(key)) for key, found in self.found.items()}
        self._installation.put(KUBEAI, models, faults=faults, versions=versions)

    def retry(self, origins: Container[Origin]) -> None:
        """Convert again those of these objects whose conversion raised an exception, and pass the results on."""
        for watched in self._watches:
            for key, old in tuple(watched.items.items()):
                if old.undecoded is not None and Origin(KUBEAI, *key) in origins:
                    watched.replace(key, self._read_version(old.undecoded.found, old))
        self._put()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, found: Object) -> KubeaiObject | None:
        """Convert an object once per generation; one that is being deleted counts as deleted."""
        metadata = found["metadata"]
        key = ObjectKey(metadata["namespace"], metadata["name"])
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        if "deletionTimestamp" in metadata:
            return None
        old = next((old for watched in self._watches if (old := watched.items.get(key)) is not None), None)
        if old is not None and old.uid == uid and self._generations.get(key) == generation:
            return old
        self._generations[key] = generation
        return self._read_version(found, old if old is not None and old.uid == uid else None)

    def _read_version(self, found: Object, old: KubeaiObject | None) -> KubeaiObject:
        """Convert an object. `old`: its earlier version; None: it is new."""
        last, uid = None if old is None else old.model, found["metadata"]["uid"]
        done = attempt(partial(self._convert_model, found))
        if isinstance(done, Failure):
            return KubeaiObject(uid, last, "", (), describe_unconverted(found, done.error))
        model, wrong, notes = done
        return KubeaiObject(uid, last if model is None else model, wrong, notes)

    def _convert_model(self, found: Object) -> tuple[Model | None, str, tuple[str, ...]]:
        model, wrong, notes = self._convert({"apiVersion": API_VERSION, "kind": "Model"} | found)
        if model is not None:
            model = replace(model, created_unix_s=created_unix_s(found["metadata"]))
        return model, wrong, notes
