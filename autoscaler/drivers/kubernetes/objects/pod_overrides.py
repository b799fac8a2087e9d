"""What a pod says of the others of its Model, where the scheduler chooses its node: apart, or near. Pure.

Owns the words for `spread` and `near`. Of a Replica on Devices the plan chooses the node, and heeds both itself
(`autoscaler.placement.model.spread`). They are a liking here as there: no pod waits for it. What people say of affinity
stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoscaler.kubernetes.api import Object
from autoscaler.spec.model import ModelSpec

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
NEAR, APART = 100, 10
"""Weights, for each other pod. Nearness comes first: hosts apart within one rack."""


def like(spec: Object, of: ModelSpec, labels: Mapping[str, str]) -> None:
    """Adds it to a pod's spec. `labels`: by which its Model's pods are known."""
    for kind, topology, weight in (("podAffinity", of.near, NEAR), ("podAntiAffinity", of.spread, APART)):
        if topology:
            term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": topology}
            affinity = spec.get("affinity", {})
            said = affinity.get(kind, {})
            terms = [*said.get(PREFERRED, []), {"weight": weight, "podAffinityTerm": term}]
            spec["affinity"] = {**affinity, kind: {**said, PREFERRED: terms}}
