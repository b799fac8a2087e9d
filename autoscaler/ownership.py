"""Whose an object of a cluster is: the label of the installation that made it, and selectors that use it. Pure.

Several installations may share a cluster, and a namespace of engines. Each reads, changes and deletes only objects with
its own label. Objects without a label were made by an earlier version. Every installation counts them as its own; the
first leader labels the pods and ResourceClaims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from autoscaler.podspec import MANAGED_BY, OURS

INSTALLATION: Final = OURS + "installation"
"""A label: the installation that made an object."""
NAMESPACE_MAX: Final = 40
"""Characters of a namespace in an identity: behind the slash an annotation's key has 63."""
_ENGINES: Final = f"{MANAGED_BY}=pilotlight,{OURS}intent"


def identity(namespace: str, lease: str) -> str:
    """Of the installation whose autoscalers run in `namespace` and elect their leader by `lease`."""
    digest = hashlib.sha256(f"{namespace}/{lease}".encode()).hexdigest()[:8]
    return f"{namespace[:NAMESPACE_MAX]}-{digest}"


class Ownership(NamedTuple):
    """Of the objects of one installation."""

    installation: str = ""
    """See `identity`; empty: there is only one installation, and objects have no such label."""

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
