"""What the pods of a Model ask of a node, before there is one: for those who look for nodes ahead. Pure.

Owns what of a pod counts for that, so that what is looked for is what the pods can use: its own manifest is taken, and
all is left out of it by which no scheduler chooses. Devices are not in it: how many are asked for is who asks' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import pod as pods
from autoscaler.kubernetes.api import Object
from autoscaler.slicing.base import PodFields
from autoscaler.spec.model import Model
from autoscaler.spec.pod import GPU, MANAGED_BY, OURS
from autoscaler.spec.settings import Settings
from autoscaler.state.world import Replica

CHOSEN_BY = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName", "schedulerName",
    "tolerations", "topologySpreadConstraints",
)  # fmt: skip
"""Of a pod's spec, beside what its containers request; and how its image comes, for who runs one."""


class _Nothing(NamedTuple):
    """A Launch of what is not started."""

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    readiness_path: str = "/"


def build_pod_template(model: Model, settings: Settings) -> Object:
    """Metadata and spec of such a pod."""
    ranked = settings.priority_class(model.spec.priority)
    replica = Replica(
        id=ReplicaId("template"), model=model.name, spec_hash="", intent="", slices=(), memory_bytes=model.memory_bytes
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
    """As every pod that has devices has it."""
    gpu = {"key": GPU, "operator": "Exists"}
    return [] if gpu in pod["spec"].get("tolerations", ()) else [gpu]
