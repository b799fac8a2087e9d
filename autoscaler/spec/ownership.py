"""Whose an object of a cluster is: the label of the installation that made it, and selectors that use it. Pure.

Several installations may share a cluster, and a namespace of engines. Each reads, changes and deletes only objects with
its own label. Objects without a label were made by an earlier version. Every installation counts them as its own; the
first leader labels the pods and ResourceClaims.

Several may read the same Models, too. One of them serves a Model: the one that `spec.installation` names, else the one
that holds the Lease CLAIM of the Model's namespace. It is renewed for as long as there are Models in the namespace; one
that is not renewed for CLAIM_S may be taken. As in leader election (client-go's), no clock of another host is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from autoscaler.spec.pod import MANAGED_BY, OURS

INSTALLATION: Final = OURS + "installation"
"""A label: the installation that made an object."""
TITLE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
TITLE_WANTED: Final = "expected NAMESPACE/LEASE of an installation, as `pilotlight doctor` shows it"
NAMESPACE_MAX: Final = 40
"""Characters of a namespace in an identity: behind the slash an annotation's key has 63."""
CLAIM: Final = "models.pilotlight.dev"
"""The Lease in each namespace that has Models. It has a dot, which no name of the chart's objects may have."""
CLAIM_S, RENEW_S = 600, 180.0
"""How long a Lease holds after its last renewal, and when it is renewed."""
_ENGINES: Final = f"{MANAGED_BY}=pilotlight,{OURS}intent"


def installation_id(namespace: str, lease: str) -> str:
    """Of the installation whose autoscalers run in `namespace` and elect their leader by `lease`."""
    digest = hashlib.sha256(f"{namespace}/{lease}".encode()).hexdigest()[:8]
    return f"{namespace[:NAMESPACE_MAX]}-{digest}"


def installation_title(namespace: str, lease: str) -> str:
    """Of an installation, as people and Leases name it."""
    return f"{namespace}/{lease}"


class Claim(NamedTuple):
    """The Lease CLAIM of one namespace, as this process saw it."""

    holder: str
    """The title of an installation; empty: of none."""
    renewed: str
    """As its holder wrote it; only compared with itself."""
    duration_s: float
    since_s: float
    """When it was first seen as it is."""

    def next(self, me: str, now_s: float) -> Literal["take", "renew", "keep", "leave"]:
        """What the installation `me` does with it."""
        if self.holder == me:
            return "renew" if now_s - self.since_s >= RENEW_S else "keep"
        return "take" if not self.holder or now_s - self.since_s >= self.duration_s else "leave"


def explain_not_served(
    named: str | None, holder: str, me: str, namespace: str, field: str = "spec.installation"
) -> str:
    """Why `me` does not serve a Model of `namespace` that names the installation `named` in `field`; empty: it does."""
    if named is not None:
        return "" if named == me else f"{field} is {named}; installation {me} does not serve this Model"
    if holder in {"", me}:
        return ""
    return (
        f"installation {holder} serves the Models of namespace {namespace}, which installation {me} also watches: "
        f"to let {me} serve this Model, set {field} to {me}; otherwise configure different namespaces"
    )


class Ownership(NamedTuple):
    """Of the objects of one installation."""

    installation: str = ""
    """See `installation_id`; empty: there is only one installation, and objects have no such label."""

    @property
    def engines(self) -> str:
        """The selector of its engines' pods and their ResourceClaims."""
        return f"{_ENGINES},{INSTALLATION}={self.installation}" if self.installation else _ENGINES

    @property
    def unlabelled(self) -> str:
        """The selector of those that have no label of an installation; empty: they need none."""
        return f"{_ENGINES},!{INSTALLATION}" if self.installation else ""

    @property
    def labels(self) -> dict[str, str]:
        """What each of its objects has."""
        return {INSTALLATION: self.installation} if self.installation else {}

    def owns(self, found: Mapping[str, Any]) -> bool:
        """Whether an object is not another installation's."""
        labels: Mapping[str, str] = found["metadata"].get("labels") or {}
        return labels.get(INSTALLATION, self.installation) == self.installation

    def label(self, made: dict[str, Any]) -> dict[str, Any]:
        """The object as it is made."""
        if not self.installation:
            return made
        metadata = made.get("metadata", {})
        return {**made, "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **self.labels}}}


ANYBODYS: Final = Ownership()
