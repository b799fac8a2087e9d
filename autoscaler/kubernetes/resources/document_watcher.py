"""Watches the custom resources Model and Tenant and passes their documents to the installation. I/O.

`parse` decodes objects by the same rules as files. An object is decoded again only when its spec changes. An invalid
object does not affect the others; its last valid version stays in force, and `wrong` is the reason. If decoding a Model
raises any other exception, the Model is quarantined and decoded again later (`undecoded_models`, `retry`). A Tenant
that was never valid exists without keys, so that `auth: auto` requires keys. Without permission to read Tenants there
are none; without permission to read Models the start waits (`watch_set`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import TenantName
from autoscaler.documents.partial_decoding import read_installation
from autoscaler.exception_handling import Failure, attempt
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, Installation, Status
from autoscaler.kubernetes.resources.model_conditions import ELSEWHERE
from autoscaler.kubernetes.resources.undecoded_models import Undecoded, describe_undecoded
from autoscaler.kubernetes.watch import ObjectKey, Watched
from autoscaler.kubernetes.watch_set import Kinds, created_unix_s, list_collection_paths
from autoscaler.spec.decode import WrongKeyError, format_path
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.tenant import Tenant, TenantSpec
from autoscaler.text import one_line

_log = logging.getLogger("pilotlight.autoscaler.resources")

Parse = Callable[[object], Model | Tenant]
"""Decodes a document from a plain value; raises WrongKeyError (`autoscaler.documents.parse.read_document`)."""


class StatusSeen(NamedTuple):
    """The status of a Model object, as of a version of the object."""

    uid: str
    version: int
    status: Status


Heard = Callable[[Origin, StatusSeen], None]


class ModelObject(NamedTuple):
    """The retained state of a Model object."""

    uid: str
    generation: int
    model: Model | None
    """The current or the last valid version; None: it was never valid."""
    wrong: str
    """Why its current version is not in force; empty: it is."""
    named: str | None = None
    """The installation in `spec.installation`."""
    shown: str = ""
    """The message of its condition ELSEWHERE; empty: it has none."""
    undecoded: Undecoded | None = None
    """Its current version, if decoding it raised an exception."""

    @property
    def in_force(self) -> Model | None:
        """The Model in force; None: there is none."""
        return self.undecoded.stand_in if self.model is None and self.undecoded is not None else self.model


class TenantObject(NamedTuple):
    """The retained state of a Tenant object."""

    uid: str
    generation: int
    created_unix_s: int
    tenant: Tenant
    wrong: str


class DocumentWatcher:
    """Watches the custom resources of a cluster, or of some namespaces. Tenants are watched only with `tenants`."""

    def __init__(
        self,
        api: Api,
        parse: Parse,
        installation: Installation,
        namespaces: Sequence[str] | None = None,
        *,
        tenants: bool = True,
        heard: Heard | None = None,
    ) -> None:
        """`heard` is called with every later status of a Model.
        Followers get the leader's learned values from it, and the leader detects writes of others.
        """
        self._parse = parse
        self._installation = installation
        self._heard = heard
        self._fresh: dict[Origin, Status] = {}
        """Status of new Models, until it is published."""
        self._kinds = Kinds(api, self._put)
        self._models = [
            self._kinds.add(one, self._read_model) for one in list_collection_paths(API_VERSION, "models", namespaces)
        ]
        self._tenants: Watched[TenantObject] | None = None
        if tenants:
            (path,) = list_collection_paths(API_VERSION, "tenants", None)
            self._tenants = self._kinds.add(path, self._read_tenant, optional=True)

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._kinds.run()

    @property
    def models(self) -> dict[ObjectKey, ModelObject]:
        """All Model objects."""
        return {key: found for watched in self._models for key, found in watched.items.items()}

    @property
    def tenants(self) -> Mapping[ObjectKey, TenantObject]:
        """All Tenant objects; their namespace is empty."""
        return {} if self._tenants is None else self._tenants.items

    @property
    def wrong(self) -> dict[ObjectKey, str]:
        """Objects whose current spec is not in force, and why, as `KEY PATH: what was expected`."""
        models = {key: found.wrong for key, found in self.models.items() if found.wrong}
        return models | {key: found.wrong for key, found in self.tenants.items() if found.wrong}

    def _put(self) -> None:
        found_now = {Origin(CUSTOMS, *key): found for key, found in self.models.items()}
        models = {origin: model for origin, found in found_now.items() if (model := found.in_force) is not None}
        faults = {
            origin: found.undecoded.reason for origin, found in found_now.items() if found.undecoded is not None
        }  # fmt: skip
        tenants = sorted(self.tenants.values(), key=lambda found: (found.created_unix_s, found.tenant.name))
        fresh = {origin: status for origin, status in self._fresh.items() if origin in models}
        self._fresh = {o: status for o, status in self._fresh.items() if o in found_now and o not in models}
        places = {key.namespace for key, found in self.models.items() if found.named is None}
        versions = {origin: (found.uid, found.generation) for origin, found in found_now.items()}
        self._installation.put(
            CUSTOMS, models, [found.tenant for found in tenants], fresh, places=places, faults=faults, versions=versions
        )

    def retry(self, origins: Container[Origin]) -> None:
        """Decode again those of these objects whose decoding raised an exception, and pass the results on."""
        for watched in self._models:
            for key, old in tuple(watched.items.items()):
                if old.undecoded is not None and Origin(CUSTOMS, *key) in origins:
                    watched.replace(key, self._read_version(old.undecoded.found, old))
        self._put()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_model(self, found: Object) -> ModelObject | None:
        """Decode an object once per generation; one that is being deleted counts as deleted."""
        metadata = found["metadata"]
        key = ObjectKey(metadata["namespace"], metadata["name"])
        old = self._known(key)
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        if "deletionTimestamp" in metadata:
            return None
        if old is None or old.uid != uid:
            self._fresh[Origin(CUSTOMS, *key)] = found.get("status", {})
            old = None
        elif self._heard is not None:
            status = StatusSeen(uid, int(metadata["resourceVersion"]), found.get("status", {}))
            self._heard(Origin(CUSTOMS, *key), status)
        shown = _shown(found)
        if old is not None and old.generation == generation:
            return old if old.shown == shown else old._replace(shown=shown)
        return self._read_version(found, old)._replace(shown=shown)

    def _read_version(self, found: Object, old: ModelObject | None) -> ModelObject:
        """Decode the spec of an object. `old`: its earlier version; None: it is new."""
        done = attempt(partial(self._decode_model, found, old))
        if not isinstance(done, Failure):
            return done
        metadata, last = found["metadata"], None if old is None else old.model
        named = read_installation(found) if old is None or last is None else old.named
        return ModelObject(
            metadata["uid"], metadata.get("generation", 0), last, "", named, "" if old is None else old.shown,
            describe_undecoded(found, done.error),
        )  # fmt: skip

    def _decode_model(self, found: Object, old: ModelObject | None) -> ModelObject:
        metadata = found["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        whose = {"name": metadata["name"], "namespace": metadata["namespace"]}
        document, wrong = self._decode(found, "Model", whose)
        shown = "" if old is None else old.shown
        if isinstance(document, Model):
            model = replace(document, created_unix_s=created_unix_s(metadata), uid=uid)
            return ModelObject(uid, generation, model, "", read_installation(found), shown)
        if old is not None and old.model is not None:
            return old._replace(generation=generation, wrong=wrong, undecoded=None)
        return ModelObject(uid, generation, None, wrong, read_installation(found), shown)

    def _read_tenant(self, found: Object) -> TenantObject | None:
        metadata = found["metadata"]
        name, uid, generation = metadata["name"], metadata["uid"], metadata.get("generation", 0)
        old = self.tenants.get(ObjectKey("", name))
        if "deletionTimestamp" in metadata:
            return None
        if old is not None and old.uid == uid and old.generation == generation:
            return old
        document, wrong = self._decode(found, "Tenant", {"name": name})
        if isinstance(document, Tenant):
            tenant = document
        elif old is not None and old.uid == uid:
            tenant = old.tenant
        else:
            tenant = Tenant(name=TenantName(name), spec=TenantSpec(models=()))
        return TenantObject(uid, generation, created_unix_s(metadata), tenant, wrong)

    def _decode(self, found: Object, kind: str, metadata: Mapping[str, str]) -> tuple[Model | Tenant | None, str]:
        """The decoded document, or the error."""
        document = {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": found.get("spec", {})}
        try:
            return self._parse(document), ""
        except WrongKeyError as error:
            wrong = one_line(f"{format_path(error.path)}: {error.message}")
            whose = "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))
            _log.warning("event=document_rejected kind=%s name=%s error=%s", kind, whose, wrong)
            return None, wrong

    def _known(self, key: ObjectKey) -> ModelObject | None:
        known = (watched.items.get(key) for watched in self._models)
        return next((found for found in known if found is not None), None)


def _shown(found: Object) -> str:
    """The message of the object's condition ELSEWHERE."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next((str(one.get("message", "")) for one in conditions if one.get("type") == ELSEWHERE), "")
