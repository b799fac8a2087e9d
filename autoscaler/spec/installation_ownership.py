"""Ownership of cluster objects: the label of the installation that created an object, and selectors for it. Pure.

Several installations may share a cluster and a namespace for engines. Each one reads, changes and deletes only objects
with its own label. Objects without a label were created by an earlier version. The first leader labels the pods and
ResourceClaims. The leader of the installation that serves their Model labels capacity orders
(`autoscaler.providers.unlabelled_orders`). Every installation counts other objects without a label as its own.

Several installations may also read the same Models. One of them serves a Model: the one in `spec.installation`, else
the one that holds the Lease CLAIM in the Model's namespace. The holder renews it while the namespace has Models.
Another installation can take a Lease that has not been renewed for CLAIM_S. As in client-go's leader election, clocks
of different hosts are never compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from autoscaler.spec.pod import MANAGED_BY, OURS

INSTALLATION: Final = OURS + "installation"
"""The label with the installation that created an object."""
TITLE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
TITLE_WANTED: Final = "expected NAMESPACE/LEASE of an installation, as `pilotlight doctor` shows it"
NAMESPACE_MAX: Final = 40
"""The maximum length of a namespace in an identity: the name part of an annotation key has at most 63 characters."""
CLAIM: Final = "models.pilotlight.dev"
"""The name of the Lease in each namespace that has Models. It contains a dot, which names of the chart's objects
cannot.
"""
CLAIM_S, RENEW_S = 600, 180.0
"""How long a Lease is valid after its last renewal, and the interval of renewals, in seconds."""
_ENGINES: Final = f"{MANAGED_BY}=pilotlight,{OURS}intent"


def installation_id(namespace: str, lease: str) -> str:
    """Return the ID of the installation whose autoscalers run in `namespace` and elect their leader with `lease`."""
    digest = hashlib.sha256(f"{namespace}/{lease}".encode()).hexdigest()[:8]
    return f"{namespace[:NAMESPACE_MAX]}-{digest}"


def installation_title(namespace: str, lease: str) -> str:
    """Return the display name of an installation, as in Leases."""
    return f"{namespace}/{lease}"


class Claim(NamedTuple):
    """The Lease CLAIM of one namespace, as this process observed it."""

    holder: str
    """The display name of an installation. Empty: no installation holds it."""
    renewed: str
    """The renewal time that the holder wrote; it is compared only with earlier values."""
    duration_s: float
    since_s: float
    """When the Lease was first observed in its current form."""

    def next(self, me: str, now_s: float) -> Literal["take", "renew", "keep", "leave"]:
        """Return what installation `me` does with the Lease."""
        if self.holder == me:
            return "renew" if now_s - self.since_s >= RENEW_S else "keep"
        return "take" if not self.holder or now_s - self.since_s >= self.duration_s else "leave"


def explain_not_served(
    named: str | None, holder: str, me: str, namespace: str, field: str = "spec.installation"
) -> str:
    """Explain why `me` does not serve a Model of `namespace` whose `field` is `named`. Empty: it does."""
    if named is not None:
        return "" if named == me else f"{field} is {named}; installation {me} does not serve this Model"
    if holder in {"", me}:
        return ""
    return (
        f"installation {holder} serves the Models of namespace {namespace}, which installation {me} also watches: "
        f"to let {me} serve this Model, set {field} to {me}; otherwise configure different namespaces"
    )


class Ownership(NamedTuple):
    """The labels and selectors of the objects of one installation."""

    installation: str = ""
    """The ID (`installation_id`). Empty: there is only one installation, and objects do not have the label."""

    @property
    def engines(self) -> str:
        """The selector of the engines' pods and their ResourceClaims."""
        return f"{_ENGINES},{INSTALLATION}={self.installation}" if self.installation else _ENGINES

    @property
    def unlabelled(self) -> str:
        """The selector of such objects without an installation label. Empty: the label is not used."""
        return f"{_ENGINES},!{INSTALLATION}" if self.installation else ""

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every object of the installation."""
        return {INSTALLATION: self.installation} if self.installation else {}

    @property
    def suffix(self) -> str:
        """The end of object names that must differ between installations: a hyphen and the hash in the ID, or empty."""
        return f"-{self.installation.rpartition('-')[2]}" if self.installation else ""

    def owns(self, found: Mapping[str, Any]) -> bool:
        """Return whether an object does not belong to another installation."""
        labels: Mapping[str, str] = found["metadata"].get("labels") or {}
        return labels.get(INSTALLATION, self.installation) == self.installation

    def has_label(self, found: Mapping[str, Any]) -> bool:
        """Return whether an object has this installation's label. Without an installation, whether `owns` it."""
        labels: Mapping[str, str] = found["metadata"].get("labels") or {}
        return self.owns(found) and (not self.installation or INSTALLATION in labels)

    def label(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return the object with the installation's label."""
        if not self.installation:
            return made
        metadata = made.get("metadata", {})
        return {**made, "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **self.labels}}}


ANYBODYS: Final = Ownership()
