"""A Replica as a pod: the manifest that starts it, and what a pod says of its Replica. Pure.

Owns the names of our labels and annotations. Promises: everything that a new leader needs to adopt a Replica stands in
its pod; a pod's name is its Replica's id, which ends in the intent, so that a second create of the same decision finds
the first. A pod never starts its container again: another try is another Replica, and the plan's decision.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.base import Launch
from autoscaler.drivers.kubernetes.api import Object
from autoscaler.model import Model
from autoscaler.world import Replica, SliceId

GROUP = "pilotlight.dev/"
OURS = "app.kubernetes.io/managed-by"
OWNER = "pilotlight"
PORT = 8000
"""Of every engine: pods have addresses of their own."""
HOST = "$(POD_IP)"
"""What an engine listens on; Kubernetes puts the address in."""
GPU = "nvidia.com/gpu"

_WAITING_BAD = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError",
                "CreateContainerError", "RunContainerError")  # fmt: skip


class PodSeen(NamedTuple):
    """What is kept of a pod of ours."""

    name: str
    uid: str
    replica: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    slices: tuple[SliceId, ...]
    memory_bytes: int
    compute_percent: int
    slots: int
    readiness_path: str
    node: str
    ip: str
    started_unix_s: float | None
    """When its container started."""
    ended: str
    """How its container ended; empty while it runs, or waits."""
    waits: str
    """Why it does not run yet: no place, no image."""
    leaving: bool
    """Its deletion was asked for."""


def manifest(replica: Replica, model: Model, launch: Launch, image: str) -> Object:
    """The pod of a Replica, on the node that the plan chose."""
    node = node_of(replica.slices)
    notes = {
        "model": replica.model, "spec-hash": replica.spec_hash, "intent": replica.intent,
        "slices": ",".join(replica.slices), "memory-bytes": str(replica.memory_bytes),
        "compute-percent": str(replica.compute_percent), "slots": str(replica.slots),
        "readiness-path": launch.readiness_path,
    }  # fmt: skip
    env: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    env += [{"name": name, "value": value} for name, value in launch.env.items()]
    container: Object = {
        "name": "engine", "image": image, "command": list(launch.argv), "env": env,
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": launch.readiness_path, "port": "http"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "100m"}},
    }  # fmt: skip
    if gpus := sum("/gpu" in one for one in replica.slices):
        container["resources"]["limits"] = {GPU: str(gpus)}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": replica.id, "labels": {OURS: OWNER},
            "annotations": {GROUP + name: value for name, value in notes.items()},
        },
        "spec": {
            "restartPolicy": "Never", "containers": [container], "affinity": _on(node),
            "tolerations": [{"key": GPU, "operator": "Exists"}], "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": max(1, int(model.spec.drain_seconds_max)),
        },
    }  # fmt: skip


def node_of(slices: tuple[SliceId, ...]) -> str:
    """A Slice's id is NODE/NAME."""
    return slices[0].partition("/")[0]


def _on(node: str) -> Object:
    """By affinity, not by `nodeName`: the scheduler must still count what is there."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def read(pod: Object) -> PodSeen | None:
    """What its pod says of a Replica; None of a pod that is not ours."""
    metadata, status = pod["metadata"], pod.get("status", {})
    notes: dict[str, str] = metadata.get("annotations", {})
    if GROUP + "intent" not in notes:
        return None

    def note(name: str) -> str:
        return notes.get(GROUP + name, "")

    (container,) = status.get("containerStatuses", [{}])[:1] or [{}]
    state: dict[str, Any] = container.get("state", {})
    started = state.get("running", {}).get("startedAt")
    return PodSeen(
        metadata["name"], metadata["uid"], ReplicaId(metadata["name"]), ModelName(note("model")), note("spec-hash"),
        note("intent"), tuple(map(SliceId, note("slices").split(","))), int(note("memory-bytes")),
        int(note("compute-percent")), int(note("slots")), note("readiness-path"), pod["spec"].get("nodeName", ""),
        status.get("podIP", ""), None if started is None else datetime.fromisoformat(started).timestamp(),
        _ended(status, state), _waits(status, state), "deletionTimestamp" in metadata,
    )  # fmt: skip


def same(found: PodSeen, replica: Replica) -> bool:
    """Whether a pod of that name is this very decision, and may be taken for it."""
    decided = (found.intent, found.spec_hash, found.slices)
    return not found.leaving and decided == (replica.intent, replica.spec_hash, replica.slices)


def _ended(status: dict[str, Any], state: dict[str, Any]) -> str:
    over = state.get("terminated")
    if over is None:
        return _evicted(status) if status.get("phase") in ("Failed", "Succeeded") else ""
    code: int = over["exitCode"]
    if over.get("reason") == "OOMKilled":
        return "was killed for memory (OOMKilled)"
    if code == 137:
        return "was killed by SIGKILL"
    reason = over.get("reason", "")
    said = over.get("message", "") or (reason if reason not in ("Error", "Completed") else "")
    return f"ended with status {code}" + (f": {said}" if said else "")


def _evicted(status: dict[str, Any]) -> str:
    """The pod is over and its container says nothing: the node or the API server ended it."""
    return ": ".join(filter(None, (status.get("reason", "was ended by the node"), status.get("message", ""))))


def _waits(status: dict[str, Any], state: dict[str, Any]) -> str:
    waiting = state.get("waiting", {})
    if waiting.get("reason") in _WAITING_BAD:
        return ": ".join(filter(None, (waiting["reason"], waiting.get("message", ""))))
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return ": ".join(filter(None, (condition.get("reason", ""), condition.get("message", ""))))
    return ""
