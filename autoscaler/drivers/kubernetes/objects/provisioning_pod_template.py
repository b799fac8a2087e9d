"""Builds a pod template with a model's requirements of a node, for providers that order nodes for it. Pure.

It is derived from the real manifest, without fields that no scheduler evaluates, so that the pods fit the ordered
nodes. Device requests are left out: the caller adds their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.kubernetes.api import Object
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.model import Model
from autoscaler.spec.pod import GPU, MANAGED_BY, OURS
from autoscaler.spec.settings import Settings
from autoscaler.state.world import Replica, ReplicaResources

CHOSEN_BY = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName", "schedulerName",
    "tolerations", "topologySpreadConstraints",
)  # fmt: skip
"""Fields of a pod's spec that affect scheduling, and image pull secrets. Containers' requests are added separately."""


class _Nothing(NamedTuple):
    """A `Launch` of a pod that is never started."""

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    readiness_path: str = "/"


def build_pod_template(model: Model, settings: Settings) -> Object:
    """Return the template's metadata and spec."""
    ranked = settings.priority_class(model.spec.priority)
    replica = Replica(
        id=ReplicaId("template"),
        model=model.name,
        spec_hash="",
        intent="",
        resources=ReplicaResources(slices=(), memory_bytes=model.memory_bytes),
    )
    pod = pods.build_pod_manifest(
        replica, model, _Nothing(), model.spec.image or "engine", settings.pod,
        priority_class=None if ranked is None else ranked.name, asks=PodFields(),
    )  # fmt: skip
    engine, said = pod["spec"]["containers"][0], pod["metadata"]
    ours = {MANAGED_BY, OURS + "intent"}
    resources = {kind: amounts for kind, amounts in engine["resources"].items() if kind != "claims"}
    return {
        "metadata": {"labels": {name: value for name, value in said["labels"].items() if name not in ours}},
        "spec": {
            **{name: pod["spec"][name] for name in CHOSEN_BY if name in pod["spec"]},
            "tolerations": [*pod["spec"].get("tolerations", ()), *_gpu(pod)],
            "containers": [{"name": engine["name"], "image": engine["image"], "resources": resources}],
        },
    }


def _gpu(pod: Object) -> list[Object]:
    """Return the toleration that every pod with devices has, unless the pod already has it."""
    gpu = {"key": GPU, "operator": "Exists"}
    return [] if gpu in pod["spec"].get("tolerations", ()) else [gpu]
